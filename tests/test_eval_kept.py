"""An evaluation that is killed goes on where it was: what was measured stays, and nothing else does."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest
import tiny

from headstart.data.rendering import ChatRenderer
from headstart.decode.drafters.ngram import NgramDrafter
from headstart.eval import measure
from headstart.eval.kept import KeptAnswers
from headstart.eval.prompts import Question
from headstart.eval.timing import Contender, time_arms
from headstart.recipe import ChatSection


class Killed(Exception):
    """What stands for a kill: nothing catches it."""


def question(number: int, *texts: str) -> Question:
    turns = tuple(({"role": "user", "content": text},) for text in texts or (f"Question {number}",))
    return Question("the same id", "chat", "chat", "from elsewhere", turns)


QUESTIONS = [question(0), question(1, "Say a", "Say b"), question(2, "x" * 500), question(3)]


def run(kept=None, *, fail_after: int | None = None, batch_size: int = 1):
    """All answers by plain decoding and by n-grams; perhaps killed after so many answers."""
    told = []

    def progress(tokens: int) -> None:
        told.append(tokens)
        if fail_after is not None and len(told) > fail_after:
            raise Killed

    target = tiny.target("llama")
    measured = time_arms(
        target,
        {"ngram": Contender(NgramDrafter(3), 4)},
        QUESTIONS,
        ChatRenderer(tiny.tokenizer(), ChatSection()),
        max_new_tokens=6,
        batch_size=batch_size,
        transformers_questions=1,
        warm_up=False,
        kept=kept,
        progress=progress,
    )
    return measured, len(told)


@pytest.mark.parametrize(("batch_size", "groups"), [(1, 3), (2, 1)])
def test_a_killed_measurement_goes_on_with_the_next_question(tmp_path, batch_size, groups):
    with pytest.raises(Killed):
        run(KeptAnswers(tmp_path).open({"a": 1}), fail_after=3, batch_size=batch_size)
    kept = KeptAnswers(tmp_path)
    file = kept.open({"a": 1})
    before = file.path.read_bytes()
    assert len(file.groups) == groups, "of the question that was under way, nothing is kept"
    measured, told = run(file, batch_size=batch_size)
    straight, all_told = run(batch_size=batch_size)
    assert measured.earlier == all_told - told == 3 and file.path.read_bytes().startswith(before)
    assert [(one.question, one.turn, one.group) for one in measured.answers] == [
        (one.question, one.turn, one.group) for one in straight.answers
    ]
    for one, other in zip(measured.answers, straight.answers, strict=True):
        assert one.prompt_ids == other.prompt_ids and (one.transformers is None) == (other.transformers is None)
        for arm in ("none", "ngram"):
            assert one.arms[arm].token_ids == other.arms[arm].token_ids
            assert [step.accepted for step in one.arms[arm].steps] == [step.accepted for step in other.arms[arm].steps]
    assert measured.too_long == straight.too_long == ["the same id"] and measured.memory == straight.memory
    again, told = run(KeptAnswers(tmp_path).open({"a": 1}), batch_size=batch_size)
    assert told == 0 and [asdict(one) for one in again.answers] == [asdict(one) for one in measured.answers]
    kept.discard()
    assert not list(tmp_path.iterdir())


def test_what_was_measured_otherwise_or_is_damaged_is_not_taken(tmp_path):
    file = KeptAnswers(tmp_path).open({"temperature": 0.0})
    run(file)
    lines = file.path.read_bytes().splitlines(keepends=True)
    assert not KeptAnswers(tmp_path).open({"temperature": 1.0}).groups
    file.path.write_bytes(lines[0] + lines[1].replace(b'"seconds": 0.', b'"seconds": 1.', 1) + lines[3][:-40])
    opened = KeptAnswers(tmp_path).open({"temperature": 0.0})
    assert list(opened.groups) == [0] and opened.path.read_bytes() == lines[0]


def test_the_same_command_finishes_an_evaluation_that_was_killed(tmp_path, monkeypatch, capsys):
    target, prompts, output = tiny.save(tmp_path / "target", "llama"), tmp_path / "mine.jsonl", tmp_path / "out"
    records = [{"id": f"p{number}", "kind": "ab"[number % 2], "turns": [f"Say {number}"]} for number in range(4)]
    prompts.write_text("".join(json.dumps(record) + "\n" for record in records))

    def evaluate():
        return measure.run(
            target=str(target),
            drafters=["none", "ngram", "ngram@chain2"],
            bench=str(prompts),
            overrides=["eval.max_new_tokens=8", "eval.identity_prompts=1"],
            output=str(output),
            device="cpu",
            dtype="float32",
        )

    def killed(*_):
        raise Killed

    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr(measure, "write_report", killed)
        evaluate()
    (kept,) = output.glob("answers-*.partial.jsonl")
    assert str(tmp_path) not in kept.read_text(), "no path of this machine"
    capsys.readouterr()
    report = evaluate()
    assert "4 of 4 prompts were measured before" in capsys.readouterr().out
    assert any("4 of these answers were measured before" in gate["text"] for gate in report["details"]["gates"])
    assert not list(output.glob("answers-*"))
    # and every drafter stands in the tables by category, by context length and of latency
    for one in report["details"]["drafters"]:
        assert [row["answers"] for row in one["by_kind"]] == [2, 2] and one["by_context"]
        for arms in one["latency"].values():
            for values in map(list, (seconds.values() for seconds in arms.values())):
                assert values == sorted(values) and values[0] > 0
    markdown = (output / "report.md").read_text()
    assert "answers | plain tok/s | ngram: τ | speedup | ngram@chain2: τ | speedup |" in markdown
    assert "## All drafters by category" in markdown and "## Latency of all drafters in ms" in markdown
