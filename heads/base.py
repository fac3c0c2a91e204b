"""What all heads share: their base class, the sums a forward gives back, and which position predicts which token."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional

from headstart.borrowed import Embedding, OutputHead
from headstart.data.packing import TokenBatch
from headstart.errors import HeadError
from headstart.heads.configs import HeadConfig
from headstart.heads.recompute import Recomputing
from headstart.heads.vocab import DraftVocab
from headstart.target import Features, Target

NUM_RANKS = 10
"""Ranks 0..9 are counted: the top-1 to top-10 accuracies, and what a tree is tuned from."""


class HeadOutput(NamedTuple):
    """Sums and counts of one forward, never means: add them over micro-batches and ranks, then divide. (A tuple, since
    ZeRO-3 and FSDP2 look for the tensors of an output in tuples and dicts alone, to gather weights for the backward.)

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

    Depth d at position j predicts token j + 2 + d of the same document (j + 1 for a head that reads the text itself).
    Everything about that token, the label and the target's distribution (given by the feature one token before it), is
    shared by all depths, so it is worked out once.
    Indices are into the flattened [batch * seq] positions unless said otherwise.
    """

    positions: Int[Tensor, "positions"]
    """Positions that predict at least one token, ascending."""
    tokens: Int[Tensor, "tokens"]
    """Places of the tokens that at least one depth predicts, ascending."""
    rows: Int[Tensor, "tokens depth"]
    """Index into `positions` of the position from which each depth predicts the token; 0 where there is none."""
    scored: Bool[Tensor, "tokens depth"]
    """Whether there is one."""

    @classmethod
    def of(cls, batch: TokenBatch, depths: int) -> Alignment:
        """All pairs whose predicted token is supervised."""
        return cls._where(torch.stack([batch.labels_at(2 + depth)[1] for depth in range(depths)], dim=-1))

    @classmethod
    def of_next(cls, batch: TokenBatch) -> Alignment:
        """Every position that predicts the very next token, if that is supervised: one depth."""
        return cls._where(batch.labels_at(1)[1][..., None], first=1)

    @classmethod
    def of_drafts(cls, batch: TokenBatch, depths: int) -> Alignment:
        """The pairs that a head which reads tokens can meet while decoding: those whose read tokens are supervised too.

        A draft starts from a token that the target gave, so what follows the last token of a prompt is no draft. Where
        a document stops with a supervised token, `tokens` has the place behind it: the target's distribution is known
        there, a label is not (`has_label`). What follows the end of a turn is not scored.
        """
        document, supervised = batch.document_ids, batch.supervised
        ends = torch.ones_like(supervised)
        ends[:, :-1] = document[:, 1:] != document[:, :-1]
        rooted = batch.labels_at(1)[1]
        pairs = []
        for depth in range(depths):
            stops = torch.zeros_like(supervised)
            read = slice(1 + depth, None)
            same = document[:, read] == document[:, : max(document.shape[1] - 1 - depth, 0)]
            stops[:, : same.shape[1]] = (ends & supervised)[:, read] & same
            pairs.append(rooted & batch.labels_at(1 + depth)[1] & (batch.labels_at(2 + depth)[1] | stops))
        return cls._where(torch.stack(pairs, dim=-1))

    @classmethod
    def _where(cls, by_position: Bool[Tensor, "batch seq depth"], first: int = 2) -> Alignment:
        depths = by_position.shape[-1]
        flat = by_position.flatten(0, 1)
        by_token = flat.new_zeros(len(flat) + 1, depths)  # the last document may stop at the last position
        for depth in range(depths):
            rows = flat[:, depth].nonzero().squeeze(-1)
            by_token[rows + first + depth, depth] = True
        positions = flat.any(-1).nonzero().squeeze(-1)
        tokens = by_token.any(-1).nonzero().squeeze(-1)
        scored = by_token[tokens]
        shifts = first + torch.arange(depths, device=tokens.device)
        rows = torch.searchsorted(positions, tokens[:, None] - shifts).where(scored, 0)
        return cls(positions, tokens, rows, scored)

    @property
    def teachers(self) -> Int[Tensor, "tokens"]:
        """Position whose final feature gives the target's distribution of the token: the one before it."""
        return self.tokens - 1

    def has_label(self, batch: TokenBatch) -> Bool[Tensor, "tokens"]:
        """Whether the text has the token, in the document of the position before it."""
        document = functional.pad(batch.document_ids.flatten(), (0, 1), value=-1)
        within = self.tokens % batch.document_ids.shape[1] > 0
        return within & (document[self.tokens] == document[self.teachers])


class Head(nn.Module, ABC):
    """A module that is trained to draft for one target; the target's embedding and output rows are only borrowed.

    vocab: the draft vocabulary, None for the target's whole one. vocab_size: rows of the target's output weight.
    """

    config: HeadConfig
    wants: tuple[int, ...] = ()
    """Which HF[k] it reads besides the final state."""

    def __init__(self, config: HeadConfig, *, hidden_size: int, vocab_size: int, vocab: DraftVocab | None = None):
        super().__init__()
        _check_vocab(config, vocab_size, vocab)
        self.config, self.hidden_size, self.vocab_size, self.vocab = config, hidden_size, vocab_size, vocab

    @property
    @abstractmethod
    def num_depths(self) -> int:
        """How many tokens ahead it is trained: Medusa's heads, EAGLE's most unrolled steps."""

    @property
    def draft_vocab_size(self) -> int:
        return self.vocab_size if self.vocab is None else len(self.vocab)

    @property
    def draft_ids(self) -> Int[Tensor, "draft"] | None:
        """Target ids of the draft vocabulary, None for all."""
        return None if self.vocab is None else self.vocab.ids

    @abstractmethod
    def forward(self, features: Features, batch: TokenBatch, embedding: Embedding, output: OutputHead) -> HeadOutput:
        """Loss and counts over all supervised tokens of the batch."""

    @abstractmethod
    def initialise(self, target: Target) -> None:
        """What the head takes from its target at the start: output rows, layers. Once, after construction."""

    def set_share(self, share: float) -> None:
        """How far the training is, from 0 to 1; for heads with a curriculum."""

    def recompute_activations(self) -> None:
        """From now on the inner activations are worked out again in the backward pass instead of being kept."""
        for module in self.modules():
            if isinstance(module, Recomputing):
                module.recomputes = True

    @staticmethod
    @abstractmethod
    def axis_names(name: str) -> tuple[str, ...]:
        """What the axes of a tensor of the state dict are, in the words of the configuration: for messages."""

    def draft_index(self, token_ids: Int[Tensor, "*batch"]) -> Int[Tensor, "*batch"]:
        """Draft index of each target id, -1 for those outside the draft vocabulary."""
        return token_ids if self.vocab is None else self.vocab.index_of(token_ids)


def _check_vocab(config: HeadConfig, vocab_size: int, vocab: DraftVocab | None) -> None:
    asked = config.draft_vocab_size
    if asked in (None, vocab_size) and vocab is None:
        return
    if vocab is None or asked != len(vocab):
        found = "none was built" if vocab is None else f"one of {len(vocab)} ids was given"
        raise HeadError(
            f"draft_vocab_size is {asked}, but {found}; build it with DraftVocab.build from the training data"
        )
    if vocab.vocab_size != vocab_size:
        raise HeadError(
            f"the draft vocabulary was built for {vocab.vocab_size} output rows, the target has {vocab_size}; "
            "build it again from this target's data"
        )
