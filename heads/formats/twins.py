"""Small re-statements of how serving engines load a draft and compute with it, written apart from our writers.

An engine does not say what it left out: SGLang skips unknown tensors and keeps missing ones as they were initialised,
vLLM keeps missing ones too and drops unknown biases. A twin owns the engine's parameters (q, k and v as one, gate and
up as one), fills them by the engine's renaming, says what was missing, left over or filled twice, and computes draft
logits from what it has. vLLM 0.33.0, SGLang 0.5.23.

Letters in shapes: batch, seq, dim (the target's hidden size), draft (the draft vocabulary).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention, silu
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

Engine = Literal["vllm", "sglang"]

_STACKED = {
    "self_attn.q_proj": ("self_attn.qkv_proj", 0),
    "self_attn.k_proj": ("self_attn.qkv_proj", 1),
    "self_attn.v_proj": ("self_attn.qkv_proj", 2),
    "mlp.gate_proj": ("mlp.gate_up_proj", 0),
    "mlp.up_proj": ("mlp.gate_up_proj", 1),
}


@dataclass
class Loaded:
    """What an engine holds after loading; every list is empty where the checkpoint fits."""

    parameters: dict[str, Tensor]
    missing: list[str] = field(default_factory=list)
    left_over: list[str] = field(default_factory=list)
    twice: list[str] = field(default_factory=list)
    misshapen: list[str] = field(default_factory=list)

    @property
    def faults(self) -> list[str]:
        named = {"missing": self.missing, "left over": self.left_over, "filled twice": self.twice}
        said = [f"{what}: {', '.join(names)}" for what, names in named.items() if names]
        return said + [f"wrong shape: {name}" for name in self.misshapen]


Slots = dict[str, list[tuple[int, ...]]]
"""Shapes of a parameter's parts, along its rows, by its name; one part unless several tensors are merged into it."""


@dataclass(frozen=True)
class Layers:
    """The keys of a Llama configuration that an engine reads for the draft's layers."""

    config: Mapping[str, Any]

    def __getattr__(self, name: str) -> Any:
        return self.config[name]

    @property
    def query(self) -> int:
        return self.num_attention_heads * self.head_dim

    @property
    def key(self) -> int:
        return self.num_key_value_heads * self.head_dim

    def slots(self, layer: int, width: int, norms: tuple[str, ...]) -> Slots:
        hidden, inner, prefix = self.hidden_size, self.intermediate_size, f"model.layers.{layer}."
        return {
            f"{prefix}self_attn.qkv_proj.weight": [(self.query, width), (self.key, width), (self.key, width)],
            f"{prefix}self_attn.o_proj.weight": [(hidden, self.query)],
            f"{prefix}mlp.gate_up_proj.weight": [(inner, hidden)] * 2,
            f"{prefix}mlp.down_proj.weight": [(hidden, inner)],
            **{f"{prefix}{norm}.weight": [(hidden,)] for norm in norms},
        }


def fill(slots: Slots, tensors: Mapping[str, Tensor], places: Mapping[str, tuple[str, int] | None]) -> Loaded:
    """places: for each tensor of the file its parameter and part, None where the engine passes it over on purpose."""
    parts: dict[str, dict[int, Tensor]] = {name: {} for name in slots}
    loaded = Loaded({})
    for name, tensor in tensors.items():
        place = places[name]
        if place is None:
            continue
        parameter, part = place
        if parameter not in slots or part >= len(slots[parameter]):
            loaded.left_over.append(name)
        elif part in parts[parameter]:
            loaded.twice.append(name)
        elif tuple(tensor.shape) != slots[parameter][part]:
            loaded.misshapen.append(f"{name} {list(tensor.shape)}, expected {list(slots[parameter][part])}")
        else:
            parts[parameter][part] = tensor
    for parameter, shapes in slots.items():
        if len(parts[parameter]) == len(shapes):
            loaded.parameters[parameter] = torch.cat([parts[parameter][part] for part in range(len(shapes))])
        elif not any(name.startswith(parameter) for name in loaded.misshapen):
            loaded.missing.append(parameter)
    return loaded


