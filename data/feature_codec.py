"""How the states of the target are stored: as they are, rounded to a smaller float, or as 8-bit numbers with scales.

`int8` keeps one scale s = max|x| / 127 for each token and state, and q = round(x / s). What comes back, s * q, differs
from x by at most s / 2 = max|x| / 254 (and by the roundings of float32 and of the target's own dtype). A few dimensions
of a state are often ten times larger than the rest, and they set the scale: what that costs a head is measured, not
assumed (`headstart data features --dtype int8 --head RUN`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int8
from torch import Tensor

from headstart.errors import DataError
from headstart.loading import DTYPES

INT8 = "int8"
STORAGE = (*DTYPES, INT8)
"""Names of what states can be stored as."""
FINAL = "final"
SCALE = ".scale"
LEVELS = 127


def state_name(layer: int) -> str:
    """The name under which HF[layer] is stored."""
    return f"layer.{layer}"


def stored_names(layers: Sequence[int], storage: str) -> list[str]:
    """The tensors of a shard that hold states: `final`, `layer.K`..., each with `.scale` where it is quantised."""
    states = [FINAL, *(state_name(k) for k in layers)]
    return [name + end for name in states for end in (("", SCALE) if storage == INT8 else ("",))]


def bytes_per_token(num_layers: int, hidden_size: int, storage: str) -> int:
    """What a token takes: 1 + num_layers states, their scales, its id (4 bytes) and its mask (1)."""
    state = hidden_size + 4 if storage == INT8 else hidden_size * DTYPES[storage].itemsize
    return (1 + num_layers) * state + 5


def quantise(states: Float[Tensor, "tokens dim"]) -> tuple[Int8[Tensor, "tokens dim"], Float[Tensor, "tokens"]]:
    """(q, scale) with states = q * scale, each number to within half a scale; a state of zeros stays zero."""
    states = states.float()
    largest = states.abs().amax(-1)
    scales = torch.where(largest > 0, largest / LEVELS, 1.0)
    return (states / scales[:, None]).round_().clamp_(-LEVELS, LEVELS).to(torch.int8), scales


def dequantise(
    values: Int8[Tensor, "tokens dim"], scales: Float[Tensor, "tokens"], dtype: torch.dtype
) -> Float[Tensor, "tokens dim"]:
    return (values.float() * scales[:, None]).to(dtype)


def encode(states: Float[Tensor, "tokens dim"], name: str, storage: str) -> dict[str, Tensor]:
    """What is stored of one state of one row, by the name of its tensor; on the CPU. Refuses what isn't finite."""
    if not torch.isfinite(states).all():
        raise DataError(
            "the target's states are not finite, so no head can learn from them; load it in bfloat16 or float32 "
            "(target.dtype)"
        )
    if storage == INT8:
        values, scales = quantise(states)
        return {name: values.cpu(), name + SCALE: scales.cpu()}
    return {name: states.to("cpu", DTYPES[storage], copy=True)}  # a view would keep the whole sequence


def decode(
    stored: dict[str, Tensor], name: str, storage: str, dtype: torch.dtype, device: torch.device
) -> Float[Tensor, "tokens dim"]:
    """The inverse of `encode`, in the target's dtype; numbers travel to the device as they are stored."""
    if storage == INT8:
        return dequantise(stored[name].to(device), stored[name + SCALE].to(device), dtype)
    return stored[name].to(device).to(dtype)
