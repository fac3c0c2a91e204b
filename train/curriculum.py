"""A curriculum of unrolled steps: which stage a training is in, and how it is announced."""

from __future__ import annotations

import math

from headstart.heads.configs import HeadConfig, Stage, UnrolledConfig


def stages(config: HeadConfig) -> list[Stage]:
    """The stages of a head's training, in each of which a step costs the same; a single one where it has no curriculum.

    Medusa's heads all learn at once: one stage of one step.
    """
    steps = config.unrolled_steps if isinstance(config, UnrolledConfig) else 1
    return [Stage(until=1.0, steps=steps)] if isinstance(steps, int) else steps


def describe_curriculum(config: UnrolledConfig, total_steps: int) -> str:
    """What a head that unrolls starts from, and how many steps are unrolled in which optimiser steps."""
    parts, begin = [], 0
    for stage in stages(config):
        end = math.ceil(stage.until * total_steps - 1e-9)  # as `step / total_steps < until` has it
        if end > begin:
            parts.append(f"{stage.steps} in steps {begin + 1} to {end}")
        begin = end
    return f"start: {config.init}; unrolled steps: {', then '.join(parts)}"
