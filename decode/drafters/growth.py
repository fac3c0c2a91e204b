"""Choosing nodes: a head's first choices, the levels of a static tree, and the growth of a dynamic one.

Everything is deterministic and the same for a row in any batch: of equal logits the lower column comes first, of equal
scores the candidate that was found first.

Letters in shapes: rows of the batch, width (nodes of one level), choices (below one node), columns (of the draft
logits).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from headstart.decode.tree import Path, TokenTree, Topology


def best_choices(
    logits: Float[Tensor, "rows width columns"], count: int
) -> tuple[Float[Tensor, "rows width choices"], Int[Tensor, "rows width choices"]]:
    """The `count` largest logits and their columns, largest first; of equal ones the lower column first.

    topk alone leaves open which of equal logits it takes, and in bf16 many are equal.
    """
    count = min(count, logits.shape[-1])
    if count == 1:
        columns = logits.argmax(-1, keepdim=True)  # the first of equal ones
        return logits.gather(-1, columns), columns
    values, columns = logits.topk(min(count + 1, logits.shape[-1]))
    if values.shape[-1] > count and bool((values[..., count - 1] == values[..., count]).any()):
        last = values[..., count - 1 : count]
        size = logits.shape[-1]
        place = torch.arange(size, 0, -1, device=logits.device)
        rank = torch.where(logits > last, 2 * size, torch.where(logits == last, place, 0))
        columns = rank.topk(count).indices
    columns = columns[..., :count].sort(-1).values
    values, order = logits.gather(-1, columns).sort(dim=-1, descending=True, stable=True)
    return values, columns.gather(-1, order)


def log_probabilities(
    values: Float[Tensor, "rows width choices"], logits: Float[Tensor, "rows width columns"]
) -> Float[Tensor, "rows width choices"]:
    """Log-probabilities of some of the logits at temperature 1, in float32 at least; never above 0 by rounding."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    return (values.to(wide) - logits.to(wide).logsumexp(-1, keepdim=True)).clamp(max=0)


@dataclass(frozen=True)
class Level:
    """One level of a static tree: which nodes above it are expanded, and where its own find their tokens."""

    depth: int
    expanded: Int[Tensor, "width"]
    """Places, among the nodes one level up, of those that have children."""
    above: Int[Tensor, "1 width"]
    """For each of them, the place of its own parent among the nodes that were expanded before it."""
    choice: Int[Tensor, "drafts"]
    """Per node of this level, the index into the choices of all expanded nodes, rank after rank."""
    num_ranks: int


def static_levels(paths: Sequence[Path], device: torch.device | str = "cpu") -> list[Level]:
    """The levels of a static tree, from the first on; `paths` as `sort_paths` orders them."""
    levels: list[Level] = []
    nodes: list[Path] = [()]
    parents: list[Path] = [()]
    for depth in range(1, 1 + max(map(len, paths), default=0)):
        children = [path for path in paths if len(path) == depth]
        inner = list(dict.fromkeys(path[:-1] for path in children))
        num_ranks = 1 + max(path[-1] for path in children)
        levels.append(
            Level(
                depth,
                torch.tensor([nodes.index(path) for path in inner], device=device),
                torch.tensor([[parents.index(path[:-1]) for path in inner]], device=device),
                torch.tensor([inner.index(path[:-1]) * num_ranks + path[-1] for path in children], device=device),
                num_ranks,
            )
        )
        nodes, parents = children, inner
    return levels


class StaticLayout:
    """What follows from the shape of a static tree: its levels, its topology, and which nodes have children."""

    def __init__(self, paths: Sequence[Path], device: torch.device | str = "cpu"):
        self.levels = static_levels(paths, device)
        self.topology = Topology.from_paths(paths, device)
        above = {path[:-1] for path in paths}
        inner = [node for node in [(), *paths] if node in above]
        self.places = [inner.index(node) if node in above else 0 for node in [(), *paths]]
        """Per node with children, its place among those: the order in which the levels expand them."""


