"""What a step costs on this device, what a tree yields on this text, and the tree that makes the most of both.

The forecast is a replay, not a product of accuracies: along the target's own answer, at every base the tree's deepest
node that agrees with what follows is found, and the next base lies that many tokens plus one further on. Averaging over
all positions instead would overstate τ (a good stretch is crossed in few steps, a bad one in many), and multiplying
per-depth accuracies would take depths for independent. Speed: tokens per step over seconds per step (Medusa,
arXiv 2401.10774, section 2.3.3; Sequoia, arXiv 2402.12374, section 4.2).
"""

from __future__ import annotations

import random
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle

from jaxtyping import Int
from torch import Tensor

from headstart.decode.drafters.base import NoDraft, Request, Rows
from headstart.decode.drafters.plans import DynamicTree, Plan, as_plan, chain_paths
from headstart.decode.engine import WIDTHS, Engine
from headstart.decode.tree import Path, TokenTree
from headstart.target import Target

SIZES = tuple(width for width in WIDTHS if width <= 64)
"""Numbers of nodes, root included, that trees are tuned for."""
BLOCK = 3
"""Steps of one width in a row while costs are measured."""


@dataclass(frozen=True)
class RankedAnswer:
    """One answer of the target's with the ranks that a head gave to its tokens."""

    ranks: Int[Tensor, "bases depth"]
    """Base b is the step whose first draft is answer token b (0-based), one base per token. [b, d]: the rank of token
    b + d among the drafts for depth d + 1; -1 where it is none of them or lies behind the answer."""
    token_ids: list[int] = field(default_factory=list)
    """The answer, where anyone wants to read it."""


@dataclass(frozen=True)
class GrownAnswer:
    """One answer of the target's with the dynamic trees that a head grows along it, all of one width."""

    width: int
    before: Int[Tensor, "bases levels levels"]
    """Bases as in RankedAnswer. [b, d, l]: candidates of level l + 1 that a tree keeps before token b + d; -1 where
    that token is no candidate. Levels further down than the tree is deep do not count."""


@dataclass(frozen=True, kw_only=True)
class DraftCosts:
    """Median seconds of drafting for one step, of a head that runs once per level."""

    first: float
    """Of taking in what was accepted, and drafting the first level from it."""
    static_level: dict[int, float]
    """Of each further level of a static tree, by the number of nodes expanded in it."""
    dynamic_level: dict[int, float]
    """The same for a dynamic tree, choosing its nodes included."""

    def of(self, plan: Plan | Sequence[Path]) -> float:
        """Seconds of drafting a whole tree; widths between measured ones lie on the line between them."""
        plan = as_plan(plan)
        if isinstance(plan, DynamicTree):
            return self.first + (plan.depth - 1) * _between(self.dynamic_level, plan.width)
        expanded = Counter(len(path) for path in {path[:-1] for path in plan.paths} if path)
        return self.first + sum(_between(self.static_level, width) for width in expanded.values())


def _between(points: dict[int, float], at: int) -> float:
    """Linear between measured points, and beyond the last along the last line."""
    known = sorted(points)
    if at <= known[0] or len(known) == 1:
        return points[known[0]]
    right = next((place for place, one in enumerate(known) if one >= at), len(known) - 1)
    low, high = known[right - 1], known[right]
    return points[low] + (points[high] - points[low]) * (at - low) / (high - low)


@dataclass(frozen=True, kw_only=True)
class CostCurve:
    """Median seconds of one step without its drafting, by the width of the forward, at about one context length."""

    seconds: dict[int, float]
    context_length: int
    rows: int
    device: str
    dtype: str

    def at(self, nodes: int) -> float:
        """Seconds of a step of `nodes` nodes, padding to the next measured width included."""
        return self.seconds[min(width for width in self.seconds if width >= nodes)]

    def ratio(self, nodes: int) -> float:
        """t(n) / t(1)."""
        return self.at(nodes) / self.at(1)


class _WidthSweep(NoDraft):
    """Plain decoding that pads each step to the next width of a schedule."""

    def __init__(self, schedule: Sequence[int]):
        super().__init__()
        self._arms = {width: NoDraft(width) for width in schedule}
        self._coming = cycle(schedule)

    def propose(self, rows: Rows, budget: int) -> TokenTree:
        return self._arms[next(self._coming)].propose(rows, budget)


