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
    take_step: Callable[[], None],
    *,
    head: nn.Module,
    optimizer: Any,
    accelerator: Accelerator,
    clock: Callable[[], float] = time.process_time,
) -> int:
    """How many steps take `cpu_seconds` of process time, all threads of the busiest rank; at least 1.

    take_step does one real step on a progress of its own. The first of 20 is not timed: it allocates. Weights,
    optimiser and random generators are put back to the bit. Evaluating and saving are not in the budget.
    """
    weights = {name: value.clone() for name, value in head.state_dict().items()}
    moments = copy.deepcopy(optimizer.state_dict())
    with unmoved_random_state():
        take_step()
        start = clock()
        for _ in range(CALIBRATION_STEPS - 1):
            take_step()
        used = (clock() - start) / (CALIBRATION_STEPS - 1)
    head.load_state_dict(weights)
    optimizer.load_state_dict(moments)
    optimizer.zero_grad(set_to_none=True)
    of_ranks = accelerator.gather(torch.tensor([used], device=accelerator.device))
    assert isinstance(of_ranks, torch.Tensor)
    return max(1, round(cpu_seconds / of_ranks.max().item()))
