"""Candidate trees: what a drafter proposes and one target forward verifies.

Node 0, the root, is the last committed token, which the target has not processed yet. Every other node has a parent
that stands before it. A chain is a tree with one child per node. Padding is told by `valid`, never by a token id:
the id 0 is real text in many vocabularies.

Letters in shapes: batch rows, `nodes` per tree (root included).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from headstart.errors import HeadstartError

Path = tuple[int, ...]
"""A node of a static tree as child ranks from the root: (0, 2) is the third-best child of the best child."""

Branch = tuple[int, ...]
"""The tokens from a root's first child down to a node."""


@dataclass(frozen=True, eq=False)
class Topology:
    """The shape of a batch of trees, without tokens; what follows from `parents` is derived once and kept.

    A drafter whose tree never changes keeps one Topology and pays for its masks once.
    """

    parents: Int[Tensor, "batch nodes"]
    """Index of each node's parent; -1 for the root. A parent stands before its children."""
    valid: Bool[Tensor, "batch nodes"]
    """False for padding. The root is valid; every ancestor of a valid node is valid."""

    @property
    def num_nodes(self) -> int:
        return self.parents.shape[1]

    @cached_property
    def ancestors(self) -> Bool[Tensor, "batch nodes nodes"]:
        """[b, i, j] is True where j is i itself or an ancestor of i. By doubling: log2(nodes) products."""
        batch, nodes = self.parents.shape
        eye = torch.eye(nodes, dtype=torch.bool, device=self.parents.device)
        reach = eye.expand(batch, nodes, nodes).clone()
        reach.scatter_(2, self.parents.clamp(min=0)[..., None], True)
        reach[:, 0, 1:] = False
        hops = 1
        while hops < nodes:
            as_float = reach.float()
            reach = (as_float @ as_float) > 0
            hops *= 2
        return reach

    @cached_property
    def depth(self) -> Int[Tensor, "batch nodes"]:
        """Number of edges from the root: the position offset of each node."""
        return self.ancestors.sum(-1) - 1

    @property
    def is_chain(self) -> bool:
        """Whether every node hangs below the one before it."""
        places = torch.arange(-1, self.num_nodes - 1, device=self.parents.device)
        return bool((self.parents == places).all())

    @cached_property
    def max_depth(self) -> int:
        return int((self.depth * self.valid).max())

    def expand(self, batch: int) -> Topology:
        """One tree for `batch` rows: views, and the derived masks are shared."""
        if batch == self.parents.shape[0]:
            return self
        wide = Topology(self.parents.expand(batch, -1), self.valid.expand(batch, -1))
        wide.__dict__["ancestors"] = self.ancestors.expand(batch, -1, -1)
        wide.__dict__["depth"] = self.depth.expand(batch, -1)
        wide.__dict__["max_depth"] = self.max_depth
        return wide

    def padded(self, width: int) -> Topology:
        """The same trees with invalid children of the root appended up to `width` nodes."""
        extra = width - self.num_nodes
        if extra <= 0:
            return self
        pad = torch.nn.functional.pad
        wide = Topology(pad(self.parents, (0, extra), value=0), pad(self.valid, (0, extra), value=False))
        if "ancestors" in self.__dict__:
            ancestors = pad(self.ancestors, (0, extra, 0, extra), value=False)
            ancestors[:, self.num_nodes :, 0] = True
            ancestors.diagonal(dim1=1, dim2=2)[:, self.num_nodes :] = True
            wide.__dict__["ancestors"] = ancestors
        return wide

    def within(self, max_depth: Int[Tensor, "batch"]) -> Topology:
        """The same nodes, those deeper than `max_depth` of their row made invalid."""
        return self.without(self.depth > max_depth[:, None])

    def without(self, dropped: Bool[Tensor, "batch nodes"]) -> Topology:
        """The same nodes, those dropped and all below them made invalid; the root is not to be dropped."""
        gone = (self.ancestors & dropped[:, None]).any(-1)
        kept = Topology(self.parents, self.valid & ~gone)
        kept.__dict__["ancestors"] = self.ancestors
        kept.__dict__["depth"] = self.depth
        return kept

    @classmethod
    def chain(cls, length: int, device: torch.device | str = "cpu") -> Topology:
        """A root and `length` nodes below it, each the child of the one before: [1, length + 1]."""
        parents = torch.arange(-1, length, device=device)[None]
        return cls(parents, torch.ones_like(parents, dtype=torch.bool))

    @classmethod
    def from_paths(cls, paths: Sequence[Path], device: torch.device | str = "cpu") -> Topology:
        """A static tree from its nodes' paths (Medusa's notation, root left out), in the order of `sort_paths`."""
        index = {(): 0} | {path: i + 1 for i, path in enumerate(paths)}
        parents = torch.tensor([[-1] + [index[path[:-1]] for path in paths]], device=device)
        return cls(parents, torch.ones_like(parents, dtype=torch.bool))


