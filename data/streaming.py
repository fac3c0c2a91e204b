"""Training rows read while training, for what no memory and no disk can hold.

    prepared = prepare(recipe, tokenizer)               # with data.streaming: the first rows, and the held-out ones
    stream = prepared.train.stream(rank=0, world_size=8)
    window = stream.window(epoch=0, number=3)           # the rows that are shuffled and packed together

An epoch deals every row of every source to one rank, in turn; the sources take turns too. A rank renders its own rows
only, `data.buffer` of them at a time. What a window holds follows from seed, epoch, rank and number of ranks alone, so
a resumed run finds it again by reading past what came before, which it need not render.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field

from headstart.data.messages import Conversation
from headstart.data.packing import RowStore
from headstart.data.reading import Part, Reader, prompt_key
from headstart.data.reports import SkipReport
from headstart.data.sources import Share, read
from headstart.recipe import Recipe


@dataclass(frozen=True)
class ShareOfPrompts:
    """Holds the keys of about this fraction of all prompts, the same in every run, without a list of them."""

    fraction: float

    def __contains__(self, key: object) -> bool:
        return int(str(key)[:8], 16) < self.fraction * 2**32


@dataclass
class Window:
    """What one rank reads between two looks at what the others have."""

    rows: RowStore
    last: bool
    """The rank has no more rows in this epoch."""
    counts: Counter[str] = field(default_factory=Counter)
    """`rows` read, and of them those skipped by reason."""


class Stream:
    """The windows of one rank. They are read in order; any other window costs reading up to it."""

    def __init__(self, recipe: Recipe, reader: Reader, kept_away: Container[str], rank: int = 0, world_size: int = 1):
        self.recipe, self.reader, self.kept_away = recipe, reader, kept_away
        self.rank, self.world_size = rank, world_size
        self._reports: dict[str, SkipReport] = {}
        self._conversations: Iterator[Conversation] = iter(())
        self._next = (-1, 0)

    def window(self, epoch: int, number: int) -> Window:
        """The rows of one window, which may be none. Raises DataError where a source can't be read."""
        size = self.recipe.data.buffer
        if self._next != (epoch, number):
            self._conversations = _one_pass(self.recipe, self._reports, epoch, self.rank, self.world_size)
            for _ in itertools.islice(self._conversations, number * size):
                pass
        self._reports.clear()
        conversations = list(itertools.islice(self._conversations, size))
        part = Part(reports=self._reports)
        self.reader.render(conversations, part, self.kept_away)
        self._next = (epoch, number + 1)
        counts: Counter[str] = Counter()
        for report in part.reports.values():
            counts["rows"] += report.rows
            counts.update({reason: len(places) for reason, places in report.skipped.items()})
        return Window(part.rows, len(conversations) < size, counts)


class StreamedRows(RowStore):
    """The first rows of a stream, rendered by every rank alike. They stand for all where all would be looked at: for
    the draft vocabulary, the summary, and whether the target wrote them."""

    def __init__(self, recipe: Recipe, reader: Reader, kept_away: Container[str], held_out: Part | None = None):
        """held_out: takes the first rows that are kept away; None: they are held out elsewhere."""
        self._recipe, self._reader, self._kept_away = recipe, reader, kept_away
        self.reports: dict[str, SkipReport] = {}
        part = Part(reports=self.reports)
        conversations = list(itertools.islice(_one_pass(recipe, self.reports), recipe.data.buffer))
        reader.render(conversations, part, kept_away)
        if not len(part.rows):
            part.check()
        super().__init__(part.rows)
        if held_out is not None:
            held_out.reports = {name: SkipReport(name) for name in self.reports}
            reader.render([one for one in conversations if prompt_key(one) in kept_away], held_out)

    def stream(self, rank: int, world_size: int) -> Stream:
        """All rows of the stream, as this rank reads them."""
        return Stream(self._recipe, self._reader, self._kept_away, rank, world_size)


def _one_pass(
    recipe: Recipe, reports: dict[str, SkipReport], epoch: int = 0, rank: int = 0, world_size: int = 1
) -> Iterator[Conversation]:
    """What one rank reads of the training sources in one pass."""
    share = Share(rank, world_size, f"headstart {recipe.seed} {epoch}")
    return _in_turn([read(source, reports, share=share) for source in recipe.data.train])


def _in_turn(streams: Sequence[Iterator[Conversation]]) -> Iterator[Conversation]:
    """One of each, again and again; those that end are left out from then on."""
    left = list(streams)
    while left:
        for stream in list(left):
            try:
                yield next(stream)
            except StopIteration:
                left.remove(stream)
