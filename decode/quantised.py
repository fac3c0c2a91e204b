"""A copy of the target with its linear layers in 8 or 4 bits: less to read, and nearly the same choices.

    copy = quantised_copy(target, bits=4)
    copy.target.model                       # drafts; the target's own weights are neither changed nor copied

Codes, scales and kernels are those of `headstart.quantised_linear`; layers that read the same tensor are one product.
Embeddings, norms and whatever else is no linear layer are the target's own tensors. Where this device has no such
kernel, or it is wrong, weights are widened before every product, which is slower than the target itself; one warning
says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from headstart.decode.decode_copy import plainly_linear
from headstart.decode.prepack import Product, plain_linears, with_products
from headstart.decode.swapped import put
from headstart.errors import HeadstartError, warn
from headstart.quantised_linear import Codes, Multiply, quantise_padded, through_kernel
from headstart.target import Target


class QuantisedProduct(Product):
    """The product of one or several layers, in bfloat16 over weights in 8 or 4 bits."""

    def __init__(self, linears: Sequence[nn.Linear], bits: int):
        super().__init__(linears)
        self.num_weights = sum(linear.weight.numel() for linear in linears)
        weight = torch.cat([linear.weight.detach() for linear in linears])
        self._columns = weight.shape[1]
        codes, (self._more_rows, self._more_columns) = quantise_padded(weight, bits)
        kernel = through_kernel(codes)
        self.has_kernel = kernel is not None
        self._multiply, self._held = kernel or _widening(codes)

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