def sort_paths(paths: Sequence[Sequence[int]], max_depth: int, max_rank: int) -> list[Path]:
    """Checks a static tree and puts it in order (by depth, then by ranks).

    Raises HeadstartError naming the first node that is a duplicate, that lacks its parent, or that asks for a depth or
    rank which the head does not have (`max_depth` levels, ranks 0..max_rank-1).
    """
    seen: set[Path] = set()
    for path in sorted((tuple(path) for path in paths), key=lambda path: (len(path), path)):
        if not path or len(path) > max_depth:
            raise HeadstartError(
                f"tree node {list(path)} has depth {len(path)}, but this head drafts depths 1 to {max_depth}; "
                "tune a tree for this head with `headstart tune`"
            )
        if any(not 0 <= rank < max_rank for rank in path):
            raise HeadstartError(f"tree node {list(path)} asks for a rank outside 0 to {max_rank - 1}; remove it")
        if path in seen:
            raise HeadstartError(f"tree node {list(path)} stands twice in the tree; remove one")
        if len(path) > 1 and path[:-1] not in seen:
            raise HeadstartError(f"tree node {list(path)} has no parent {list(path[:-1])} in the tree; add it")
        seen.add(path)
    return sorted(seen, key=lambda path: (len(path), path))


@dataclass(frozen=True, eq=False)
class DrawnFrom:
    """The exact distributions that the tokens of sampled trees were drawn from: what verifying them divides by.

    The children of a node are drawn one after the other, in the order of their nodes, and without replacement: each
    from what its elder siblings left of the distribution below their parent. A chain is the case of one child each.
    Which nodes there are may not depend on the tokens of their siblings or of any node below them, or what is verified
    would no longer be what was drawn. Kept over the draft vocabulary, not the target's: a drafter's whole batch draws
    from the same columns.
    """

    probs: Float[Tensor, "batch parents columns"]
    """[b, i]: what the first child of one parent in row b was drawn from."""
    ids: Int[Tensor, "columns"]
    """Target id of each column; all different."""
    sampled: list[bool]
    """Per row, whether it was drawn at all; the others are deterministic, and their `probs` mean nothing."""
    places: Sequence[int] | None = None
    """Per node, where in `probs` its children's distribution stands, if it has any; None: node i's at i, as in a
    chain."""

    def place(self, node: int) -> int:
        return node if self.places is None else self.places[node]


@dataclass(frozen=True, eq=False)
class VerifyFrom:
    """What the target's own lower layers made of a tree's nodes while it was drafted: verifying it goes on from there.

    The keys and values of those layers stand behind each row's length in the target's cache, in node order.
    """

    layer: int
    """Layers that are done."""
    states: Float[Tensor, "batch nodes dim"]
    """HF[layer] of every node."""


@dataclass(frozen=True, eq=False)
class ExtraQueries:
    """Tokens that ride in the target's forward behind the trees, for the drafter alone; see `decode.drafters.base`.

    They hang below each row's root like a second tree, whose nodes are neither drafts nor seen by drafts: parents tell
    what each of them sees and where it stands. A row that has fewer is padded at the end, with any tokens.
    """

    tokens: Int[Tensor, "batch queries"]
    parents: Int[Tensor, "batch queries"]
    """The query above each one, which stands before it; -1: the root of the row's tree."""
    wanted: Int[Tensor, "batch wanted"]
    """The queries whose logits the drafter gets; a row that wants fewer is padded at the end, with any queries."""


@dataclass(frozen=True, eq=False)
class TokenTree:
    """A batch of candidate trees."""

    tokens: Int[Tensor, "batch nodes"]
    """Token of each node; whatever stands at an invalid node is never emitted."""
    topology: Topology
    drawn: DrawnFrom | None = None
    """Where tokens were drawn and not chosen."""
    verify_from: VerifyFrom | None = None
    """Where the drafter has run the target's first layers over the very nodes, the root among them. Such a tree has no
    extra queries, which nobody ran those layers over."""
    extra: ExtraQueries | None = None

    @property
    def num_nodes(self) -> int:
        return self.tokens.shape[1]

    def padded(self, width: int) -> TokenTree:
        extra = width - self.num_nodes
        if extra <= 0:
            return self
        done = self.verify_from
        if done is not None:
            done = VerifyFrom(done.layer, torch.nn.functional.pad(done.states, (0, 0, 0, extra)))
        tokens = torch.nn.functional.pad(self.tokens, (0, extra))
        return replace(self, tokens=tokens, topology=self.topology.padded(width), verify_from=done)

    def with_queries(self) -> TokenTree:
        """What the target is sent: the nodes, and behind them the extra queries as invalid nodes of the same trees."""
        if self.extra is None:
            return self
        tokens, above = self.extra.tokens, self.extra.parents
        parents = torch.where(above < 0, 0, above + self.num_nodes)
        invalid = torch.zeros_like(above, dtype=torch.bool)
        return TokenTree(
            torch.cat([self.tokens, tokens], dim=1),
            Topology(torch.cat([self.topology.parents, parents], 1), torch.cat([self.topology.valid, invalid], 1)),
        )

    @classmethod
    def from_branches(cls, rows: Sequence[Sequence[Branch]], device: torch.device | str = "cpu") -> TokenTree:
        """One tree per row from its branches, each behind the one that it goes on from; padded to the largest."""
        width = 1 + max(map(len, rows), default=0)
        tokens, parents, valid = [], [], []
        for branches in rows:
            index = {(): 0} | {branch: place for place, branch in enumerate(branches, 1)}
            padding = width - 1 - len(branches)
            tokens.append([0, *(branch[-1] for branch in branches), *[0] * padding])
            parents.append([-1, *(index[branch[:-1]] for branch in branches), *[0] * padding])
            valid.append([True] * (1 + len(branches)) + [False] * padding)
        topology = Topology(torch.tensor(parents, device=device), torch.tensor(valid, device=device))
        return cls(torch.tensor(tokens, device=device), topology)
