"""Starting a draft layer from the target's own last layers, where their shapes allow.

What a layer of the target does to its residual stream is written into the draft layer so that it does the same to the
state of the head. The gains of the target's norms go into the projections behind them, because the draft layer's own
norms may stand elsewhere; and what a layer adds is scaled to the stream it is added to: the last layer's output fits a
stream of the target's scale (a root mean square of 28 at SmolLM2's end), and would drown a stream of 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from headstart.borrowed import read_weight, weight_of, weight_shape
from headstart.heads.draft_layer import DraftLayer
from headstart.target import Features, Target

NOISE = 0.002
"""Standard deviation of what is not copied in a layer that starts as a copy."""
SAMPLE = (
    "The lighthouse keeper wrote down the weather every evening: wind from the west, rain before midnight, and a thin "
    "moon after that. Nobody had asked him to, but in forty years he had not left out a single day."
)
"""A text on which scales are measured; only orders of magnitude matter."""
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
_MLP = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class LayerCopy:
    """One layer of the target in fp32, the gains of its two norms multiplied into the projections behind them."""

    weights: dict[str, Float[Tensor, "rows columns"]]
    """By name: q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj."""
    biases: dict[str, Float[Tensor, "rows"]]
    """Of queries, keys and values, where the target has them."""

    def write(
        self,
        layer: DraftLayer,
        *,
        stream: float | Float[Tensor, "dim"],
        reads: Float[Tensor, "dim"] | None = None,
    ) -> None:
        """Makes `layer` the copy.

        stream: what the head's stream is in terms of the target's at this layer, an entry-wise factor; what the layer
        adds is multiplied with it. reads: entry-wise factor that turns the state that the projections read into what
        the target's read after its norm, where they do not read a normed state of gain 1; None: they do. The
        projections' last dim columns read the state; columns before them (an embedding) keep their random start.
        """
        with torch.no_grad():
            for name in ("q_proj", "k_proj", "v_proj"):
                weight = self.weights[name]
                copy = weight if reads is None else weight * reads
                ours = getattr(layer.self_attn, name)
                ours.weight[:, -weight.shape[1] :].copy_(copy)
                if ours.bias is not None:
                    ours.bias.copy_(self.biases.get(name, torch.zeros_like(ours.bias)))
            scale = torch.as_tensor(stream, dtype=torch.float32).expand(self.weights["o_proj"].shape[0])[:, None]
            layer.self_attn.o_proj.weight.copy_(self.weights["o_proj"] * scale)
            layer.mlp.down_proj.weight.copy_(self.weights["down_proj"] * scale)
            for name in ("gate_proj", "up_proj"):
                getattr(layer.mlp, name).weight.copy_(self.weights[name])


def last_layers(target: Target, layers: Sequence[DraftLayer]) -> list[LayerCopy] | str:
    """Copies of the target's last layers for these draft layers, or why there are none, as half a sentence."""
    if len(layers) > target.num_layers:
        return f"it has {target.num_layers} layers, the head {len(layers)}"
    copies = []
    for ours, theirs in zip(layers, target.layers[-len(layers) :], strict=True):
        copy = _copy(theirs)
        if isinstance(copy, str):
            return copy
        for name, weight in copy.weights.items():
            own = getattr(ours.self_attn if name in PROJECTIONS else ours.mlp, name).weight
            columns = min(own.shape[1], weight.shape[1])  # EAGLE-3's first layer reads an embedding beside
            if own[:, -columns:].shape != weight.shape:
                return f"its {name} is {list(weight.shape)}, the head's {list(own.shape)}"
        copies.append(copy)
    return copies


