"""Heads that read their own output: what EAGLE-1 and EAGLE-3 share.

Index j stands for the pair (embedding of token j + 1, the target's features at j). Step k (k = 0, 1, ..) at index j
reads the embedding of token j + 1 + k and the state s_k[j], and predicts token j + 2 + k, where

    s_0[j] = fuse(features)[j],    s_{k+1}[j] = what step k gave at j.

Its rotary position is that of token j plus k. `step` is the only way through the head, in training and in drafting;
they differ in `attend` alone: in training every index unrolls at once (heads/unrolled_attention.py), in drafting the
keys stand in a cache. So the k-th distribution of training is that of the k-th drafted token.

Letters in shapes: batch, seq, dim (hidden size), draft (draft vocabulary).
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from headstart.borrowed import Embedding, OutputHead, SelectedRows
from headstart.data.packing import TokenBatch
from headstart.errors import HeadError, warn
from headstart.heads.base import Alignment, Head, HeadOutput
from headstart.heads.chunked import ChunkedLoss
from headstart.heads.configs import UnrolledConfig
from headstart.heads.draft_layer import Attend, DraftLayer, Rotary, dimensions, pick
from headstart.heads.last_layer import LayerCopy, last_layers
from headstart.heads.unrolled_attention import UnrolledAttention, unrolled_rows
from headstart.heads.vocab import DraftVocab
from headstart.target import Features, Target

__all__ = ["Attend", "StepStates", "UnrolledHead"]

LAST_LAYER, RANDOM = "last-layer", "random"
"""Values of `head.init` that are no path."""


@dataclass(frozen=True)
class StepStates:
    """What one step gives at every index that is gone on with."""

    output: Float[Tensor, "batch seq dim"]
    """What the output rows read."""
    carried: Float[Tensor, "batch seq dim"]
    """The state of the next step."""


class UnrolledHead(Head):
    """Base of EagleHead and Eagle3Head. `output_weight` [draft, dim]: own output rows; None: the target's are borrowed.

    num_layers, num_heads, num_kv_heads, head_dim: of its attention, for whoever keeps its keys.
    """

    config: UnrolledConfig  # pyright: ignore[reportIncompatibleVariableOverride]
    layers: nn.ModuleList

    def __init__(self, config: UnrolledConfig, *, hidden_size: int, vocab_size: int, vocab: DraftVocab | None = None):
        super().__init__(config, hidden_size=hidden_size, vocab_size=vocab_size, vocab=vocab)
        self.num_layers = config.num_layers
        self.num_heads, self.num_kv_heads, self.head_dim, _ = dimensions(config)
        assert config.rope is not None and config.max_positions is not None and config.rms_norm_eps is not None
        self.rotary = Rotary(config.rope, self.head_dim, config.max_positions)
        self.eps = config.rms_norm_eps
        own = config.output == "own"
        self.output_weight = nn.Parameter(torch.zeros(self.draft_vocab_size, hidden_size)) if own else None
        self.steps = config.steps_at(0.0)

    @abstractmethod
    def fuse(self, features: Features) -> Float[Tensor, "*batch dim"]:
        """s_0: the first state of every position, from the target's features."""

    @abstractmethod
    def step(
        self,
        embeds: Float[Tensor, "batch seq dim"],
        states: Float[Tensor, "batch seq dim"],
        positions: Int[Tensor, "batch seq"],
        attend: Attend,
        rows: Int[Tensor, "rows"] | None = None,
    ) -> StepStates:
        """One step. embeds: of the tokens read. positions: rotary. attend: sees to it that a query meets its keys.

        rows: flattened indices that are gone on with; of the others only the keys are made. None: all. What is given
        back is then [1, rows, dim].
        """

    def copy_output(self, target: Target) -> None:
        """Own output rows start as copies of the target's, its logit scale included."""
        if self.output_weight is not None:
            with torch.no_grad():
                self.output_weight.copy_(target.output.weight_rows(self.draft_ids) * target.output.scale)

    def last_layers(self, target: Target) -> list[LayerCopy]:
        """Copies of the target's last layers, one for each of the head's; none, and a warning, where they don't fit."""
        copies = last_layers(target, [layer for layer in self.layers if isinstance(layer, DraftLayer)])
        if isinstance(copies, list):
            return copies
        warn(f"head.init: the layers of this head start at random, not from those of {target.name}: {copies}")
        return []

    @property
    def num_depths(self) -> int:
        return self.config.most_unrolled_steps

    def set_share(self, share: float) -> None:
        self.steps = self.config.steps_at(share)

    def forward(self, features: Features, batch: TokenBatch, embedding: Embedding, output: OutputHead) -> HeadOutput:
        """Loss and counts over the drafts of all steps: those of this stage while training, else of all stages.

        Depths that were not unrolled count nothing.
        """
        steps = self.steps if self.training else self.num_depths
        alignment = Alignment.of_drafts(batch, steps)
        rows = unrolled_rows(batch, alignment.positions)
        unrolled = self.unroll(features, batch, embedding, steps, rows)
        scored = torch.searchsorted(rows, alignment.positions)
        states = torch.stack([step.output[0, scored] for step in unrolled], dim=1)
        result = self.score(states, alignment, features, batch, output)
        missing = (0, self.num_depths - steps)
        return HeadOutput(
            loss_sum=result.loss_sum,
            token_count=result.token_count,
            scored=functional.pad(result.scored, missing),
            loss=functional.pad(result.loss, missing),
            hits=functional.pad(result.hits, (0, 0, *missing)),
        )

    def unroll(
        self,
        features: Features,
        batch: TokenBatch,
        embedding: Embedding,
        steps: int,
        rows: Int[Tensor, "rows"] | None = None,
    ) -> list[StepStates]:
        """The first `steps` steps at every index of the batch, or at `rows` (of `unrolled_rows`) as [1, rows, dim].

        Where step k would read a token beyond the text it reads any token: nothing that is scored depends on it.
        """
        attend = UnrolledAttention(batch, rows)
        states, positions, unrolled = self.first_states(features, batch), batch.position_ids, []
        length = batch.input_ids.shape[1]
        tokens = functional.pad(batch.input_ids, (0, steps), value=0).unfold(1, length, 1)  # [batch, step, seq]
        for step in range(steps):
            reads = tokens[:, 1 + step]
            if step and rows is not None:
                reads, positions = pick(reads, rows), pick(batch.position_ids, rows)
            embeds = embedding.embed(reads)
            unrolled.append(self.step(embeds, states, positions + step, attend, None if step else rows))
            states = unrolled[-1].carried
        return unrolled

    def first_states(self, features: Features, batch: TokenBatch) -> Float[Tensor, "batch seq dim"]:
        """s_0 of a batch; a head that is trained on noisy features adds the noise here."""
        return self.fuse(features)

    def score(
        self,
        states: Float[Tensor, "positions depth dim"],
        alignment: Alignment,
        features: Features,
        batch: TokenBatch,
        output: OutputHead,
    ) -> HeadOutput:
        """Loss and counts of the states at `alignment.positions`."""
        weights: dict[str, float] = {**self.config.loss_weights}
        final = features.final.flatten(0, 1)
        has_label = alignment.has_label(batch)
        # always, though own rows under hard-ce need them only where a text stops: all ranks gather a sharded weight
        rows = output.select(self.draft_ids)
        teacher_logits = rows.logits
        ids = functional.pad(batch.input_ids.flatten(), (0, 1))
        labels = self.draft_index(ids[alignment.tokens])
        if not bool(has_label.all()):  # where the text stops, the target's own choice stands in for it
            labels[~has_label] = teacher_logits(final[alignment.teachers[~has_label]]).argmax(-1)
        loss = ChunkedLoss(
            alignment=alignment,
            labels=labels,
            project=lambda states, *own: self._project(states, rows, *own),
            teacher_logits=teacher_logits,
            final=final,
            vocab_size=self.draft_vocab_size,
            loss_weights=weights,
            depth_weights=[self.config.loss_decay**depth for depth in range(states.shape[1])],
            teacher_top_k=self.config.teacher_top_k,
        )
        return loss(states, *self._own_output())

    def logits(self, output: Float[Tensor, "*batch dim"], rows: SelectedRows | None) -> Float[Tensor, "*batch vocab"]:
        """Logits over the draft vocabulary from `StepStates.output`.

        rows: the target's, of `draft_ids` and any others behind them; None for a head with own output rows.
        """
        dtype = output.dtype if rows is None else rows.weight.dtype
        return self._project(output.to(dtype), rows, *(weight.to(dtype) for weight in self._own_output()))

    def _own_output(self) -> list[nn.Parameter]:
        return [] if self.output_weight is None else [self.output_weight]

    def _project(self, states: Tensor, rows: SelectedRows | None, *own: Tensor) -> Tensor:
        """The one way from states to logits, in training and drafting."""
        if not own:
            assert rows is not None
            return rows.logits(states)
        if rows is not None and len(rows.weight) != self.draft_vocab_size:
            raise HeadError(
                f"this head has {self.draft_vocab_size} output rows of its own, {len(rows.weight)} were asked for; a "
                "vocabulary can be widened with `output: shared` only"
            )
        return functional.linear(states.to(own[0].dtype), own[0])

    def _run_layers(
        self,
        reading: Tensor,
        residual: Tensor,
        positions: Int[Tensor, "batch seq"],
        attend: Attend,
        rows: Int[Tensor, "rows"] | None,
    ) -> Float[Tensor, "lines rows dim"]:
        """All layers: the first on what the head made ready, each later one on the normed output of the one before. The
        last goes on with `rows` alone, if they are given."""
        rotary = self.rotary(positions, residual)
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, DraftLayer)
            if index:
                reading = layer.input_layernorm(residual)
            last = index == len(self.layers) - 1
            residual = layer(reading, residual, rotary, partial(attend, index), rows if last else None)
        return residual

    def _match(self, states: Tensor) -> Tensor:
        """In the dtype of the head, unless autocast sees to it."""
        if torch.is_autocast_enabled(states.device.type):
            return states
        return states.to(next(self.layers.parameters()).dtype)

    @staticmethod
    def axis_names(name: str) -> tuple[str, ...]:
        inner, _, kind = name.rpartition(".")
        module = inner.rpartition(".")[2]
        given = {
            "fc": ("hidden_size", "width of the features read"),
            "q_proj": ("num_attention_heads * head_dim", "width of the state read"),
            "k_proj": ("num_kv_heads * head_dim", "width of the state read"),
            "v_proj": ("num_kv_heads * head_dim", "width of the state read"),
            "o_proj": ("hidden_size", "num_attention_heads * head_dim"),
            "gate_proj": ("intermediate_size", "hidden_size"),
            "up_proj": ("intermediate_size", "hidden_size"),
            "down_proj": ("hidden_size", "intermediate_size"),
        }
        if kind == "ids":
            return ("draft_vocab_size",)
        if name == "output_weight":
            return ("draft_vocab_size", "hidden_size")
        return given.get(module, ("hidden_size",))
