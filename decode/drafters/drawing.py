"""Drawing a level of drafts, once, for every drafter that draws: so that what the rejection rule divides by is the very
distribution that the draft came from. And when to stop: where what was drafted so far looks doubtful to the drafter."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from headstart.decode.drafters.base import Rows
from headstart.decode.sampling import draw, group_by_distribution, probabilities


def draw_drafts(
    logits: Float[Tensor, "rows columns"], rows: Rows, going: Sequence[bool]
) -> tuple[Int[Tensor, "rows"], Float[Tensor, "rows drawn"]]:
    """One column per row, and the distribution that it was drawn from: zeros where the argmax was taken, and no column
    at all where every row is greedy.

    A row spends a number of its own stream on every draft that it makes (`going`), and on no other.
    """
    columns, groups = logits.argmax(-1), group_by_distribution([request.settings for request in rows.requests])
    probs = torch.zeros(logits.shape if groups else (len(logits), 0), dtype=torch.float64, device=logits.device)
    for group in groups:
        drawing = [row for row in group if going[row]]
        index = torch.tensor(drawing, dtype=torch.long, device=logits.device)
        probs[index] = probabilities(logits[index], rows.requests[group[0]].settings)
        numbers = torch.tensor([rows.streams[row].random() for row in drawing], dtype=torch.float64)
        columns[index] = draw(probs[index], numbers.to(logits.device))
    return columns, probs


def least_scores(stop_below: float | Sequence[float], device: torch.device) -> Float[Tensor, "bounds"] | None:
    """`stop_below`, one for all rows or one each, as log-probabilities; None where no row ever stops."""
    bounds = stop_below if isinstance(stop_below, Sequence) else [stop_below]
    if not any(bounds):
        return None
    return torch.tensor([math.log(bound) if bound else -math.inf for bound in bounds], device=device)
