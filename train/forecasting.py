"""What the head would gain if training stopped now: acceptance by replay along held-out answers, speedup by this
device's own costs.

The costs are measured once a launch, on a copy that shares the target's weights and is prepared for decoding, so they
vary from launch to launch as clocks do; nothing that training does depends on them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from headstart.data.rendering import Row
from headstart.decode.cost import SIZES, CostCurve, best_size, grow_tree, mean_tokens, measure_costs, replay, tune
from headstart.decode.decode_copy import make_faster, shared_copy
from headstart.decode.forecast import measure_drafting, rank_rows
from headstart.heads.medusa import MedusaHead
from headstart.target import Target

NUM_ANSWERS = 24
"""Held-out rows that are replayed, from the first on."""
CPU_SIZES = tuple(size for size in SIZES if size <= 16)
"""Larger trees cost more than they bring where a forward is bound by arithmetic."""
REPEATS = 6


@dataclass(frozen=True)
class Forecast:
    """chain: τ of a chain of all heads. acceptance_length, speedup: of the best static tree, `nodes` nodes with the
    root, on answers that it was not chosen on."""

    chain: float
    acceptance_length: float
    speedup: float
    nodes: int

    def as_metrics(self) -> dict[str, Any]:
        """As `metrics.jsonl` has them."""
        return {
            "forecast_chain_acceptance_length": self.chain,
            "forecast_acceptance_length": self.acceptance_length,
            "forecast_speedup": self.speedup,
            "forecast_nodes": self.nodes,
        }

    def __str__(self) -> str:
        tree = f"τ {self.acceptance_length:.2f} and speedup {self.speedup:.2f} with {self.nodes} nodes"
        return f"forecast {tree}, τ {self.chain:.2f} with a chain"


class Forecaster:
    """Forecasts for one target and its held-out rows; called with the head as it stands."""

    def __init__(self, target: Target, rows: Sequence[Row]):
        self.target, self.rows = target, list(rows[:NUM_ANSWERS])
        self._costs: tuple[CostCurve, float] | None = None

    @torch.no_grad()
    def __call__(self, head: MedusaHead) -> Forecast:
        answers = rank_rows(head, self.target, self.rows)
        sizes = CPU_SIZES if self.target.device.type == "cpu" else SIZES
        if self._costs is None:
            decoder = shared_copy(self.target)
            make_faster(decoder)
            curve = measure_costs(decoder, widths=sizes, repeats=REPEATS)
            self._costs = curve, measure_drafting(head, decoder, grow_tree(answers, 8))
        forecasts = tune(answers, *self._costs, sizes)
        nodes = best_size(forecasts)
        chain = [(0,) * depth for depth in range(1, head.config.num_heads + 1)]
        return Forecast(
            chain=mean_tokens([replay(answer, chain) for answer in answers]),
            acceptance_length=forecasts[nodes].acceptance_length,
            speedup=forecasts[nodes].speedup,
            nodes=nodes,
        )