def _place(name: str) -> tuple[str, int]:
    """The parameter of either engine that a tensor named as in the file goes to."""
    name = name.replace("midlayer.", "layers.0.")
    if "lm_head" not in name and not name.startswith("model."):
        name = f"model.{name}"
    for part, (merged, index) in _STACKED.items():
        if part in name:
            return name.replace(part, merged), index
    return name, 0


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
        return ("d2t", 0) if name == "d2t" else _place(name)

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
                norm = "hidden_norm" if self.engine == "sglang" else "input_layernorm"
                residual = states
                inputs = self._norm(states, f"model.layers.{layer}.{norm}")
            states = _layer(self.parameters, self.layers, layer, inputs, residual, self._rotary(positions))
        normed = self._norm(states, "model.norm")
        return linear(normed, self.parameters["lm_head.weight"]), normed if self.config.get("norm_output") else states

    def _rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        return rotary(self.layers.config, positions, new_spelling=self.engine == "vllm")

    def _norm(self, states: Tensor, name: str) -> Tensor:
        return _norm(states, self.parameters[f"{name}.weight"], self.layers.rms_norm_eps)


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
        places = {name: None if "embed_tokens" in name else _place(name) for name in tensors}
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
                norm = self.parameters[f"model.layers.{layer}.input_layernorm.weight"]
                inputs = _norm(states, norm, self.layers.rms_norm_eps)
            states = _layer(self.parameters, self.layers, layer, inputs, states, rotation)
        output = self.parameters.get("lm_head.weight", self._output)
        assert output is not None
        return linear(states, output), states


def rotary(config: Mapping[str, Any], positions: Tensor, *, new_spelling: bool) -> tuple[Tensor, Tensor]:
    """Cosines and sines [batch, seq, head_dim] of the spelling that an engine reads."""
    if new_spelling and config.get("rope_parameters") is not None:
        rope = dict(config["rope_parameters"])
    else:
        scaling = config.get("rope_scaling") or {"rope_type": "default"}
        rope = {**scaling, "rope_theta": config.get("rope_theta", 10000.0)}
    llama = LlamaConfig(
        hidden_size=config["hidden_size"],
        num_attention_heads=config["num_attention_heads"],
        head_dim=config["head_dim"],
        max_position_embeddings=config["max_position_embeddings"],
        rope_parameters=rope,  # pyright: ignore[reportArgumentType]  (a dict is what a file gives)
    )
    cos, sin = LlamaRotaryEmbedding(llama)(torch.zeros(1), positions)
    return cos, sin


def _rotate(states: Float[Tensor, "batch heads seq dim"], rotation: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = (part[:, None] for part in rotation)
    first, second = states.chunk(2, -1)
    return states * cos + torch.cat([-second, first], -1) * sin


def _norm(states: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return rms_norm(states, weight.shape, weight, epsilon)


def _layer(
    parameters: Mapping[str, Tensor],
    layers: Layers,
    layer: int,
    inputs: Float[Tensor, "batch seq width"],
    residual: Float[Tensor, "batch seq dim"],
    rotation: tuple[Tensor, Tensor],
) -> Float[Tensor, "batch seq dim"]:
    """Attention over `inputs` and the MLP, each added to the residual stream."""
    prefix = f"model.layers.{layer}."
    bias = parameters.get(f"{prefix}self_attn.qkv_proj.bias")
    merged = linear(inputs, parameters[f"{prefix}self_attn.qkv_proj.weight"], bias)
    query, key, value = (
        part.unflatten(-1, (-1, layers.head_dim)).transpose(1, 2)
        for part in merged.split([layers.query, layers.key, layers.key], -1)
    )
    mixed = scaled_dot_product_attention(
        _rotate(query, rotation), _rotate(key, rotation), value, is_causal=True, enable_gqa=True
    )
    states = residual + linear(mixed.transpose(1, 2).flatten(2), parameters[f"{prefix}self_attn.o_proj.weight"])
    normed = _norm(states, parameters[f"{prefix}post_attention_layernorm.weight"], layers.rms_norm_eps)
    gate, up = linear(normed, parameters[f"{prefix}mlp.gate_up_proj.weight"]).chunk(2, -1)
    return states + linear(silu(gate) * up, parameters[f"{prefix}mlp.down_proj.weight"])
