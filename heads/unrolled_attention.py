"""The attention of unrolled training: what step k may see, for all positions at once.

Step 0 is causal attention within a document. While drafting, a chain that starts at position j has the target's
features up to j, so keys of step 0, and one key of its own for every step after that. So the query of step k at
position j sees

    the keys of step 0 at positions <= j of its document, and the keys of steps 1..k at its own position j,

under a single softmax (training-time test, EAGLE-3, https://arxiv.org/abs/2503.01840, figure 6; HASS,
https://arxiv.org/abs/2408.15766).

Not every position has to be unrolled: what a prompt's positions would draft is never scored, and others see nothing of
them but their keys of step 0. So queries, and the keys of later steps, may be those of some positions only.

On a CPU the part over step 0 is PyTorch's fused attention, document by document, which gives its output and the
logarithm of its sum of exponentials, lse: once over the keys before the first query, and once, causal, over those from
there on. Both parts and the few later keys are then merged:

    c_i = q . k_i * scale,    LSE = log(sum exp(lse of the parts) + sum_i exp(c_i)),
    out = sum exp(lse - LSE) * part + sum_i exp(c_i - LSE) * v_i

The gradient of a softmax needs of the other keys nothing but LSE and out, so the fused backward, given the merged ones,
is exact for each part too. Elsewhere the eager form runs.

Letters in shapes: batch, heads, kv_heads, seq, width (of one head), rows (positions that are unrolled, one after the
other), lines x rows (batch x seq, or 1 x rows), later (steps after the first, the query's own included), group (heads
that share a key head).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from headstart.data.packing import TokenBatch
from headstart.device_kind import device_kind
from headstart.heads.draft_layer import Key, Query

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class Span(NamedTuple):
    """A document, and where the queries of its positions `first` to `stop` stand among all: from number `at` on."""

    line: int
    start: int
    first: int
    stop: int
    at: int

    def parts(self) -> Iterator[tuple[int, int, bool]]:
        """(begin, end, causal) of the keys that its queries see: those before the first query, and those from there."""
        if self.start < self.first:
            yield self.start, self.first, False
        yield self.first, self.stop, True

    @property
    def queries(self) -> slice:
        return slice(self.at, self.at + self.stop - self.first)


class UnrolledAttention:
    """`Attend` of one forward in training: call it for every layer, step after step; it keeps the keys of all steps.

    rows: the positions that are unrolled, from `unrolled_rows`; None: all. With them tensors are
    [1, heads, rows, width], but for keys and values of step 0, which every position has, and queries of step 0, which
    may be either. eager: None for whatever suits the device.
    """

    def __init__(self, batch: TokenBatch, rows: Int[Tensor, "rows"] | None = None, *, eager: bool | None = None):
        eager = device_kind(batch.input_ids.device) != "cpu" if eager is None else eager
        self._shape, self._rows = batch.input_ids.shape, rows
        self._allowed = batch.attention()[0] if eager else None
        self._spans = [] if eager else spans(batch)
        self._row_spans = self._spans if eager or rows is None else spans_of_rows(self._spans, rows)
        self._seen: dict[int, list[tuple[Key, Key]]] = {}

    def __call__(self, layer: int, query: Query, key: Key, value: Key) -> Query:
        seen = self._seen.setdefault(layer, [])
        seen.append((key, value))
        (first_key, first_value), *later = seen
        everywhere = self._rows is None or (query.shape[0], query.shape[2]) == self._shape
        if self._allowed is not None:
            if everywhere:
                return eager_attention(query, first_key, first_value, later, self._allowed)
            later = [(self._spread(k), self._spread(v)) for k, v in later]
            return self._rows_of(eager_attention(self._spread(query), first_key, first_value, later, self._allowed))
        wide = torch.promote_types(query.dtype, torch.float32)  # few CPUs have a fast half-precision kernel
        chosen = self._spans if everywhere else self._row_spans
        flat = [_in_a_line(tensor).to(wide) for pair in later for tensor in pair]
        merged = _Merged.apply(chosen, _in_a_line(query).to(wide), first_key.to(wide), first_value.to(wide), *flat)
        assert isinstance(merged, Tensor)
        return merged.to(query.dtype).unflatten(1, (query.shape[0], query.shape[2])).transpose(0, 1)

    def _spread(self, rows: Float[Tensor, "1 heads rows width"]) -> Float[Tensor, "batch heads seq width"]:
        """At every position; zero where nothing is unrolled."""
        assert self._rows is not None
        lines, length = self._shape
        zeros = rows.new_zeros(rows.shape[1], lines * length, rows.shape[3])
        return zeros.index_copy(1, self._rows, rows[0]).unflatten(1, self._shape).transpose(0, 1)

    def _rows_of(self, everywhere: Float[Tensor, "batch heads seq width"]) -> Float[Tensor, "1 heads rows width"]:
        return _in_a_line(everywhere)[:, self._rows][None]


def _in_a_line(tensor: Float[Tensor, "batch heads seq width"]) -> Float[Tensor, "heads rows width"]:
    return tensor.transpose(0, 1).flatten(1, 2)


def unrolled_rows(batch: TokenBatch, positions: Int[Tensor, "positions"]) -> Int[Tensor, "rows"]:
    """Of each document the positions from the first to the last of `positions`; both flattened, ascending."""
    lines, length = batch.document_ids.shape
    places = torch.arange(lines * length, device=positions.device)
    documents = (batch.document_ids + (length + 1) * torch.arange(lines, device=positions.device)[:, None]).flatten()
    marked = torch.zeros_like(places, dtype=torch.bool).index_fill(0, positions, True)
    before = places.where(marked, -1).cummax(0).values
    after = places.where(marked, len(places)).flip(0).cummin(0).values.flip(0)
    inside = (before >= 0) & (after < len(places))
    inside &= (documents[before] == documents) & (documents[after.clamp(max=len(places) - 1)] == documents)
    return places[inside]


def spans(batch: TokenBatch) -> list[Span]:
    """All documents, for queries at every position; padding is in none."""
    found, length = [], batch.input_ids.shape[1]
    for line, ids in enumerate(batch.document_ids):
        _, lengths = ids.unique_consecutive(return_counts=True)
        stops = lengths.cumsum(0).tolist()
        for start, stop in zip([0, *stops[:-1]], stops, strict=True):
            if ids[start] >= 0:
                found.append(Span(line, start, start, stop, line * length + start))
    return found


def spans_of_rows(documents: Sequence[Span], rows: Int[Tensor, "rows"]) -> list[Span]:
    """The documents of which something is unrolled, for queries at `rows` alone."""
    known, found = rows.tolist(), []
    for document in documents:
        begin, end = (bisect_left(known, edge) for edge in (document.queries.start, document.queries.stop))
        if begin < end:
            first = document.start + known[begin] - document.at
            found.append(Span(document.line, document.start, first, first + end - begin, begin))
    return found


class _Merged(torch.autograd.Function):
    """(spans, queries, key and value of step 0, then key and value of every later step) -> what the queries gather.

    Queries and later keys: [heads or kv_heads, rows, width]. Keys of step 0: [batch, kv_heads, seq, width].
    """

    @staticmethod
    def forward(ctx, chosen: Sequence[Span], query: Tensor, key: Tensor, value: Tensor, *later: Tensor):
        kv_heads, scale = key.shape[1], query.shape[-1] ** -0.5
        queries = query.unflatten(0, (kv_heads, -1))
        # rows before heads in memory, as the output projection reads it; padding gathers nothing
        out = query.new_zeros(query.shape[1], query.shape[0], query.shape[2]).transpose(0, 1)
        outs = out.unflatten(0, (kv_heads, -1))
        lse = torch.zeros_like(queries[..., 0])
        for span in chosen:
            rows = queries[:, :, span.queries]
            gathered = [_flash(rows, *_keys(span, part, rows, key, value), 0.0, part[2]) for part in span.parts()]
            together = torch.stack([sums for _, sums in gathered]).logsumexp(0)
            lse[:, :, span.queries] = together
            for part, sums in gathered:
                outs[:, :, span.queries] += part * (sums - together).exp()[..., None]
        scores = [(queries * k[:, None]).sum(-1) * scale for k in later[::2]]
        merged = torch.stack([lse, *scores]).logsumexp(0)
        weights = [(score - merged).exp_() for score in scores]
        if later:
            outs *= (lse - merged).exp_()[..., None]
            for weight, v in zip(weights, later[1::2], strict=True):
                outs.addcmul_(weight[..., None], v[:, None])
        ctx.spans = chosen
        ctx.save_for_backward(query, key, value, out, merged, *later, *weights)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, by_out: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        query, key, value, out, lse, *rest = ctx.saved_tensors
        kv_heads, scale, count = key.shape[1], query.shape[-1] ** -0.5, len(rest) // 3
        later, weights = rest[: 2 * count], rest[2 * count :]
        by_query, by_key, by_value = (torch.zeros_like(tensor) for tensor in (query, key, value))
        queries, outs, by_outs, by_queries = (
            each.unflatten(0, (kv_heads, -1)) for each in (query, out, by_out, by_query)
        )
        for span in ctx.spans:
            rows = slice(None), slice(None), span.queries
            for part in span.parts():
                begin, end, causal = part
                inputs = [by_outs[rows], queries[rows], *_keys(span, part, queries, key, value), outs[rows], lse[rows]]
                by_rows, by_keys, by_values = _flash_backward(*inputs, 0.0, causal)
                by_queries[rows] += by_rows
                by_key[span.line, :, begin:end] = by_keys.sum(1)
                by_value[span.line, :, begin:end] = by_values.sum(1)
        along = (by_outs * outs).sum(-1) if later else None
        by_later: list[Tensor] = []
        for weight, k, v in zip(weights, later[::2], later[1::2], strict=True):
            by_score = ((by_outs * v[:, None]).sum(-1) - along) * weight * scale
            by_queries.addcmul_(by_score[..., None], k[:, None])
            by_later += [(by_score[..., None] * queries).sum(1), (weight[..., None] * by_outs).sum(1)]
        return None, by_query, by_key, by_value, *by_later


def _keys(span: Span, part: tuple[int, int, bool], queries: Tensor, *tensors: Tensor) -> list[Tensor]:
    """The part's keys or values as [kv_heads, group, keys, width].

    A key stands for its whole group without being copied, which works with any version of the fused kernels.
    """
    group = queries.shape[1]
    return [tensor[span.line, :, None, part[0] : part[1]].expand(-1, group, -1, -1) for tensor in tensors]


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
