"""What the head really gains in tokens, where no process holds the whole target: held-out prompts, decoded by all
processes together.

Every process decodes the same prompts with the same head, greedily, so that all of them meet in every layer. Costs, and
with them speedups, are measured on the device that decodes afterwards (`headstart tune`, `headstart eval`): a target
whose layers come from other processes tells nothing about them.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from headstart.data.packing import spread
from headstart.data.rendering import Row, label_runs
from headstart.decode.drafters.base import Request
from headstart.decode.drafters.heads import head_drafter
from headstart.decode.engine import Engine
from headstart.heads.base import Head
from headstart.recipe import EvalSection
from headstart.target import Target

NUM_PROMPTS, NEW_TOKENS = 16, 64
"""At most: a step gathers the whole target once, however many prompts it serves."""


@dataclass(frozen=True)
class Acceptance:
    """Greedy decoding of `prompts` held-out prompts with a chain of drafts: `tokens` in `steps` whole steps."""

    prompts: int
    steps: int
    tokens: int

    @property
    def acceptance_length(self) -> float | None:
        """τ: tokens emitted per step, the bonus token counted; None where every step was cut short."""
        return self.tokens / self.steps if self.steps else None

    def as_metrics(self) -> dict[str, Any]:
        """As `metrics.jsonl` has them."""
        return {"decoded_acceptance_length": self.acceptance_length, "decoded_prompts": self.prompts}

    def __str__(self) -> str:
        found = "n/a" if self.acceptance_length is None else f"{self.acceptance_length:.2f}"
        return f"acceptance decoded on {self.prompts} held-out prompts: τ {found} with a chain ({self.steps} steps)"


class SharedDecoding:
    """Decodes with the head as it stands; called by all processes, where the target can be run."""

    def __init__(self, target: Target, rows: Sequence[Row], settings: EvalSection):
        self.target = target
        self.rows = spread(rows, min(settings.num_prompts, NUM_PROMPTS))
        self.new_tokens = min(settings.max_new_tokens, NEW_TOKENS)

    @torch.no_grad()
    def __call__(self, head: Head) -> Acceptance:
        drafting = copy.deepcopy(head).to(self.target.device, self.target.dtype).eval()
        requests = [request for row in self.rows if (request := self._request(row))]
        attention = self.target.model.config._attn_implementation or "eager"
        try:
            engine = Engine(self.target, head_drafter(drafting, self.target), batch_size=max(1, len(requests)))
            steps = [step for answer in engine.generate(requests) for step in answer.steps if not step.cut]
        finally:
            self.target.model.set_attn_implementation(attention)
        return Acceptance(len(requests), len(steps), sum(step.emitted for step in steps))

    def _request(self, row: Row) -> Request | None:
        """The prompt of the last answer of a row; None where it has none."""
        runs = label_runs(row)
        return (
            Request(prompt_ids=row.input_ids[: max(runs[-1][0], 1)], max_new_tokens=self.new_tokens) if runs else None
        )
