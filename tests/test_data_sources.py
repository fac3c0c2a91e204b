"""Reading conversations: every shape, every fault counted with its line, nothing lost in silence."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from headstart.data.messages import Conversation
from headstart.data.reports import SkipReport
from headstart.data.sources import display_name, read, read_all, with_limit
from headstart.errors import DataError
from headstart.recipe import Source, load_recipe

QUESTION = {"role": "user", "content": "a"}
ANSWER = {"role": "assistant", "content": "b"}
GOOD = {"messages": [QUESTION, ANSWER]}


def write(path: Path, *records: object) -> Source:
    path.write_text("\n".join(json.dumps(record) for record in records) + "\n")
    return Source(source=str(path))


def read_rows(source: Source, **options) -> tuple[list[Conversation], SkipReport]:
    reports: dict[str, SkipReport] = {}
    rows = list(read(source, reports, **options))
    (report,) = reports.values()
    assert report.rows == len(rows) + report.num_skipped
    return rows, report


def pairs(conversation: Conversation) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in conversation.messages or ()]


def test_rows_without_turns_are_skipped_and_counted_with_their_lines(tmp_path):
    """B01: one of five is good."""
    good = {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}
    rows, report = read_rows(
        write(
            tmp_path / "chats.jsonl",
            {"conversations": []},
            {"conversations": [{"from": "gpt", "value": "hi"}]},
            {"conversations": [{"from": "system", "value": "s"}]},
            {"conversations": None},
            good,
        )
    )
    assert [pairs(row) for row in rows] == [[("user", "q"), ("assistant", "a")]]
    assert report.skipped == {
        "no turns": ["line 1", "line 4"],
        "no user turn": ["line 2, roles: assistant", "line 3, roles: system"],
    }
    assert "5 rows, 1 kept, 4 skipped" in report.summary()


def test_a_field_may_change_its_type_from_line_to_line(tmp_path):
    """B02: ids and contents of any type; an image part is skipped and counted."""
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "c"}]
    image = [{"type": "image_url", "image_url": {"url": "x"}}, {"type": "text", "text": "a"}]
    rows, report = read_rows(
        write(
            tmp_path / "mixed.jsonl",
            {"id": 1, **GOOD},
            {"id": "x2", "messages": [{"role": "user", "content": parts}, ANSWER]},
            {"id": None, "messages": [{"role": "user", "content": image}, ANSWER]},
            {"id": [1], "messages": [{"role": "user", "content": {"type": "text", "text": "d"}}, ANSWER]},
            {"id": 5, "messages": [{"role": "user", "content": 42}, ANSWER]},
            {"id": 6, "messages": [{"role": "user", "content": 4.5}, ANSWER]},
            {"id": 7, "messages": json.dumps([QUESTION, ANSWER])},
            {"id": 8, "messages": "none"},
            {"id": "\ud83d", "messages": [{"role": "user", "content": "\ud83d"}, ANSWER]},
        )
    )
    assert [pairs(row)[0][1] for row in rows] == ["a", "ac", "d", "42", "a"]
    assert [row.row_id for row in rows] == ["1", "x2", "mixed.jsonl:4", "5", "7"]
    assert report.skipped == {
        "image part": ["line 3"],
        "field 'content' is a number": ["line 6, text expected"],
        "the turns are not a list": ["line 8, found a string"],
        "half a character": ["line 9, field 'content'"],
    }


def test_broken_lines_are_counted_and_blank_ones_ignored(tmp_path):
    path = tmp_path / "chats.jsonl"
    path.write_bytes(
        b"\xef\xbb\xbf" + json.dumps(GOOD).encode() + b"\n\n  \n{\n[1]\n\xff\xfe\n" + json.dumps(GOOD).encode()
    )
    rows, report = read_rows(Source(source=str(path)))
    assert [row.origin for row in rows] == [f"{path}:1", f"{path}:7"]
    assert {reason: len(places) for reason, places in report.skipped.items()} == {
        "not JSON": 1,
        "not an object": 1,
        "not UTF-8 text": 1,
    }


def test_unknown_roles_are_listed_once_with_counts(tmp_path):
    """B09: the line and the role list are named; `merge` mends what can be mended."""

    def chat(*roles: str) -> dict:
        return {"conversations": [{"from": role, "value": role[0]} for role in roles]}

    source = write(
        tmp_path / "chats.jsonl",
        chat("human", "human", "gpt"),
        chat("human", "gpt", "gpt"),
        chat("gpt", "human", "gpt"),
        chat("human", "gpt"),
        chat("human", "assistant "),
        chat("human", "bing"),
        chat("bing", "human"),
    )
    rows, report = read_rows(source)
    assert [row.origin.rpartition(":")[2] for row in rows] == ["4"]
    assert report.skipped == {
        "the roles don't alternate": [
            "line 1, roles: user, user, assistant",
            "line 2, roles: user, assistant, assistant",
        ],
        "opens with the assistant": ["line 3, roles: assistant, user, assistant"],
        "unknown role": ["line 5, 'assistant '", "line 6, 'bing'", "line 7, 'bing'"],
    }
    assert report.summary().count("'bing' (2), 'assistant ' (1)") == 1

    rows, report = read_rows(source.model_copy(update={"non_alternating": "merge"}))
    assert [pairs(row) for row in rows] == [
        [("user", "h\n\nh"), ("assistant", "g")],
        [("user", "h"), ("assistant", "g\n\ng")],
        [("user", "h"), ("assistant", "g")],
        [("user", "h"), ("assistant", "g")],
        [("user", "h"), ("assistant", "a")],
    ]
    assert report.unknown_roles == {"bing": 2}


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"instruction": "i", "input": "", "output": "o"}, [("user", "i"), ("assistant", "o")]),
        ({"instruction": "i", "input": "x", "output": "o"}, [("user", "i\n\nx"), ("assistant", "o")]),
        ({"prompt": "p", "response": "r", "system": "s"}, [("system", "s"), ("user", "p"), ("assistant", "r")]),
        ({"question": "p", "answer": 4}, [("user", "p"), ("assistant", "4")]),
        ({"prompt": [QUESTION], "completion": [ANSWER]}, [("user", "a"), ("assistant", "b")]),
        ({"conversation": [QUESTION, ANSWER]}, [("user", "a"), ("assistant", "b")]),
        ({"prompt": "ignored", "messages": [QUESTION, ANSWER]}, [("user", "a"), ("assistant", "b")]),
        ({"messages": [{"from": "human", "value": "a"}, ANSWER]}, [("user", "a"), ("assistant", "b")]),
    ],
)
def test_the_shape_of_a_row_is_found(tmp_path, record, expected):
    rows, _ = read_rows(write(tmp_path / "rows.jsonl", record))
    assert pairs(rows[0]) == expected


def test_a_named_format_says_which_field_is_missing(tmp_path):
    rows, report = read_rows(write(tmp_path / "rows.jsonl", GOOD).model_copy(update={"format": "alpaca"}))
    assert rows == []
    assert report.skipped == {"no field 'instruction'": ["line 1, fields: messages"]}


def test_rows_of_text_and_of_tokens(tmp_path):
    rows, report = read_rows(
        write(
            tmp_path / "rows.jsonl",
            {"text": "hello"},
            {"text": " "},
            {"input_ids": [5, 6, 7], "prompt_tokens": 1},
            {"input_ids": [5, 6, 7], "loss_mask": [0, 1, 0]},
            {"input_ids": [5, 6, 7], "labels": [-100, -100, 7]},
            {"input_ids": [5, 6, 7]},
            {"input_ids": [5, 6, 7], "loss_mask": [1]},
            {"input_ids": [5, -1, 7], "prompt_tokens": 1},
            {"rubbish": 1},
        )
    )
    assert rows[0].text == "hello" and rows[0].messages is None
    assert [row.supervised for row in rows[1:]] == [(False, True, True), (False, True, False), (False, False, True)]
    assert len(report.skipped) == report.num_skipped == 5


def test_prompts_need_no_answers_and_may_follow_each_other(tmp_path):
    source = write(tmp_path / "bench.jsonl", {"question_id": 81, "category": "writing", "turns": ["one", "two"]})
    (row,), _ = read_rows(source, answers=False)
    assert pairs(row) == [("user", "one"), ("user", "two")]
    assert (row.row_id, row.kind) == ("81", "writing")
    rows, report = read_rows(source)
    assert rows == [] and list(report.skipped) == ["no assistant turn"]


def test_reasoning_is_kept_and_tool_calls_are_skipped(tmp_path):
    thought = {**ANSWER, "reasoning_content": "r"}
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": 1}]}
    rows, report = read_rows(
        write(
            tmp_path / "rows.jsonl",
            {"messages": [QUESTION, thought]},
            {"messages": [QUESTION, call]},
            {"messages": [QUESTION, {"role": "tool", "content": "x"}, ANSWER]},
        )
    )
    assert rows[0].messages == (QUESTION, thought)
    assert report.skipped == {"tool calls": ["line 2", "line 3"]}


def test_every_kind_of_file_gives_the_same_rows(tmp_path):
    import pyarrow
    import pyarrow.parquet

    records = [{"id": number, **GOOD} for number in range(3)]
    write(tmp_path / "a.jsonl", *records)
    (tmp_path / "b.json").write_text(json.dumps(records))
    (tmp_path / "c.json").write_text(json.dumps({"data": records}))
    (tmp_path / "d.jsonl.gz").write_bytes(gzip.compress((tmp_path / "a.jsonl").read_bytes()))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), tmp_path / "e.parquet")
    for path in sorted(tmp_path.iterdir()):
        rows, _ = read_rows(Source(source=str(path)))
        assert [row.row_id for row in rows] == ["0", "1", "2"], path
        assert [pairs(row) for row in rows] == [[("user", "a"), ("assistant", "b")]] * 3, path


def test_a_folder_gives_the_files_of_its_split_with_a_report_each(tmp_path):
    write(tmp_path / "train-0.jsonl", GOOD)
    write(tmp_path / "train-1.jsonl", GOOD, {})
    write(tmp_path / "test.jsonl", GOOD)
    reports: dict[str, SkipReport] = {}
    assert len(list(read(Source(source=str(tmp_path)), reports))) == 2
    assert {Path(name).name: (report.rows, report.kept) for name, report in reports.items()} == {
        "train-0.jsonl": (1, 1),
        "train-1.jsonl": (2, 1),
    }
    assert len(list(read(Source(source=str(tmp_path), split="test"), {}))) == 1


def test_hub_data_sets_go_through_datasets(monkeypatch):
    import datasets

    asked = []

    def load_dataset(name, subset, *, split, streaming):
        asked.append((name, subset, split, streaming))
        return datasets.Dataset.from_list([GOOD, GOOD, GOOD])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    source = Source(source="org/chats", subset="main", split="train_sft", limit=2)
    rows, report = read_rows(source)
    assert asked == [("org/chats", "main", "train_sft", True)]
    assert report.name == display_name(source) == "org/chats:main:train_sft"
    assert [row.row_id for row in rows] == ["chats:main:train_sft:1", "chats:main:train_sft:2"]


def test_a_hub_data_set_that_cannot_be_loaded_is_one_sentence():
    with pytest.raises(DataError, match=r"'org/no-such-set:train' can't be loaded.*local file"):
        list(read(Source(source="org/no-such-set"), {}))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.jsonl", b"", r"empty.jsonl holds no rows"),
        ("blank.jsonl", b"\n \n", r"blank.jsonl holds no rows"),
        ("broken.json", b'{"a": 1}\n{"a": 2}', r"name the file .jsonl"),
        ("number.json", b"3", r"neither a list of rows"),
        ("broken.parquet", b"nothing", r"can't be read as Parquet"),
        ("chats.csv", b"a,b", r"of no known kind"),
        (None, b"", r"There is no file"),
    ],
)
def test_a_file_that_cannot_be_used_is_one_sentence(tmp_path, name, content, message):
    path = tmp_path / (name or "missing.jsonl")
    if name:
        path.write_bytes(content)
    with pytest.raises(DataError, match=message):
        list(read(Source(source=str(path)), {}))


def test_one_file_has_no_other_split(tmp_path):
    source = write(tmp_path / "chats.jsonl", GOOD).model_copy(update={"split": "test"})
    with pytest.raises(DataError, match="has no split 'test'"):
        list(read(source, {}))


def test_row_ids_are_unique_over_all_sources(tmp_path):
    first = write(tmp_path / "a.jsonl", {"id": 1, **GOOD}, {"id": 1, **GOOD})
    second = write(tmp_path / "b.jsonl", {"id": 1, **GOOD}, GOOD)
    assert [row.row_id for row in read_all([first, second], {})] == ["1", "1#2", "1#3", "b.jsonl:2"]


def test_a_limit_counts_rows_from_the_top(tmp_path):
    source = write(tmp_path / "a.jsonl", {}, GOOD, GOOD)
    rows, report = read_rows(source.model_copy(update={"limit": 2}))
    assert (len(rows), report.rows) == (1, 2)
    recipe = load_recipe("quickstart.yaml")
    assert [source.limit for source in with_limit(recipe, 7).data.train] == [7]
    assert {source.limit for source in with_limit(recipe, 7).data.held_out.sources} == {7}
    assert with_limit(recipe, None) is recipe


def test_the_bundled_chats_are_a_source():
    rows, report = read_rows(Source(source="bundled:chats", split="held_out_kinds", limit=4), answers=False)
    assert len(rows) == 4 and report.name == "bundled:chats:held_out_kinds"
    assert all(row.kind and row.topic and row.messages for row in rows)
    with pytest.raises(DataError, match="bundled:chats"):
        list(read(Source(source="bundled:chat"), {}))


def test_the_wordings_are_prompts_and_no_conversations():
    wordings = Source(source="bundled:wordings", split="train", limit=4)
    rows, report = read_rows(wordings, answers=False)
    assert len(rows) == 4 and report.name == "bundled:wordings:train"
    with pytest.raises(DataError, match="has no answers; make them with `headstart data distill`"):
        list(read(wordings, {}))


@pytest.mark.parametrize("damage", [lambda packed: b"no gzip", lambda packed: packed[:-20]])
def test_a_packed_file_that_is_damaged_is_refused(tmp_path, damage):
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(damage(gzip.compress((json.dumps(GOOD) + "\n").encode() * 50)))
    with pytest.raises(DataError, match="a.jsonl.gz can't be unpacked"):
        list(read(Source(source=str(path)), {}))
