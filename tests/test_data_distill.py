"""Distilling: every prompt answered once, whatever happens on the way."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from io import FileIO
from pathlib import Path
from typing import Any

import pytest
import torch

from headstart.data import distill as distill_module
from headstart.data.distill import Answer, Question, distill
from headstart.data.distill import run as run_distill
from headstart.data.messages import Conversation
from headstart.data.prepare import prepare
from headstart.data.rendering import ChatRenderer, decode, label_runs
from headstart.data.reports import SkipReport
from headstart.data.sources import read
from headstart.errors import DataError, disk_fault
from headstart.recipe import ChatSection, Recipe, Source
from tests import tiny

SETTINGS = {"target": "tiny", "temperature": 0.0}


def prompt(number: int, *questions: str) -> Conversation:
    messages = tuple({"role": "user", "content": text} for text in questions or (f"q{number}",))
    return Conversation(row_id=f"row {number}", origin=f"f:{number}", messages=messages, kind="k", topic="t")


def echo(question: Question) -> Answer:
    return Answer(question.request_id, question.messages[-1]["content"].upper(), cut=False, num_tokens=3)


def in_order(questions: Iterator[Question]) -> Iterator[Answer]:
    return map(echo, questions)


def first_is_slowest(questions: Iterator[Question]) -> Iterator[Answer]:
    """Three rows at once; the one that came first leaves last."""
    at_work: list[Question] = []
    for question in questions:
        at_work.append(question)
        if len(at_work) == 3:
            yield echo(at_work.pop())
    yield from map(echo, reversed(at_work))


def all_at_once(questions: Iterator[Question]) -> Iterable[Answer]:
    return [echo(question) for question in list(questions)]


def renderer(**chat) -> ChatRenderer:
    return ChatRenderer(tiny.tokenizer(), ChatSection(**chat))


def answered(prompts: Iterable[Conversation], output: Path, generate=in_order, **options):
    report = distill(prompts, generate, renderer(), output, settings=SETTINGS, **options)
    return report, [json.loads(line) for line in output.read_text().splitlines()]


def texts(row: dict) -> list[str]:
    return [message["content"] for message in row["messages"]]


def test_a_row_per_prompt_with_the_targets_words(tmp_path):
    report, rows = answered([prompt(1), prompt(2)], tmp_path / "out.jsonl")
    assert rows[0] == {
        "row_id": "row 1",
        "kind": "k",
        "topic": "t",
        "messages": [{"role": "user", "content": "q1"}, {"role": "assistant", "content": "Q1"}],
        "cut": False,
        "temperature": 0.0,
        "check": "crc32:4a98c8a8",
    }
    assert (report.rows, report.kept, len(rows)) == (2, 2, 2)


@pytest.mark.parametrize("generate", [in_order, first_is_slowest, all_at_once])
def test_every_question_is_answered_in_sequence(tmp_path, generate):
    """Also the last chat's, whose second question comes up when no prompt is left to draw."""
    prompts = [prompt(number, *[f"{number}{turn}" for turn in "abc"[: number % 3 + 1]]) for number in range(8)]
    _, rows = answered(prompts, tmp_path / "out.jsonl", generate)
    assert sorted(row["row_id"] for row in rows) == sorted(one.row_id for one in prompts)
    for row in rows:
        number = row["row_id"].split()[1]
        expected = [
            text for turn in "abc"[: int(number) % 3 + 1] for text in (f"{number}{turn}", f"{number}{turn}".upper())
        ]
        assert texts(row) == expected


def test_the_prompt_of_a_question_holds_the_answers_before_it(tmp_path):
    asked: list[Question] = []

    def generate(questions: Iterator[Question]) -> Iterator[Answer]:
        for question in questions:
            asked.append(question)
            yield echo(question)

    render = renderer(system="S")
    distill([prompt(1, "a", "b")], generate, render, tmp_path / "out.jsonl", settings=SETTINGS)
    assert [question.prompt_ids for question in asked] == [render.prompt(question.messages) for question in asked]
    assert decode(render.tokenizer, asked[1].prompt_ids).startswith(
        "<system>S<|turn_end|>\n<user>a<|turn_end|>\n<assistant>A"
    )
    assert [len(question.messages) for question in asked] == [
        2,
        4,
    ]  # as a server is told them, which adds no system turn of a recipe


