"""What all heads share: the sums a forward gives back, and which position predicts which token."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from headstart.data.packing import TokenBatch

NUM_RANKS = 10
"""Ranks 0..9 are counted: the top-1 to top-10 accuracies, and what a tree is tuned from."""


@dataclass
class HeadOutput:
    """Sums and counts of one forward, never means: add them over micro-batches and ranks, then divide.

    A label is a supervised token of the text. `depth` d is the head or unrolled step that predicts the token d + 2
    behind the position it reads. A label outside the draft vocabulary is scored, is no hit at any rank, and adds no
    loss: the head cannot draft it, and what the target would say instead is asked of no decoder.
    """

    loss_sum: Float[Tensor, ""]
    """Sum over scored labels and depths of weight * loss: what is differentiated, after division by `token_count`."""
    token_count: Int[Tensor, ""]
    """Scored labels of depth 0. Zero where the batch has none; then `loss_sum` is 0 and its gradient is 0."""
    scored: Int[Tensor, "depth"]
    """Scored labels per depth. Zero means that nothing can be said of this depth (`n/a`), not that it is bad."""
    loss: Float[Tensor, "depth"]
    """Sum of the unweighted losses per depth, without gradient."""
    hits: Int[Tensor, "depth rank"]
    """Labels that were the head's choice number `rank`, per depth; divide by `scored`."""

    def accuracy(self, top: int) -> list[float | None]:
        """Per depth the share of labels among the head's first `top` choices; None where none was scored."""
        hits = self.hits[:, :top].sum(-1).tolist()
        return [hit / count if count else None for hit, count in zip(hits, self.scored.tolist(), strict=True)]


@dataclass(frozen=True)
class Alignment:
    """All (position, depth) pairs of a batch that predict a supervised token, grouped by the token predicted.

    Depth d at position j predicts token j + 2 + d of the same document. Everything about that token, the label and the
    target's distribution (given by the feature at j + 1 + d), is shared by all depths, so it is worked out once.
    Indices are into the flattened [batch * seq] positions unless said otherwise.
    """

    positions: Int[Tensor, "positions"]
    """Positions that predict at least one token, ascending."""
    tokens: Int[Tensor, "tokens"]
    """Tokens that at least one depth predicts, ascending."""
    rows: Int[Tensor, "tokens depth"]
    """Index into `positions` of the position from which each depth predicts the token; 0 where there is none."""
    scored: Bool[Tensor, "tokens depth"]
    """Whether there is one."""

    @classmethod
    def of(cls, batch: TokenBatch, depths: int) -> Alignment:
        by_position = torch.stack([batch.labels_at(2 + depth)[1] for depth in range(depths)], dim=-1)
        by_token = torch.zeros_like(by_position)
        for depth in range(depths):
            by_token[:, 2 + depth :, depth] = by_position[:, : -(2 + depth), depth]
        positions = by_position.any(-1).flatten().nonzero().squeeze(-1)
        tokens = by_token.any(-1).flatten().nonzero().squeeze(-1)
        scored = by_token.flatten(0, 1)[tokens]
        shifts = 2 + torch.arange(depths, device=tokens.device)
        rows = torch.searchsorted(positions, tokens[:, None] - shifts).where(scored, 0)
        return cls(positions, tokens, rows, scored)

    @property
    def teachers(self) -> Int[Tensor, "tokens"]:
        """Position whose final feature gives the target's distribution of the token: the one before it."""
        return self.tokens - 1
