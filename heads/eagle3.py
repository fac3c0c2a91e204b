"""EAGLE-3: a draft layer over fused features of several layers of the target. https://arxiv.org/abs/2503.01840

    s_0 = fc([HF[k] for k in layers]),    x = [input_layernorm(e); hidden_norm(s)],
    h = s + attention(x),    a = h + mlp(post_attention_layernorm(h)),    logits = rows . norm(a),    s' = a

with e the embedding of the token read. Flags, the same in training, drafting and export: `fc_norm` norms each HF[k]
before fc, `norm_before_fc` all of them together, `norm_before_residual` puts hidden_norm(s) in the place of s in h, and
`norm_output` makes s' = norm(a).
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from headstart.heads.configs import Eagle3Config
from headstart.heads.draft_layer import Attend, DraftLayer, RMSNorm
from headstart.heads.dropout import dropout
from headstart.heads.last_layer import NOISE, Scales, norm_gain
from headstart.heads.unrolled import LAST_LAYER, StepStates, UnrolledHead
from headstart.heads.vocab import DraftVocab
from headstart.target import Features, Target

NORMED_RESIDUAL = 4.0
"""Scale of the residual stream where it starts from a normed state: the best of 1.5, 4 and 28 in a short trial, where
the layer's own contributions are scaled to match."""


class Eagle3Head(UnrolledHead):
    """The EAGLE-3 head of one target; names of its parameters are the published ones."""

    config: Eagle3Config  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(self, config: Eagle3Config, *, hidden_size: int, vocab_size: int, vocab: DraftVocab | None = None):
        super().__init__(config, hidden_size=hidden_size, vocab_size=vocab_size, vocab=vocab)
        assert config.layers is not None
        self.wants = tuple(config.layers)
        taps, dim = len(self.wants), hidden_size
        self.fc = nn.Linear(taps * dim, dim, bias=False)
        self.fc_norm = nn.ModuleList(RMSNorm(dim, self.eps) for _ in range(taps)) if config.fc_norm else None
        self.input_norm = RMSNorm(taps * dim, self.eps) if config.norm_before_fc else None
        first = DraftLayer(config, dim, 2 * dim, ("input_layernorm", "hidden_norm"))
        later = [DraftLayer(config, dim, dim, ("input_layernorm",)) for _ in range(1, config.num_layers)]
        self.layers = nn.ModuleList([first, *later])
        self.norm = RMSNorm(dim, self.eps)

    def fuse(self, features: Features) -> Float[Tensor, "*batch dim"]:
        taps = [self._match(features.taps[k]) for k in self.wants]
        if self.fc_norm is not None:
            taps = [norm(tap) for norm, tap in zip(self.fc_norm, taps, strict=True)]
        fused = dropout(torch.cat(taps, dim=-1), self.config.dropout, self.training)
        return self.fc(fused if self.input_norm is None else self.input_norm(fused))

    def step(
        self,
        embeds: Float[Tensor, "batch seq dim"],
        states: Float[Tensor, "batch seq dim"],
        positions: Int[Tensor, "batch seq"],
        attend: Attend,
        rows: Int[Tensor, "rows"] | None = None,
    ) -> StepStates:
        embeds, states = self._match(embeds), self._match(states)
        first = self.layers[0]
        assert isinstance(first, DraftLayer)
        normed = first.hidden_norm(states)
        reading = torch.cat([first.input_layernorm(embeds), normed], dim=-1)
        residual = normed if self.config.norm_before_residual else states
        given = self._run_layers(reading, residual, positions, attend, rows)
        output = self.norm(given)
        return StepStates(output, output if self.config.norm_output else given)

    def initialise(self, target: Target) -> None:
        """Own output rows start as copies of the target's. With `init: last-layer`, so do the output norm and the
        layers, and the fused state starts as the highest tap."""
        self.copy_output(target)
        if self.config.init != LAST_LAYER:
            return
        dim, top = self.hidden_size, self.wants[-1]
        with torch.no_grad():
            self.fc.weight.normal_(std=NOISE)
            self.fc.weight[:, -dim:] += torch.eye(dim)
            gain = norm_gain(target.output.normalise, dim, target.output.weight_rows(torch.tensor([0])))
            if gain is not None:
                self.norm.weight.copy_(gain)
        copied = target.num_layers - self.num_layers
        scales = Scales.measure(target, sorted({*self.wants, max(copied, 0)}))
        residual = self._fused_scale(scales, top)
        first = self.layers[0]
        assert isinstance(first, DraftLayer)
        reads = None
        if self.config.norm_before_residual:
            residual = NORMED_RESIDUAL
            nn.init.constant_(first.hidden_norm.weight, NORMED_RESIDUAL)
            reads = torch.full((dim,), 1 / NORMED_RESIDUAL)
        copies = self.last_layers(target)
        for index, (layer, copy) in enumerate(zip(self.layers, copies, strict=False)):
            assert isinstance(layer, DraftLayer)
            copy.write(layer, stream=residual / scales.of(copied), reads=None if index else reads)

    def _fused_scale(self, scales: Scales, top: int) -> float:
        """Root mean square of the fused state while fc is the identity on the highest tap."""
        if self.fc_norm is not None:
            return 1.0
        if self.input_norm is None:
            return scales.of(top)
        together = sum(scales.of(layer) ** 2 for layer in self.wants) / len(self.wants)
        return scales.of(top) / together**0.5
