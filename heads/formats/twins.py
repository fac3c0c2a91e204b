"""Small re-statements of how serving engines load a draft and compute with it, written apart from our writers.

An engine does not say what it left out: SGLang skips unknown tensors and keeps missing ones as they were initialised,
vLLM keeps missing ones too and drops unknown biases. A twin owns the engine's parameters (q, k and v as one, gate and
up as one), fills them by the engine's renaming, says what was missing, left over or filled twice, and computes draft
logits from what it has. vLLM 0.33.0, SGLang 0.5.23.

Letters in shapes: batch, seq, dim (the target's hidden size), draft (the draft vocabulary).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import linear

from headstart.heads.formats.engine_layers import Layers, Slots, fill, norm, place, rotary, run_layer

Engine = Literal["vllm", "sglang"]


class Eagle3Twin:
    """EAGLE-3 in vLLM or SGLang."""

    def __init__(self, config: Mapping[str, Any], tensors: Mapping[str, Tensor], engine: Engine):
        self.engine, self.config = engine, config
        speculators = "speculators_config" in config
        self.layers = Layers(config["transformer_layer_config"] if speculators else config)
        draft, vocab = config["draft_vocab_size"], self.layers.vocab_size
        self.taps = self._taps()
        self.residual_is_normed = engine == "vllm" and bool(config.get("norm_before_residual", speculators))
        hidden, width = self.layers.hidden_size, len(self.taps) * self.layers.hidden_size
        slots: Slots = {
            "model.fc.weight": [(hidden, width)],
            "model.norm.weight": [(hidden,)],
            "lm_head.weight": [(draft, hidden)],
        }
        if config.get("fc_norm"):
            slots |= {f"model.fc_norm.{tap}.weight": [(hidden,)] for tap in range(len(self.taps))}
        if config.get("norm_before_fc"):
            slots["model.input_norm.weight"] = [(width,)]
        for layer in range(self.layers.num_hidden_layers):
            norms = ["input_layernorm", "hidden_norm", "post_attention_layernorm"]
            if layer and speculators:
                norms.remove("hidden_norm")  # vLLM never reads it there; speculators' own layers do not have it
            slots |= self.layers.slots(layer, hidden if layer else 2 * hidden, tuple(norms))
        # vLLM makes the table of ids for a reduced vocabulary alone, and raises on one that it has no table for
        if draft != vocab:
            slots["d2t"] = [(draft,)]
        places = {name: self._place(name) for name in tensors}
        self.loaded = fill(slots, tensors, places)
        self.parameters = self.loaded.parameters

    def _place(self, name: str) -> tuple[str, int] | None:
        if name == "t2d" or "embed_tokens" in name:  # both take the target's embedding
            return None
        return ("d2t", 0) if name == "d2t" else place(name)

    def _taps(self) -> list[int]:
        """HF indices of the hidden states that the engine hands to the draft."""
        key = "eagle_aux_hidden_state_layer_ids"
        if self.engine == "sglang":
            nested = (self.config.get("eagle_config") or {}).get(key)
            return [] if nested is None else [layer + 1 for layer in nested]
        return sorted(set(self.config.get(key) or []))

    @property
    def target_ids(self) -> Int[Tensor, "draft"]:
        offsets = self.parameters.get("d2t")
        return torch.arange(self.config["draft_vocab_size"]) + (0 if offsets is None else offsets)

    def fuse(self, taps: Mapping[int, Float[Tensor, "batch seq dim"]]) -> Float[Tensor, "batch seq dim"]:
        states = [taps[layer] for layer in self.taps]
        if self.config.get("fc_norm"):
            states = [self._norm(state, f"model.fc_norm.{tap}") for tap, state in enumerate(states)]
        fused = torch.cat(states, -1)
        if self.config.get("norm_before_fc"):
            fused = self._norm(fused, "model.input_norm")
        return linear(fused, self.parameters["model.fc.weight"])

    def step(
        self,
        embeds: Float[Tensor, "batch seq dim"],
        states: Float[Tensor, "batch seq dim"],
        positions: Int[Tensor, "batch seq"],
    ) -> tuple[Float[Tensor, "batch seq draft"], Float[Tensor, "batch seq dim"]]:
        """Draft logits and the states of the next step, every position seeing those before it."""
        hidden = self._norm(states, "model.layers.0.hidden_norm")
        residual = hidden if self.residual_is_normed else states
        inputs = torch.cat([self._norm(embeds, "model.layers.0.input_layernorm"), hidden], -1)
        for layer in range(self.layers.num_hidden_layers):
            if layer:
                # SGLang's later layers know the other name only
                name = "hidden_norm" if self.engine == "sglang" else "input_layernorm"
                residual = states
                inputs = self._norm(states, f"model.layers.{layer}.{name}")
            states = run_layer(self.parameters, self.layers, layer, inputs, residual, self._rotary(positions))
        normed = self._norm(states, "model.norm")
        return linear(normed, self.parameters["lm_head.weight"]), normed if self.config.get("norm_output") else states

    def _rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        return rotary(self.layers.config, positions, new_spelling=self.engine == "vllm")

    def _norm(self, states: Tensor, name: str) -> Tensor:
        return norm(states, self.parameters[f"{name}.weight"], self.layers.rms_norm_eps)


class EagleTwin:
    """EAGLE-1 in vLLM or SGLang; output: the target's output rows, which a file without `lm_head` shares."""

    def __init__(
        self,
        config: Mapping[str, Any],
        tensors: Mapping[str, Tensor],
        engine: Engine,
        output: Float[Tensor, "vocab dim"] | None,
    ):
        self.engine, self.layers, self._output = engine, Layers(config), output
        hidden = self.layers.hidden_size
        slots: Slots = {"model.fc.weight": [(hidden, 2 * hidden)]}
        if engine == "sglang":
            slots["model.fc.bias"] = [(hidden,)]
        if "lm_head.weight" in tensors:
            slots["lm_head.weight"] = [(self.layers.vocab_size, hidden)]
        for layer in range(self.layers.num_hidden_layers):
            norms = ("input_layernorm", "post_attention_layernorm") if layer else ("post_attention_layernorm",)
            slots |= self.layers.slots(layer, hidden, norms)
            if config.get("qkv_bias"):
                slots[f"model.layers.{layer}.self_attn.qkv_proj.bias"] = [
                    (rows,) for rows in (self.layers.query, self.layers.key, self.layers.key)
                ]
        places = {name: None if "embed_tokens" in name else place(name) for name in tensors}
        if engine == "vllm":  # has no bias of fc, and drops one without a word
            places["fc.bias"] = None
        self.loaded = fill(slots, tensors, places)
        self.parameters = self.loaded.parameters

    def step(
        self,
        embeds: Float[Tensor, "batch seq dim"],
        states: Float[Tensor, "batch seq dim"],
        positions: Int[Tensor, "batch seq"],
    ) -> tuple[Float[Tensor, "batch seq vocab"], Float[Tensor, "batch seq dim"]]:
        """Draft logits and the states of the next step, every position seeing those before it."""
        bias = self.parameters.get("model.fc.bias")
        states = linear(torch.cat([embeds, states], -1), self.parameters["model.fc.weight"], bias)
        rotation = rotary(self.layers.config, positions, new_spelling=self.engine == "vllm")
        for layer in range(self.layers.num_hidden_layers):
            inputs = states
            if layer:
                weight = self.parameters[f"model.layers.{layer}.input_layernorm.weight"]
                inputs = norm(states, weight, self.layers.rms_norm_eps)
            states = run_layer(self.parameters, self.layers, layer, inputs, states, rotation)
        output = self.parameters.get("lm_head.weight", self._output)
        assert output is not None
        return linear(states, output), states
