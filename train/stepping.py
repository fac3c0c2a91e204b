"""One optimiser step: micro-batches of all ranks in, sums and counts out, every label weighed alike."""

from __future__ import annotations

import math

from headstart.data.packing import TokenBatch
from headstart.errors import TrainingError
from headstart.train.train_module import Totals
from headstart.train.wrapping import Wrapped


def optimiser_step(
    wrapped: Wrapped,
    batches: list[TokenBatch],
    *,
    rate: float,
    clip: float | None,
    step: int,
    adapter_rate: float = 0.0,
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
    scale = wrapped.world_size / labels
    norm = wrapped.update(scale, rate=rate, clip=clip, adapter_rate=adapter_rate)
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
