"""What each optimiser step of this rank reads: a plan per epoch, and a position in it that can be saved."""

from __future__ import annotations

from collections.abc import Sequence

from headstart.data.packing import TokenBatch, batches, collate
from headstart.data.rendering import Row
from headstart.recipe import Recipe
from headstart.train.checkpoint import Progress


def plan_batches(
    rows: Sequence[Row], recipe: Recipe, *, epoch: int = 0, rank: int = 0, world_size: int = 1
) -> list[list[list[int]]]:
    """The batches that a recipe makes of these rows: batch -> sequence -> row number; see `data.packing.batches`."""
    return batches(
        rows,
        batch_size=recipe.train.batch_size,
        max_length=recipe.data.max_length,
        packing=recipe.data.packing,
        seed=recipe.seed,
        epoch=epoch,
        rank=rank,
        world_size=world_size,
    )


class Feed:
    """The micro-batches of one rank, in an order that follows from the seed and the epoch alone."""

    def __init__(self, rows: Sequence[Row], recipe: Recipe, *, rank: int = 0, world_size: int = 1):
        self.rows, self.recipe, self.rank, self.world_size = rows, recipe, rank, world_size
        self._epoch, self._plan = -1, []

    def plan(self, epoch: int, rank: int | None = None) -> list[list[list[int]]]:
        """Batch -> sequence -> row number, for one rank (None: this one); equally many batches on every rank."""
        rank = self.rank if rank is None else rank
        return plan_batches(self.rows, self.recipe, epoch=epoch, rank=rank, world_size=self.world_size)

    def next_step(self, progress: Progress) -> list[TokenBatch]:
        """The micro-batches of the step after `progress`, which is moved on; fewer where an epoch ends."""
        if progress.epoch != self._epoch:
            self._epoch, self._plan = progress.epoch, self.plan(progress.epoch)
        if progress.position >= len(self._plan):
            progress.epoch, progress.position = progress.epoch + 1, 0
            return self.next_step(progress)
        chosen = self._plan[progress.position : progress.position + self.recipe.train.accumulation]
        progress.position += len(chosen)
        return [collate(self.rows, batch) for batch in chosen]

    def num_steps(self, epochs: int) -> int:
        """Optimiser steps in so many epochs; the last step of an epoch may be short, none reaches into the next."""
        accumulation = self.recipe.train.accumulation
        return sum(-(-len(self.plan(epoch)) // accumulation) for epoch in range(epochs))

    def first_rows(self, rank: int) -> list[str]:
        """Ids of the rows that a rank reads in the first step of all."""
        first = self.plan(0, rank)[: self.recipe.train.accumulation]
        return [self.rows[row].row_id for batch in first for sequence in batch for row in sequence]
