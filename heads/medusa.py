"""Medusa heads: several next-next-token predictors over the target's final state. https://arxiv.org/abs/2401.10774

Head i reads the state at position j, runs it through its own residual blocks x + SiLU(W x + b), and predicts token
j + 2 + i (the target's own output head predicts j + 1). Blocks start at zero, so every head starts as the target's
output head. The target's output rows are borrowed: they are arguments, never attributes.

Letters in shapes: heads, dim (the target's hidden size), draft (the draft vocabulary).
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from headstart.borrowed import Embedding, OutputHead, SelectedRows
from headstart.data.packing import TokenBatch
from headstart.errors import HeadError
from headstart.heads.base import Alignment, Head, HeadOutput
from headstart.heads.chunked import ChunkedLoss
from headstart.heads.configs import MedusaConfig
from headstart.heads.dropout import dropout
from headstart.heads.losses import needs_teacher
from headstart.heads.recompute import Recomputing
from headstart.heads.vocab import DraftVocab
from headstart.target import Features, Target


class ResidualBlock(Recomputing):
    """One residual block of every head, x + SiLU(W x + b), each head with its own W and b; the identity at first."""

    def __init__(self, num_heads: int, dim: int):
        super().__init__()
        # zero weight AND bias: with PyTorch's default bias the published block is not quite the identity at first
        self.weight = nn.Parameter(torch.zeros(num_heads, dim, dim))
        self.bias = nn.Parameter(torch.zeros(num_heads, dim))

    def forward(self, states: Float[Tensor, "*batch given dim"], heads: int) -> Float[Tensor, "*batch heads dim"]:
        """The first `heads` heads. states: one per head, or a single one that all share (one product for all)."""
        weight, bias = self.weight[:heads], self.bias[:heads]
        if states.shape[-2] == 1:
            inner = functional.linear(states[..., 0, :], weight.flatten(0, 1)).unflatten(-1, bias.shape)
        else:
            inner = torch.einsum("...hd,hed->...he", states, weight)
        return states + functional.silu(inner + bias)


class MedusaHead(Head):
    """All Medusa heads of one target.

    vocab: the draft vocabulary, None for the target's whole one. vocab_size: rows of the target's output weight.
    Parameters: `blocks.{layer}.weight` [heads, dim, dim] and `.bias` [heads, dim]; `output: own` adds `output_weight`
    [heads, draft, dim]; `output: low-rank` adds `output_down` [heads, rank, dim] and `output_up` [heads, draft, rank].
    """

    config: MedusaConfig  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(self, config: MedusaConfig, *, hidden_size: int, vocab_size: int, vocab: DraftVocab | None = None):
        super().__init__(config, hidden_size=hidden_size, vocab_size=vocab_size, vocab=vocab)
        heads, draft = config.num_heads, self.draft_vocab_size
        self.blocks = nn.ModuleList(ResidualBlock(heads, hidden_size) for _ in range(config.num_layers))
        self.output_weight = self.output_down = self.output_up = None
        if config.output == "own":
            self.output_weight = nn.Parameter(torch.zeros(heads, draft, hidden_size))
        elif config.output == "low-rank":
            assert config.rank is not None
            self.output_down = nn.Parameter(torch.empty(heads, config.rank, hidden_size))
            nn.init.normal_(self.output_down, std=hidden_size**-0.5)
            self.output_up = nn.Parameter(torch.zeros(heads, draft, config.rank))

    @property
    def num_depths(self) -> int:
        return self.config.num_heads

    @staticmethod
    def axis_names(name: str) -> tuple[str, ...]:
        return {
            "weight": ("num_heads", "hidden_size", "hidden_size"),
            "bias": ("num_heads", "hidden_size"),
            "output_weight": ("num_heads", "draft_vocab_size", "hidden_size"),
            "output_down": ("num_heads", "rank", "hidden_size"),
            "output_up": ("num_heads", "draft_vocab_size", "rank"),
            "ids": ("draft_vocab_size",),
        }[name.rpartition(".")[2]]

    def initialise(self, target: Target) -> None:
        """Own output matrices start as copies of the target's rows, its logit scale included."""
        if self.output_weight is not None:
            rows = target.output.weight_rows(self.draft_ids) * target.output.scale
            with torch.no_grad():
                self.output_weight.copy_(rows.expand_as(self.output_weight))

    def forward(self, features: Features, batch: TokenBatch, embedding: Embedding, output: OutputHead) -> HeadOutput:
        """Loss and counts over all supervised tokens of the batch; Medusa has no use for `embedding`."""
        alignment = Alignment.of(batch, self.config.num_heads)
        final = features.final.flatten(0, 1)
        states = self.draft_hidden(final[alignment.positions])
        weights: dict[str, float] = {**self.config.loss_weights}
        tokens = batch.input_ids.flatten()[alignment.tokens]
        shares_rows = self.output_weight is None
        rows = output.select(self.draft_ids) if shares_rows or needs_teacher(weights) else None
        loss = ChunkedLoss(
            alignment=alignment,
            labels=self.draft_index(tokens),
            project=lambda states, *own: self._project(states, rows, *own),
            teacher_logits=lambda final: rows.logits(final),  # pyright: ignore[reportOptionalMemberAccess]
            final=final,
            vocab_size=self.draft_vocab_size,
            loss_weights=weights,
            depth_weights=[self.config.loss_decay**head for head in range(self.config.num_heads)],
            teacher_top_k=self.config.teacher_top_k,
        )
        return loss(states, *self._own_output())

    def draft_hidden(
        self, final: Float[Tensor, "*batch dim"], heads: int | None = None
    ) -> Float[Tensor, "*batch heads dim"]:
        """The state of the first `heads` heads (None: all) at each position, in the dtype of the head."""
        states = final.to(next(self.blocks.parameters()).dtype)[..., None, :]
        states = dropout(states, self.config.dropout, self.training)
        for block in self.blocks:
            states = block(states, heads or self.config.num_heads)
        return states

    def draft_logits(
        self, final: Float[Tensor, "*batch dim"], output: OutputHead, rows: Int[Tensor, "rows"] | None = None
    ) -> Float[Tensor, "*batch heads vocab"]:
        """Logits of every head over the draft vocabulary: what a tree is drawn from.

        rows: target ids of a widened draft vocabulary, the head's own ids first (`self.draft_ids`, then any others);
        refused by heads with own output matrices, which have no further rows.
        """
        selected = output.select(self.draft_ids if rows is None else rows)
        return self.logits(self.draft_hidden(final), selected)

    def logits(
        self, states: Float[Tensor, "*batch heads dim"], rows: SelectedRows | None
    ) -> Float[Tensor, "*batch heads vocab"]:
        """The same from the states of the first heads, and output rows that were selected once.

        rows: `draft_ids` and any others behind them; None for heads with own output matrices.
        """
        dtype = states.dtype if rows is None else rows.weight.dtype
        return self._project(states.to(dtype), rows, *(parameter.to(dtype) for parameter in self._own_output()))

    def _own_output(self) -> list[nn.Parameter]:
        """The head's own output parameters, in the order in which `_project` takes them."""
        own = (self.output_weight, self.output_down, self.output_up)
        return [parameter for parameter in own if parameter is not None]

    def _project(self, states: Tensor, rows: SelectedRows | None, *own: Tensor) -> Tensor:
        """The one way from states to logits, in training and drafting; all heads in one product."""
        heads = states.shape[-2]
        if self.output_weight is not None:
            if rows is not None and len(rows.weight) != self.draft_vocab_size:
                raise HeadError(
                    f"these heads have output matrices of {self.draft_vocab_size} rows of their own, "
                    f"{len(rows.weight)} were asked for; a vocabulary can be widened with `output: shared` only"
                )
            return torch.einsum("...hd,hvd->...hv", states.to(own[0].dtype), own[0][:heads])
        assert rows is not None
        logits = rows.logits(states)
        if not own:
            return logits
        down, up = (parameter[:heads] for parameter in own)
        correction = torch.einsum("...hr,hvr->...hv", torch.einsum("...hd,hrd->...hr", states.to(down.dtype), down), up)
        return logits + functional.pad(correction, (0, logits.shape[-1] - correction.shape[-1]))
