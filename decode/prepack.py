"""Faster linear layers for decoding in bf16 on a CPU: weights reordered once into the layout that oneDNN computes in.

A plain `nn.Linear` reorders its weight on every call, which for a few rows costs as much as the product itself. The
prepacked copy serves any number of rows. It is compared with the plain layer on the spot; where it is absent, wrong or
no faster, the plain layers stay, with one warning.
"""

from __future__ import annotations

import time
import warnings

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headstart.target import Target

ROWS_HINT = 8
"""Rows that the layout is chosen for; measured to be as good for 1 to 64."""


class PackedLinear(nn.Module):
    """An inference-only linear layer over a prepacked bf16 weight. The plain weight stays, for who reads it."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), ROWS_HINT)

    def forward(self, hidden: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(hidden, self.packed, self.bias, "none", [], "")


def prepack(target: Target) -> bool:
    """Swaps the target's linear layers for prepacked ones where that pays: bf16 on CPU. True if it did.

    Only for decoding: gradients do not flow through the packed layers.
    """
    if torch.device(target.device).type != "cpu" or target.dtype != torch.bfloat16:
        return False
    if getattr(target, "prepacked", False):
        return True
    linears = {
        name: module
        for name, module in target.model.named_modules()
        if type(module) is nn.Linear and not module.training
    }
    examples = {(linear.in_features, linear.out_features): linear for linear in linears.values()}
    try:
        gain = [_gain(linear) for linear in examples.values()]
    except (AttributeError, RuntimeError, NotImplementedError) as error:
        warnings.warn(
            f"prepacked linear layers are not available ({error}); decoding uses the plain ones", stacklevel=2
        )
        return False
    if not gain or sum(gain) / len(gain) < 1.0:
        return False
    for name, linear in linears.items():
        parent = target.model.get_submodule(name.rpartition(".")[0])
        setattr(parent, name.rpartition(".")[2], PackedLinear(linear))
    target.prepacked = True
    return True


@torch.no_grad()
def _gain(linear: nn.Linear, repeats: int = 20) -> float:
    """Plain seconds / packed seconds at 1 and 8 rows; RuntimeError where the two differ by more than rounding."""
    packed = PackedLinear(linear)
    plain_seconds = packed_seconds = 0.0
    for rows in (1, 8):
        hidden = torch.linspace(-1, 1, rows * linear.in_features).reshape(rows, -1).to(linear.weight.dtype)
        exact = F.linear(hidden.float(), linear.weight.float(), None if linear.bias is None else linear.bias.float())
        error = (packed(hidden).float() - exact).abs().max()
        if not error <= 0.02 * exact.abs().max() + 1e-6:
            raise RuntimeError(f"a prepacked layer was off by {error:.3g}")
        plain_seconds += _best_seconds(linear, hidden, repeats)
        packed_seconds += _best_seconds(packed, hidden, repeats)
    return plain_seconds / packed_seconds


def _best_seconds(layer: nn.Module, hidden: Tensor, repeats: int) -> float:
    best = float("inf")
    for _ in range(repeats):
        started = time.perf_counter()
        layer(hidden)
        best = min(best, time.perf_counter() - started)
    return best
