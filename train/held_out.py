"""The look at held-out conversations: losses and accuracies per head, without a trace in the training."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from headstart.data.packing import TokenBatch, collate
from headstart.data.rendering import Row
from headstart.heads.base import NUM_RANKS
from headstart.recipe import Recipe
from headstart.train.feed import plan_batches
from headstart.train.random_state import unmoved_random_state
from headstart.train.stepping import refuse_broken_loss
from headstart.train.train_module import Totals
from headstart.train.wrapping import Wrapped


@torch.no_grad()
def evaluate(wrapped: Wrapped, rows: Sequence[Row], recipe: Recipe, *, step: int) -> Totals | None:
    """Totals over all held-out rows and ranks; None where there are none. Called by every rank.

    The module is in evaluation mode meanwhile and in training mode afterwards; no random number is used up. Raises
    TrainingError if a loss is not finite. step: for that message.
    """
    if not len(rows):
        return None
    totals, module = None, wrapped.module
    module.eval()
    try:
        with unmoved_random_state():
            for batch in held_out_batches(wrapped, rows, recipe):
                part = Totals.of(module(batch), batch)
                totals = part if totals is None else totals + part
    finally:
        module.train()
    assert totals is not None
    totals = totals.over_ranks(wrapped.accelerator, wrapped.group)
    refuse_broken_loss(totals, step)
    return totals


def held_out_batches(wrapped: Wrapped, rows: Sequence[Row], recipe: Recipe) -> Iterator[TokenBatch]:
    """This rank's part of the held-out rows, on its device."""
    plan = plan_batches(rows, recipe, rank=wrapped.rank, world_size=wrapped.world_size)
    return (collate(rows, group).to(wrapped.accelerator.device) for group in plan)


def report(totals: Totals) -> dict[str, Any]:
    """The numbers of an evaluation, as `metrics.jsonl` has them: `loss` (what training minimises, per label that the
    first head scored), `labels` of the first head, those outside of the draft vocabulary too, and per head the plain
    loss and the accuracies top_1 to top_10, null where nothing was scored."""
    accuracies = {f"top_{top}": totals.accuracies(top) for top in range(1, NUM_RANKS + 1)}
    return {
        "loss": totals.mean_loss(),
        "labels": int(totals.token_count),
        "head_loss": totals.losses(),
        **accuracies,
    }


def shares(values: Sequence[float | None]) -> str:
    """Accuracies as they are printed: `.355 .240 n/a`."""
    return " ".join("n/a" if value is None else f"{value:.3f}".removeprefix("0") for value in values)
