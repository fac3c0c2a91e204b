"""What the head would gain if training stopped now: acceptance by replay along held-out answers, speedup by this
device's own costs.

The costs are measured once a launch, on a copy that shares the target's weights and is prepared for decoding, so they
vary from launch to launch as clocks do; nothing that training does depends on them.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from headstart.data.packing import collate
from headstart.data.rendering import Row, label_runs
from headstart.decode.cost import SIZES, CostCurve, RankedAnswer, best_size, mean_tokens, measure_costs, replay, tune
from headstart.decode.forecast import rank_answer
from headstart.decode.prepack import prepack
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
        self._costs: CostCurve | None = None

    @torch.no_grad()
    def __call__(self, head: MedusaHead) -> Forecast:
        # drafting happens in the target's dtype
        head = copy.deepcopy(head).to(self.target.dtype).eval()
        answers = [rank_row(row, head, self.target) for row in self.rows]
        sizes = CPU_SIZES if self.target.device.type == "cpu" else SIZES
        self._costs = self._costs or measure_costs(decode_copy(self.target), widths=sizes, repeats=REPEATS)
        forecasts = tune(answers, self._costs, draft_seconds(head, self.target), sizes)
        nodes = best_size(forecasts)
        chain = [(0,) * depth for depth in range(1, head.config.num_heads + 1)]
        return Forecast(
            chain=mean_tokens([replay(answer, chain) for answer in answers]),
            acceptance_length=forecasts[nodes].acceptance_length,
            speedup=forecasts[nodes].speedup,
            nodes=nodes,
        )


def rank_row(row: Row, head: MedusaHead, target: Target) -> RankedAnswer:
    """The ranks that the head gives to the tokens of the row's last answer."""
    start, end = label_runs(row)[-1]
    start = max(start, 1)  # the first token of all is never drafted
    batch = collate([row], [[0]]).to(target.device)
    features = target.forward(batch.input_ids, batch.position_ids, target.masks(*batch.attention()))
    token_ids = row.input_ids[:end]
    answer = rank_answer(head, target.output, features.final[0], token_ids, start)
    return replace(answer, ended=token_ids[-1] in target.end_token_ids)


def decode_copy(target: Target) -> Target:
    """A target of its own over the same weights, with the linear layers that decoding would use."""
    shared: dict[int, Any] = {id(tensor): tensor for tensor in [*target.model.parameters(), *target.model.buffers()]}
    copied = Target(copy.deepcopy(target.model, shared), target.tokenizer, name=target.name)
    prepack(copied)
    return copied


def draft_seconds(head: MedusaHead, target: Target) -> float:
    """Median seconds in which the heads draft for one text."""
    rows = target.output.select(head.draft_ids)
    state = torch.zeros(1, target.hidden_size, dtype=target.dtype, device=target.device)
    times = []
    for _ in range(10):
        start = time.perf_counter()
        head.logits(head.draft_hidden(state), rows).topk(min(10, head.draft_vocab_size)).indices.tolist()
        times.append(time.perf_counter() - start)
    return statistics.median(times)
