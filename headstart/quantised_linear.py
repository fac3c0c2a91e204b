"""Linear layers in 8 or 4 bits, for frozen weights: less to hold and to read.

    quantise_layers(target, bits=4)      # the linear layers within the target's decoder layers, in place

Weights alone are quantised: a row is multiplied in bfloat16 by PyTorch's own kernels, which widen the codes in
registers. In 8 bits a weight is code * scale, one scale per output row; in 4 bits code * scale + zero, one pair for
every 32 columns of a row (round to nearest, as in tinygemm and GGUF's Q4_1). Where this device has no such kernel, or
it is wrong, weights are widened before every product.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from headstart.errors import TargetError, warn

if TYPE_CHECKING:
    from headstart.target import Target

BITS = {"none": None, "int8": 8, "int4": 4}
"""By the value of `target.quantization`."""
GROUP = 32
"""Columns that share a scale and a zero in 4 bits: the smallest that the kernels know."""
ROWS = 16
"""Output rows come in blocks of so many, and columns in groups: the kernel for 8 bits reads past the end of others."""
FEW_TOKENS = 64
"""Up to so many tokens the kernels read codes; more are worth widening the weight for, once."""
TOLERANCE = 0.02
"""Largest difference of a kernel from the widened weights, relative to its largest output: bf16 rounds to 0.004."""

Multiply = Callable[[Float[Tensor, "tokens columns"]], Float[Tensor, "tokens rows"]]


@dataclass(frozen=True)
class Codes:
    """A weight in few bits: codes * scales + zeros, scales and zeros repeated over the columns of their group."""

    codes: Int[Tensor, "rows columns"]
    """int8; from -127 to 127, or from -8 to 7."""
    scales: Float[Tensor, "rows groups"]
    """bfloat16, as the kernels have them; the codes were chosen for these very numbers."""
    zeros: Float[Tensor, "rows groups"] | None
    """Likewise; None: nothing is added."""

    def widened(self) -> Float[Tensor, "rows columns"]:
        """The weight that the codes stand for, in float32."""
        codes = self.codes.float().unflatten(1, (self.scales.shape[1], -1)) * self.scales.float()[..., None]
        if self.zeros is not None:
            codes = codes + self.zeros.float()[..., None]
        return codes.flatten(1)


def quantise(weight: Float[Tensor, "rows columns"], bits: int) -> Codes:
    """The nearest codes; in 4 bits, columns must be a multiple of 32.

    An entry is off by half a scale at most, and by what bfloat16 makes of scale and zero (2^-8 of the largest entry of
    its row or group). Raises TargetError for other bits.
    """
    weight = weight.detach().float()
    if bits == 8:
        scales = (weight.abs().amax(1, keepdim=True) / 127).clamp(min=1e-12).bfloat16()
        return Codes((weight / scales.float()).round().clamp(-127, 127).to(torch.int8), scales, None)
    if bits != 4:
        raise TargetError(f"a copy in {bits} bits cannot be made; give 8 or 4 bits")
    groups = weight.unflatten(1, (-1, GROUP))
    low, high = groups.amin(-1), groups.amax(-1)
    scales = ((high - low) / 15).clamp(min=1e-12).bfloat16()
    zeros = (low + 8 * scales.float()).bfloat16()
    codes = ((groups - zeros.float()[..., None]) / scales.float()[..., None]).round().clamp(-8, 7)
    return Codes(codes.flatten(1).to(torch.int8), scales, zeros)


def quantise_padded(weight: Float[Tensor, "rows columns"], bits: int) -> tuple[Codes, tuple[int, int]]:
    """The codes of a weight filled up with zeros to whole blocks, and how many rows and columns were added."""
    more = -weight.shape[0] % ROWS, -weight.shape[1] % GROUP
    return quantise(functional.pad(weight.detach(), (0, more[1], 0, more[0])), bits), more


def through_kernel(codes: Codes) -> tuple[Multiply, list[Tensor]] | None:
    """The product by PyTorch's kernel for this device, and the tensors that it holds; None where there is none that
    gives what the widened weight gives."""
    columns, device = codes.codes.shape[1], codes.codes.device
    some = torch.linspace(-9, 9, 2 * columns, device=device).cos().view(2, columns).bfloat16()
    expected = functional.linear(some.float(), codes.widened())
    try:
        multiply, held = _kernel(codes)
        off = (multiply(some).float() - expected).abs().max()
    except (RuntimeError, NotImplementedError, AttributeError):
        return None
    return (multiply, held) if bool(off <= TOLERANCE * expected.abs().max().clamp(min=1e-12)) else None


def _kernel(codes: Codes) -> tuple[Multiply, list[Tensor]]:
    if codes.zeros is None:
        weight, scales = codes.codes, codes.scales[:, 0].contiguous()
        return lambda rows: torch._weight_int8pack_mm(rows, weight, scales), [weight, scales]
    both = torch.stack([codes.scales, codes.zeros], -1).transpose(0, 1).contiguous()  # [groups, rows, 2]
    from_zero = codes.codes.int() + 8
    if codes.codes.device.type == "cpu":
        packed = torch._convert_weight_to_int4pack_for_cpu(from_zero, 1)
        return lambda rows: torch._weight_int4pack_mm_for_cpu(rows, packed, GROUP, both), [packed, both]
    pairs = (from_zero[:, ::2] << 4 | from_zero[:, 1::2]).to(torch.uint8)
    packed = torch._convert_weight_to_int4pack(pairs, 2)  # tiles of 2 * 16 columns, which every group fills
    return lambda rows: torch._weight_int4pack_mm(rows, packed, GROUP, both), [packed, both]


class QuantisedLinear(nn.Module):
    """A frozen linear layer in 8 or 4 bits, two codes to a byte in 4. Gradients flow to its input, not to its weight.

    In bfloat16, few tokens go through the kernels, many through the widened weight; in other dtypes all of them do. A
    copy in float32 is the same model with finer arithmetic.
    """

    def __init__(self, linear: nn.Linear, bits: int):
        super().__init__()
        codes, self._more = quantise_padded(linear.weight, bits)
        self.in_features, self.out_features, self.bits = linear.in_features, linear.out_features, bits
        stored = codes.codes if bits == 8 else ((codes.codes[:, ::2] + 8) << 4 | (codes.codes[:, 1::2] + 8)).byte()
        self.register_buffer("codes", stored)
        self.register_buffer("scales", codes.scales)
        self.register_buffer("zeros", codes.zeros)
        self.bias = linear.bias
        self._multiply: dict[torch.device, Multiply | None] = {}

    @property
    def weight(self) -> Float[Tensor, "rows columns"]:
        """What the codes stand for, in float32; made anew at every call."""
        return self._all_codes().widened()[: self.out_features, : self.in_features]

    def forward(self, hidden: Float[Tensor, "*batch columns"]) -> Float[Tensor, "*batch rows"]:
        few = hidden.dtype == torch.bfloat16 and hidden.numel() <= FEW_TOKENS * self.in_features
        multiply = self._kernel(hidden.device) if few and not torch.is_grad_enabled() else None
        if multiply is None:
            return functional.linear(hidden, self.weight.to(hidden.dtype), self.bias)
        rows = functional.pad(hidden.reshape(-1, self.in_features), (0, self._more[1])).contiguous()
        out = multiply(rows)[:, : self.out_features].view(*hidden.shape[:-1], -1)
        return out if self.bias is None else out + self.bias

    def _kernel(self, device: torch.device) -> Multiply | None:
        if device not in self._multiply:
            found = through_kernel(self._all_codes())
            self._multiply[device] = found and found[0]
        return self._multiply[device]

    def _all_codes(self) -> Codes:
        codes, scales, zeros = self.codes, self.scales, self.zeros
        assert isinstance(codes, Tensor) and isinstance(scales, Tensor)
        if self.bits == 4:
            codes = (torch.stack([codes >> 4, codes & 15], -1).flatten(1).to(torch.int8)) - 8
        zeros = zeros.bfloat16() if isinstance(zeros, Tensor) else None
        return Codes(codes, scales.bfloat16(), zeros)


@torch.no_grad()
def quantise_layers(target: Target, bits: int) -> None:
    """Puts the linear layers within the decoder layers in so many bits, in place; embedding, norms and output head stay
    as they are, for heads to borrow. Raises TargetError where there are none."""
    count = 0
    for layer in target.layers:
        for owner in list(layer.modules()):
            for name, linear in list(owner.named_children()):
                if type(linear) is nn.Linear:
                    count += linear.weight.numel()
                    setattr(owner, name, QuantisedLinear(linear, bits))
    whole = count + sum(parameter.numel() for layer in target.layers for parameter in layer.parameters())
    if not count:
        raise TargetError(f"{target.name} has no linear layers that could be quantised; set target.quantization: none")
    if 2 * count < whole:
        warn(f"only {count / whole:.0%} of the weights of {target.name} stand in linear layers and are quantised")
