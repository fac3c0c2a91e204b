"""One optimiser step: micro-batches of all ranks in, sums and counts out, every label weighed alike."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from headstart.data.packing import TokenBatch
from headstart.errors import TrainingError
from headstart.heads.base import Head, HeadOutput
from headstart.target import Target
from headstart.train.features import FeatureSource, OnlineFeatures


class TrainModule(nn.Module):
    """Target and head as one module, the thing that is wrapped for several processes; all training is its `forward`.

    The target is frozen: no gradient, always in evaluation mode, in no optimiser and in no checkpoint, and computes in
    its own dtype. compute: bfloat16 for autocast around the head, whose weights stay in fp32. features: where the
    target's states come from; None: it runs in every forward.
    """

    def __init__(self, target: Target, head: Head, compute: torch.dtype, features: FeatureSource | None = None):
        super().__init__()
        self.target_model = target.model.requires_grad_(False).eval()
        self.head = head
        self._target, self.compute = target, compute
        self.features = features or OnlineFeatures(target, head.wants)

    def train(self, mode: bool = True) -> TrainModule:
        super().train(mode)
        self.target_model.eval()
        return self

    def forward(self, batch: TokenBatch) -> HeadOutput:
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

    def over_ranks(self, accelerator: Accelerator) -> Totals:
        """The sums of all ranks, brought to the CPU in one transfer."""
        values = self._values()
        flat = accelerator.reduce(torch.cat([value.flatten() for value in values]), reduction="sum")
        assert isinstance(flat, Tensor)
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
    module: nn.Module,
    optimizer: Any,
    batches: list[TokenBatch],
    *,
    accelerator: Accelerator,
    rate: float,
    clip: float | None,
    step: int,
) -> tuple[Totals, float]:
    """One update from this rank's micro-batches; every rank brings equally many. Returns the totals of all ranks and
    the norm of the gradient before clipping.

    The gradient is that of (sum of losses) / (number of labels), both over all micro-batches and ranks; the number is
    known only after the forwards, so sums are differentiated and divided at the end. Without any label nothing changes.
    Raises TrainingError, before any weight is touched, if a loss or the gradient is not finite. step: number of this
    step, for that message.
    """
    optimizer.zero_grad(set_to_none=True)
    totals = None
    for index, batch in enumerate(batches):
        batch = batch.to(accelerator.device)
        last = index == len(batches) - 1
        # gradients of all but the last micro-batch stay at home and travel with the last one's
        with nullcontext() if last else accelerator.no_sync(module):
            output = module(batch)
            accelerator.backward(output.loss_sum)
        totals = Totals.of(output, batch) if totals is None else totals + Totals.of(output, batch)
    assert totals is not None
    totals = totals.over_ranks(accelerator)
    refuse_broken_loss(totals, step)
    labels = float(totals.token_count)
    if labels == 0:
        return totals, 0.0
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(accelerator.num_processes / labels)  # the wrapper has averaged over ranks
    norm_tensor = accelerator.clip_grad_norm_(parameters, math.inf if clip is None else clip)
    assert norm_tensor is not None
    norm = float(norm_tensor)
    refuse_broken_gradient(module, norm, step)
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()
    return totals, norm


def refuse_broken_loss(totals: Totals, step: int) -> None:
    """Raises TrainingError naming the step and every head, from 1, whose loss is not finite."""
    broken = [depth for depth, loss in enumerate(totals.loss.tolist(), 1) if not math.isfinite(loss)]
    if broken or not math.isfinite(totals.loss_sum):
        which = "head " + ", ".join(map(str, broken)) if broken else "the heads together"
        raise TrainingError(f"step {step}: the loss of {which} is not finite; {_ADVICE}")


def refuse_broken_gradient(module: nn.Module, norm: float, step: int) -> None:
    if math.isfinite(norm):
        return
    broken = [
        name
        for name, parameter in module.named_parameters()
        if parameter.grad is not None and not torch.isfinite(parameter.grad).all()
    ]
    names = ", ".join(broken[:4]) or "the head"
    raise TrainingError(f"step {step}: the gradient of {names} is not finite (norm {norm}); {_ADVICE}")


_ADVICE = (
    "the run stopped, and nothing was saved over its last good checkpoint; "
    "lower train.lr or train.clip and start again under another --name"
)
