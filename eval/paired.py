"""Arms that answered the same prompts: pooled figures, and their differences with intervals.

Counts hold a row of sums for every prompt, the same prompts in the same order in all arms. Prompts are drawn anew,
whole, and both sides of a difference are recomputed from the same ones: what makes a prompt easy is on both sides, and
cancels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from headstart.eval.acceptance import Number
from headstart.eval.intervals import Sums, bootstrap

Counts = Sequence[Sequence[Number]]
Figure = dict[str, Any]
"""`value`, and its 95% `interval` or None where fewer than two prompts say nothing about it."""


def figure(value: Number, interval: Sequence[Number] | None) -> Figure:
    return {"value": value, "interval": interval}


def pooled(seeds: Sequence[Counts]) -> Counts:
    """Sums over several arms, such as the seeds of one recipe, prompt by prompt."""
    return np.sum(np.asarray(seeds, dtype=np.float64), axis=0).tolist()


def columns(counts: Counts) -> list[list[float]]:
    """One list of numbers per sum, as `intervals` takes them."""
    return np.asarray(counts, dtype=np.float64).T.tolist()


def quotient(counts: Counts) -> float:
    """The first sum over the second, each over all prompts: τ of (tokens, steps)."""
    top, bottom = np.sum(counts, axis=0)
    return float(top / bottom)


def ratio_difference(one: Counts, other: Counts) -> Figure:
    """τ of one less that of the other, from (tokens, steps) of every prompt."""

    def difference(tokens: Sums, steps: Sums, other_tokens: Sums, other_steps: Sums) -> Sums:
        return tokens / steps - other_tokens / other_steps

    interval = bootstrap([*columns(one), *columns(other)], difference)
    return figure(quotient(one) - quotient(other), interval)


def speedup_difference(one: Counts, other: Counts, one_plain: Counts, other_plain: Counts) -> Figure:
    """Speedup of one less that of the other, from (tokens, seconds) of every prompt, each over the plain decoding that
    was interleaved with it (the same counts where both were measured in one run)."""

    def difference(*sums: Sums) -> Sums:
        rates = [tokens / seconds for tokens, seconds in zip(sums[::2], sums[1::2], strict=True)]
        return rates[0] / rates[2] - rates[1] / rates[3]

    arms = (one, other, one_plain, other_plain)
    value = quotient(one) / quotient(one_plain) - quotient(other) / quotient(other_plain)
    return figure(value, bootstrap([column for arm in arms for column in columns(arm)], difference))


def as_text(one: Figure, *, signed: bool = False) -> str:
    """`1.52 [1.45, 1.59]`; a difference has its sign."""
    sign = "+" if signed else ""
    text = f"{one['value']:{sign}.2f}"
    interval = one["interval"]
    return text if interval is None else f"{text} [{interval[0]:{sign}.2f}, {interval[1]:{sign}.2f}]"
