"""The trained module, and one optimiser step: micro-batches of all ranks in, sums and counts out, every label weighed
alike."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from headstart.data.packing import TokenBatch
from headstart.errors import TrainingError
from headstart.heads.base import Head, HeadOutput
from headstart.target import Target
from headstart.train.features import FeatureSource, OnlineFeatures

if TYPE_CHECKING:
    from headstart.train.wrapping import Wrapped


class TrainModule(nn.Module):
    """Target and head as one module, the thing that is wrapped for several processes; all training is its `forward`.

    The target is frozen: no gradient, always in evaluation mode, in no optimiser and in no checkpoint, and computes in
    its own dtype. compute: bfloat16 for autocast around the head, whose weights stay in fp32. features: where the
    target's states come from; None: it runs in every forward.
    """

    def __init__(self, target: Target, head: Head, compute: torch.dtype, features: FeatureSource | None = None):
        super().__init__()
        target.model.requires_grad_(False).eval()
        # a target split by tensor parallelism is none of the wrapper's business, and DDP refuses its kind of tensors
        self.target_model = target.model if target.group == 1 else None
        self.head = head
        self._target, self.compute = target, compute
        self.features = features or OnlineFeatures(target, head.wants)

    def train(self, mode: bool = True) -> TrainModule:
        super().train(mode)
        self._target.model.eval()
        return self

    def decoder_layers(self) -> Sequence[nn.Module]:
        """The target's layers as they run; with offline features stand-ins without weights."""
        return list(self._target.running_layers)

    def forward(self, batch: TokenBatch | Callable[[], None]) -> Any:
        """The HeadOutput of one batch. Or calls a function: sharded weights can be used within a forward only."""
        if not isinstance(batch, TokenBatch):
            return batch()
        target, kind = self._target, batch.input_ids.device.type
        with torch.no_grad(), torch.autocast(kind, enabled=False):
            features = self.features(batch, keep=self.training)
        with torch.autocast(kind, torch.bfloat16) if self.compute == torch.bfloat16 else nullcontext():
            return self.head(features, batch, target.embedding, target.output)


@dataclass
class Totals:
    """The sums of several forwards, over micro-batches and, after `over_ranks`, over ranks. Means are taken last.

    tokens: tokens read, padding apart. Fields otherwise as in HeadOutput, on CPU in float64 once reduced.
    """

    loss_sum: Tensor
    token_count: Tensor
    tokens: Tensor
    loss: Tensor
    scored: Tensor
    hits: Tensor

    @classmethod
    def of(cls, output: HeadOutput, batch: TokenBatch) -> Totals:
        tokens = (batch.document_ids >= 0).sum()
        sums = (output.loss_sum.detach(), output.token_count, tokens, output.loss, output.scored, output.hits)
        return cls(*(value.double() for value in sums))

    def __add__(self, other: Totals) -> Totals:
        return Totals(*(mine + theirs for mine, theirs in zip(self._values(), other._values(), strict=True)))

    def over_ranks(self, accelerator: Accelerator, group: int = 1) -> Totals:
        """The sums of all ranks, brought to the CPU in one transfer. group: so many processes counted the same."""
        values = self._values()
        flat = accelerator.reduce(torch.cat([value.flatten() for value in values]), reduction="sum") / group
        parts = flat.cpu().split([value.numel() for value in values])
        return Totals(*(part.reshape(value.shape) for part, value in zip(parts, values, strict=True)))

    def mean_loss(self) -> float:
        """The loss per scored label of the first depth; 0 where nothing was scored. Labels outside of the draft
        vocabulary are not scored, so that held-out text can be compared with what was trained on."""
        return float(self.loss_sum / self.scored[0].clamp(min=1))

    def losses(self) -> list[float | None]:
        """The unweighted loss per scored label, per depth; None where none was scored."""
        return _shares(self.loss, self.scored)

    def accuracies(self, top: int) -> list[float | None]:
        """Per depth, the share of labels among the first `top` choices; None where none was scored."""
        return _shares(self.hits[:, :top].sum(-1), self.scored)

    def _values(self) -> list[Tensor]:
        return [self.loss_sum, self.token_count, self.tokens, self.loss, self.scored, self.hits]


def _shares(sums: Tensor, counts: Tensor) -> list[float | None]:
    return [part / count if count else None for part, count in zip(sums.tolist(), counts.tolist(), strict=True)]


def optimiser_step(
    wrapped: Wrapped, batches: list[TokenBatch], *, rate: float, clip: float | None, step: int
) -> tuple[Totals, float]:
    """One update from this rank's micro-batches; every rank brings equally many. Returns the totals of all ranks and
    the norm of the gradient before clipping.

    The gradient is that of (sum of losses) / (number of labels), both over all micro-batches and ranks; the number is
    known only after the forwards, so sums are differentiated and divided at the end. Without any label nothing changes.
    Raises TrainingError, before any weight is touched, if a loss or the gradient is not finite. step: number of this
    step, for that message.
    """
    accelerator = wrapped.accelerator
    totals = wrapped.accumulate([batch.to(accelerator.device) for batch in batches]).over_ranks(
        accelerator, wrapped.group
    )
    refuse_broken_loss(totals, step)
    labels = float(totals.token_count)
    if labels == 0:
        return totals, 0.0
    # the wrapper has averaged over ranks
    norm = wrapped.update(wrapped.world_size / labels, rate=rate, clip=clip)
    refuse_broken_gradient(wrapped, norm, step)
    return totals, norm


def refuse_broken_loss(totals: Totals, step: int) -> None:
    """Raises TrainingError naming the step and every head, from 1, whose loss is not finite."""
    broken = [depth for depth, loss in enumerate(totals.loss.tolist(), 1) if not math.isfinite(loss)]
    if broken or not math.isfinite(totals.loss_sum):
        which = "head " + ", ".join(map(str, broken)) if broken else "the heads together"
        raise TrainingError(f"step {step}: the loss of {which} is not finite; {_ADVICE}")


def refuse_broken_gradient(wrapped: Wrapped, norm: float, step: int) -> None:
    if math.isfinite(norm):
        return
    names = ", ".join(wrapped.broken_gradients()[:4]) or "the head"
    raise TrainingError(f"step {step}: the gradient of {names} is not finite (norm {norm}); {_ADVICE}")


_ADVICE = (
    "the run stopped, and nothing was saved over its last good checkpoint; "
    "lower train.lr or train.clip and start again under another --name"
)
