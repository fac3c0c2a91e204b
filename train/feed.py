"""What each optimiser step of this rank reads: a plan per epoch, or per window of a stream, and a position in it that
can be saved."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from accelerate.utils import gather_object

from headstart.data.packing import RowStore, TokenBatch, batches, collate
from headstart.data.rendering import Row
from headstart.data.streaming import StreamedRows, Window
from headstart.errors import DataError, HeadstartError
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


class StreamFeed:
    """The same for a stream: a plan per window of rows. Ranks have as many batches in every window, empty ones where
    one has fewer rows; the next window is read and rendered while this one is trained on."""

    def __init__(
        self,
        rows: StreamedRows,
        recipe: Recipe,
        *,
        rank: int = 0,
        world_size: int = 1,
        gather: Callable[[list[Any]], list[Any]] = gather_object,
    ):
        """gather: joins the lists of all ranks, for whom it is called alike."""
        self.rows, self.recipe, self.rank, self.gather = rows, recipe, rank, gather
        self._stream = rows.stream(rank, world_size)
        self._reader = ThreadPoolExecutor(1, "reading ahead")
        self._ahead: dict[tuple[int, int], Future[Window]] = {}
        self._at = (-1, 0)
        self._window, self._plan, self._over = Window(RowStore(), last=True), [], False
        self._counts: Counter[str] = Counter()
        self._batches = 0
        self._whole = False  # those two are of a pass that was read from its beginning

    def next_step(self, progress: Progress) -> list[TokenBatch]:
        """The micro-batches of the step after `progress`, which is moved on; fewer where a window ends."""
        self._turn_to(progress)
        while progress.position >= len(self._plan):
            if self._over:
                self._end_epoch(progress.epoch)
                progress.epoch, progress.window = progress.epoch + 1, 0
            else:
                progress.window += 1
            progress.position = 0
            self._turn_to(progress)
        chosen = self._plan[progress.position : progress.position + self.recipe.train.accumulation]
        progress.position += len(chosen)
        return [collate(self._window.rows, batch) for batch in chosen]

    def num_steps(self, epochs: int) -> int:
        raise AssertionError("a recipe with data.streaming has train.max_steps")

    def first_rows(self, rank: int) -> list[str]:
        """Ids of the rows that a rank reads in the first step of all; asked by every rank alike."""
        self._turn_to(Progress())
        first = self._plan[: self.recipe.train.accumulation]
        own = [self._window.rows[row].row_id for batch in first for sequence in batch for row in sequence]
        return self.gather([own])[rank]

    def _turn_to(self, progress: Progress) -> None:
        """Makes the window of `progress` the present one, and settles with the other ranks how many batches it has."""
        at = (progress.epoch, progress.window)
        if at == self._at:
            return
        if at not in self._ahead:  # the first window, or one that a run goes on with
            self._counts, self._batches, self._whole = Counter(), 0, at[1] == 0
        fault = None
        try:
            self._window = self._read(at).result()
        except HeadstartError as error:  # the others are told, or they would wait for this rank
            self._window, fault = Window(RowStore(), last=True), str(error)
        self._plan = plan_batches(self._window.rows, self.recipe, epoch=progress.epoch)
        everyone = self.gather([(len(self._plan), self._window.last, self._window.counts, fault)])
        for rank, (_, _, _, found) in enumerate(everyone):
            if found is not None:
                raise DataError(f"rank {rank} can't go on reading: {found}" if len(everyone) > 1 else found)
        longest = max(count for count, _, _, _ in everyone)
        self._plan += [[] for _ in range(longest - len(self._plan))]
        self._over = all(last for _, last, _, _ in everyone)
        for _, _, counts, _ in everyone:
            self._counts += counts
        self._batches += longest
        self._at = at
        following = (progress.epoch + 1, 0) if self._over else (progress.epoch, progress.window + 1)
        self._ahead = {following: self._read(following)}

    def _read(self, at: tuple[int, int]) -> Future[Window]:
        return self._ahead.pop(at, None) or self._reader.submit(self._stream.window, *at)

    def _end_epoch(self, epoch: int) -> None:
        """Says what became of the rows; refuses to read on and on where nothing is learnt from any."""
        rows, whole, self._whole = self._counts.pop("rows", 0), self._whole, True
        skipped = ", ".join(f"{reason} ({count})" for reason, count in self._counts.most_common()) or "none"
        if whole and not self._batches:
            raise DataError(f"No row of the stream can be learnt from; of {rows}: {skipped}.")
        if whole and not self.rank:
            kept = rows - sum(self._counts.values())
            print(f"stream, pass {epoch}: {rows} rows read, {kept} kept; skipped: {skipped}", file=sys.stderr)
        self._counts, self._batches = Counter(), 0


def open_feed(rows: Sequence[Row], recipe: Recipe, *, rank: int = 0, world_size: int = 1) -> Feed | StreamFeed:
    """What feeds one rank: from rows in memory, or from the stream that they are the first of."""
    if isinstance(rows, StreamedRows):
        return StreamFeed(rows, recipe, rank=rank, world_size=world_size)
    return Feed(rows, recipe, rank=rank, world_size=world_size)
