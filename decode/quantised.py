"""A copy of the target with its linear layers in 8 or 4 bits: less to read, and nearly the same choices.

    copy = quantised_copy(target, bits=4)
    copy.target.model                       # drafts; the target's own weights are neither changed nor copied

Weights alone are quantised: a row is multiplied in bfloat16 by PyTorch's own kernels, which widen the codes in
registers. In 8 bits a weight is code * scale, one scale per output row; in 4 bits code * scale + zero, one pair for
every 32 columns of a row (round to nearest, as in tinygemm and GGUF's Q4_1). Embeddings, norms and whatever else is no
linear layer are the target's own tensors. Where this device has no such kernel, or it is wrong, weights are widened
before every product, which is slower than the target itself; one warning says so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from headstart.decode.decode_copy import plainly_linear
from headstart.decode.prepack import Product, plain_linears, with_products
from headstart.decode.swapped import put
from headstart.errors import HeadstartError, warn
from headstart.target import Target

GROUP = 32
"""Columns that share a scale and a zero in 4 bits: the smallest that the kernels know."""
ROWS = 16
"""Output rows come in blocks of so many, and columns in groups: the kernel for 8 bits reads past the end of others."""
TOLERANCE = 0.02
"""Largest difference of a kernel from the widened weights, relative to its largest output: bf16 rounds to 0.004."""


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
    its row or group). Raises HeadstartError for other bits.
    """
    weight = weight.detach().float()
    if bits == 8:
        scales = (weight.abs().amax(1, keepdim=True) / 127).clamp(min=1e-12).bfloat16()
        return Codes((weight / scales.float()).round().clamp(-127, 127).to(torch.int8), scales, None)
    if bits != 4:
        raise HeadstartError(f"a copy in {bits} bits cannot be made; give 8 or 4 bits")
    groups = weight.unflatten(1, (-1, GROUP))
    low, high = groups.amin(-1), groups.amax(-1)
    scales = ((high - low) / 15).clamp(min=1e-12).bfloat16()
    zeros = (low + 8 * scales.float()).bfloat16()
    codes = ((groups - zeros.float()[..., None]) / scales.float()[..., None]).round().clamp(-8, 7)
    return Codes(codes.flatten(1).to(torch.int8), scales, zeros)


class QuantisedProduct(Product):
    """The product of one or several layers, in bfloat16 over weights in 8 or 4 bits."""

    def __init__(self, linears: Sequence[nn.Linear], bits: int):
        super().__init__(linears)
        self.num_weights = sum(linear.weight.numel() for linear in linears)
        weight = torch.cat([linear.weight.detach() for linear in linears])
        self._columns = weight.shape[1]
        # rows and columns of zeros make whole blocks; most models' sizes are multiples already
        self._more_rows, self._more_columns = -len(weight) % ROWS, -self._columns % GROUP
        codes = quantise(functional.pad(weight, (0, self._more_columns, 0, self._more_rows)), bits)
        through_kernel = _through_kernel(codes)
        self.has_kernel = through_kernel is not None
        self._multiply, self._held = through_kernel or _widening(codes)

    def __call__(self, hidden: Tensor) -> Tensor:
        rows = hidden.reshape(-1, self._columns).bfloat16().contiguous()  # a norm may hand over a part of its output
        if self._more_columns:
            rows = functional.pad(rows, (0, self._more_columns))
        out = self._multiply(rows)
        if self._more_rows:
            out = out[:, : -self._more_rows]
        out = out.to(hidden.dtype).view(*hidden.shape[:-1], -1)
        return out if self.bias is None else out + self.bias

    def num_bytes(self) -> int:
        """Of codes, scales and zeros; the plain weights are the target's."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self._held)


Multiply = Callable[[Float[Tensor, "tokens columns"]], Float[Tensor, "tokens rows"]]


def _through_kernel(codes: Codes) -> tuple[Multiply, list[Tensor]] | None:
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


def _widening(codes: Codes) -> tuple[Multiply, list[Tensor]]:
    """The product without a kernel: correct anywhere, and slower than the plain one."""
    held = [codes.codes, codes.scales, *([] if codes.zeros is None else [codes.zeros])]
    return lambda rows: functional.linear(rows, codes.widened().bfloat16()), held


@dataclass(frozen=True)
class QuantisedCopy:
    """A model of its own that draws on the target's tensors for all that is not quantised."""

    target: Target
    products: list[QuantisedProduct]


@torch.no_grad()
def quantised_copy(target: Target, bits: int) -> QuantisedCopy:
    """The target with every linear layer, the output head too, in so many bits. Raises HeadstartError for other bits
    than 8 and 4."""
    products: list[QuantisedProduct] = []

    def make(linears: Sequence[nn.Linear]) -> QuantisedProduct:
        products.append(QuantisedProduct(linears, bits))
        return products[-1]

    copy = plainly_linear(target)
    layers = with_products(plain_linears(copy.model), make)
    if not layers:
        raise HeadstartError(f"{target.name} has no linear layers that could be quantised; draft with another model")
    put(copy.model, layers)
    whole = sum(parameter.numel() for parameter in target.model.parameters() if parameter.dim() > 1)
    quantised = sum(product.num_weights for product in products)
    if 2 * quantised < whole:
        warn(f"only {quantised / whole:.0%} of the weights of {target.name} stand in linear layers and are quantised")
    if any(not product.has_kernel for product in products):
        warn(
            f"this {target.device} has no kernel for weights in {bits} bits: the copy of {target.name} widens them for "
            "every product and is slower than the target"
        )
    return QuantisedCopy(copy, products)
