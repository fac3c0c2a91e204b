"""The learning rate as a function of the optimiser step: nothing to save, nothing to re-seed when a run is resumed."""

from __future__ import annotations

import math
from dataclasses import dataclass

from headstart.errors import TrainingError


@dataclass(frozen=True)
class Schedule:
    """Warm-up to `peak`, then a fall to zero at `total_steps` (or none, if `kind` is constant).

    kind: cosine, linear or constant. warmup_steps: whole optimiser steps of linear rise; the first step already learns,
    the last step of the warm-up runs at the peak.
    """

    kind: str
    peak: float
    warmup_steps: int
    total_steps: int

    @classmethod
    def of(cls, kind: str, peak: float, warmup: float, total_steps: int) -> Schedule:
        """warmup: share of `total_steps`, between 0 and 1."""
        return cls(kind, peak, round(warmup * total_steps), total_steps)

    def rate(self, step: int) -> float:
        """The rate of the step after `step` finished ones."""
        if step < self.warmup_steps:
            return self.peak * (step + 1) / self.warmup_steps
        done = min(1.0, (step - self.warmup_steps) / max(1, self.total_steps - self.warmup_steps))
        if self.kind == "constant":
            return self.peak
        if self.kind == "linear":
            return self.peak * (1 - done)
        if self.kind == "cosine":
            return self.peak * (1 + math.cos(math.pi * done)) / 2
        raise TrainingError(f"train.schedule: {self.kind} is unknown; use cosine, linear or constant")
