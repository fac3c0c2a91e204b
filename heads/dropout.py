"""Dropout whose mask costs little on a CPU."""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional


def dropout(states: Float[Tensor, "*batch dim"], rate: float, training: bool) -> Float[Tensor, "*batch dim"]:
    """functional.dropout. On a CPU every number costs 16 bits of the generator, which draws 64 at once, instead of a
    draw of its own: a fifth of the time, and small steps spend several percent on it. The rate is met to 1 / 65536."""
    if not training or rate == 0 or states.device.type != "cpu":
        return functional.dropout(states, rate, training)
    count = states.numel()
    words = torch.empty(-(-count // 4), dtype=torch.int64).random_(torch.iinfo(torch.int64).min, None)
    kept = words.view(torch.int16)[:count] >= round(rate * 2**16) - 2**15
    return states * (kept.view(states.shape).to(states.dtype) / (1 - rate))
