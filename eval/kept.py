"""Answers that are kept as they are measured: a long evaluation that was killed goes on with the next question.

    store = KeptAnswers(folder)
    kept = store.open({"target": ..., "drafters": ..., "temperature": 0.0})    # everything that a figure depends on
    time_arms(..., kept=kept)                                                  # measures what is not there yet
    store.discard()                                                            # once the report is written

One file for each measurement, answers-0123abcd.partial.jsonl: its name follows from what was measured and how, so that
other settings never meet its answers. A line holds the questions that were decoded together, by all arms, with a
checksum; a line that was cut off or changed is measured again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple
from hashlib import sha256
from pathlib import Path
from typing import Any

from headstart.atomic import write_bytes
from headstart.data.checked_rows import intact, to_line
from headstart.data.messages import SkipRow
from headstart.decode.engine import StepRecord
from headstart.errors import naming
from headstart.eval.prompts import Question
from headstart.eval.timing import Answer, Measurement, Timed
from headstart.eval.transformers_arm import Generated

FORMAT = 1
"""Of the lines; part of every file's name."""


class KeptAnswers:
    """The files of one evaluation's measurements, in the folder of its report."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._opened: list[KeptFile] = []

    def open(self, key: Mapping[str, Any]) -> KeptFile:
        """The file of one measurement. key: everything that its figures depend on, as JSON has it."""
        whole = json.dumps({"format": FORMAT, **key}, sort_keys=True, default=str)
        name = f"answers-{sha256(whole.encode()).hexdigest()[:8]}.partial.jsonl"
        self._opened.append(KeptFile(self.folder / name))
        return self._opened[-1]

    def discard(self) -> None:
        """Removes them: what they hold is in the report."""
        for one in self._opened:
            one.path.unlink(missing_ok=True)
        self._opened.clear()


class KeptFile:
    """The answers of one measurement, by group."""

    def __init__(self, path: Path):
        self.path = path
        self.groups: dict[int, dict[str, Any]] = {}
        if path.is_file():
            self._read()

    def _read(self) -> None:
        """Whole lines; the file is left with these alone, so that what is added next begins a line."""
        lines = self.path.read_bytes().splitlines(keepends=True)
        whole = {line: record for line in lines if (record := _parsed(line)) is not None}
        if len(whole) < len(lines):
            write_bytes(self.path, b"".join(whole))
        self.groups = {record["group"]: record for record in whole.values()}

    def read(self, group: int, questions: Sequence[Question]) -> Measurement | None:
        """questions: those of the group."""
        record = self.groups.get(group)
        if record is None:
            return None
        answers = [_answer(one, group, questions[one["question"]]) for one in record["answers"]]
        return Measurement(answers, record["memory"], record["too_long"], earlier=len(answers))

    def add(self, group: int, questions: Sequence[Question], part: Measurement) -> None:
        numbers = {id(question): number for number, question in enumerate(questions)}
        record = {
            "group": group,
            "answers": [{"question": numbers[id(one.question)], **_as_dict(one)} for one in part.answers],
            "memory": part.memory,
            "too_long": part.too_long,
        }
        with naming(self.path), self.path.open("ab") as file:
            file.write(to_line(record))
            file.flush()
            os.fsync(file.fileno())


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        return intact(json.loads(line))
    except (ValueError, SkipRow):
        return None


def _as_dict(answer: Answer) -> dict[str, Any]:
    return {
        "turn": answer.turn,
        "prompt_ids": answer.prompt_ids,
        "arms": {
            name: {
                "token_ids": timed.token_ids,
                "finish_reason": timed.finish_reason,
                "steps": [astuple(step) for step in timed.steps],
                "prefill_seconds": timed.prefill_seconds,
                "seconds": timed.seconds,
            }
            for name, timed in answer.arms.items()
        },
        "transformers": asdict(answer.transformers) if answer.transformers else None,
    }


def _answer(record: dict[str, Any], group: int, question: Question) -> Answer:
    return Answer(
        question=question,
        turn=record["turn"],
        group=group,
        prompt_ids=record["prompt_ids"],
        arms={
            name: Timed(**{**timed, "steps": [StepRecord(*step) for step in timed["steps"]]})
            for name, timed in record["arms"].items()
        },
        transformers=Generated(**record["transformers"]) if record["transformers"] else None,
    )
