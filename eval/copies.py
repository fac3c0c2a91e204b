"""Copies of a target that decoding has not touched: plain linear layers and transformers' own attention.

Decoding switches the target's attention to ours and may swap its linears for prepacked ones. Comparisons need the model
as transformers runs it (the `transformers.generate` arm), or in float32 (the identity checks).
"""

from __future__ import annotations

import copy

from torch import nn

from headstart.decode.prepack import PackedLinear
from headstart.target import Target


def untouched(target: Target) -> Target:
    """The same weights, not copied, under plain linears and transformers' sdpa attention (eager where it has none)."""
    shared: dict[int, object] = {id(tensor): tensor for tensor in [*target.model.parameters(), *target.model.buffers()]}
    shared |= {id(layer): _plain(layer) for layer in target.model.modules() if isinstance(layer, PackedLinear)}
    model = copy.deepcopy(target.model, shared)
    try:
        model.set_attn_implementation("sdpa")
    except (ValueError, ImportError):
        model.set_attn_implementation("eager")
    return Target(model, target.tokenizer, name=target.name)


def in_float32(target: Target) -> Target:
    """The target with its weights widened to float32: exactly the same numbers, so only the arithmetic is finer."""
    same = untouched(target)
    model = copy.deepcopy(same.model).float()
    return Target(model, target.tokenizer, name=target.name)


def _plain(packed: PackedLinear) -> nn.Linear:
    linear = nn.Linear(packed.in_features, packed.out_features, bias=packed.bias is not None, device="meta")
    linear.weight, linear.bias = packed.weight, packed.bias
    return linear.eval()
