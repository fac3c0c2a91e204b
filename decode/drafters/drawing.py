"""Drawing drafts, a level or a whole chain, once, for every drafter that draws: so that what the rejection rule divides
by is the very distribution that the draft came from."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from headstart.decode.drafters.base import Rows
from headstart.decode.sampling import draw, group_by_distribution, probabilities
from headstart.decode.tree import DrawnFrom, TokenTree, Topology


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


def draw_chain(
    logits: Float[Tensor, "rows columns"],
    rows: Rows,
    limits: Sequence[int],
    read: Callable[[Int[Tensor, "rows"]], Float[Tensor, "rows columns"]],
) -> TokenTree:
    """A chain per row of as many tokens as its limit, the longest of at least one.

    logits: behind the roots, a column for each of the first target ids. read: the logits behind the next token of every
    row; it is not asked for those behind the longest chain's last one.
    """
    most, device = max(limits), logits.device
    drafted, drawn_from = [torch.zeros(len(rows), dtype=torch.long, device=device)], []
    for depth in range(1, most + 1):
        if depth > 1:
            logits = read(drafted[-1])
        columns, probs = draw_drafts(logits, rows, [depth <= limit for limit in limits])
        drafted.append(columns)
        drawn_from.append(probs)
    chain = Topology.chain(most, device).expand(len(rows)).within(torch.tensor(limits, device=device))
    sampled = [not request.settings.greedy for request in rows.requests]
    if not any(sampled):
        return TokenTree(torch.stack(drafted, dim=1), chain)
    ids = torch.arange(logits.shape[1], device=device)
    return TokenTree(torch.stack(drafted, dim=1), chain, DrawnFrom(torch.stack(drawn_from, dim=1), ids, sampled))
