"""Turns a budget of CPU seconds into a number of optimiser steps, once, and leaves no trace."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from headstart.train.random_state import unmoved_random_state
from headstart.train.wrapping import Wrapped

CALIBRATION_STEPS = 20


@dataclass(frozen=True)
class Phase:
    """Steps of one cost: those until the share `until` of the training is over, from where the phase before ended.

    fresh: seconds of a step in the first epoch. later: in the epochs behind it.
    """

    until: float
    fresh: float
    later: float


def steps_within(
    cpu_seconds: float,
    new_trial: Callable[[float], Callable[[], object]],
    *,
    wrapped: Wrapped,
    phases: Sequence[float] = (1.0,),
    epoch_steps: int = 0,
    remembered: float = 0.0,
    clock: Callable[[], float] = time.process_time,
) -> int:
    """How many steps take `cpu_seconds` of process time, all threads of the busiest rank; at least 1.

    new_trial(share) gives a function that does one real step after the other, from the first of all, each as it will be
    when the training is `share` over. The first of 20 is not timed: it allocates. Weights, optimiser and random
    generators are put back to the bit. Evaluating and saving are not in the budget. phases: the shares at which the
    cost of a step changes, ascending to 1; each phase is timed by itself. remembered: the share of an epoch (of
    `epoch_steps` steps) whose target states are kept; then the same 20 steps are timed again, which tells what the
    target costs, and that share of the steps after the first epoch does without it.
    """
    weights, adapters, moments = wrapped.head_state(), wrapped.adapter_state(), wrapped.optimizer_tensors()
    begins = [0.0, *phases[:-1]]
    with unmoved_random_state():
        times = [_seconds_per_step(new_trial(share), clock) for share in (begins[:1] if remembered else begins)]
        target = 0.0
        if remembered:  # the same steps again, now without the target
            fresh, times = times[0], [_seconds_per_step(new_trial(share), clock) for share in begins]
            target = fresh - times[0]
    wrapped.load_head_state(weights)
    wrapped.load_adapter_state(adapters)
    wrapped.load_optimizer_tensors(moments)
    accelerator = wrapped.accelerator
    costs = [[one + target for one in times], [one + (1 - remembered) * target for one in times]]
    of_ranks = accelerator.gather(torch.tensor([costs], device=accelerator.device, dtype=torch.float32))
    assert isinstance(of_ranks, torch.Tensor)
    measured = [Phase(*one) for one in zip(phases, *of_ranks.amax(0).tolist(), strict=True)]
    return max(1, steps_for(cpu_seconds, measured, epoch_steps))


def steps_for(seconds: float, phases: Sequence[Phase], epoch_steps: int) -> int:
    """The number of steps whose whole cost is nearest to `seconds`: `seconds_of` solved by bisection."""
    low, high = 0.0, seconds / min(min(phase.fresh, phase.later) for phase in phases)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if seconds_of(middle, phases, epoch_steps) < seconds else (low, middle)
    return round(high)


def seconds_of(steps: float, phases: Sequence[Phase], epoch_steps: int) -> float:
    """What `steps` steps cost: each phase has its share of them, and of those the first `epoch_steps` are fresh."""
    total = begin = 0.0
    for phase in phases:
        end = phase.until * steps
        fresh = max(0.0, min(end, epoch_steps) - begin)
        total += fresh * phase.fresh + (end - begin - fresh) * phase.later
        begin = end
    return total


def _seconds_per_step(take_step: Callable[[], object], clock: Callable[[], float]) -> float:
    take_step()
    start = clock()
    for _ in range(CALIBRATION_STEPS - 1):
        take_step()
    return (clock() - start) / (CALIBRATION_STEPS - 1)
