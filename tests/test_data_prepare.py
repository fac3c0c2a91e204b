"""Recipe to rows: what is held out, what is refused, and what the reports say."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from headstart.cli import main
from headstart.data.agreement import Agreement, agreement
from headstart.data.packing import batches, collate
from headstart.data.prepare import Prepared, choose_held_out, prepare, run, show_row
from headstart.data.rendering import Row
from headstart.errors import DataError
from headstart.recipe import Recipe
from tests import chat_templates, tiny


def recipe(*sources: Path | str | dict, target: str = "unused", **data) -> Recipe:
    named = [source if isinstance(source, dict) else {"source": str(source)} for source in sources]
    return Recipe.model_validate(
        {"name": "r", "target": {"name": target}, "head": {"type": "medusa"}, "data": {"train": named, **data}}
    )


def write_chats(path: Path, *chats: tuple[str, ...]) -> Path:
    names = ("user", "assistant")
    rows = [
        {"messages": [{"role": names[turn % 2], "content": text} for turn, text in enumerate(chat)]} for chat in chats
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def many(count: int, word: str = "q") -> list[tuple[str, str]]:
    return [(f"{word}{number}", f"answer {number}") for number in range(count)]


def ids(rows) -> set[str]:
    return {row.row_id for row in rows}


def test_rows_in_are_rows_kept_and_skipped_and_the_share_is_said(tmp_path):
    """B14: `24 of 212 tokens supervised`, from a template without markers."""
    path = write_chats(tmp_path / "chats.jsonl", *many(4))
    with path.open("a") as lines:
        lines.write('{"messages": []}\n')
    prepared = prepare(recipe(path), tiny.tokenizer())
    (report,) = prepared.reports.values()
    assert (report.rows, report.kept, report.num_skipped) == (5, 4, 1)
    assert report.supervised == 4 * (len("answer 0") + 1)
    assert report.tokens == sum(len(row.input_ids) for rows in (prepared.train, prepared.held_out) for row in rows)
    share = f"{report.supervised} of {report.tokens} tokens supervised"
    assert share in prepared.summary() and "skipped 1: no turns (line 5)" in prepared.summary()
    assert f"training: {len(prepared.train)} rows" in prepared.summary()


def test_a_file_that_teaches_nothing_is_refused(tmp_path):
    """B01 and B14: all rows bad, or no token supervised, is an error before any model."""
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"conversations": []}\n' * 5)
    with pytest.raises(
        DataError, match=r"No row of .*bad.jsonl can be learnt from. Its 5 rows were skipped: no turns \(5"
    ):
        prepare(recipe(write_chats(tmp_path / "good.jsonl", *many(3)), bad), tiny.tokenizer())
    masked = tmp_path / "masked.jsonl"
    masked.write_text(json.dumps({"input_ids": [1] * 53, "loss_mask": [0] * 53}) + "\n")
    masked.write_text(masked.read_text() * 4)
    with pytest.raises(DataError, match=r"0 of 212 tokens supervised"):
        prepare(recipe(masked), tiny.tokenizer())


def test_hardly_anything_supervised_is_a_warning(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"input_ids": [1] * 300, "prompt_tokens": 299}) + "\n")
    prepared = prepare(recipe(path), tiny.tokenizer())
    assert "warning: under 1% of the tokens are supervised" in prepared.summary()


def test_the_command_refuses_before_it_loads_a_model(tmp_path, capsys, monkeypatch):
    """B01: five bad rows: exit status 1, the reasons, no traceback."""
    tokenizer_only = tmp_path / "target"
    tiny.tokenizer().save_pretrained(tokenizer_only)
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"conversations": []}\n' * 5)
    recipe_file = tmp_path / "r.yaml"
    recipe_file.write_text(recipe(bad, target=str(tokenizer_only)).to_yaml())
    assert main(["data", "prepare", "--recipe", str(recipe_file)]) == 1
    assert "No row of" in capsys.readouterr().err
    good = write_chats(tmp_path / "good.jsonl", *many(3))
    recipe_file.write_text(recipe(good, target=str(tokenizer_only)).to_yaml())
    assert main(["data", "prepare", "--recipe", str(recipe_file)]) == 0
    shown = capsys.readouterr().out
    assert "3 rows, 3 kept, 0 skipped" in shown
    assert "[[answer 0<|turn_end|>]]" in shown or "[[answer 1<|turn_end|>]]" in shown


def test_labels_are_shown_in_brackets():
    row = Row("r", [*b"<user>q", tiny.TURN_END, *b"<a>ok", tiny.TURN_END, *b"\n"], [False] * 11 + [True] * 3 + [False])
    text = show_row(row, tiny.tokenizer())
    assert text.plain.splitlines()[1:] == ["<user>q<|turn_end|><a>[[ok<|turn_end|>]]"]
    assert any("green" in str(span.style) for span in text.spans)


def test_a_bad_template_row_does_not_end_the_run(tmp_path):
    """B09: kept and skipped by line, with the template's own words."""
    path = tmp_path / "chats.jsonl"
    system = {"role": "system", "content": "s"}
    user, answer = {"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}
    rows = [[system, user, answer], [user, answer], [user, user, answer]]
    path.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in rows))
    prepared = prepare(recipe(path), tiny.tokenizer(template=chat_templates.STRICT))
    (report,) = prepared.reports.values()
    assert report.kept == 1
    assert "must alternate" in report.summary() and "line 1, roles: system, user, assistant" in report.summary()
    assert "the roles don't alternate (line 3, roles: user, user, assistant)" in report.summary()


