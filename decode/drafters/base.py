"""The contract between the engine and everything that proposes tokens.

One step of a batch: `propose` a tree per row, the target verifies all trees in one forward, `commit` tells what stayed.
How the known drafters fit, in three lines each (state kept; propose; commit):

- Medusa tree: the feature of the last committed token; all heads' top ranks in one product, laid out along a static
  tree; commit replaces the feature. Trees are deterministic, or drawn once per depth.
- EAGLE: a KVCache of its own, holding only true features of the accepted prefix; its layer runs once per level over
  (embedding, feature) pairs, tree entries thrown away; commit runs it over the committed (token, feature) pairs.
- Draft model, sampled chains: its own KVCache, behind the target's by at most the last proposal; draws each token from
  `probabilities(logits, row's settings)` at a number of the row's stream and hands that distribution on with the tree;
  commit cuts its cache to the committed length.
- n-grams: an index over `rows.ids`; looks up the last n-gram and proposes what followed; commit indexes the new tokens.
- Lookahead: its windows ride in the target's forward behind the tree, as extra queries; their logits come back in
  `commit` and fill the pool that `propose` reads.
- Layer skip: runs the target's first layers over its chain with `rows.cache`, keeping the states at the exit; the
  engine then verifies from that layer on, because the tree carries those states; commit forgets them.
- Union: proposes with both, merges the trees over shared prefixes within the budget; commits to both; `wants` is the
  union of theirs.
- Adaptive length: wraps one drafter and lowers the budget per step from what was accepted at tested depths; with a
  budget of one it proposes the root alone, which is plain decoding.

Extra queries. A drafter that wants to ask the target something of its own hands `TokenTree.extra` on with its tree:
tokens that hang below the root, or below one another, as drafts would. Where a query hangs says it all: it sees the
committed text, the queries above it and itself, and stands as many positions behind the root as there are of them, so
that its logits are those of a plain forward over that very text, in layers with sliding windows too. They come back in
`Committed.extra_logits` of the step's `commit`, for the queries that were wanted. No draft ever sees a query, none is
verified or emitted, and no key of one stays in the cache. Queries are no part of the budget, but cost what nodes cost,
except at the output head, which reads the wanted ones only. A query past the last position that the target knows
(`Rows.max_positions`) is computed at that one, and means little. A drafter without queries leaves `extra` out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from headstart.decode.cache import KVCache
from headstart.decode.sampling import SamplingSettings
from headstart.decode.tree import TokenTree, Topology
from headstart.target import UNLIMITED_POSITIONS, Features


@dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt to be answered."""

    prompt_ids: Sequence[int]
    """The rendered prompt, begin token included; at least one token."""
    max_new_tokens: int
    settings: SamplingSettings = SamplingSettings()
    stop: tuple[str, ...] = ()
    """The answer ends with the first token that completes one of these strings (the string stays in the answer). Only
    the answer's own text counts: a string that begins in the prompt does not end it, as it would in transformers."""
    ignore_end: bool = False
    """Go on through end tokens up to the length limit: for timing at equal lengths."""
    request_id: Any = None
    """Handed through to the Generation."""


@dataclass
class Rows:
    """The active rows of the batch, in slot order; a drafter reads it and keeps its own state in the same order."""

    requests: list[Request] = field(default_factory=list)
    ids: list[list[int]] = field(default_factory=list)
    """Prompt and emitted tokens; the last one is the root of the next tree and is not in the cache yet."""
    streams: list[np.random.Generator] = field(default_factory=list)
    """Each row's own numbers for drafts that are drawn and for their trials: whoever takes one has used it up."""
    cache: KVCache = None  # pyright: ignore[reportAssignmentType]  (set by the engine before any row joins)
    device: torch.device = torch.device("cpu")
    max_positions: int = UNLIMITED_POSITIONS
    """Tokens of the longest text that the target can read."""

    def __len__(self) -> int:
        return len(self.ids)

    def roots(self) -> Int[Tensor, "batch"]:
        return torch.tensor([ids[-1] for ids in self.ids], device=self.device)

    def num_new(self, row: int) -> int:
        return len(self.ids[row]) - len(self.requests[row].prompt_ids)


@dataclass(frozen=True)
class Committed:
    """What has just entered the cache: tokens with the target's features, per row from the left."""

    tokens: Int[Tensor, "batch most"]
    counts: list[int]
    """How many of a row's tokens are meant; the rest of the row is padding. Zero: nothing for this row."""
    features: Features
    """`final` and taps, [batch, most, dim]."""
    extra_logits: Float[Tensor, "batch wanted vocab"] | None = None
    """Of the extra queries that the step's trees carried, those that were wanted, with their padding."""

    def last_final(self) -> Float[Tensor, "batch dim"]:
        """The final feature of each row's last token (of its first one where the count is zero)."""
        last = torch.tensor(self.counts, device=self.tokens.device).clamp(min=1) - 1
        return self.features.final[torch.arange(len(self.counts), device=last.device), last]


def take(features: Features, *index: Any) -> Features:
    """The final state and every tap at an index into [batch, seq]."""
    return Features(features.final[index], {k: tap[index] for k, tap in features.taps.items()})


@runtime_checkable
class Drafter(Protocol):
    """Anything that proposes tokens. Rows are told by their order; see `select`."""

    name: str
    wants: tuple[int, ...]
    """HF layer indices whose hidden states it needs beside the final feature."""

    def start(self, rows: Rows, first: int) -> None:
        """Rows first..len(rows)-1 have joined at the end of the batch; their prompt's features come with `commit`."""
        ...

    def propose(self, rows: Rows, budget: int) -> TokenTree:
        """A tree of at most `budget` nodes (root included) for every row; the engine overwrites the root's token."""
        ...

    def commit(self, rows: Rows, first: int, committed: Committed) -> None:
        """Tokens of rows first..first+len(counts)-1 entered the cache: prompt tokens in chunks, later each step's."""
        ...

    def select(self, keep: Int[Tensor, "kept"]) -> None:
        """The rows that stay, in their new order."""
        ...

    def num_parameters(self) -> int:
        """Parameters that it adds to the target's."""
        ...

    def num_bytes(self) -> int:
        """Bytes it holds while decoding: parameters, caches, tables."""
        ...


class NoDraft:
    """Proposes the root alone: plain decoding through the same engine.

    `width` > 1 pads the root to that many nodes: the control arm that tells what the width of a forward alone does to
    rounding.
    """

    name = "none"
    wants: tuple[int, ...] = ()

    def __init__(self, width: int = 1):
        self._topology = Topology.chain(0).padded(width)

    def start(self, rows: Rows, first: int) -> None: ...

    def propose(self, rows: Rows, budget: int) -> TokenTree:
        if self._topology.parents.device != rows.device:
            self._topology = Topology(self._topology.parents.to(rows.device), self._topology.valid.to(rows.device))
        topology = self._topology.expand(len(rows))
        return TokenTree(torch.zeros_like(topology.parents), topology)

    def commit(self, rows: Rows, first: int, committed: Committed) -> None: ...

    def select(self, keep: Int[Tensor, "kept"]) -> None: ...

    def num_parameters(self) -> int:
        return 0

    def num_bytes(self) -> int:
        return 0
