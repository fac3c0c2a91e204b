"""Benchmarks by name: layouts and columns of the real ones, what each row asks, and what is refused."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import tiny

from headstart.data.rendering import ChatRenderer
from headstart.errors import DataError, HeadstartError, RecipeError
from headstart.eval.benchmarks import KNOWN, MT_BENCH, SPEC_BENCH_GROUPS, parse_bench
from headstart.eval.prompts import choose, load_questions
from headstart.recipe import ChatSection, load_recipe

OTHERS = ["translation", "summarization", "qa", "math_reasoning", "rag"]


def questions_of(bench: str, split: str | None = None):
    return load_questions(load_recipe("quickstart.yaml"), tiny.tokenizer(), parse_bench(bench, split))


def asked(question) -> list[str]:
    return [turn[-1]["content"] for turn in question.turns]


def write(path: Path, records) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.fixture(scope="module")
def spec_bench(tmp_path_factory) -> Path:
    """Its layout and proportions: two turns in ten of each of eight categories, one in eighty of each of five."""
    records = [
        {"question_id": 81 + number, "category": category, "turns": [f"Say {number}", "And now backwards"]}
        for number, category in enumerate(category for category in MT_BENCH for _ in range(10))
    ]
    records += [
        {"question_id": 161 + number, "category": category, "turns": [f"Ask {number}"], "reference": ["x"]}
        for number, category in enumerate(category for category in OTHERS for _ in range(80))
    ]
    return write(tmp_path_factory.mktemp("spec") / "question.jsonl", records)


def test_spec_bench_has_13_categories_in_six_groups_and_is_drawn_from_evenly(spec_bench):
    questions = questions_of(f"spec-bench={spec_bench}")
    assert len(questions) == 480 and {len(question.turns) for question in questions} == {1, 2}
    chosen = choose(questions, 240)
    assert set(Counter(question.category for question in chosen).values()) == {40}
    kinds = Counter(question.kind for question in chosen)
    assert len(kinds) == 13 and all(kinds[kind] == 5 for kind in MT_BENCH) and all(kinds[one] == 40 for one in OTHERS)
    assert [one.question_id for one in chosen] == [one.question_id for one in choose(questions, 240)]
    assert set(SPEC_BENCH_GROUPS.values()) == {"MT conversation", "translation", "summarization", "QA", "math", "RAG"}
    few = choose(questions, 48)
    assert set(Counter(one.kind for one in few if one.category == "MT conversation").values()) == {1}, "of every kind"
    assert len({one.category for one in few[:6]}) == 6
    whole = choose(questions, 480)
    assert sorted(one.question_id for one in whole) == sorted(one.question_id for one in questions)


def test_turns_are_asked_one_after_the_other_as_mt_bench_does(tmp_path):
    as_fastchat = {"question_id": 81, "category": "writing", "turns": ["One?", "Two?"], "reference": []}
    as_on_the_hub = {"prompt_id": 82, "category": "math", "prompt": ["Three?", "Four?"]}
    path = write(tmp_path / "question.jsonl", [as_fastchat, as_on_the_hub])
    questions = questions_of(f"mt-bench={path}")
    assert [asked(question) for question in questions] == [["One?", "Two?"], ["Three?", "Four?"]]
    assert [question.category for question in questions] == ["writing", "math"], "here every category is a group"
    renderer = ChatRenderer(tiny.tokenizer(), ChatSection())
    second = str(tiny.tokenizer().decode(questions[0].prompt_ids(renderer, ["its own answer"])))
    assert "One?" in second and "its own answer" in second and second.endswith("Two?<|turn_end|>\n<assistant>")


ROWS = {
    "humaneval": (
        {"task_id": "HumanEval/0", "prompt": "def f(a):\n    '''Adds.'''\n", "test": "..", "entry_point": "f"},
        "Complete this Python function:\n\n```python\ndef f(a):\n    '''Adds.'''\n```",
    ),
    "gsm8k": ({"question": "How many?", "answer": "#### 4"}, "How many?"),
    "alpaca": ({"instruction": "Sort.", "input": "b a", "output": "a b", "text": "Below is .."}, "Sort.\n\nb a"),
    "cnn-dm": ({"id": "0a", "article": "It rained.", "highlights": "Rain."}, "Summarize: It rained."),
}


@pytest.mark.parametrize("name", ROWS)
def test_rows_of_a_data_set_become_what_they_ask(name, tmp_path):
    row, prompt = ROWS[name]
    known = KNOWN[name]
    table = pyarrow.Table.from_pylist([row, row])
    # as in a copy of the hub's repository: a folder of the subset's name, one file a split
    for split in ("train", "test"):
        place = tmp_path / "copy" / (known.subset or "data") / f"{split}-00000-of-00001.parquet"
        place.parent.mkdir(parents=True, exist_ok=True)
        pyarrow.parquet.write_table(table if split == known.split else table.slice(0, 0), place)
    for place in (tmp_path / "copy", write(tmp_path / "rows.jsonl", [row, row])):
        questions = questions_of(f"{name}={place}")
        assert [asked(question) for question in questions] == [[prompt]] * 2
        assert all(question.ids is None and len(question.turns[0]) == 1 for question in questions), "no answer is read"
    with pytest.raises(DataError, match="gives no prompt to decode: .*no text in"):
        questions_of(f"{name}={write(tmp_path / 'wrong.jsonl', [{'other': 1}])}")


@pytest.mark.parametrize("name", ROWS)
def test_a_hub_that_is_not_reached_is_one_sentence_that_names_the_way_out(name):
    with pytest.raises(DataError) as caught:
        questions_of(name)
    text = str(caught.value)
    assert str(KNOWN[name].hub_id) in text and text.endswith(f"A copy on the disk will do: --bench {name}=PATH")
    assert "\n" not in text


def test_a_file_of_ones_own_is_read_in_every_format_of_training(tmp_path):
    records = [
        {"prompt": "Hi", "category": "greeting"},
        {"messages": [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}], "kind": "chat"},
        {"instruction": "Do"},
    ]
    questions = questions_of(str(write(tmp_path / "a=b.jsonl", records)))
    assert [asked(question)[0] for question in questions] == ["Hi", "Q", "Do"]
    assert [question.category for question in questions][:2] == ["greeting", "chat"]


def test_mistakes_are_refused_by_name(tmp_path, spec_bench):
    for bench, told in [("spec-bench", "needs its file; write spec-bench=PATH"), ("gsm8k=", "names no file")]:
        with pytest.raises(RecipeError, match=told):
            parse_bench(bench)
    with pytest.raises(HeadstartError, match="nowhere"):
        questions_of(f"spec-bench={tmp_path}/nowhere.jsonl")
    with pytest.raises(DataError, match=r"has the category 'math_reasoning', which mt-bench has not.*--bench "):
        questions_of(f"mt-bench={spec_bench}")
    assert len(questions_of(str(spec_bench))) == 480, "the file alone is asked all the same"
