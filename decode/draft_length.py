"""How many tokens to draft next: policies that learn from what was accepted, and their replay along recorded texts.

    policy = AdaptiveLength(StepCosts.measured(curve, lambda depth: 0.002 * depth, range(1, 10)))
    depth = policy.choose()                                      # 0 is plain decoding, or say 4
    policy.observe(chosen=depth, drafted=depth, accepted=2)      # the third draft was wrong

A policy knows nothing of tokens. It sees depths and what became of them, so what a drafter's every length would have
taken along a text can be computed from the text's longest acceptances alone (`replay_lengths`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf, isfinite, prod
from operator import mul
from typing import Protocol, runtime_checkable

from headstart.decode.cost import CostCurve
from headstart.errors import HeadstartError

FIRST_RATE, FIRST_WEIGHT = 0.5, 1.0
"""What the first depth's rate starts from, and how many tests that is worth."""
ABOVE_WEIGHT = 4.0
"""How many tests of a depth the rate of the depth above is worth."""
SHARE = 0.02
"""Of the weight of all memories, what is spread evenly anew in every step."""


@dataclass(frozen=True, kw_only=True)
class StepCosts:
    """Seconds of a whole step, drafting and verifying, by the depth that is drafted; only ratios matter."""

    seconds: tuple[float, ...]
    """[depth], from 0, plain decoding, on. Infinite: this depth is not on offer."""
    budgets: tuple[int, ...]
    """[depth]: nodes, root included, that hold what is drafted down to this depth: depth + 1 for a chain."""

    def __post_init__(self) -> None:
        if len(self.seconds) != len(self.budgets) or not self.budgets or self.budgets[0] != 1:
            raise HeadstartError(
                f"costs of {len(self.seconds)} depths with budgets {list(self.budgets)} are no table; give one budget "
                "for every depth from 0 on, and 1 for depth 0"
            )
        if not all(seconds > 0 for seconds in self.seconds) or not isfinite(self.seconds[0]):
            raise HeadstartError(f"a step costs {min(self.seconds)} s; give seconds above 0, finite for depth 0")

    @property
    def longest(self) -> int:
        return len(self.seconds) - 1

    @classmethod
    def measured(cls, curve: CostCurve, draft_seconds: Callable[[int], float], budgets: Sequence[int]) -> StepCosts:
        """From a measured cost curve and the seconds of drafting down to a depth from 1 on.

        budgets: the drafter's nodes down to every depth from 0 on, root included: 1, 2, 3, .. for a chain; 0 for a
        depth that is not on offer, as all but 0 and the last of a dynamic tree are not.
        """
        seconds = [
            curve.at(nodes) + (draft_seconds(depth) if depth else 0.0) if nodes else inf
            for depth, nodes in enumerate(budgets)
        ]
        return cls(seconds=tuple(seconds), budgets=tuple(budgets))


@runtime_checkable
class LengthPolicy(Protocol):
    """Chooses the depth of the next draft, from what the steps before it told."""

    def choose(self) -> int:
        """The depth to draft to, from 0, plain decoding, to the longest on offer."""
        ...

    def stop_below(self) -> float:
        """In the step just chosen for: how likely what is drafted so far must be, by the drafter's own confidence, for
        drafting one level further; 0 asks nothing."""
        ...

    def observe(self, *, chosen: int, drafted: int, accepted: int) -> None:
        """What became of a step of one row. drafted: how deep its draft was; less than `chosen` where the drafter had
        no more to say. Steps cut short by an end token, a stop or a limit are not told."""
        ...


class ConstantLength:
    """The same depth in every step."""

    def __init__(self, length: int):
        self.length = length

    def choose(self) -> int:
        return self.length

    def stop_below(self) -> float:
        return 0.0

    def observe(self, *, chosen: int, drafted: int, accepted: int) -> None: ...


class HeuristicLength:
    """transformers' `num_assistant_tokens_schedule="heuristic"`: two more where all that was drafted was accepted, else
    one less; never below 1. The default start is its `num_assistant_tokens`."""

    def __init__(self, longest: int, start: int = 20):
        self.longest, self.length = longest, min(start, longest)

    def choose(self) -> int:
        return self.length

    def stop_below(self) -> float:
        return 0.0

    def observe(self, *, chosen: int, drafted: int, accepted: int) -> None:
        change = 2 if accepted == drafted else -1
        self.length = min(max(1, self.length + change), self.longest)


