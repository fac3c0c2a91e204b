"""Acceptance figures from step records: pure counts, pooled over steps, never averaged over prompts or batches.

    counts = count_steps(answer.steps for answer in answers)
    counts.acceptance_length, counts.conditional

One step is one target forward that verifies one tree; prefill is no step. A step cut short by an end token, a stop
string or a length limit says nothing about the drafter: it is left out of every figure here, counted in `cut_steps`.
Counts add, so no figure depends on how prompts were batched or in which order they came.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import mean, median

from headstart.decode.engine import StepRecord

Number = int | float
LOOP_NGRAM, LOOP_TIMES = 8, 3
"""An answer loops if one of its 8-grams occurs three times."""

FORMULAS = {
    "acceptance_length": "tokens emitted per step, the bonus token counted: sum(accepted + 1) / steps, prefill apart",
    "mean_accepted": "accepted drafts per step: sum(accepted) / steps, which is acceptance_length - 1",
    "draft_acceptance": "accepted drafts / levels drafted: sum(accepted) / sum(depth); for chains, accepted / drafted",
    "per_position": "share at depth d: steps with accepted >= d / steps whose tree reached depth d",
    "conditional": "alpha_d: steps with accepted >= d / steps with accepted >= d - 1 whose tree reached depth d",
    "alpha": "one rate for all depths: the numerators of alpha_d, summed / their denominators, summed",
    "mean_depth": "levels drafted per step: sum(depth) / steps; for chains, K",
}
"""What the figures are called and how they are computed; printed in the reports."""


@dataclass(frozen=True)
class StepCounts:
    """Sums over whole (not cut) steps. Figures are None where nothing was counted. Index 0 of a tuple is depth 1."""

    steps: int = 0
    cut_steps: int = 0
    emitted: int = 0
    """Tokens, the bonus token of each step counted."""
    accepted: int = 0
    """Drafted tokens accepted."""
    drafted_levels: int = 0
    """Sum of the trees' depths: the most drafts that could have been accepted."""
    reached: tuple[int, ...] = ()
    """Steps whose tree reached depth d."""
    tested: tuple[int, ...] = ()
    """Of those, the steps whose first d - 1 drafts were accepted: only they say anything about depth d."""
    passed: tuple[int, ...] = ()
    """Steps whose first d drafts were accepted."""

    @property
    def acceptance_length(self) -> float | None:
        """tau = sum(emitted) / sum(steps), the bonus token counted, prefill apart."""
        return ratio(self.emitted, self.steps)

    @property
    def mean_accepted(self) -> float | None:
        """Accepted drafts per step: sum(accepted) / steps."""
        return ratio(self.accepted, self.steps)

    @property
    def draft_acceptance(self) -> float | None:
        """sum(accepted) / sum(depth): for chains, accepted / drafted; of siblings in a tree, at most one can be."""
        return ratio(self.accepted, self.drafted_levels)

    @property
    def mean_depth(self) -> float | None:
        """Levels drafted per step: sum(depth) / steps; for chains of one length, that length K."""
        return ratio(self.drafted_levels, self.steps)

    @property
    def alpha(self) -> float | None:
        """The likeliest rate of acceptance if it is one for all depths: sum(passed) / sum(tested)."""
        return ratio(sum(self.passed), sum(self.tested))

    @property
    def per_position(self) -> list[float | None]:
        """Depth d: steps that accepted d drafts or more / steps whose tree reached depth d."""
        return [ratio(passed, reached) for passed, reached in zip(self.passed, self.reached, strict=True)]

    @property
    def conditional(self) -> list[float | None]:
        """alpha_d: of the steps whose tree reached depth d and whose first d - 1 drafts were accepted, the share whose
        d-th was accepted too."""
        return [ratio(passed, tested) for passed, tested in zip(self.passed, self.tested, strict=True)]


def count_steps(answers: Iterable[Iterable[StepRecord]]) -> StepCounts:
    """Pools the steps of all answers."""
    steps = [step for answer in answers for step in answer]
    whole = [step for step in steps if not step.cut]
    depths = range(1, max((step.depth for step in whole), default=0) + 1)
    return StepCounts(
        steps=len(whole),
        cut_steps=len(steps) - len(whole),
        emitted=sum(step.emitted for step in whole),
        accepted=sum(step.accepted for step in whole),
        drafted_levels=sum(step.depth for step in whole),
        reached=tuple(sum(step.depth >= depth for step in whole) for depth in depths),
        tested=tuple(sum(step.depth >= depth and step.accepted >= depth - 1 for step in whole) for depth in depths),
        passed=tuple(sum(step.accepted >= depth for step in whole) for depth in depths),
    )


def ratio(numerator: Number, denominator: Number) -> float | None:
    """The quotient, or None where nothing was counted."""
    return numerator / denominator if denominator else None


def mean_and_median(values: Iterable[Number | None]) -> dict[str, float | None]:
    """Over prompts, those without a value left out: one prompt, one vote, unlike the pooled figures."""
    known = [float(value) for value in values if value is not None]
    return {"mean": mean(known) if known else None, "median": median(known) if known else None}


def loops(token_ids: Sequence[int]) -> bool:
    """Whether an 8-gram of the answer occurs three times or more (overlapping occurrences count).

    A small target loops on many greedy answers, which every drafter predicts well; n-grams best of all.
    """
    grams = Counter(tuple(token_ids[i : i + LOOP_NGRAM]) for i in range(len(token_ids) - LOOP_NGRAM + 1))
    return max(grams.values(), default=0) >= LOOP_TIMES
