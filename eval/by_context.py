"""Acceptance and speed against the length of the context: a head that learnt on short texts drafts worse in long ones.

Every step counts where it happened: a long answer to a short question reaches several buckets.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from headstart.decode.engine import StepRecord
from headstart.eval.acceptance import Number, count_steps, ratio
from headstart.eval.intervals import group_sums, ratio_interval, speedup_interval
from headstart.eval.timing import PLAIN, Answer

SHORTEST = 128
"""Tokens in the cache: the first bucket is everything below, each further one reaches twice as far."""

Steps = list[StepRecord]


def by_context(answers: Sequence[Answer], drafter: str) -> list[dict[str, Any]]:
    """One row for every bucket that a step of the drafter's lies in, shortest contexts first.

    `acceptance_length` is pooled over the whole steps of the bucket; `speedup` is tokens per second of steps in it,
    drafted over plain (None where the plain arm has no step there).
    """
    plain, drafted = ([_split(answer.arms[arm].steps) for answer in answers] for arm in (PLAIN, drafter))
    rows = []
    for edge in sorted({edge for one in drafted for edge in one}):
        there = [number for number in range(len(answers)) if edge in drafted[number] or edge in plain[number]]
        groups = [answers[number].group for number in there]
        steps = ([arm[number].get(edge, []) for number in there] for arm in (plain, drafted))
        rows.append(_row(edge, groups, *steps))
    return rows


def bucket(context_length: int) -> int:
    """One past the longest context of the bucket: 128, 256, 512, ..."""
    return max(SHORTEST, 1 << context_length.bit_length())


def _split(steps: Steps) -> dict[int, Steps]:
    found: dict[int, Steps] = defaultdict(list)
    for step in steps:
        found[bucket(step.context_length)].append(step)
    return dict(found)


def _row(edge: int, groups: list[int], plain: list[Steps], drafted: list[Steps]) -> dict[str, Any]:
    """Of the answers that come here in either arm, and of their steps those that are here."""
    counts = count_steps(drafted)
    emitted = [sum(step.emitted for step in steps if not step.cut) for steps in drafted]
    whole = [sum(not step.cut for step in steps) for steps in drafted]
    columns = [group_sums(groups, column) for arm in (drafted, plain) for column in _tokens_and_seconds(arm)]
    drafted_rate, plain_rate = (ratio(sum(columns[at]), sum(columns[at + 1])) for at in (0, 2))
    return {
        "name": f"{0 if edge == SHORTEST else edge // 2} to {edge - 1}",
        "answers": sum(map(bool, drafted)),
        "steps": counts.steps,
        "acceptance_length": counts.acceptance_length,
        "acceptance_length_interval": ratio_interval(group_sums(groups, emitted), group_sums(groups, whole)),
        "speedup": drafted_rate / plain_rate if drafted_rate and plain_rate else None,
        "speedup_interval": speedup_interval(*columns),
        "plain_tokens_per_second": plain_rate,
        "drafted_tokens_per_second": drafted_rate,
    }


def _tokens_and_seconds(arm: list[Steps]) -> tuple[list[Number], list[Number]]:
    tokens: list[Number] = [sum(step.emitted for step in steps) for steps in arm]
    seconds: list[Number] = [
        sum((step.draft_seconds + step.verify_seconds + step.host_seconds) / step.rows for step in steps)
        for steps in arm
    ]
    return tokens, seconds
