"""EAGLE-1: predicts the target's next final state, and reads what it predicted. https://arxiv.org/abs/2401.15077

    s_0[j] = f_j,    x = fc([a * e; b * s]),    s' = layers(x),    logits = the target's output rows . s'

with f the target's state after its final norm, e the embedding of the token read, and a, b the powers of two that bring
both nearest to a root mean square of 1 (`embedding_scale`, `feature_scale`: constants of the head, which an export
multiplies into fc). The first layer has no norm in front of its attention. Its loss is

    L = feature_loss * smooth-L1(s', f_next) + token_loss * loss(logits)

More than one unrolled step trains it on its own predictions, as HASS does (https://arxiv.org/abs/2408.15766), except
that the gradient goes through all steps at once.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from headstart.borrowed import OutputHead
from headstart.data.packing import TokenBatch
from headstart.heads.base import Alignment, HeadOutput
from headstart.heads.configs import EagleConfig
from headstart.heads.draft_layer import Attend, DraftLayer
from headstart.heads.last_layer import NOISE, Scales, norm_gain
from headstart.heads.unrolled import LAST_LAYER, StepStates, UnrolledHead
from headstart.heads.vocab import DraftVocab
from headstart.target import Features, Target

NOISE_LENGTH = 512
"""The published noise is that of a document of this length; shorter ones have more."""


class EagleHead(UnrolledHead):
    """The EAGLE-1 head of one target; names of its parameters are the published ones."""

    config: EagleConfig  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(self, config: EagleConfig, *, hidden_size: int, vocab_size: int, vocab: DraftVocab | None = None):
        super().__init__(config, hidden_size=hidden_size, vocab_size=vocab_size, vocab=vocab)
        assert config.embedding_scale is not None and config.feature_scale is not None
        self.embedding_scale, self.feature_scale = config.embedding_scale, config.feature_scale
        dim = hidden_size
        self.fc = nn.Linear(2 * dim, dim, bias=config.fc_bias)
        self.layers = nn.ModuleList(
            DraftLayer(config, dim, dim, ("input_layernorm",) if index else ()) for index in range(config.num_layers)
        )

    def fuse(self, features: Features) -> Float[Tensor, "*batch dim"]:
        return self._match(features.final)

    def step(
        self,
        embeds: Float[Tensor, "batch seq dim"],
        states: Float[Tensor, "batch seq dim"],
        positions: Int[Tensor, "batch seq"],
        attend: Attend,
        rows: Int[Tensor, "rows"] | None = None,
    ) -> StepStates:
        embeds, states = self._match(embeds), self._match(states)
        joined = self.fc(torch.cat([embeds * self.embedding_scale, states * self.feature_scale], dim=-1))
        given = self._run_layers(joined, joined, positions, attend, rows)
        return StepStates(given, given)

    def first_states(self, features: Features, batch: TokenBatch) -> Float[Tensor, "batch seq dim"]:
        """Features, while training with uniform noise of amplitude noise / 2 * 512 / length of the document."""
        states = self.fuse(features)
        if not self.training or not self.config.noise:
            return states
        amplitude = self.config.noise / 2 * NOISE_LENGTH / document_lengths(batch) / self.feature_scale
        return states + (2 * torch.rand_like(states) - 1) * amplitude[..., None].to(states.dtype)

    def score(
        self,
        states: Float[Tensor, "positions depth dim"],
        alignment: Alignment,
        features: Features,
        batch: TokenBatch,
        output: OutputHead,
    ) -> HeadOutput:
        """The token loss of all unrolled heads, and the distance to the target's next feature, averaged over dim."""
        tokens = super().score(states, alignment, features, batch, output)
        true = features.final.flatten(0, 1)[alignment.teachers].to(torch.promote_types(states.dtype, torch.float32))
        by_depth = []
        for depth in range(states.shape[1]):
            scored = alignment.scored[:, depth]
            predicted = states[alignment.rows[scored, depth], depth].to(true.dtype)
            distance = functional.smooth_l1_loss(predicted, true[scored], reduction="none").mean(-1)
            by_depth.append(distance.sum() * self.config.feature_loss)
        distances = torch.stack(by_depth)
        weights = self.config.loss_decay ** torch.arange(len(by_depth), device=distances.device)
        return HeadOutput(
            loss_sum=tokens.loss_sum * self.config.token_loss + (distances * weights).sum(),
            token_count=tokens.token_count,
            scored=tokens.scored,
            loss=tokens.loss * self.config.token_loss + distances.detach(),
            hits=tokens.hits,
        )

    def initialise(self, target: Target) -> None:
        """Own output rows start as copies of the target's. With `init: last-layer`, fc starts as passing the feature
        on, and the layers as the target's last ones, seen from behind its final norm."""
        self.copy_output(target)
        if self.config.init != LAST_LAYER:
            return
        dim = self.hidden_size
        with torch.no_grad():
            self.fc.weight.normal_(std=NOISE)
            self.fc.weight[:, dim:] += torch.eye(dim) / self.feature_scale
            if self.fc.bias is not None:
                self.fc.bias.zero_()
        gain = norm_gain(target.output.normalise, dim, target.output.weight_rows(torch.tensor([0])))
        if gain is None:
            return
        # the state is f = gain * h / rms(h) of a stream h
        inverse = torch.where(gain.abs() > 0.01 * gain.abs().mean(), 1 / gain, 0.0)
        scales = Scales.measure(target, [target.num_layers - self.num_layers])
        scale = scales.of(None)
        for index, (layer, copy) in enumerate(zip(self.layers, self.last_layers(target), strict=False)):
            assert isinstance(layer, DraftLayer)
            stream = gain / scales.of(target.num_layers - self.num_layers)
            copy.write(layer, stream=stream, reads=None if index else inverse)
            with torch.no_grad():
                for name in ("input_layernorm", "post_attention_layernorm"):
                    if hasattr(layer, name):
                        getattr(layer, name).weight.copy_(inverse * scale)


def document_lengths(batch: TokenBatch) -> Int[Tensor, "batch seq"]:
    """Of the document that each token belongs to; padding counts as one more document of its sequence."""
    ids = batch.document_ids + 1
    counts = torch.zeros(ids.shape[0], int(ids.max()) + 1, dtype=torch.long, device=ids.device)
    counts.scatter_add_(1, ids, torch.ones_like(ids))
    return counts.gather(1, ids)
