"""Activation checkpointing: modules whose inner activations can be worked out again instead of being kept.

https://arxiv.org/abs/1604.06174
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Recomputing(nn.Module):
    """Keeps its inputs alone where `recomputes` is set and something is learnt; the numbers are the same.

    Around the call, not within it: what gathers sharded weights before a module runs does so again.
    """

    recomputes = False

    def __call__(self, *inputs: Any) -> Any:
        if self.recomputes and self.training and torch.is_grad_enabled():
            return checkpoint(super().__call__, *inputs, use_reentrant=False)
        return super().__call__(*inputs)
