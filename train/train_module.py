"""The trained module, target and head in one, and the sums and counts that its forwards give."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from headstart.data.packing import TokenBatch
from headstart.heads.base import Head, HeadOutput
from headstart.stopping import asked_to_stop, weight_of
from headstart.target import Target
from headstart.train.features import FeatureSource, OnlineFeatures

if TYPE_CHECKING:
    from headstart.train.joint import Joint


class TrainModule(nn.Module):
    """Target and head as one module, the thing that is wrapped for several processes; all training is its `forward`.

    The target is frozen: no gradient, always in evaluation mode, in no optimiser and in no checkpoint, and computes in
    its own dtype. compute: bfloat16 for autocast around the head, whose weights stay in fp32. features: where the
    target's states come from; None: it runs in every forward. joint: what trains adapters on the target in a second
    stage.
    """

    def __init__(
        self,
        target: Target,
        head: Head,
        compute: torch.dtype,
        features: FeatureSource | None = None,
        joint: Joint | None = None,
    ):
        super().__init__()
        if joint is None:  # else all but the adapters is frozen already
            target.model.requires_grad_(False)
        target.model.eval()
        self.joint = joint
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
            if self.joint is not None and self.joint.active:
                return self.joint.forward(self.head, batch, features)
            return self.head(features, batch, target.embedding, target.output)


@dataclass
class Totals:
    """The sums of several forwards, over micro-batches and, after `over_ranks`, over ranks. Means are taken last.

    tokens: tokens read, padding apart. stop: after `over_ranks`, the sum of what `stopping.weight_of` says of every
    rank. Fields otherwise as in HeadOutput, on CPU in float64 once reduced.
    """

    loss_sum: Tensor
    token_count: Tensor
    tokens: Tensor
    loss: Tensor
    scored: Tensor
    hits: Tensor
    stop: float = field(default=0.0, kw_only=True)

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
        asked = values[0].new_tensor([weight_of(asked_to_stop())])
        summed = accelerator.reduce(torch.cat([*(value.flatten() for value in values), asked]), reduction="sum")
        assert isinstance(summed, Tensor)
        *parts, stop = summed.cpu().split([*(value.numel() for value in values), 1])
        sums = [(part / group).reshape(value.shape) for part, value in zip(parts, values, strict=True)]
        return Totals(*sums, stop=float(stop))

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