def test_other_peoples_answers_are_left_out_and_system_turns_kept(tmp_path):
    messages = [("system", "s"), ("user", "a"), ("assistant", "foreign"), ("user", "b"), ("assistant", "foreign")]
    conversation = Conversation(
        row_id="r", origin="f:1", messages=tuple({"role": role, "content": text} for role, text in messages)
    )
    _, (row,) = answered([conversation], tmp_path / "out.jsonl")
    assert texts(row) == ["s", "a", "A", "b", "B"]


@pytest.mark.parametrize("kept", [0, 1, 3])
def test_a_stopped_run_goes_on_by_row_id(tmp_path, kept):
    """B04: six prompts, the first the slowest, stopped after some; then exactly six rows, each once."""
    output = tmp_path / "out.jsonl"
    prompts = [prompt(number) for number in range(6)]

    class Killed(Exception):
        pass

    def dies(questions: Iterator[Question]) -> Iterator[Answer]:
        for count, answer in enumerate(first_is_slowest(questions)):
            if count == kept:
                raise Killed
            yield answer

    with pytest.raises(Killed):
        answered(prompts, output, dies)
    lines = output.read_text().splitlines()
    assert len(lines) == kept
    with output.open("a") as torn:
        torn.write('{"row_id": "row 5", "mess')
    report, rows = answered(prompts, output, first_is_slowest)
    assert sorted(row["row_id"] for row in rows) == [f"row {number}" for number in range(6)]
    assert output.read_text().splitlines()[:kept] == lines
    assert (report.rows, report.kept) == (6, 6)
    before = output.read_bytes()
    answered(prompts, output)
    assert output.read_bytes() == before


