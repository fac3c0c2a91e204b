"""The bundled conversations: own prompts (prompts.py) and the demo target's own answers to them (answers.jsonl).

    from headstart.data.bundled import rows
    next(rows("train"))["messages"]

Everything about them, from the fields of a topic to the licence, is in README.md beside this file.
"""

import json
from collections.abc import Iterator
from functools import cache
from typing import Any

from headstart.data.bundled.prompts import FOLDER, SPLITS, all_prompts, further_wordings, split_of
from headstart.errors import DataError

__all__ = ["SPLITS", "prompts", "rows", "split_of"]

ANSWERS = FOLDER.joinpath("answers.jsonl")


def prompts(split: str = "all", wordings: bool = False) -> Iterator[dict[str, Any]]:
    """The prompts of `split`, user turns only, in a fixed mixed order; `wordings`: their other wordings instead.

    The splits are "train", "held_out_kinds" and "held_out_topics"; "all" is the three together. Each prompt is a
    dictionary of `row_id`, `kind`, `topic` and `messages`. Raises DataError where there is no such split.
    """
    if split not in (*SPLITS, "all"):
        raise DataError(f"The bundled conversations have no split {split!r}; write one of {', '.join(SPLITS)}, or all.")
    chosen = further_wordings() if wordings else all_prompts()
    return (row for row in chosen if split == "all" or split_of(row) == split)


def rows(split: str, answers: bool = True) -> Iterator[dict[str, Any]]:
    """The conversations of `split`: each prompt with its `messages` completed by the target's answers, and `cut`.

    `cut` is True where the last answer was ended by the length limit and not by the model. Prompts without an answer
    are left out. With `answers=False` this is `prompts(split)`. Raises DataError where there are no answers at all.
    """
    chosen = prompts(split)
    if not answers:
        return chosen
    answered = _answered()
    return (row | answered[row["row_id"]] for row in chosen if row["row_id"] in answered)


@cache
def _answered() -> dict[str, dict[str, Any]]:
    """Row id -> `messages` and `cut`, from the file that `headstart data distill` wrote."""
    if not ANSWERS.is_file():
        raise DataError(
            f"The bundled answers are missing at {ANSWERS}; "
            "make them with `headstart data distill`, or name another data source."
        )
    turns_asked = {row["row_id"]: _user_turns(row) for row in all_prompts()}
    answered = {}
    with ANSWERS.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            record = json.loads(line)
            turns = _user_turns(record)
            # A chat whose first answer was cut ends there, so a record may have fewer turns than its prompt.
            if turns != turns_asked.get(record["row_id"], [])[: len(turns)]:
                raise DataError(
                    f"{ANSWERS}:{number}: {record['row_id']} answers another prompt than prompts.py composes now; "
                    "distill the bundled answers again."
                )
            answered[record["row_id"]] = {"messages": record["messages"], "cut": record["cut"]}
    return answered


def _user_turns(row: dict[str, Any]) -> list[str]:
    return [message["content"] for message in row["messages"] if message["role"] == "user"]