class AdaptiveLength:
    """The depth with the most tokens per second, at the acceptance seen lately and the measured costs.

    alpha_d, a depth's rate, is the share of its tests that it passed; depth K yields 1 + alpha_1 + alpha_1 alpha_2 + ..
    + alpha_1 .. alpha_K tokens. Only tested depths count, those all before which were accepted: the others say nothing,
    and would pull the rates down. Where a drafter has nothing (more) to say, n-grams without a match, a head that stops
    in doubt, the test of the next depth is not passed, and what that depth costs is paid that much less often.

    How far back to look is learnt too: rates are kept over several `memories` (steps) and weighted by how well each
    foretold the latest tests, with a share of the weight spread anew in every step (Herbster and Warmuth, "Tracking the
    best expert", 1998). So a text that changes is followed at once, and one that does not is averaged over.

    What is not drafted is not learnt, least of all after falling back to plain decoding. So one depth more than seems
    best is drafted now and then: as often as the seconds expected to be lost by it stay below `explore` of all seconds.
    """

    def __init__(self, costs: StepCosts, *, memories: Sequence[float] = (12.0, 100.0), explore: float = 0.006):
        self.costs, self.explore = costs, explore
        self._offered = [depth for depth, seconds in enumerate(costs.seconds) if isfinite(seconds)]
        self._memories = [_Memory(costs.longest, steps) for steps in memories]
        self._weights = [1 / len(memories)] * len(memories)
        self._saved = 0.0
        """Seconds that exploring may still cost."""
        self._speed = 0.0
        """Tokens per second at the depth that seemed best."""

    def rates(self) -> list[float]:
        """alpha_d for every depth from 1 on."""
        return self._mean([memory.rates() for memory in self._memories])

    def choose(self) -> int:
        tokens = [1.0, *(1.0 + drafted for drafted in accumulate(accumulate(self.rates(), mul)))]
        seconds = self._seconds()
        best = max(self._offered, key=lambda depth: (tokens[depth] / seconds[depth], -depth))
        self._speed = tokens[best] / seconds[best]
        self._saved += self.explore * seconds[best]
        further = next((depth for depth in self._offered if depth > best), None)
        if further is not None:
            lost = seconds[further] - tokens[further] / self._speed
            if lost <= self._saved:
                self._saved -= lost
                return further
        return best

    def stop_below(self) -> float:
        """One level more pays as long as its chance of being accepted is worth its seconds at the present speed; that
        chance is at most the drafter's own of what is there already."""
        last = self._offered[-1]
        return min(1.0, self._speed * (self.costs.seconds[last] - self.costs.seconds[0]) / last) if last else 0.0

    def observe(self, *, chosen: int, drafted: int, accepted: int) -> None:
        tested = min(accepted + 1, chosen)
        if tested:
            found = [memory.likelihood(tested, accepted) for memory in self._memories]
            weights = list(map(mul, self._weights, found))
            anew, total = SHARE / len(weights), sum(weights)
            self._weights = [(1 - SHARE) * weight / total + anew for weight in weights]
        for memory in self._memories:
            memory.observe(chosen, drafted, tested, accepted)

    def _seconds(self) -> list[float]:
        """[depth]: what a step costs in the mean, its draft often being less deep; infinite where not on offer."""
        drafted = [1.0, *self._mean([memory.drafted_shares() for memory in self._memories])]
        asked, found, before = self.costs.seconds, [inf] * len(self.costs.seconds), 0
        for depth in self._offered:
            more = asked[depth] - asked[before]
            found[depth] = found[before] + drafted[depth] * more if depth else asked[0]
            before = depth
        return found

    def _mean(self, by_memory: Sequence[Sequence[float]]) -> list[float]:
        return [sum(map(mul, self._weights, values)) for values in zip(*by_memory, strict=True)]


class _Memory:
    """What became of every depth; a step counts 1 / steps less with each further one."""

    def __init__(self, longest: int, steps: float):
        self._kept = 1 - 1 / steps
        self._chosen, self._drafted = [0.0] * longest, [0.0] * longest
        self._tested, self._accepted = [0.0] * longest, [0.0] * longest

    def rates(self) -> list[float]:
        """Of the tests of each depth, the share passed; where there are few, that of the depth above stands in."""
        return _shares(self._accepted, self._tested, FIRST_RATE, FIRST_WEIGHT)

    def drafted_shares(self) -> list[float]:
        """Of the steps that were to draft to each depth, those that did."""
        return _shares(self._drafted, self._chosen, 1.0, FIRST_WEIGHT)

    def likelihood(self, tested: int, accepted: int) -> float:
        """How likely these rates took what then happened to be."""
        rates = self.rates()
        passed = prod(rates[:accepted])
        return passed * (1 - rates[accepted]) if accepted < tested else passed

    def observe(self, chosen: int, drafted: int, tested: int, accepted: int) -> None:
        counted = [(self._chosen, chosen), (self._drafted, drafted), (self._tested, tested), (self._accepted, accepted)]
        for counts, until in counted:
            for depth, count in enumerate(counts):
                counts[depth] = self._kept * count + (depth < until)


def _shares(hits: Sequence[float], of: Sequence[float], above: float, weight: float) -> list[float]:
    """Per depth, smoothed by the depth above; `above` and `weight` are what the first one starts from."""
    shares = []
    for hit, all_of_them in zip(hits, of, strict=True):
        above, weight = (hit + weight * above) / (all_of_them + weight), ABOVE_WEIGHT
        shares.append(above)
    return shares


def replay_lengths(policy: LengthPolicy, accepted: Sequence[int], costs: StepCosts) -> float:
    """Seconds that a text takes with this policy.

    accepted: for every token of the text, how many drafts would be accepted, however many were made, if a step began
    there (`decode.cost.accepted_at`): drafting to depth K accepts at most K of them, and the next step begins one token
    behind those.
    """
    seconds, base = 0.0, 0
    while base < len(accepted):
        depth = policy.choose()
        seconds += costs.seconds[depth]
        found = min(accepted[base], depth)
        base += found + 1
        if base <= len(accepted):  # the text's end cuts no step short
            policy.observe(chosen=depth, drafted=depth, accepted=found)
    return seconds
