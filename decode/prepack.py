"""Faster linear layers for decoding in bf16 on a CPU: weights reordered once into the layout that oneDNN computes in.

A plain `nn.Linear` reorders its weight on every call, which for a few rows costs as much as the product itself. The
prepacked copy serves any number of rows, and layers that read the same tensor (queries, keys and values; the two inner
projections of an MLP) are one product. Each layer and then the whole model is compared with the plain one on the spot;
where prepacking is absent, wrong or no faster, the plain layers stay, with one warning.
"""

from __future__ import annotations

import time
import warnings
from collections import Counter
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headstart.target import Target

ROWS_HINT = 8
"""Rows that the layout is chosen for; measured to be as good for 1 to 64."""
SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Layers of one module that may read the same tensor, by transformers' names; whether they do is seen at each call."""
LARGEST_ERROR = 0.06
"""Mean change of the logits, in their standard deviations, that is taken for bf16 rounding (as in the self-check)."""


class PackedLinear(nn.Module):
    """An inference-only linear layer over a prepacked bf16 weight. The plain weight stays, for who reads it."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._product = _Product([linear])

    def forward(self, hidden: Tensor) -> Tensor:
        return self._product(hidden)


class SiblingLinear(PackedLinear):
    """One of several layers that share a product: the first to be called computes it, the others take their part."""

    def __init__(self, linear: nn.Linear, product: _Product, index: int):
        nn.Module.__init__(self)
        self.weight, self.bias = linear.weight, linear.bias
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._product, self.index = product, index

    def forward(self, hidden: Tensor) -> Tensor:
        return self._product.part(hidden, self.index)


class _Product:
    """hidden @ weight.T + bias over the prepacked weights of one or several layers, one above the other."""

    def __init__(self, linears: Sequence[nn.Linear]):
        weight = torch.cat([linear.weight.detach() for linear in linears])
        biases = [linear.bias for linear in linears if linear.bias is not None]
        assert len(biases) in (0, len(linears))
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight, ROWS_HINT)
        self.bias = torch.cat([bias.detach() for bias in biases]) if biases else None
        self.sizes = [linear.out_features for linear in linears]
        self._hidden: Tensor | None = None
        self._parts: dict[int, Tensor] = {}

    def __call__(self, hidden: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(hidden, self.packed, self.bias, "none", [], "")

    def part(self, hidden: Tensor, index: int) -> Tensor:
        """The output of layer `index`. The tensor is held until all layers had theirs, so `is` cannot be fooled."""
        if hidden is not self._hidden or index not in self._parts:
            self._hidden, self._parts = hidden, dict(enumerate(self(hidden).split(self.sizes, dim=-1)))
        part = self._parts.pop(index)
        if not self._parts:
            self._hidden = None
        return part


def prepack(target: Target) -> bool:
    """Swaps the target's linear layers for prepacked ones where that pays: bf16 on CPU. True if it did.

    Only for decoding: gradients do not flow through the packed layers.
    """
    if torch.device(target.device).type != "cpu" or target.dtype != torch.bfloat16:
        return False
    if target.prepacked:
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
    before = _few_logits(target)
    for name, layer in _packed_layers(linears).items():
        _put(target, name, layer)
    changed = (_few_logits(target) - before).abs().mean() / before.std().clamp(min=1e-12)
    if not changed <= LARGEST_ERROR:
        for name, linear in linears.items():
            _put(target, name, linear)
        warnings.warn(
            f"prepacked layers changed the logits by {changed:.2g}; decoding uses the plain ones", stacklevel=2
        )
        return False
    target.prepacked = True
    return True


@torch.no_grad()
def seconds_by_dtype(target: Target, rows: int = 8, repeats: int = 10) -> dict[torch.dtype, float]:
    """Seconds that all linear layers of one forward of `rows` tokens take: as they stand, and in float32.

    One layer of each shape is timed. Tells which dtype to decode in: without matrix instructions for bf16, a CPU may
    well be faster in float32, although it reads twice the bytes.
    """
    layers = [layer for layer in target.model.modules() if isinstance(layer, nn.Linear | PackedLinear)]
    counts = Counter((layer.in_features, layer.out_features) for layer in layers)
    examples = {(layer.in_features, layer.out_features): layer for layer in layers}
    seconds = {target.dtype: 0.0, torch.float32: 0.0}
    for shape, layer in examples.items():
        wide = nn.Linear(*shape, bias=False, device="meta")
        wide.weight = nn.Parameter(layer.weight.detach().float(), requires_grad=False)
        for dtype, module in ((target.dtype, layer), (torch.float32, wide)):
            hidden = torch.linspace(-1, 1, rows * shape[0]).reshape(rows, -1).to(dtype)
            seconds[dtype] += counts[shape] * _best_seconds(module, hidden, repeats)
    return seconds


def _packed_layers(linears: dict[str, nn.Linear]) -> dict[str, PackedLinear]:
    layers: dict[str, PackedLinear] = {}
    for name in linears:
        parent, dot, own = name.rpartition(".")
        if name in layers:
            continue
        names = next(([f"{parent}{dot}{one}" for one in group] for group in SIBLINGS if own in group), [name])
        group = [linears[one] for one in names if one in linears]
        alike = len({(linear.in_features, linear.bias is None) for linear in group}) == 1
        if len(group) == len(names) > 1 and alike:
            product = _Product(group)
            layers |= {
                one: SiblingLinear(linear, product, i) for i, (one, linear) in enumerate(zip(names, group, strict=True))
            }
        else:
            layers[name] = PackedLinear(linears[name])
    return layers


def _put(target: Target, name: str, layer: nn.Module) -> None:
    parent, _, own = name.rpartition(".")
    setattr(target.model.get_submodule(parent), own, layer)


@torch.no_grad()
def _few_logits(target: Target) -> Tensor:
    """Logits of eight fixed tokens."""
    vocab = min(target.vocab_size, target.embedding.vocab_size)
    ids = torch.tensor([[(7 + 31 * index) % vocab for index in range(8)]])
    return target.model(ids, use_cache=False).logits.float()


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
