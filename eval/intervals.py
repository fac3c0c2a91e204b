"""How sure a figure is: bootstrap intervals over prompts, and the exact test of two arms on the same prompts.

Tokens of one answer hang together, answers hardly do: so prompts are drawn anew, whole, and every figure is recomputed
from the pooled sums of those drawn (Efron & Tibshirani, An Introduction to the Bootstrap, chapter 13: percentiles).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Float
from scipy.stats import binomtest

from headstart.eval.acceptance import Number

RESAMPLES = 4000
Interval = tuple[float, float]
Sums = Float[np.ndarray, "resamples"]
"""One sum per resample."""


def bootstrap(
    columns: Sequence[Sequence[Number]],
    statistic: Callable[..., Sums],
    *,
    seed: int = 0,
    resamples: int = RESAMPLES,
    level: float = 0.95,
) -> Interval | None:
    """The interval of `statistic(*sums)`; `columns` are numbers per prompt, `sums` their sums over the drawn prompts.

    None below two prompts, where there is no spread to see. Columns of one prompt stay together, so arms are paired.
    """
    table = np.asarray(columns, dtype=np.float64)
    if table.ndim != 2 or table.shape[1] < 2:
        return None
    prompts = table.shape[1]
    times_drawn = np.random.default_rng(seed).multinomial(prompts, np.full(prompts, 1 / prompts), size=resamples)
    with np.errstate(divide="ignore", invalid="ignore"):
        values = statistic(*(times_drawn @ table.T).T)
    values = values[np.isfinite(values)]
    if not len(values):
        return None
    tail = (1 - level) / 2
    low, high = np.quantile(values, [tail, 1 - tail])
    return float(low), float(high)


def ratio_interval(numerators: Sequence[Number], denominators: Sequence[Number], *, seed: int = 0) -> Interval | None:
    """Of sum(numerators) / sum(denominators): an acceptance length from tokens and steps per prompt."""
    return bootstrap([numerators, denominators], lambda top, bottom: top / bottom, seed=seed)


def speedup_interval(
    drafted_tokens: Sequence[Number],
    drafted_seconds: Sequence[Number],
    plain_tokens: Sequence[Number],
    plain_seconds: Sequence[Number],
    *,
    seed: int = 0,
) -> Interval | None:
    """Of (drafted tokens / drafted seconds) / (plain tokens / plain seconds), both pooled, each prompt in both arms."""
    return bootstrap(
        [drafted_tokens, drafted_seconds, plain_tokens, plain_seconds],
        lambda tokens, seconds, plain, plain_s: (tokens / seconds) / (plain / plain_s),
        seed=seed,
    )


def group_sums(groups: Sequence[int], values: Sequence[Number]) -> list[Number]:
    """The sum over each group, in order of the groups: prompts that were decoded together are drawn together."""
    sums: dict[int, Number] = dict.fromkeys(sorted(groups), 0)
    for group, value in zip(groups, values, strict=True):
        sums[group] += value
    return list(sums.values())


def more_often(first: Sequence[bool], second: Sequence[bool]) -> float:
    """p value of the one-sided exact McNemar test that `first` is true more often than `second` on the same prompts.

    Only prompts where the two differ count: if they were alike, either would be the true one with probability 1/2.
    """
    only_first = sum(a and not b for a, b in zip(first, second, strict=True))
    only_second = sum(b and not a for a, b in zip(first, second, strict=True))
    if not only_first + only_second:
        return 1.0
    return float(binomtest(only_first, only_first + only_second, 0.5, alternative="greater").pvalue)
