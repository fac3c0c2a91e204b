"""Answers that are kept as they are measured: a long evaluation that was killed goes on with the next question.

    store = KeptAnswers(folder)
    kept = store.open(measurement_key(trained, plans, questions, temperature, rows))
    time_arms(..., kept=kept)     # measures what is not there yet
    store.discard()               # once the report is written

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
from headstart.eval.drafters import DrafterPlan
from headstart.eval.prompts import Question
from headstart.eval.timing import Answer, Measurement, Timed
from headstart.eval.trained import Trained
from headstart.eval.transformers_arm import Generated
from headstart.train.run_folder import environment

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


def measurement_key(
    trained: Trained, plans: Sequence[DrafterPlan], questions: Sequence[Question], temperature: float, rows: int
) -> dict[str, Any]:
    """Everything that the figures of one measurement depend on, but for the weather on the machine."""
    recipe, target, here = trained.recipe, trained.target, environment(())
    return {
        "headstart": [here["headstart"], here["packages"]],
        "machine": [str(target.device), here["device"], here["threads"]],
        "target": [target.fingerprint(), str(target.dtype), recipe.target.quantization],
        "drafters": [[plan.name, plan.budget, plan.tree, [_contents(one) for one in plan.reads]] for plan in plans],
        "questions": [[one.question_id, one.kind, one.turns, one.ids] for one in questions],
        "chat": recipe.data.chat.model_dump(),
        "settings": [recipe.seed, recipe.eval.max_new_tokens, temperature, rows],
    }


def _contents(folder: Path) -> list[list[Any]]:
    """What a folder holds, without reading it."""
    files = sorted(file for file in folder.iterdir() if file.is_file())
    return [[file.name, (stat := file.stat()).st_size, stat.st_mtime_ns] for file in files]
