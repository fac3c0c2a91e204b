"""What the head would gain if training stopped now: acceptance by replay along held-out answers, speedup by this
device's own costs.

The costs are measured once a launch, on a copy that shares the target's weights and is prepared for decoding, so they
vary from launch to launch as clocks do; nothing that training does depends on them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from headstart.data.packing import spread
from headstart.data.rendering import Row
from headstart.decode.cost import (
    SIZES,
    CostCurve,
    DraftCosts,
    RankedAnswer,
    best_size,
    grow_tree,
    mean_tokens,
    measure_costs,
    rates_by_depth,
    replay,
    tune,
)
from headstart.decode.decode_copy import make_faster, shared_copy
from headstart.decode.drafters.plans import chain_paths
from headstart.decode.forecast import measure_chain, measure_drafting, measure_levels, rank_rows
from headstart.decode.tree import Path
from headstart.heads.base import Head
from headstart.heads.draft import DraftHead
from headstart.heads.unrolled import UnrolledHead
from headstart.target import Target

NUM_ANSWERS = 24
"""Held-out rows that are replayed."""
CPU_SIZES = tuple(size for size in SIZES if size <= 16)
"""Larger trees cost more than they bring where a forward is bound by arithmetic."""
REPEATS = 6
TREE_DEPTH = 5
"""Levels of the trees of a head that reads its own states, at least: it drafts deeper than it was trained."""
CHAIN_DEPTH = 9
"""Drafts of a student's chains at most."""


@dataclass(frozen=True)
class Forecast:
    """chain: τ of a chain as deep as the trees may be: all Medusa heads, TREE_DEPTH, or CHAIN_DEPTH.
    acceptance_length, speedup: of the best static tree, `nodes` nodes with the root, on answers that it was not chosen
    on."""

    chain: float
    acceptance_length: float
    speedup: float
    nodes: int
    by_depth: list[float | None]
    """Along the chain: of the steps that accepted all drafts before this one, the share that accepted it too."""
    paths: list[Path]
    """The tree."""
    answers: list[RankedAnswer] = field(repr=False)
    """What was replayed."""

    def as_metrics(self) -> dict[str, Any]:
        """As `metrics.jsonl` has them."""
        return {
            "forecast_chain_acceptance_length": self.chain,
            "forecast_acceptance_length": self.acceptance_length,
            "forecast_speedup": self.speedup,
            "forecast_nodes": self.nodes,
            "forecast_acceptance_by_depth": self.by_depth,
        }

    def __str__(self) -> str:
        tree = f"τ {self.acceptance_length:.2f} and speedup {self.speedup:.2f} with {self.nodes} nodes"
        return f"forecast {tree}, τ {self.chain:.2f} with a chain"


class Forecaster:
    """Forecasts for one target and its held-out rows; called with the head as it stands.

    tuned: while it is entered, the target is the one that will be decoded; its costs are those of the plain one.
    """

    def __init__(
        self, target: Target, rows: Sequence[Row], tuned: Callable[[], AbstractContextManager[None]] = nullcontext
    ):
        self.target, self.rows, self.tuned = target, spread(rows, NUM_ANSWERS), tuned
        self._costs: tuple[CostCurve, float | DraftCosts] | None = None

    @torch.no_grad()
    def __call__(self, head: Head) -> Forecast:
        depth = tree_depth(head)
        with self.tuned():
            answers = rank_rows(head, self.target, self.rows, depth=depth)
        sizes = CPU_SIZES if self.target.device.type == "cpu" else SIZES
        if self._costs is None:
            decoder = shared_copy(self.target)
            make_faster(decoder)
            curve = measure_costs(decoder, widths=sizes, repeats=REPEATS)
            self._costs = curve, measure_draft_costs(head, decoder, depth, grow_tree(answers, 8), quick=True)
        forecasts = tune(answers, *self._costs, sizes, chains=isinstance(head, DraftHead))
        nodes = best_size(forecasts)
        chain = [replay(answer, chain_paths(depth)) for answer in answers]
        return Forecast(
            chain=mean_tokens(chain),
            acceptance_length=forecasts[nodes].acceptance_length,
            speedup=forecasts[nodes].speedup,
            nodes=nodes,
            by_depth=rates_by_depth(chain, depth),
            paths=forecasts[nodes].paths,
            answers=answers,
        )


def tree_depth(head: Head) -> int:
    """Levels that a tree of this head may have."""
    if isinstance(head, DraftHead):
        return CHAIN_DEPTH
    return max(head.num_depths, TREE_DEPTH) if isinstance(head, UnrolledHead) else head.num_depths


def measure_draft_costs(
    head: Head, target: Target, depth: int, paths: Sequence[Path], *, rows: int = 1, quick: bool = False
) -> float | DraftCosts:
    """Seconds of drafting for `rows` rows, as `decode.cost.tune` takes them: by level for a head that runs once per
    level, else those of the tree `paths`, which are much the same for every tree. quick: fewer widths and steps."""
    if isinstance(head, DraftHead):
        return measure_chain(head, target, depth=depth, steps=5 if quick else 16, rows=rows)
    if not isinstance(head, UnrolledHead):
        return measure_drafting(head, target, paths, rows=rows)
    return (
        measure_levels(head, target, widths=(1, 4), depth=depth, steps=5, rows=rows)
        if quick
        else measure_levels(head, target, depth=depth, rows=rows)
    )
