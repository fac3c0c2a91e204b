"""The target's own weights in 8 or 4 bits as its draft model: right nearly always, and cheaper by what it reads less.

    drafter = QuantisedDrafter(target, bits=4, length=3)

What it costs is the ratio of bytes where a device waits for its memory, and near 1 or above it where it does not: then
no acceptance makes up for it. It keeps a cache of its own, since keys and values of other weights are other numbers.
"""

from __future__ import annotations

from headstart.decode.drafters.model import ModelDrafter
from headstart.decode.quantised import quantised_copy
from headstart.target import Target


class QuantisedDrafter(ModelDrafter):
    """Chains of the target's copy in 8 or 4 bits, drawn where a row samples. Raises HeadstartError for other bits."""

    def __init__(self, target: Target, bits: int, length: int = 4, *, drawn: bool = True, stop_below: float = 0.0):
        copy = quantised_copy(target, bits)
        super().__init__(copy.target, target, length, drawn=drawn, stop_below=stop_below, name=f"quantised:int{bits}")
        self._products = copy.products

    def num_parameters(self) -> int:
        """The weights that it holds once more, in fewer bits."""
        return super().num_parameters() + sum(product.num_weights for product in self._products)

    def num_bytes(self) -> int:
        return super().num_bytes() + sum(product.num_bytes() for product in self._products)
