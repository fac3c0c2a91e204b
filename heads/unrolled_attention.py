"""The attention of unrolled training: what step k may see, for all positions at once.

Step 0 is causal attention within a document. While drafting, a chain that starts at position j has the target's
features up to j, so keys of step 0, and one key of its own for every step after that. So the query of step k at
position j sees

    the keys of step 0 at positions <= j of its document, and the keys of steps 1..k at its own position j,

under a single softmax (training-time test, EAGLE-3, https://arxiv.org/abs/2503.01840, figure 6; HASS,
https://arxiv.org/abs/2408.15766).

On a CPU the part over step 0 is PyTorch's fused attention, document by document, which gives its output and the
logarithm of its sum of exponentials, lse. The few later keys are then merged in:

    c_i = q . k_i * scale,    LSE = log(exp(lse) + sum_i exp(c_i)),
    out = exp(lse - LSE) * part + sum_i exp(c_i - LSE) * v_i

The gradient of a softmax needs of the other keys nothing but LSE and out, so the fused backward, given the merged ones,
is exact for the part over step 0 too. Elsewhere the eager form runs.

Letters in shapes: batch, heads, kv_heads, seq, width (of one head), later (steps after the first, the query's own
included), group (heads that share a key head).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from headstart.data.packing import TokenBatch

Query = Float[Tensor, "batch heads seq width"]
Key = Float[Tensor, "batch kv_heads seq width"]

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class UnrolledAttention:
    """`Attend` of one forward in training: call it for every layer, step after step; it keeps the keys of all steps.

    eager: None for whatever suits the device.
    """

    def __init__(self, batch: TokenBatch, *, eager: bool | None = None):
        eager = batch.input_ids.device.type != "cpu" if eager is None else eager
        self._allowed = batch.attention()[0] if eager else None
        self._spans = None if eager else document_spans(batch)
        self._seen: dict[int, list[tuple[Key, Key]]] = {}

    def __call__(self, layer: int, query: Query, key: Key, value: Key) -> Query:
        seen = self._seen.setdefault(layer, [])
        seen.append((key, value))
        (first_key, first_value), *later = seen
        if self._allowed is not None:
            return eager_attention(query, first_key, first_value, later, self._allowed)
        wide = torch.promote_types(query.dtype, torch.float32)  # few CPUs have a fast half-precision kernel
        flat = [tensor.to(wide) for pair in later for tensor in pair]
        merged = _Merged.apply(self._spans, query.to(wide), first_key.to(wide), first_value.to(wide), *flat)
        assert isinstance(merged, Tensor)
        return merged.to(query.dtype)


Span = tuple[int, int, int]
"""(row, start, stop) of a document in a batch."""


def document_spans(batch: TokenBatch) -> list[Span]:
    """Where each document stands; padding is in none."""
    spans = []
    for row, ids in enumerate(batch.document_ids):
        _, lengths = ids.unique_consecutive(return_counts=True)
        stops = lengths.cumsum(0).tolist()
        starts = [0, *stops[:-1]]
        spans += [(row, start, stop) for start, stop in zip(starts, stops, strict=True) if ids[start] >= 0]
    return spans


class _Merged(torch.autograd.Function):
    """(spans, query, key, value of step 0, then key and value of every later step) -> what the queries gather."""

    @staticmethod
    def forward(ctx, spans: Sequence[Span], query: Tensor, key: Tensor, value: Tensor, *later: Tensor):
        kv_heads, scale = key.shape[1], query.shape[-1] ** -0.5
        # seq before heads in memory, as the output projection reads it; padding gathers nothing
        out = torch.zeros_like(query.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)
        lse = torch.zeros_like(query[..., 0])
        for span in spans:
            part, part_lse = _flash(*_cut(span, kv_heads, query, key, value), 0.0, True)
            into, lse_into = _cut(span, kv_heads, out, lse)
            into.copy_(part)
            lse_into.copy_(part_lse)
        queries, outs = query.unflatten(1, (kv_heads, -1)), out.unflatten(1, (kv_heads, -1))
        lse = lse.unflatten(1, (kv_heads, -1))
        scores = [(queries * k[:, :, None]).sum(-1) * scale for k in later[::2]]
        merged = torch.stack([lse, *scores]).logsumexp(0)
        weights = [(score - merged).exp_() for score in scores]
        if later:
            outs *= (lse - merged).exp_()[..., None]
            for weight, v in zip(weights, later[1::2], strict=True):
                outs.addcmul_(weight[..., None], v[:, :, None])
        ctx.spans = spans
        ctx.save_for_backward(query, key, value, out, merged.flatten(1, 2), *later, *weights)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, by_out: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        query, key, value, out, lse, *rest = ctx.saved_tensors
        kv_heads, scale, count = key.shape[1], query.shape[-1] ** -0.5, len(rest) // 3
        later, weights = rest[: 2 * count], rest[2 * count :]
        by_query, by_key, by_value = (torch.zeros_like(tensor) for tensor in (query, key, value))
        for span in ctx.spans:
            by_part, *inputs, part, part_lse = _cut(span, kv_heads, by_out, query, key, value, out, lse)
            gradients = _flash_backward(by_part, *inputs, part, part_lse, 0.0, True)
            row, start, stop = span
            by_query[row, :, start:stop] = gradients[0].flatten(0, 1)
            by_key[row, :, start:stop], by_value[row, :, start:stop] = gradients[1].sum(1), gradients[2].sum(1)
        queries, by_outs = query.unflatten(1, (kv_heads, -1)), by_out.unflatten(1, (kv_heads, -1))
        by_queries = by_query.unflatten(1, (kv_heads, -1))
        along = (by_outs * out.unflatten(1, (kv_heads, -1))).sum(-1) if later else None
        by_later: list[Tensor] = []
        for weight, k, v in zip(weights, later[::2], later[1::2], strict=True):
            by_score = ((by_outs * v[:, :, None]).sum(-1) - along) * weight * scale
            by_queries.addcmul_(by_score[..., None], k[:, :, None])
            by_later += [(by_score[..., None] * queries).sum(2), (weight[..., None] * by_outs).sum(2)]
        return None, by_query, by_key, by_value, *by_later


def _cut(span: Span, kv_heads: int, *tensors: Tensor) -> list[Tensor]:
    """The document's part of each [batch, heads or kv_heads, seq, ..] as [kv_heads, group, document, ..].

    A key stands for its whole group without being copied, which works with any version of the fused kernels.
    """
    row, start, stop = span
    parts = [tensor[row, :, start:stop].unflatten(0, (kv_heads, -1)) for tensor in tensors]
    group = max(part.shape[1] for part in parts)
    return [part.expand(-1, group, *part.shape[2:]) for part in parts]


def eager_attention(
    query: Query,
    key: Key,
    value: Key,
    later: list[tuple[Key, Key]],
    allowed: Bool[Tensor, "batch seq seq"],
) -> Query:
    """The definition, in plain PyTorch.

    key, value: of step 0. later: (key, value) of steps 1..k, the query's own last. allowed: which keys of step 0 each
    position may see.
    """
    group = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(group, dim=1) for tensor in (key, value))
    later = [(k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)) for k, v in later]
    scale = query.shape[-1] ** -0.5
    scores = (query @ key.transpose(-1, -2) * scale).masked_fill(~allowed[:, None], -torch.inf)
    own = [(query * k).sum(-1, keepdim=True) * scale for k, _ in later]
    weights = torch.cat([scores, *own], dim=-1).softmax(-1, dtype=torch.promote_types(query.dtype, torch.float32))
    weights = weights.to(query.dtype)
    length = key.shape[2]
    gathered = weights[..., :length] @ value
    for step, (_, v) in enumerate(later):
        gathered = gathered + weights[..., length + step, None] * v
    return gathered
