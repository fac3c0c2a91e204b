"""Turns a budget of CPU seconds into a number of optimiser steps, once, and leaves no trace."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from headstart.train.random_state import unmoved_random_state

CALIBRATION_STEPS = 20


def steps_within(
    cpu_seconds: float,
    new_trial: Callable[[], Callable[[], object]],
    *,
    head: nn.Module,
    optimizer: Any,
    accelerator: Accelerator,
    epoch_steps: int = 0,
    remembered: float = 0.0,
    clock: Callable[[], float] = time.process_time,
) -> int:
    """How many steps take `cpu_seconds` of process time, all threads of the busiest rank; at least 1.

    new_trial gives a function that does one real step after the other, from the first of all. The first of 20 is not
    timed: it allocates. Weights, optimiser and random generators are put back to the bit. Evaluating and saving are not
    in the budget. remembered: the share of an epoch (of `epoch_steps` steps) whose target states are kept; then the
    same 20 steps are timed again, and that share of the steps after the first epoch costs as much as they did.
    """
    weights = {name: value.clone() for name, value in head.state_dict().items()}
    moments = copy.deepcopy(optimizer.state_dict())
    with unmoved_random_state():
        fresh = _seconds_per_step(new_trial(), clock)
        later = remembered * _seconds_per_step(new_trial(), clock) + (1 - remembered) * fresh if remembered else fresh
    head.load_state_dict(weights)
    optimizer.load_state_dict(moments)
    optimizer.zero_grad(set_to_none=True)
    of_ranks = accelerator.gather(torch.tensor([[fresh, later]], device=accelerator.device))
    assert isinstance(of_ranks, torch.Tensor)
    fresh, later = of_ranks.amax(0).tolist()
    first_epoch = epoch_steps * fresh
    if not remembered or cpu_seconds <= first_epoch:
        return max(1, round(cpu_seconds / fresh))
    return epoch_steps + round((cpu_seconds - first_epoch) / later)


def _seconds_per_step(take_step: Callable[[], object], clock: Callable[[], float]) -> float:
    take_step()
    start = clock()
    for _ in range(CALIBRATION_STEPS - 1):
        take_step()
    return (clock() - start) / (CALIBRATION_STEPS - 1)