def _copy(layer: nn.Module) -> LayerCopy | str:
    """The layer in the form of Llama's: two norms, separate projections, a gated MLP."""
    attention, mlp = getattr(layer, "self_attn", None), getattr(layer, "mlp", None)
    norms = sorted(name for name, _ in layer.named_children() if "norm" in name)
    if attention is None or mlp is None or norms != ["input_layernorm", "post_attention_layernorm"]:
        return "its last layer is not built as Llama's is"
    found = {name: getattr(attention if name in PROJECTIONS else mlp, name, None) for name in (*PROJECTIONS, *_MLP)}
    modules = {name: module for name, module in found.items() if isinstance(module, nn.Linear)}
    missing = [name for name in found if name not in modules]
    if missing:
        return f"its last layer has no {missing[0]} of its own"
    dim = weight_shape(weight_of(modules["q_proj"]))[1]
    before, after = (norm_gain(layer.get_submodule(name), dim, weight_of(modules["q_proj"])) for name in norms)
    if before is None or after is None:
        return "its norms are no RMS norms"
    weights = {name: read_weight(weight_of(module)).float() for name, module in modules.items()}
    for name, gain in [("q_proj", before), ("k_proj", before), ("v_proj", before)]:
        weights[name] = weights[name] * gain
    for name in ("gate_proj", "up_proj"):
        weights[name] = weights[name] * after
    for name, norm in [("q_proj", "q_norm"), ("k_proj", "k_norm")]:
        weights[name] = _without_head_norm(weights[name], getattr(attention, norm, None))
    # Granite's own factors: of what a layer adds, and of its scores
    added = float(getattr(layer, "residual_multiplier", 1.0))
    width = getattr(attention, "head_dim", None)
    sharper = float(getattr(attention, "scaling", width**-0.5)) * width**0.5 if width else 1.0
    for name, factor in [("o_proj", added), ("down_proj", added), ("q_proj", sharper)]:
        weights[name] = weights[name] * factor
    biases = {}
    for name in ("q_proj", "k_proj", "v_proj"):
        bias = modules[name].bias
        if bias is not None:
            biases[name] = read_weight(bias).float() * (sharper if name == "q_proj" else 1.0)
    return LayerCopy(weights, biases)


def _without_head_norm(weight: Float[Tensor, "rows columns"], norm: nn.Module | None) -> Float[Tensor, "rows columns"]:
    """Queries or keys that the target norms per head, as Qwen3 does: the norm at its value for a typical input."""
    gains = getattr(norm, "weight", None)
    width = len(gains) if isinstance(gains, Tensor) else 0
    gain = norm_gain(norm, width, weight) if norm is not None and width and len(weight) % width == 0 else None
    if gain is None:
        return weight
    by_head = weight.unflatten(0, (-1, width))
    # an input of unit entries without order gives row r a variance of |row r|^2
    typical = by_head.square().sum(-1).mean(-1).sqrt()
    return (by_head * gain[:, None] / typical[:, None, None]).flatten(0, 1)


@torch.no_grad()
def norm_gain(norm: Callable[[Tensor], Tensor], dim: int, like: Tensor) -> Float[Tensor, "dim"] | None:
    """What an RMS norm multiplies with, in fp32, whatever form its weight has; None for another kind of norm."""
    ones = torch.ones(1, dim, dtype=like.dtype, device=like.device)
    gain, opposite = norm(ones)[0].float(), norm(-ones)[0].float()
    # a norm that subtracts the mean gives its bias here, or nothing
    return gain if torch.equal(gain, -opposite) and bool(gain.any()) else None


@dataclass(frozen=True)
class Scales:
    """Root mean squares of the target's states on a short text: the median over its tokens, which passes over the few
    whose states are enormous."""

    features: Features

    @classmethod
    @torch.no_grad()
    def measure(cls, target: Target, layers: Sequence[int] = ()) -> Scales:
        length = min(64, target.max_positions)
        ids = target.tokenizer(SAMPLE, add_special_tokens=False, truncation=True, max_length=length)["input_ids"]
        tokens = torch.tensor([ids], device=target.device).clamp(max=target.embedding.vocab_size - 1)
        places = torch.arange(len(ids), device=target.device)[None]
        return cls(target.forward(tokens, places, None, layers=layers))

    def of(self, layer: int | None) -> float:
        """Of HF[layer]; None: of the final state."""
        states = self.features.final if layer is None else self.features.taps[layer]
        return float(states[0].float().square().mean(-1).sqrt().median().clamp(min=1e-6))


@torch.no_grad()
def embedding_scale(target: Target) -> float:
    """Root mean square of the target's embeddings, as its first layer receives them."""
    ids = torch.linspace(0, target.embedding.vocab_size - 1, min(512, target.embedding.vocab_size)).long()
    vectors = target.embedding.embed(ids.to(target.device)).float()
    return float(vectors.square().mean(-1).sqrt().median().clamp(min=1e-6))
