"""RMS norms in one kernel: on a CPU the usual six small operations of each norm cost more than its arithmetic.

PyTorch has a fused layer norm for CPUs and no fused RMS norm. The layer norm of (x, -x) is one: the mean of that vector
is zero and its variance the mean square of x, so its first half is the RMS norm of x.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from headstart.borrowed import weight_of
from headstart.decode.swapped import Swapped

TOLERANCE = {torch.bfloat16: 0.02, torch.float32: 1e-5}
"""Largest difference from the model's own norm, relative to its largest output, that is taken for rounding."""


class OneKernelRMSNorm(Swapped):
    """weight * x / sqrt(mean(x^2) + eps) over the last axis, rounded once, at the end."""

    def __init__(self, norm: nn.Module, weight: Float[Tensor, "dim"], eps: float):
        super().__init__()
        self.weight = weight_of(norm)
        self.eps = eps
        self._norm = [norm]  # in a list: its parameters are counted once
        self._scale = torch.cat([weight, torch.zeros_like(weight)]).float()
        self._shape = [2 * len(weight)]

    def forward(self, hidden: Float[Tensor, "*batch dim"]) -> Float[Tensor, "*batch dim"]:
        both = torch.cat((hidden, -hidden), -1)
        return torch.layer_norm(both, self._shape, self._scale, None, self.eps).narrow(-1, 0, hidden.shape[-1])

    def plain(self) -> nn.Module:
        return self._norm[0]


@torch.no_grad()
def one_kernel_norms(root: nn.Module) -> dict[str, OneKernelRMSNorm]:
    """A replacement for each RMS norm of a model or a head over a vector of its weight's size, by name.

    What a norm does is not told by its class: a replacement is offered where it gives the norm's own output.
    """
    found = {}
    for name, module in root.named_modules():
        weight = getattr(module, "weight", None)
        eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
        if "RMSNorm" not in type(module).__name__ or eps is None or not isinstance(weight, Tensor) or weight.dim() != 1:
            continue
        # Gemma's weights are stored less one
        offers = (OneKernelRMSNorm(module, scale, eps) for scale in (weight, 1 + weight.float()))
        if agreeing := next((one for one in offers if _agrees(one)), None):
            found[name] = agreeing
    return found


def _agrees(replacement: OneKernelRMSNorm) -> bool:
    weight = replacement.weight
    hidden = torch.linspace(-2, 3, 3 * len(weight)).reshape(3, -1).to(weight.dtype)
    own, ours = replacement.plain()(hidden), replacement(hidden)
    difference = (own.float() - ours.float()).abs().max()
    return own.dtype == ours.dtype and bool(difference <= TOLERANCE[weight.dtype] * own.float().abs().max())