def test_a_context_other_than_the_prompt_is_a_warning(tmp_path):
    """B11: the template's arguments reach prepare; the first differing token is named, once, with the line."""
    path = write_chats(tmp_path / "chats.jsonl", *many(3))
    tokenizer = tiny.tokenizer(template=chat_templates.THOUGHT_BY_ARGUMENT)
    quiet = prepare(recipe(path), tokenizer)
    assert "warning" not in quiet.summary()
    told = prepare(recipe(path, chat={"arguments": {"enable_thinking": False}}), tokenizer)
    assert "warning: in 3 rows the answer doesn't follow the prompt" in told.summary()
    assert told.summary().count("in the row, 60 '<' in the prompt") == 1


def test_nothing_stale_can_be_read(tmp_path):
    """B06: another template, another length: what is prepared is what a clean folder gives."""
    path = write_chats(tmp_path / "chats.jsonl", *many(6))

    def prepared(template: str, max_length: int) -> list[Row]:
        found = prepare(recipe(path, max_length=max_length), tiny.tokenizer(template=template))
        return [*found.train, *found.held_out]

    before = sorted(tmp_path.iterdir())
    first = prepared(tiny.CHAT_TEMPLATE, 64)
    assert [row.input_ids for row in prepared(chat_templates.EMPTY_THOUGHT, 64)] != [row.input_ids for row in first]
    assert max(len(row.input_ids) for row in prepared(tiny.CHAT_TEMPLATE, 24)) == 24
    assert prepared(tiny.CHAT_TEMPLATE, 64) == first
    assert sorted(tmp_path.iterdir()) == before


def test_a_fraction_is_held_out_by_prompt_alike_in_every_run(tmp_path):
    twice = [*many(40), *[(question, "another " + answer) for question, answer in many(40)]]
    first = prepare(recipe(write_chats(tmp_path / "a.jsonl", *twice), held_out={"fraction": 0.1}), tiny.tokenizer())
    assert len(first.train) + len(first.held_out) == 80 and len(first.held_out) == 8
    asked = [
        {row.input_ids[: row.supervised.index(True)].__repr__() for row in rows}
        for rows in (first.train, first.held_out)
    ]
    assert not asked[0] & asked[1]
    again = prepare(
        recipe(tmp_path / "a.jsonl", held_out={"fraction": 0.1}), tiny.tokenizer(template=chat_templates.STRICT)
    )
    assert ids(again.held_out) == ids(first.held_out)
    random.Random(1).shuffle(twice)
    mixed = prepare(recipe(write_chats(tmp_path / "b.jsonl", *twice), held_out={"fraction": 0.1}), tiny.tokenizer())
    assert {tuple(row.input_ids) for row in mixed.held_out} == {tuple(row.input_ids) for row in first.held_out}


@pytest.mark.parametrize(
    ("keys", "fraction", "size"),
    [([], 0.5, 0), (["a"], 0.5, 0), (["a", "b"], 0.01, 1), (["a", "a", "b"], 0.9, 2), (list("abcdefghij"), 0.3, 3)],
)
def test_something_is_held_out_but_never_everything(keys, fraction, size):
    chosen = choose_held_out(keys, fraction)
    assert len(chosen) == size and chosen <= set(range(len(keys)))
    assert {keys[number] for number in chosen}.isdisjoint(keys[number] for number in set(range(len(keys))) - chosen)