def test_a_killed_process_loses_no_finished_row(tmp_path):
    """kill -9 in the middle of answering."""
    output = tmp_path / "out.jsonl"
    script = (
        "import sys, time; from tests.test_data_distill import *\n"
        "def slow(questions):\n"
        "    for count, question in enumerate(questions):\n"
        "        if count == 3: print('now', flush=True); time.sleep(60)\n"
        "        yield echo(question)\n"
        "answered([prompt(number) for number in range(6)], Path(sys.argv[1]), slow)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, str(output)], stdout=subprocess.PIPE, cwd=Path(__file__).parents[1]
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == b"now\n"
        os.kill(process.pid, signal.SIGKILL)
    assert len(output.read_text().splitlines()) == 3
    _, rows = answered([prompt(number) for number in range(6)], output)
    assert [row["row_id"] for row in rows] == [f"row {number}" for number in range(6)]


def test_two_processes_never_answer_into_one_file(tmp_path):
    """B04 in a launch of several processes, where every prompt would be answered by each."""
    output = tmp_path / "out.jsonl"

    def answers_meanwhile(questions):
        for question in questions:
            with pytest.raises(DataError, match="Another process is answering into .*out.jsonl already; wait for it"):
                answered([prompt(number) for number in range(6)], output)
            yield echo(question)

    _, rows = answered([prompt(number) for number in range(6)], output, answers_meanwhile)
    assert [row["row_id"] for row in rows] == [f"row {number}" for number in range(6)]


def test_going_on_with_other_settings_is_refused(tmp_path):
    """B06: rows made another way are never mixed in; what differs is named."""
    output = tmp_path / "out.jsonl"
    answered([prompt(1)], output)
    with pytest.raises(DataError, match=r"begun with temperature 0.0, this run has 0.7"):
        distill([prompt(2)], in_order, renderer(), output, settings={**SETTINGS, "temperature": 0.7})
    foreign = tmp_path / "foreign.jsonl"
    foreign.write_text('{"text": "mine"}\n')
    with pytest.raises(DataError, match="is there already"):
        answered([prompt(1)], foreign)
    assert foreign.read_text() == '{"text": "mine"}\n'
    with output.open("a") as lines:
        lines.write("rubbish\n")
    with pytest.raises(DataError, match=r"out.jsonl:2 is no line that distilling wrote"):
        answered([prompt(1)], output)


def test_cut_and_empty_answers_end_their_chat(tmp_path):
    """B08: a cut answer is marked, and gets no supervised turn end when it is read again."""

    def cuts(questions: Iterator[Question]) -> Iterator[Answer]:
        for question in questions:
            last = question.messages[-1]["content"]
            yield Answer(question.request_id, "" if last == "empty" else "words", cut=last == "cut")

    prompts = [
        prompt(1, "cut", "never asked"),
        prompt(2, "fine", "cut"),
        prompt(3, "fine", "empty"),
        prompt(4, "empty"),
    ]
    output = tmp_path / "out.jsonl"
    _, rows = answered(prompts, output, cuts)
    found = {row["row_id"]: (texts(row), row["cut"]) for row in rows}
    assert found == {
        "row 1": (["cut", "words"], True),
        "row 2": (["fine", "words", "cut", "words"], True),
        "row 3": (["fine", "words"], False),
        "row 4": (["empty", ""], False),
    }
    recipe = Recipe.model_validate(
        {"name": "r", "target": {"name": "t"}, "head": {"type": "medusa"}, "data": {"train": [{"source": str(output)}]}}
    )
    tokenizer = tiny.tokenizer()
    prepared = prepare(recipe, tokenizer)
    shown = {
        row.row_id: [tokenizer.decode(row.input_ids[start:end]) for start, end in label_runs(row)]
        for row in [*prepared.train, *prepared.held_out]
    }
    end = "words<|turn_end|>"
    assert shown == {"row 1": ["words"], "row 2": [end, "words"], "row 3": [end]}
    assert prepared.reports[str(output)].skipped == {
        "an empty answer": [f"line {1 + [r['row_id'] for r in rows].index('row 4')}"]
    }


def test_prompts_that_cannot_be_asked_are_counted(tmp_path):
    prompts = [prompt(1), prompt(2, "long " * 50), Conversation(row_id="t", origin="f:3", text="plain")]
    report, rows = answered(prompts, tmp_path / "out.jsonl", max_prompt_tokens=100)
    assert [row["row_id"] for row in rows] == ["row 1"]
    assert {reason: len(places) for reason, places in report.skipped.items()} == {
        "prompt too long": 1,
        "no user turn to answer": 1,
    }


def test_seeds_follow_from_the_row_alone(tmp_path):
    def seeds(prompts: list[Conversation], name: str) -> dict[str, int]:
        found: dict[str, int] = {}

        def generate(questions: Iterator[Question]) -> Iterator[Answer]:
            for question in questions:
                found[question.request_id] = question.seed
                yield echo(question)

        distill(prompts, generate, renderer(), tmp_path / name, settings=SETTINGS)
        return found

    both = seeds([prompt(1, "a", "b"), prompt(2)], "one.jsonl")
    alone = seeds([prompt(2)], "two.jsonl")
    assert len(set(both.values())) == 3 and both["row 2/1"] == alone["row 2/1"]


def test_blank_lines_are_ignored_and_an_empty_file_is_refused(tmp_path, capsys):
    """B04: through the sources of a recipe."""
    source = tmp_path / "prompts.jsonl"
    source.write_text('{"prompt": "a"}\n\n{"prompt": "b"}\n')
    recipe = Recipe.model_validate(
        {"name": "r", "target": {"name": "t"}, "head": {"type": "medusa"}, "data": {"train": [{"source": str(source)}]}}
    )
    output = tmp_path / "deep" / "out.jsonl"
    run_distill(recipe, output, tokenizer=tiny.tokenizer(), generate=in_order)
    assert [texts(json.loads(line)) for line in output.read_text().splitlines()] == [["a", "A"], ["b", "B"]]
    assert "2 rows, 2 kept, 0 skipped" in capsys.readouterr().out
    source.write_bytes(b"")
    with pytest.raises(DataError, match="holds no rows"):
        run_distill(recipe, tmp_path / "other.jsonl", tokenizer=tiny.tokenizer(), generate=in_order)


def test_a_question_that_gets_no_answer_is_an_error(tmp_path):
    with pytest.raises(DataError, match="1 questions were not answered"):
        answered([prompt(1), prompt(2)], tmp_path / "out.jsonl", lambda questions: list(in_order(questions))[:1])


def test_the_engine_answers_in_batches(tmp_path):
    """Through the real decoder: rows join and leave, and each answer is what the target says to that chat alone."""
    from headstart.scripts.distill import answer_with

    target = tiny.target("llama", dtype=torch.float64)
    render = ChatRenderer(target.tokenizer, ChatSection())
    output = tmp_path / "out.jsonl"
    prompts = [prompt(number) for number in range(7)]
    report = distill(prompts, answer_with(target, 6, 0.0, 3), render, output, settings=SETTINGS)
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert report.kept == 7 and len({row["row_id"] for row in rows}) == 7
    hugging_face: Any = target.model.generate
    for row in rows:
        asked = render.prompt(row["messages"][:1])
        plain = hugging_face(torch.tensor([asked]), max_new_tokens=6, do_sample=False)[0, len(asked) :].tolist()
        assert row["cut"] == (plain[-1] not in target.end_token_ids)
        words = decode(target.tokenizer, plain if row["cut"] else plain[:-1])
        assert row["messages"][1]["content"] == (words.rstrip("\ufffd") if row["cut"] else words)


def test_a_full_disk_keeps_whole_rows_and_the_same_command_goes_on(tmp_path, monkeypatch):
    """Planted at the write: the fourth line fits in part."""
    output = tmp_path / "out.jsonl"
    prompts = [prompt(number) for number in range(6)]
    written: list[bytes] = []

    def until_full(lines: FileIO, line: bytes) -> None:
        written.append(line)
        if len(written) == 4:
            lines.write(line[:20])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        lines.write(line)

    monkeypatch.setattr(distill_module, "_append", until_full)
    with pytest.raises(OSError) as caught:
        answered(prompts, output)
    sentence = str(disk_fault(caught.value))
    assert sentence.startswith(f"{output} cannot be written or read (no space left on device); make room")
    assert output.read_bytes() == b"".join(written[:3]) + written[3][:20]
    monkeypatch.undo()
    _, rows = answered(prompts, output)
    assert [row["row_id"] for row in rows] == [f"row {number}" for number in range(6)]


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_a_full_disk_in_earnest(tmp_path):
    folder = tmp_path / "small"
    folder.mkdir()
    small = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    if subprocess.run(small, capture_output=True).returncode:
        pytest.skip("this container may not mount")
    try:
        output, prompts = folder / "out.jsonl", [prompt(number, "x" * 1000) for number in range(40)]
        with pytest.raises(OSError) as caught:
            answered(prompts, output)
        assert str(output) in str(disk_fault(caught.value))
        whole = output.read_bytes().count(b"\n")
        assert 10 < whole < 40
        moved = tmp_path / "out.jsonl"
        for name in (output.name, f"{output.name}.settings.json"):
            shutil.copy(folder / name, tmp_path / name)
        _, rows = answered(prompts, moved)
        assert [row["row_id"] for row in rows] == [f"row {number}" for number in range(40)]
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_damaged_line_is_never_learnt_from_and_named_when_going_on(tmp_path):
    """Every single flipped bit of a line, and a file that lost its end."""
    output = tmp_path / "out.jsonl"
    prompts = [prompt(number) for number in range(3)]
    answered(prompts, output)
    good = output.read_bytes()
    line = good.splitlines(keepends=True)[1]
    copy, source = tmp_path / "copy.jsonl", Source(source=str(tmp_path / "copy.jsonl"))
    for bit in range(0, 8 * len(line), 5):
        flipped = bytearray(line)
        flipped[bit // 8] ^= 1 << bit % 8
        copy.write_bytes(bytes(flipped))
        reports: dict[str, SkipReport] = {}
        found = list(read(source, reports))
        assert all(texts({"messages": one.messages}) == ["q1", "Q1"] for one in found)
        assert sum(report.kept for report in reports.values()) == len(found)
    flip = good.replace(b'"Q1"', b'"P1"')
    output.write_bytes(flip)
    with pytest.raises(
        DataError, match="out.jsonl:2 is no line that distilling wrote, or was damaged since; take it out"
    ):
        answered(prompts, output)
    reports = {}
    assert [one.row_id for one in read(Source(source=str(output)), reports)] == ["row 0", "row 2"]
    assert "changed since it was written" in reports[str(output)].summary()
    output.write_bytes(good[: len(good) - len(line) // 2])
    _, rows = answered(prompts, output)
    assert output.read_bytes() == good and len(rows) == 3
