"""The decoder layer of a head that drafts step by step: norms, projections, gated MLP, and the rotary embedding.

The product of queries and keys is not here: `attend` is handed in, because it is all that differs between training
(heads/unrolled_attention.py) and drafting (a KV cache). Every dimension is written in the configuration
(heads/starting.py fills in the target's).

Letters in shapes: batch, seq, dim (hidden size), heads, kv_heads, width (of one attention head).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from headstart.errors import HeadError
from headstart.heads.configs import UnrolledConfig
from headstart.heads.dropout import dropout
from headstart.heads.recompute import Recomputing

Query = Float[Tensor, "lines heads rows width"]
Key = Float[Tensor, "batch kv_heads seq width"]

Attend = Callable[[int, Query, Key, Key], Query]
"""(layer, query, key, value), all rotated, -> what the layer's queries gather."""


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight, in at least fp32 inside. https://arxiv.org/abs/1910.07467"""

    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, states: Float[Tensor, "*batch dim"]) -> Float[Tensor, "*batch dim"]:
        return _Normed.apply(states, self.weight, self.eps)


class _Normed(torch.autograd.Function):
    """(states, weight, eps) -> RMSNorm's output, with its gradient in a few passes instead of autograd's dozen."""

    @staticmethod
    def forward(ctx, states: Tensor, weight: Tensor, eps: float):
        wide = states.to(torch.promote_types(states.dtype, torch.float32))
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        normed = wide * scale
        ctx.save_for_backward(normed, scale, weight)
        ctx.dtype = states.dtype
        return (normed * weight).to(states.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, by_output: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        normed, scale, weight = ctx.saved_tensors
        by_output = by_output.to(normed.dtype)
        by_weight = (by_output * normed).reshape(-1, len(weight)).sum(0).to(weight.dtype)
        by_normed = by_output * weight
        along = (by_normed * normed).mean(-1, keepdim=True)
        by_states = by_normed.sub_(normed * along).mul_(scale)
        return by_states.to(ctx.dtype), by_weight, None


class Rotary:
    """Cosines and sines of rotary positions, by transformers' own Llama embedding, whatever its scaling.

    Not a module: its frequencies stay in fp32 when the head is cast, and are not saved with it.
    """

    def __init__(self, rope: dict[str, Any], head_dim: int, max_positions: int):
        try:
            config = transformers.LlamaConfig(
                hidden_size=head_dim,
                num_attention_heads=1,
                head_dim=head_dim,
                max_position_embeddings=max_positions,
                rope_parameters=dict(rope),
            )
            self._embedding = LlamaRotaryEmbedding(config)
        except (KeyError, TypeError) as error:
            raise HeadError(f"head.rope lacks what rope_type {rope.get('rope_type')} needs ({error}); add it") from None

    @property
    def frequencies(self) -> Float[Tensor, "half"]:
        """Inverse frequencies in fp32, scaling included."""
        inverse = self._embedding.inv_freq
        assert isinstance(inverse, Tensor)
        return inverse

    def __call__(
        self, positions: Int[Tensor, "batch seq"], like: Tensor
    ) -> tuple[Float[Tensor, "batch 1 seq width"], Float[Tensor, "batch 1 seq width"]]:
        with torch.no_grad():
            cosine, sine = self._embedding(like, positions)
        return cosine[:, None], sine[:, None]


def rotate(
    states: Float[Tensor, "batch heads seq width"], rotary: tuple[Tensor, Tensor]
) -> Float[Tensor, "batch heads seq width"]:
    """Turns each pair (i, i + width / 2) by its angle. https://arxiv.org/abs/2104.09864"""
    cosine, sine = (part.to(states.dtype) for part in rotary)
    first, second = states.chunk(2, dim=-1)
    return states * cosine + torch.cat((-second, first), dim=-1) * sine


def pick(tensor: Tensor, rows: Int[Tensor, "rows"] | None) -> Tensor:
    """[batch, seq, ..] at flattened positions, as one sequence: [1, rows, ..]; None: as it is."""
    return tensor if rows is None else tensor.flatten(0, 1)[rows][None]


class DraftAttention(nn.Module):
    """Projections of grouped-query attention, for inputs of `reads` numbers."""

    def __init__(self, config: UnrolledConfig, dim: int, reads: int):
        super().__init__()
        heads, kv_heads, self.width = dimensions(config)[:3]
        bias = config.attention_bias
        self.q_proj = nn.Linear(reads, heads * self.width, bias=bias)
        self.k_proj = nn.Linear(reads, kv_heads * self.width, bias=bias)
        self.v_proj = nn.Linear(reads, kv_heads * self.width, bias=bias)
        self.o_proj = nn.Linear(heads * self.width, dim, bias=False)

    def forward(
        self,
        reading: Float[Tensor, "batch seq reads"],
        rotary: tuple[Tensor, Tensor],
        attend: Callable[[Query, Key, Key], Query],
        rows: Int[Tensor, "rows"] | None = None,
    ) -> Float[Tensor, "lines rows dim"]:
        """rows: flattened positions that ask; every position has a key and a value. None: all."""
        asking = pick(reading, rows)
        turned = (
            rotary if rows is None else (pick(rotary[0][:, 0], rows)[:, None], pick(rotary[1][:, 0], rows)[:, None])
        )
        query, key, value = (
            project(read).unflatten(-1, (-1, self.width)).transpose(1, 2)
            for project, read in ((self.q_proj, asking), (self.k_proj, reading), (self.v_proj, reading))
        )
        gathered = attend(rotate(query, turned), rotate(key, rotary), value)
        return self.o_proj(gathered.transpose(1, 2).flatten(2))


class GatedMLP(Recomputing):
    """down(silu(gate(x)) * up(x)). https://arxiv.org/abs/2002.05202"""

    def __init__(self, dim: int, inner: int):
        super().__init__()
        self.gate_proj = nn.Linear(dim, inner, bias=False)
        self.up_proj = nn.Linear(dim, inner, bias=False)
        self.down_proj = nn.Linear(inner, dim, bias=False)

    def forward(self, states: Float[Tensor, "batch seq dim"]) -> Float[Tensor, "batch seq dim"]:
        return self.down_proj(functional.silu(self.gate_proj(states)) * self.up_proj(states))


class DraftLayer(nn.Module):
    """A decoder layer whose input is normed, and joined with an embedding, by the head that owns it.

    reads: width of what the projections read. norms: names of the norms in front of it, which the head applies.
    """

    input_layernorm: RMSNorm
    """Of the embedding in EAGLE-3's first layer, of the state in later layers; EAGLE-1's first layer has none."""
    hidden_norm: RMSNorm
    """Of the state in EAGLE-3's first layer; others have none."""

    def __init__(self, config: UnrolledConfig, dim: int, reads: int, norms: tuple[str, ...]):
        super().__init__()
        assert config.rms_norm_eps is not None
        for name in norms:
            self.add_module(name, RMSNorm(dim, config.rms_norm_eps))
        self.self_attn = DraftAttention(config, dim, reads)
        self.post_attention_layernorm = RMSNorm(dim, config.rms_norm_eps)
        self.mlp = GatedMLP(dim, dimensions(config)[3])
        self.dropout = config.dropout

    def forward(
        self,
        reading: Float[Tensor, "batch seq reads"],
        residual: Float[Tensor, "batch seq dim"],
        rotary: tuple[Tensor, Tensor],
        attend: Callable[[Query, Key, Key], Query],
        rows: Int[Tensor, "rows"] | None = None,
    ) -> Float[Tensor, "lines rows dim"]:
        """rows: flattened positions that are gone on with, as one sequence; the others only have their keys and values
        seen. None: all."""
        states = pick(residual, rows) + self._dropped(self.self_attn(reading, rotary, attend, rows))
        return states + self._dropped(self.mlp(self.post_attention_layernorm(states)))

    def _dropped(self, states: Float[Tensor, "*batch dim"]) -> Float[Tensor, "*batch dim"]:
        return dropout(states, self.dropout, self.training)


def dimensions(config: UnrolledConfig) -> tuple[int, int, int, int]:
    """Query heads, key and value heads, width of a head, inner width of the MLP; refused where one is still open."""
    names = ("num_attention_heads", "num_kv_heads", "head_dim", "intermediate_size")
    values = [getattr(config, name) for name in (*names, "rms_norm_eps", "max_positions", "rope")]
    if None in values:
        raise HeadError("the dimensions of this head are open (null); build it with build_head, for a target")
    heads, kv_heads, width, inner = values[:4]
    return heads, kv_heads, width, inner