def test_held_out_sources_share_no_prompt_with_training(tmp_path):
    train = write_chats(tmp_path / "train.jsonl", *many(10))
    held = write_chats(tmp_path / "held.jsonl", *many(3), ("own", "x"))
    prepared = prepare(recipe(train, held_out={"sources": [{"source": str(held)}]}), tiny.tokenizer())
    assert (len(prepared.train), len(prepared.held_out)) == (7, 4)
    assert prepared.reports[str(train)].skipped == {"its prompt is held out": ["line 1", "line 2", "line 3"]}
    assert prepared.held_out_reports[str(held)].kept == 4


def test_an_id_without_an_output_row_is_refused_by_line(tmp_path):
    """B29: (a) more rows than the tokenizer has ids is fine; (b) fewer, and the id occurs: id and line are named."""
    path = write_chats(tmp_path / "chats.jsonl", ("q", "a"), ("q", "a<|end|>b"))
    assert prepare(recipe(path), tiny.tokenizer(), vocab_size=264).train
    with pytest.raises(DataError, match=r"chats.jsonl:\d holds token id 258 .*257 rows.*ids 0 to 256"):
        prepare(recipe(path), tiny.tokenizer(), vocab_size=257)
    tokens = tmp_path / "tokens.jsonl"
    tokens.write_text('{"input_ids": [1, 2], "prompt_tokens": 1}\n{"input_ids": [1, 257], "prompt_tokens": 1}\n')
    with pytest.raises(DataError, match=r"tokens.jsonl:2 holds token id 257"):
        prepare(recipe(tokens), tiny.tokenizer(), vocab_size=257)


def test_a_row_longer_than_the_target_takes_is_refused(tmp_path):
    path = write_chats(tmp_path / "chats.jsonl", ("q", "a" * 100))
    with pytest.raises(DataError, match="set data.max_length to 64"):
        prepare(recipe(path), tiny.tokenizer(), max_positions=64)


def test_agreement_tells_the_targets_own_answers_from_foreign_ones():
    """B08: its greedy answers agree in full, random ones in about 1 of V; the latter is a warning."""
    target = tiny.target("llama", dtype=torch.float64)
    draw = random.Random(0)
    own, foreign = [], []
    generate: Any = target.model.generate
    for number in range(40):
        prompt = [draw.randrange(256) for _ in range(6)]
        answer = generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False)[0, 6:].tolist()
        mask = [False] * 6 + [True] * len(answer)
        own.append(Row(f"own {number}", prompt + answer, mask))
        foreign.append(Row(f"foreign {number}", prompt + [draw.randrange(264) for _ in answer], mask))

    def measured(rows: list[Row]) -> Agreement:
        plan = batches(rows, batch_size=2, max_length=32, packing=True, seed=0, epoch=0)
        return agreement(target, (collate(rows, batch) for batch in plan))

    assert measured(own).share == 1 and measured(own).warning() is None
    assert measured(own).tokens == sum(sum(row.supervised) for row in own)
    assert measured(foreign).share < 0.05
    assert "headstart data distill" in (measured(foreign).warning() or "")
    assert Agreement(0, 0).warning() is None


def test_the_bundled_tokenizer_and_recipe_prepare(tmp_path, capsys):
    path = write_chats(tmp_path / "chats.jsonl", *many(4))
    prepared = run(recipe(path, target="bundled:smollm2-135m"), show=1)
    assert isinstance(prepared, Prepared)
    assert "[[answer" in capsys.readouterr().out


def test_one_prompt_alone_leaves_nothing_to_hold_out_and_that_is_said(tmp_path):
    one = prepare(recipe(write_chats(tmp_path / "one.jsonl", ("q", "a"), ("q", "b"))), tiny.tokenizer())
    assert len(one.held_out) == 0 and "warning: nothing is held out" in one.summary()
    two = prepare(recipe(write_chats(tmp_path / "two.jsonl", ("q", "a"), ("r", "b"))), tiny.tokenizer())
    assert len(two.held_out) == 1 and "warning" not in two.summary()
