"""The loss of a head over its draft vocabulary without ever holding the logits of all positions.

Logits of one chunk of predicted tokens are made, turned into loss and gradient, and forgotten. The gradient by the
head's states (and by its own output weights) is therefore worked out in the forward, as in the Liger kernels
(https://arxiv.org/abs/2410.10989); the backward only multiplies it. Memory grows with tokens * dim and with
chunk * vocab, never with tokens * vocab. The target's distribution of a token is computed once for all depths.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from headstart.device_kind import device_kind
from headstart.heads.base import NUM_RANKS, Alignment, HeadOutput
from headstart.heads.losses import Teacher, label_ranks, log_softmax, loss_and_gradient, needs_teacher
from headstart.rehearsal import region

_CHUNK_ELEMENTS = {"cpu": 1 << 21, "cuda": 1 << 27}
"""Logits per chunk: on a CPU what the caches still serve, on a GPU what keeps its multiprocessors busy."""
LOGITS = "logits"
"""What a chunk holds, in the words of a rehearsal."""
_LEAST_TOKENS = 16
"""Predicted tokens in a chunk at least: with fewer, reading the output rows costs more than using them."""

Projection = Callable[..., Float[Tensor, "tokens depth vocab"]]


@dataclass(frozen=True, kw_only=True)
class ChunkedLoss:
    """What is summed, and over what; call it with the head's states."""

    alignment: Alignment
    labels: Int[Tensor, "tokens"]
    """Draft index of each predicted token; -1 outside the draft vocabulary."""
    project: Projection
    """(states [tokens, depth, dim], *parameters) -> draft logits."""
    teacher_logits: Callable[[Float[Tensor, "tokens dim"]], Float[Tensor, "tokens vocab"]]
    """Final features of the target -> its logits over the draft vocabulary."""
    final: Float[Tensor, "all dim"]
    """The target's final features at every flattened position."""
    vocab_size: int
    """Width of the draft logits."""
    loss_weights: Mapping[str, float]
    depth_weights: Sequence[float]
    teacher_top_k: int | None = None
    chunk_tokens: int | None = None
    """Predicted tokens per chunk; None: chosen from the vocabulary and the device."""

    def __call__(self, states: Float[Tensor, "positions depth dim"], *parameters: Tensor) -> HeadOutput:
        """states: of `alignment.positions`. parameters: the head's own, handed to `project`; they get gradients."""
        learns = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (states, *parameters))
        loss_sum, loss, hits = _Chunked.apply(self, learns, states, *parameters)
        scored = self.alignment.scored.sum(0)
        return HeadOutput(loss_sum=loss_sum, token_count=scored[0], scored=scored, loss=loss, hits=hits)

    def chunks(self) -> list[slice]:
        """The predicted tokens in pieces whose logits may be in memory together."""
        count, depth = self.alignment.scored.shape
        budget = _CHUNK_ELEMENTS.get(device_kind(self.final.device), 1 << 25)
        size = self.chunk_tokens or max(_LEAST_TOKENS, budget // (depth * self.vocab_size))
        return [slice(start, min(start + size, count)) for start in range(0, count, size)]


class _Chunked(torch.autograd.Function):
    """(work, learns, states, *parameters) -> weighted loss, and without gradient: loss and hits per depth."""

    @staticmethod
    def forward(ctx, work: ChunkedLoss, learns: bool, states: Tensor, *parameters: Tensor):
        depth = states.shape[1]
        sums = _Sums(
            loss=states.new_zeros(depth, dtype=torch.promote_types(states.dtype, torch.float32)),
            hits=torch.zeros(depth, NUM_RANKS, dtype=torch.long, device=states.device),
            gradients=[torch.zeros_like(tensor) for tensor in (states, *parameters)] if learns else None,
        )
        depth_weights = torch.tensor(work.depth_weights, dtype=sums.loss.dtype, device=states.device)
        # states and output weights are brought to the target's dtype by hand, as they are while drafting
        with torch.autocast(states.device.type, enabled=False):
            leaves = [parameter.detach().to(work.final.dtype).requires_grad_(learns) for parameter in parameters]
            with region(LOGITS):
                for chunk in work.chunks():
                    _add_chunk(sums, work, chunk, depth_weights, states.detach(), leaves)
        ctx.save_for_backward(*(sums.gradients or []))
        ctx.mark_non_differentiable(sums.loss, sums.hits)
        ctx.set_materialize_grads(False)
        return (sums.loss * depth_weights).sum(), sums.loss, sums.hits

    @staticmethod
    @once_differentiable
    def backward(ctx, by_sum: Tensor | None, *_: None):  # pyright: ignore[reportIncompatibleMethodOverride]
        if by_sum is None:
            return (None,) * (2 + len(ctx.saved_tensors))
        return None, None, *(gradient * by_sum.to(gradient.dtype) for gradient in ctx.saved_tensors)


@dataclass
class _Sums:
    """What grows from chunk to chunk."""

    loss: Float[Tensor, "depth"]
    hits: Int[Tensor, "depth rank"]
    gradients: list[Tensor] | None
    """Of the states and of each parameter; None where nothing learns."""


def _add_chunk(
    sums: _Sums, work: ChunkedLoss, chunk: slice, depth_weights: Tensor, states: Tensor, leaves: list[Tensor]
) -> None:
    alignment, labels = work.alignment, work.labels[chunk]
    depth, dim = states.shape[1:]
    # one flat row per (position, depth), so that a chunk is one gather and its gradient one scatter
    rows = alignment.rows[chunk] * depth + torch.arange(depth, device=states.device)
    unscored = ~(alignment.scored[chunk] & (labels >= 0)[:, None])
    labels = labels.clamp(min=0)
    learns = sums.gradients is not None
    state = states.view(-1, dim)[rows].requires_grad_(learns)
    with torch.set_grad_enabled(learns):
        logits = work.project(state, *leaves)
    teacher = None
    if needs_teacher(work.loss_weights):
        final = work.final[alignment.teachers[chunk]]
        teacher = Teacher.from_logits(work.teacher_logits(final), work.teacher_top_k)

    log_q = log_softmax(logits.detach())
    ranks = label_ranks(log_q, labels).masked_fill_(unscored, torch.inf)
    sums.hits += (ranks[..., None] == torch.arange(NUM_RANKS, device=ranks.device)).sum(0)
    values, gradient = loss_and_gradient(work.loss_weights, log_q, teacher, labels)
    sums.loss += values.masked_fill_(unscored, 0.0).sum(0)
    if sums.gradients is not None:
        gradient *= depth_weights[:, None].to(gradient.dtype)
        # no product with zero: an unscored pair's NaN must not spread
        gradient.view(-1, gradient.shape[-1]).index_fill_(0, unscored.flatten().nonzero().squeeze(-1), 0.0)
        by_state, *by_leaf = torch.autograd.grad(logits, [state, *leaves], gradient.to(logits.dtype))
        sums.gradients[0].view(-1, dim).index_add_(0, rows.flatten(), by_state.reshape(-1, dim))
        for total, part in zip(sums.gradients[1:], by_leaf, strict=True):
            total += part