class Growth:
    """A dynamic tree under way (EAGLE-2): candidates level by level, each worth its path's product of probabilities.

    known: rows that have something to draft from; the others get a root alone.
    """

    def __init__(self, known: Bool[Tensor, "rows"]):
        self._going = known
        """Rows that are still drafted deeper."""
        self._tokens: list[Int[Tensor, "rows found"]] = []
        self._scores: list[Float[Tensor, "rows found"]] = []
        self._parents: list[Int[Tensor, "rows found"]] = []
        """Index among all candidates of the node above; -1 for the root."""
        self._order = torch.zeros(len(known), 1, dtype=torch.long, device=known.device)
        """Where the frontier's nodes stand in the last level."""
        self._choices = 1
        """Candidates below one node of the last level."""

    @property
    def num_rows(self) -> int:
        return len(self._going)

    def add(self, tokens: Int[Tensor, "rows width choices"], logs: Float[Tensor, "rows width choices"]) -> None:
        """The choices below every node of the frontier (the first time: below the root)."""
        if self._tokens:
            scores = self._scores[-1].gather(1, self._order)[..., None] + logs
            start = sum(found.shape[1] for found in self._tokens[:-1])
            parents = (start + self._order)[..., None].expand_as(tokens)
        else:
            scores, parents = logs, torch.full_like(tokens, -1)
        self._choices = tokens.shape[2]
        self._tokens.append(tokens.flatten(1))
        self._scores.append(scores.masked_fill(~self._going[:, None, None], -torch.inf).flatten(1))
        self._parents.append(parents.flatten(1))

    def choose_frontier(self, width: int, least: Float[Tensor, "bounds"] | None) -> bool:
        """Takes the `width` likeliest candidates of the last level to be expanded; False where no row goes on.

        A row stops where even the likeliest has a lower score than `least`, one for all rows or one for each.
        """
        best, order = self._scores[-1].sort(dim=1, descending=True, stable=True)
        self._order = order[:, :width]
        if least is not None:
            self._going = self._going & (best[:, 0] >= least)
        return bool(self._going.any())

    def frontier(self) -> tuple[Int[Tensor, "rows width"], Int[Tensor, "rows width"]]:
        """Tokens of the frontier, and the place of each one's parent in the frontier before it (0 for the root)."""
        return self._tokens[-1].gather(1, self._order), self._order // self._choices

    def before(self, truth: Int[Tensor, "rows levels"]) -> Int[Tensor, "rows levels levels"]:
        """[r, d, l]: candidates of level l + 1 that `tree` keeps before the node at depth d + 1 which agrees with the
        text behind the root, `truth`; -1 where no candidate does. Over all levels: how many drafts it takes to keep it.
        """
        rows, depth = len(self._tokens[0]), len(self._tokens)
        above = torch.full((rows,), -1, dtype=torch.long, device=truth.device)
        found = torch.ones(rows, dtype=torch.bool, device=truth.device)
        counts = torch.zeros(rows, truth.shape[1], truth.shape[1], dtype=torch.long, device=truth.device)
        counts[:, depth:] = -1
        start = 0
        for level in range(depth):
            tokens, parents, scores = self._tokens[level], self._parents[level], self._scores[level]
            agrees = (tokens == truth[:, level, None]) & (parents == above[:, None]) & (scores > -torch.inf)
            found = found & agrees.any(1)
            place = agrees.int().argmax(1, keepdim=True)
            own = scores.gather(1, place)
            for other in range(depth):
                ahead = self._scores[other] > own
                if other < level:
                    ahead = self._scores[other] >= own
                elif other == level:
                    ahead = ahead | ((scores == own) & (torch.arange(scores.shape[1], device=own.device) < place))
                counts[:, level, other] = ahead.sum(1)
            counts[:, level] = counts[:, level].where(found[:, None], -1)
            above = start + place[:, 0]
            start += tokens.shape[1]
        return counts

    def tree(self, drafts: int) -> TokenTree:
        """The `drafts` best of all candidates; parents stay, since no child is better than its parent."""
        tokens, scores, parents = (torch.cat(parts, dim=1) for parts in (self._tokens, self._scores, self._parents))
        chosen = scores.sort(dim=1, descending=True, stable=True).indices[:, :drafts].sort(1).values
        valid = scores.gather(1, chosen) > -torch.inf
        node = torch.zeros_like(parents)
        node.scatter_(1, chosen, torch.arange(1, 1 + chosen.shape[1], device=node.device).expand_as(chosen))
        above = parents.gather(1, chosen)
        placed = node.gather(1, above.clamp(min=0)).where(valid & (above >= 0), 0)
        pad = torch.nn.functional.pad
        topology = Topology(pad(placed, (1, 0), value=-1), pad(valid, (1, 0), value=True))
        return TokenTree(pad(tokens.gather(1, chosen), (1, 0)), topology)
