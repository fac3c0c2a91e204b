"""Sources to token rows that the target can take, and what became of every row."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, field

from transformers import PreTrainedTokenizerBase

from headstart.data.messages import Conversation, SkipRow
from headstart.data.packing import RowStore
from headstart.data.progress import Progress
from headstart.data.rendering import ChatRenderer, Row, decode
from headstart.data.reports import SkipReport
from headstart.data.sources import read_all
from headstart.errors import DataError
from headstart.recipe import Recipe, Source


def prompt_key(conversation: Conversation) -> str:
    """A hash of what a row asks: its turns before the first answer. Plain text and token rows are hashed whole.

    Two answers to one prompt have one key, so they can't end up on both sides of the split.
    """
    asked: list[object] = [conversation.text, conversation.input_ids]
    for message in conversation.messages or ():
        if message["role"] == "assistant":
            break
        asked.append([message["role"], message["content"]])
    return hashlib.sha256(json.dumps(asked).encode()).hexdigest()


@dataclass
class Part:
    """The usable rows of some sources, each with its prompt key, and the reports by file."""

    rows: RowStore = field(default_factory=RowStore)
    keys: list[str] = field(default_factory=list)
    reports: dict[str, SkipReport] = field(default_factory=dict)

    def check(self) -> None:
        """Raises DataError where nothing can be learnt from a file."""
        for report in self.reports.values():
            _check(report)


class Reader:
    """Reads sources, renders their rows and checks that the target can take them."""

    def __init__(
        self, recipe: Recipe, tokenizer: PreTrainedTokenizerBase, vocab_size: int | None, positions: int | None
    ):
        self.renderer = ChatRenderer(tokenizer, recipe.data.chat)
        self.max_length = recipe.data.max_length
        self.vocab_size, self.max_positions = vocab_size, positions
        self.tokenizer = tokenizer

    def read(self, sources: Iterable[Source], label: str, kept_away: Container[str] = ()) -> Part:
        """All usable rows but those whose prompt is `kept_away`."""
        part = Part()
        with Progress(f"rendering {label}") as progress:

            def conversations() -> Iterator[Conversation]:
                for conversation in read_all(sources, part.reports, announce=progress.expect):
                    progress.add()
                    yield conversation

            self.render(conversations(), part, kept_away)
        part.check()
        return part

    def render(self, conversations: Iterable[Conversation], part: Part, kept_away: Container[str] = ()) -> None:
        """Adds the rows of these conversations to the part, whose reports are those that they were read with."""

        def wanted() -> Iterator[Conversation]:
            for conversation in conversations:
                if prompt_key(conversation) in kept_away:
                    part.reports[conversation.file].skip(conversation.origin, SkipRow("its prompt is held out"))
                else:
                    yield conversation

        for rendered in self.renderer.rows(wanted(), self.max_length):
            row, report = rendered.row, part.reports[rendered.conversation.file]
            if row is None:
                assert rendered.why is not None
                report.skip(rendered.conversation.origin, rendered.why)
                continue
            self._check_ids(row)
            report.count(row.supervised, row.truncated, rendered.mismatch, row.origin)
            part.rows.append(row)
            part.keys.append(prompt_key(rendered.conversation))

    def _check_ids(self, row: Row) -> None:
        largest = max(row.input_ids)
        if self.vocab_size is not None and largest >= self.vocab_size:
            raise DataError(
                f"{row.origin} holds token id {largest} ({decode(self.tokenizer, [largest])!r}), and the target has "
                f"{self.vocab_size} rows of output weights, ids 0 to {self.vocab_size - 1}; take the tokenizer that "
                "belongs to the target, or leave that row out."
            )
        if self.max_positions is not None and len(row.input_ids) > self.max_positions:
            raise DataError(
                f"{row.origin} has {len(row.input_ids)} tokens, and the target takes {self.max_positions}; "
                f"set data.max_length to {self.max_positions} or less."
            )


def _check(report: SkipReport) -> None:
    """Refuses a file that nothing can be learnt from."""
    if not report.kept:
        supervised = f" 0 of {report.tokens} tokens supervised." if report.tokens else ""
        raise DataError(
            f"No row of {report.name} can be learnt from.{supervised} Its {report.rows} rows were skipped: "
            f"{report.reasons()}. Mend the first of them, or see which formats `data.train` takes."
        )
