"""What the twins of all engines share: filling merged parameters from a file, and a Llama layer over them.

Stated again on purpose instead of imported from our heads: the twins are what our heads are compared with.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention, silu
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

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


def place(name: str) -> tuple[str, int]:
    """The parameter of either engine that a tensor named as in the file goes to."""
    name = name.replace("midlayer.", "layers.0.")
    if "lm_head" not in name and not name.startswith("model."):
        name = f"model.{name}"
    for part, (merged, index) in _STACKED.items():
        if part in name:
            return name.replace(part, merged), index
    return name, 0


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


def norm(states: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return rms_norm(states, weight.shape, weight, epsilon)


def run_layer(
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
    normed = norm(states, parameters[f"{prefix}post_attention_layernorm.weight"], layers.rms_norm_eps)
    gate, up = linear(normed, parameters[f"{prefix}mlp.gate_up_proj.weight"]).chunk(2, -1)
    return states + linear(silu(gate) * up, parameters[f"{prefix}mlp.down_proj.weight"])
