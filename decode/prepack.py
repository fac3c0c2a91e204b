"""Faster linear layers for decoding on a CPU: weights reordered once into the layout that oneDNN computes in.

A plain `nn.Linear` reorders its weight on every call, or takes a kernel for single rows that gives way to a slower one
for a few. The prepacked copy serves any number of rows, and layers that read the same tensor (queries, keys and values;
the two inner projections of an MLP) are one product.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import psutil
import torch
from torch import Tensor, nn
from torch.nn import functional

from headstart.decode.swapped import Swapped

ROWS_HINT = 8
"""Rows that the layout is chosen for; measured to be as good for 1 to 64."""
SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Layers of one module that may read the same tensor, by transformers' names; whether they do is seen at each call."""


class LeanLinear(Swapped):
    """The plain product, called without the ceremony of `nn.Linear`: for where prepacking is absent or no faster."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._linear = [linear]  # in a list: no submodule, whose parameters would have a second name

    def forward(self, hidden: Tensor) -> Tensor:
        return functional.linear(hidden, self.weight, self.bias)

    def plain(self) -> nn.Linear:
        return self._linear[0]


class PackedLinear(LeanLinear):
    """A linear layer over a packed copy of its weight. The plain weight stays, for who reads it."""

    def __init__(self, linear: nn.Linear, product: Product):
        super().__init__(linear)
        self._product = product

    def forward(self, hidden: Tensor) -> Tensor:
        return self._product(hidden)


class SiblingLinear(PackedLinear):
    """One of several layers that share a product: the first to be called computes it, the others take their part."""

    def __init__(self, linear: nn.Linear, product: Product, index: int):
        super().__init__(linear, product)
        self.index = index

    def forward(self, hidden: Tensor) -> Tensor:
        return self._product.part(hidden, self.index)


class Product:
    """hidden @ weight.T + bias for the weights of one or several layers, one above the other; a subclass says how."""

    def __init__(self, linears: Sequence[nn.Linear]):
        biases = [linear.bias for linear in linears if linear.bias is not None]
        assert len(biases) in (0, len(linears))
        self.bias = torch.cat([bias.detach() for bias in biases]) if biases else None
        self.sizes = [linear.out_features for linear in linears]
        self._hidden: Tensor | None = None
        self._parts: dict[int, Tensor] = {}

    def __call__(self, hidden: Tensor) -> Tensor:
        raise NotImplementedError

    def part(self, hidden: Tensor, index: int) -> Tensor:
        """The output of layer `index`. The tensor is held until all layers had theirs, so `is` cannot be fooled."""
        if hidden is not self._hidden or index not in self._parts:
            self._hidden, self._parts = hidden, dict(enumerate(self(hidden).split(self.sizes, dim=-1)))
        part = self._parts.pop(index)
        if not self._parts:
            self._hidden = None
        return part


class _Prepacked(Product):
    """In the layout of oneDNN."""

    def __init__(self, linears: Sequence[nn.Linear]):
        super().__init__(linears)
        weight = torch.cat([linear.weight.detach() for linear in linears])
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight, ROWS_HINT)

    def __call__(self, hidden: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(hidden, self.packed, self.bias, "none", [], "")


def plain_linears(root: nn.Module) -> dict[str, nn.Linear]:
    """The linear layers of a model or a head that nothing stands in for, by name."""
    return {name: module for name, module in root.named_modules() if type(module) is nn.Linear}


def packed_linears(linears: Mapping[str, nn.Linear]) -> dict[str, PackedLinear]:
    """A prepacked layer for each of the model's linear layers, by their full names.

    Empty where their copy of the weights would take more than half of the free memory. Raises RuntimeError or
    AttributeError where this processor or build of PyTorch has no such kernels.
    """
    copied = sum(linear.weight.numel() * linear.weight.element_size() for linear in linears.values())
    return {} if copied > psutil.virtual_memory().available / 2 else with_products(linears, _Prepacked)


def with_products(
    linears: Mapping[str, nn.Linear], make: Callable[[Sequence[nn.Linear]], Product]
) -> dict[str, PackedLinear]:
    """The layer that takes the place of each, by name; siblings share a product."""
    layers: dict[str, PackedLinear] = {}
    for name in linears:
        parent, dot, own = name.rpartition(".")
        if name in layers:
            continue
        names = next(([f"{parent}{dot}{one}" for one in group] for group in SIBLINGS if own in group), [name])
        group = [linears[one] for one in names if one in linears]
        alike = len({(linear.in_features, linear.bias is None) for linear in group}) == 1
        if len(group) == len(names) > 1 and alike:
            product = make(group)
            layers |= {
                one: SiblingLinear(linear, product, i) for i, (one, linear) in enumerate(zip(names, group, strict=True))
            }
        else:
            layers[name] = PackedLinear(linears[name], make([linears[name]]))
    return layers


@torch.no_grad()
def pass_seconds(
    arms: Mapping[str, Sequence[LeanLinear]], rows: int, dtype: torch.dtype, repeats: int = 3
) -> dict[str, float]:
    """Seconds that each arm's linear layers take for `rows` tokens, all layers one after another.

    A pass goes through all weights, as a forward does: one layer alone would find its weight in the processor's cache.
    The arms take turns, and the fastest of `repeats` passes counts.
    """
    widths = {layer.in_features for layers in arms.values() for layer in layers}
    inputs = {width: torch.linspace(-1, 1, rows * width).reshape(rows, width).to(dtype) for width in widths}
    best = dict.fromkeys(arms, float("inf"))
    for _ in range(repeats):
        for name, layers in arms.items():
            started = time.perf_counter()
            for layer in layers:
                layer(inputs[layer.in_features])
            best[name] = min(best[name], time.perf_counter() - started)
    return best
