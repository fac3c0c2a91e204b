"""Which wrapper a launch takes."""

from __future__ import annotations

import torch
from accelerate import Accelerator

from headstart.errors import TrainingError
from headstart.train.modes import FSDP2, ZERO_2, ZERO_3, mode
from headstart.train.optimisers import MuonAndAdamW
from headstart.train.train_module import TrainModule
from headstart.train.wrapping import Wrapped
from headstart.train.zero import ZeroWrapped


def wrap(accelerator: Accelerator, module: TrainModule, optimizer: torch.optim.Optimizer, group: int = 1) -> Wrapped:
    """The module and its optimiser, prepared for the mode of this launch. group: as in `Wrapped`."""
    kind = mode(accelerator)
    if kind in (ZERO_2, ZERO_3, FSDP2) and isinstance(optimizer, MuonAndAdamW):
        raise TrainingError(
            f"train.optimizer: muon needs whole matrices, which {kind} splits; set train.optimizer: adamw, or launch "
            "plain data parallelism (eight-gpu.yaml)"
        )
    if kind in (ZERO_2, ZERO_3, FSDP2) and module.joint is not None:
        raise TrainingError(
            f"train.joint trains the target's adapters too, which {kind} would shard; launch one process or plain data "
            "parallelism (eight-gpu.yaml)"
        )
    if kind in (ZERO_2, ZERO_3):
        return ZeroWrapped(accelerator, module, optimizer)
    return Wrapped(accelerator, module, optimizer, group)
