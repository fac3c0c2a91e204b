"""Drawing drafts, a level or a whole chain, once, for every drafter that draws: so that what the rejection rule divides
by is the very distribution that the draft came from. And when to stop: where what was drafted so far looks doubtful to
the drafter."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from headstart.decode.drafters.base import Rows
from headstart.decode.drafters.growth import best_choices, log_probabilities
from headstart.decode.sampling import draw_in_turn, group_by_distribution, probabilities
from headstart.decode.tree import DrawnFrom, TokenTree, Topology


def draw_children(
    logits: Float[Tensor, "rows width columns"], rows: Rows, going: Sequence[bool], count: int
) -> tuple[Int[Tensor, "rows width count"], Float[Tensor, "rows width drawn"]]:
    """`count` different columns below every node of a level, in the order in which they were drawn, and what the first
    of them was drawn from: zeros where the likeliest were taken by rank, and no column at all where every row is
    greedy.

    A row spends width * count numbers of its own stream on a level that it makes (`going`), and none on any other.
    A distribution with fewer than `count` columns in it fills up with any (see `drawable`).
    """
    settings = [request.settings for request in rows.requests]
    groups = group_by_distribution(settings)
    shape, device = (*logits.shape[:2], count), logits.device
    if any(setting.greedy for setting in settings):
        columns = best_choices(logits, count)[1]
    else:
        columns = torch.zeros(shape, dtype=torch.long, device=device)
    drawn_from = torch.zeros(logits.shape if groups else (*shape[:2], 0), dtype=torch.float64, device=device)
    for group in groups:
        drawing = [row for row in group if going[row]]
        index = torch.tensor(drawing, dtype=torch.long, device=device)
        probs = probabilities(logits[index].flatten(0, 1), rows.requests[group[0]].settings)
        numbers = [[rows.streams[row].random() for _ in range(shape[1] * count)] for row in drawing]
        uniforms = torch.tensor(numbers, dtype=torch.float64, device=device).view(-1, count)
        columns[index] = draw_in_turn(probs, uniforms).view(-1, *shape[1:])
        drawn_from[index] = probs.view(-1, *logits.shape[1:])
    return columns, drawn_from


def drawable(
    drawn_from: Float[Tensor, "rows width drawn"], sampled: Sequence[bool], count: int
) -> Bool[Tensor, "rows width count"]:
    """Which of a node's `count` children could be drawn: as many as its distribution has columns. Of rows that take
    theirs by rank, all."""
    columns = (drawn_from > 0).sum(-1, keepdim=True)
    by_rank = ~torch.tensor(sampled, device=drawn_from.device)[:, None, None]
    return by_rank | (torch.arange(count, device=drawn_from.device) < columns)


def draw_drafts(
    logits: Float[Tensor, "rows columns"], rows: Rows, going: Sequence[bool]
) -> tuple[Int[Tensor, "rows"], Float[Tensor, "rows drawn"]]:
    """One column per row, the next of a chain: `draw_children` with one node and one child."""
    columns, drawn_from = draw_children(logits[:, None], rows, going, 1)
    return columns[:, 0, 0], drawn_from[:, 0]


def draw_chain(
    logits: Float[Tensor, "rows columns"],
    rows: Rows,
    limits: Sequence[int],
    read: Callable[[Int[Tensor, "rows"]], Float[Tensor, "rows columns"]],
    *,
    to_ids: Callable[[Int[Tensor, "columns"]], Int[Tensor, "columns"]] = lambda columns: columns,
    drawn: bool = True,
    stop_below: float | Sequence[float] = 0.0,
) -> TokenTree:
    """A chain per row of as many tokens as its limit, the longest of at least one.

    logits: behind the roots. read: the logits behind the next token of every row, by target id; it is not asked for
    those behind the longest chain's last one. to_ids: target ids of columns of the logits. drawn: rows that sample draw
    their drafts; False: they take the likeliest tokens too, as a tree that is merged with others must. stop_below: a
    chain ends where the probability of all that it drafted is below this; one for all rows, or one for each.
    """
    most, device = max(limits), logits.device
    drafted, drawn_from = [torch.zeros(len(rows), dtype=torch.long, device=device)], []
    sampled = [drawn and not request.settings.greedy for request in rows.requests]
    least, score = least_scores(stop_below, device), torch.zeros(len(rows), device=device)
    for depth in range(1, most + 1):
        if depth > 1:
            logits = read(drafted[-1])
        if any(sampled):
            columns, probs = draw_drafts(logits, rows, [depth <= limit for limit in limits])
            drawn_from.append(probs)
        else:
            columns = logits.argmax(-1)
        drafted.append(to_ids(columns))
        if least is not None:
            score = score + log_probabilities(logits.gather(1, columns[:, None])[:, None], logits[:, None])[:, 0, 0]
            doubts = (score < least).tolist()
            limits = [min(limit, depth) if one else limit for limit, one in zip(limits, doubts, strict=True)]
            if depth >= max(limits):
                break
    chain = Topology.chain(len(drafted) - 1, device).expand(len(rows)).within(torch.tensor(limits, device=device))
    if not any(sampled):
        return TokenTree(torch.stack(drafted, dim=1), chain)
    ids = to_ids(torch.arange(logits.shape[1], device=device))
    return TokenTree(torch.stack(drafted, dim=1), chain, DrawnFrom(torch.stack(drawn_from, dim=1), ids, sampled))


def least_scores(stop_below: float | Sequence[float], device: torch.device) -> Float[Tensor, "bounds"] | None:
    """`stop_below`, one for all rows or one each, as log-probabilities; None where no row ever stops."""
    bounds = stop_below if isinstance(stop_below, Sequence) else [stop_below]
    if not any(bounds):
        return None
    return torch.tensor([math.log(bound) if bound else -math.inf for bound in bounds], device=device)
