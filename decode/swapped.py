"""Modules that stand in for the target's own while decoding: the same function in fewer or faster operations."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from headstart.target import Target

LARGEST_CHANGE = {torch.bfloat16: 0.06, torch.float32: 1e-4}
"""Mean change of the logits, in their standard deviations, that is taken for rounding, by the target's dtype (in bf16
as in the self-check)."""


class Swapped(nn.Module):
    """Inference only: gradients do not flow to weights through it, and hooks on it do not run.

    Calls go straight to `forward`: what `nn.Module` does around it is a tenth of a small model's step on a CPU.
    """

    def __call__(self, hidden: Tensor) -> Tensor:
        return self.forward(hidden)

    def plain(self) -> nn.Module:
        """A module over the same weights as the model's own code would run it."""
        raise NotImplementedError


def swap(target: Target, modules: Mapping[str, nn.Module]) -> float:
    """Puts these modules into the target's model, by name, if its logits stay the same but for rounding.

    Returns their mean change in standard deviations; where it is above LARGEST_CHANGE the model is as it was before.
    """
    before, plain = _few_logits(target), {name: target.model.get_submodule(name) for name in modules}
    put(target.model, modules)
    change = float((_few_logits(target) - before).abs().mean() / before.std().clamp(min=1e-12))
    if not change <= LARGEST_CHANGE[target.dtype]:
        put(target.model, plain)
    return change


def put(root: nn.Module, modules: Mapping[str, nn.Module]) -> None:
    """Puts the modules into a model or a head, by name."""
    for name, module in modules.items():
        parent, _, own = name.rpartition(".")
        setattr(root.get_submodule(parent), own, module)


@torch.no_grad()
def _few_logits(target: Target) -> Tensor:
    """Logits of eight fixed tokens."""
    vocab = min(target.vocab_size, target.embedding.vocab_size)
    ids = torch.tensor([[(7 + 31 * index) % vocab for index in range(8)]])
    return target.model(ids, use_cache=False).logits.float()