def measure_costs(
    target: Target,
    *,
    widths: Sequence[int] = SIZES,
    context_length: int = 128,
    rows: int = 1,
    repeats: int = 16,
) -> CostCurve:
    """Times about `repeats` steps of every width; the context grows by one a step.

    Widths come in blocks of three steps, in an order that is shuffled anew in each round, so that drift of the machine
    meets all alike; the first step of a block pays for the change of shape, which steady decoding does not, and is left
    out, and so is the first round.
    """
    order, schedule = random.Random(0), []
    for _ in range(1 + -(-repeats // (BLOCK - 1))):
        schedule += [width for one in order.sample(list(widths), len(widths)) for width in [one] * BLOCK]
    engine = Engine(target, _WidthSweep(schedule), batch_size=rows, budget=max(widths))
    prompt = [(7 + 31 * i) % min(target.vocab_size, target.embedding.vocab_size) for i in range(context_length)]
    prompt = prompt[: max(target.max_positions - max(widths) - len(schedule), 1)]
    steps_each = min(len(schedule), target.max_positions - len(prompt))  # a short target needs several texts
    request = Request(prompt_ids=prompt, max_new_tokens=steps_each, ignore_end=True)
    texts = list(engine.generate([request] * rows * -(-len(schedule) // steps_each)))
    steps = [step for text in texts[::rows] for step in text.steps]
    by_width: dict[int, list[float]] = {width: [] for width in widths}
    for index, (width, step) in enumerate(zip(schedule, steps, strict=False)):
        if index >= BLOCK * len(widths) and index % BLOCK:
            by_width[width].append(step.verify_seconds + step.host_seconds)
    return CostCurve(
        seconds={width: statistics.median(times) for width, times in by_width.items()},
        context_length=len(prompt) + steps_each // 2,
        rows=rows,
        device=str(target.device),
        dtype=str(target.dtype).removeprefix("torch."),
    )


def replay(answer: RankedAnswer, paths: Sequence[Path]) -> list[tuple[int, int]]:
    """(base, drafts accepted) of each step along one answer with the static tree of `paths`.

    Steps that the answer's end cuts short are left out, as `StepRecord.cut` does while decoding: those that would emit
    past an end token or a length limit.
    """
    return _steps(accepted_at(answer, paths))


def accepted_at(answer: RankedAnswer, paths: Sequence[Path]) -> list[int]:
    """Drafts that the static tree of `paths` has accepted at every base of the answer, visited by a replay or not."""
    nodes, accepted = set(paths), []
    for row in answer.ranks.tolist():
        depth = 0
        while depth < len(row) and tuple(row[: depth + 1]) in nodes:
            depth += 1
        accepted.append(depth)
    return accepted


def replay_grown(answer: GrownAnswer, depth: int, num_nodes: int) -> list[tuple[int, int]]:
    """The same with dynamic trees of `depth` levels, cut to `num_nodes` nodes (root included)."""
    kept = answer.before[:, :depth, :depth]
    inside = (kept[..., 0] >= 0) & (kept.sum(-1) < num_nodes - 1)
    return _steps(inside.cumprod(-1).sum(-1).tolist())


def _steps(accepted: Sequence[int]) -> list[tuple[int, int]]:
    """The steps along an answer, given how many drafts each base accepts."""
    steps, base = [], 0
    while base < len(accepted):
        if base + accepted[base] < len(accepted):
            steps.append((base, accepted[base]))
        base += accepted[base] + 1
    return steps


def grow_tree(answers: Sequence[RankedAnswer], num_nodes: int, rounds: int = 4) -> list[Path]:
    """The static tree of `num_nodes` nodes (root included) that accepts most along these answers.

    A node is worth the number of visited bases at which its whole path is right; the best set of n paths is the n
    most frequent ones, which holds every node's parent. Which bases are visited depends on the tree, so the choice is
    repeated with the bases that its own replay visits; the best of the rounds is kept.
    """
    if num_nodes <= 1:
        return []
    visited = [range(len(answer.ranks)) for answer in answers]
    best: tuple[float, list[Path]] | None = None
    for _ in range(rounds):
        counts: Counter[Path] = Counter()
        for answer, bases in zip(answers, visited, strict=True):
            for row in answer.ranks[list(bases)].tolist():
                for depth in range(1, len(row) + 1):
                    if row[depth - 1] < 0:
                        break
                    counts[tuple(row[:depth])] += 1
        ordered = sorted(counts, key=lambda path: (-counts[path], len(path), path))
        paths = sorted(ordered[: num_nodes - 1], key=lambda path: (len(path), path))
        runs = [replay(answer, paths) for answer in answers]
        tau = mean_tokens(runs)
        if best is None or tau > best[0]:
            best = (tau, paths)
        visited = [[base for base, _ in run] for run in runs]
    assert best is not None
    return best[1]


def replay_crosswise(answers: Sequence[RankedAnswer], num_nodes: int) -> list[list[tuple[int, int]]]:
    """The steps along each answer with the best tree of the other half: even answers with the one chosen on the odd
    answers, and the other way round. A half that is empty leaves the choice to the other."""
    even, odd = answers[::2], answers[1::2]
    trees = [grow_tree(odd or even, num_nodes), grow_tree(even or odd, num_nodes)]
    return [replay(answer, trees[number % 2]) for number, answer in enumerate(answers)]


def mean_tokens(runs: Sequence[Sequence[tuple[int, int]]]) -> float:
    """τ of replays: tokens per step, the bonus token counted, pooled over answers; 1 where no step was seen."""
    steps = sum(len(run) for run in runs)
    return 1.0 + sum(accepted for run in runs for _, accepted in run) / steps if steps else 1.0


def rates_by_depth(runs: Sequence[Sequence[tuple[int, int]]], depth: int) -> list[float | None]:
    """Of replays with a tree of `depth` levels, for each: of the steps that accepted all drafts before it, the share
    that accepted its draft too; None where there were no such steps."""
    accepted = [count for run in runs for _, count in run]
    passed = [sum(count >= level for count in accepted) for level in range(depth + 1)]
    return [passed[level] / passed[level - 1] if passed[level - 1] else None for level in range(1, depth + 1)]


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """What one tree should yield on this device."""

    paths: list[Path]
    acceptance_length: float
    """τ on answers that the tree was not chosen on."""
    speedup: float
    """Over plain decoding: τ * t(1) / (t(n) + drafting)."""


def tune(
    answers: Sequence[RankedAnswer],
    costs: CostCurve,
    draft_seconds: float | DraftCosts,
    sizes: Sequence[int] = SIZES,
    *,
    chains: bool = False,
) -> dict[int, Forecast]:
    """The best tree of every size with its forecast, by number of nodes; size 1 is plain decoding.

    draft_seconds: one number for heads that draft all depths at once, else the costs of levels. chains: only chains of
    first choices, up to as deep as the answers were ranked: for drafters that draft nothing else.

    τ is forecast crosswise: trees chosen on the even answers are scored on the odd ones and the other way round.
    """
    forecasts = {1: Forecast(paths=[], acceptance_length=1.0, speedup=1.0)}
    for size in sizes:
        if size == 1 or (chains and answers and size > 1 + answers[0].ranks.shape[1]):
            continue
        if chains:
            paths = chain_paths(size - 1)
            tau = mean_tokens([replay(answer, paths) for answer in answers])
        else:
            tau, paths = mean_tokens(replay_crosswise(answers, size)), grow_tree(answers, size)
        drafting = draft_seconds.of(paths) if isinstance(draft_seconds, DraftCosts) else draft_seconds
        speedup = tau * costs.at(1) / (costs.at(size) + drafting)
        forecasts[size] = Forecast(paths=paths, acceptance_length=tau, speedup=speedup)
    return forecasts


@dataclass(frozen=True, kw_only=True)
class DynamicForecast:
    """What one dynamic tree should yield on this device."""

    plan: DynamicTree
    acceptance_length: float
    """τ on answers that depth and width were not chosen on."""
    speedup: float
    """Over plain decoding: τ * t(1) / (t(n) + drafting)."""


def tune_dynamic(
    answers: Mapping[int, Sequence[GrownAnswer]],
    costs: CostCurve,
    draft_costs: DraftCosts,
    sizes: Sequence[int] = SIZES,
) -> dict[int, DynamicForecast]:
    """The best depth and width of dynamic trees of every size but 1, each with its forecast.

    answers: the same answers by width, each grown to the greatest depth that is tried. As in `tune`, τ is forecast
    crosswise, and it stands beside the static tree of equal size there.
    """

    def seconds(plan: DynamicTree) -> float:
        return costs.at(plan.num_nodes) + draft_costs.of(plan)

    def best(runs: dict[DynamicTree, list[list[tuple[int, int]]]], half: slice) -> DynamicTree:
        return max(runs, key=lambda plan: mean_tokens(runs[plan][half]) / seconds(plan))

    even, odd, everything = slice(0, None, 2), slice(1, None, 2), slice(None)
    forecasts = {}
    for size in sizes:
        if size == 1:
            continue
        runs = {
            DynamicTree(depth=depth, width=width, num_nodes=size): [replay_grown(one, depth, size) for one in grown]
            for width, grown in answers.items()
            for depth in range(1, 1 + min(size - 1, grown[0].before.shape[1]))
        }
        scored = [*runs[best(runs, even)][odd], *runs[best(runs, odd)][even]]
        plan, tau = best(runs, everything), mean_tokens(scored)
        speedup = tau * costs.at(1) / seconds(plan)
        forecasts[size] = DynamicForecast(plan=plan, acceptance_length=tau, speedup=speedup)
    return forecasts


def best_size(forecasts: Mapping[int, Forecast] | Mapping[int, DynamicForecast]) -> int:
    """The number of nodes with the highest predicted tokens per second; of equals the smaller."""
    return max(forecasts, key=lambda size: (forecasts[size].speedup, -size))
