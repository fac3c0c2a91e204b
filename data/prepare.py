"""Recipe to token rows: read, render, check, hold out, and say what became of every row.

    prepared = prepare(recipe, tokenizer, vocab_size=target.vocab_size)
    prepared.train, prepared.held_out        # RowStore: sequences of Row
    print(prepared.summary())

Nothing is cached: rows are tokenised each time, so a changed template, length or vocabulary can't meet stale tokens.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections import Counter
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, field

from rich.console import Console
from rich.text import Text
from transformers import AutoConfig, PreTrainedTokenizerBase

from headstart.data.messages import Conversation, SkipRow
from headstart.data.packing import RowStore
from headstart.data.progress import Progress
from headstart.data.rendering import ChatRenderer, Row, decode, label_runs
from headstart.data.reports import SkipReport
from headstart.data.sources import read_all, with_limit
from headstart.errors import DataError
from headstart.recipe import Recipe, Source
from headstart.target import load_tokenizer


@dataclass
class Prepared:
    """The rows of a recipe and the reports of the files that they came from."""

    train: RowStore
    held_out: RowStore
    reports: dict[str, SkipReport]
    """By file or data set, of the training sources."""
    held_out_reports: dict[str, SkipReport] = field(default_factory=dict)
    """The same for held-out sources of their own; empty where a fraction was held out."""

    def summary(self) -> str:
        """Rows kept and skipped by reason and the supervised share of every file, and the sizes of both parts."""
        lines = [report.summary() for report in [*self.reports.values(), *self.held_out_reports.values()]]
        tokens = sum(self.train.lengths())
        held_out_tokens = sum(self.held_out.lengths())
        lines.append(
            f"training: {len(self.train)} rows, {tokens} tokens; "
            f"held out: {len(self.held_out)} rows, {held_out_tokens} tokens"
        )
        if not len(self.held_out):
            lines.append("warning: nothing is held out, because all rows have one prompt; name held-out sources")
        return "\n".join(lines)


def prepare(
    recipe: Recipe,
    tokenizer: PreTrainedTokenizerBase,
    *,
    vocab_size: int | None = None,
    max_positions: int | None = None,
) -> Prepared:
    """The training and held-out rows of a recipe; they share no prompt.

    vocab_size and max_positions: the target's, read from its weights and configuration; a row that exceeds one is
    refused by name. Raises DataError where a file gives no row that can be learnt from.
    """
    reader = _Reader(recipe, tokenizer, vocab_size, max_positions)
    if recipe.data.held_out.sources:
        held_out = reader.read(recipe.data.held_out.sources, "held-out rows")
        train = reader.read(recipe.data.train, "training rows", kept_away=set(held_out.keys))
        return Prepared(train.rows, held_out.rows, train.reports, held_out.reports)
    part = reader.read(recipe.data.train, "training rows")
    chosen = choose_held_out(part.keys, recipe.data.held_out.fraction or 0.0)
    rest = [number for number in range(len(part.rows)) if number not in chosen]
    return Prepared(part.rows.take(rest), part.rows.take(sorted(chosen)), part.reports)


def choose_held_out(keys: list[str], fraction: float) -> set[int]:
    """Which rows to hold out: whole groups of rows with one key, in order of the key, until the fraction is reached.

    At least one group, never all; none where there is one group only. The choice depends on nothing but the keys.
    """
    counts = Counter(keys)
    chosen: set[str] = set()
    held = 0
    for key in sorted(counts)[:-1]:
        if held >= max(fraction * len(keys), 1):
            break
        chosen.add(key)
        held += counts[key]
    return {number for number, key in enumerate(keys) if key in chosen}


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
class _Part:
    """The usable rows of some sources, each with its prompt key, and the reports by file."""

    rows: RowStore = field(default_factory=RowStore)
    keys: list[str] = field(default_factory=list)
    reports: dict[str, SkipReport] = field(default_factory=dict)


class _Reader:
    """Reads sources, renders their rows and checks that the target can take them."""

    def __init__(
        self, recipe: Recipe, tokenizer: PreTrainedTokenizerBase, vocab_size: int | None, positions: int | None
    ):
        self.renderer = ChatRenderer(tokenizer, recipe.data.chat)
        self.max_length = recipe.data.max_length
        self.vocab_size, self.max_positions = vocab_size, positions
        self.tokenizer = tokenizer

    def read(self, sources: Iterable[Source], label: str, kept_away: Container[str] = ()) -> _Part:
        """All usable rows but those whose prompt is `kept_away`."""
        part = _Part()
        with Progress(f"rendering {label}") as progress:
            conversations = self._conversations(sources, part, kept_away, progress)
            for rendered in self.renderer.rows(conversations, self.max_length):
                row, report = rendered.row, part.reports[rendered.conversation.file]
                if row is None:
                    assert rendered.why is not None
                    report.skip(rendered.conversation.origin, rendered.why)
                    continue
                self._check_ids(row)
                report.count(row.supervised, row.truncated, rendered.mismatch, row.origin)
                part.rows.append(row)
                part.keys.append(prompt_key(rendered.conversation))
        for report in part.reports.values():
            _check(report)
        return part

    def _conversations(
        self, sources: Iterable[Source], part: _Part, kept_away: Container[str], progress: Progress
    ) -> Iterator[Conversation]:
        for conversation in read_all(sources, part.reports, announce=progress.expect):
            progress.add()
            if prompt_key(conversation) in kept_away:
                part.reports[conversation.file].skip(conversation.origin, SkipRow("its prompt is held out"))
            else:
                yield conversation

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


def show_row(row: Row, tokenizer: PreTrainedTokenizerBase) -> Text:
    """The row's text with its labels in green between [[ and ]], which show without colours too."""
    shown = Text(
        f"{row.row_id} ({row.origin}), {len(row.input_ids)} tokens, {sum(row.supervised)} supervised\n", "bold"
    )
    position = 0
    for start, end in label_runs(row):
        shown.append(decode(tokenizer, row.input_ids[position:start]), "not bold dim")
        shown.append(f"[[{decode(tokenizer, row.input_ids[start:end])}]]", "not bold green")
        position = end
    shown.append(decode(tokenizer, row.input_ids[position:]), "not bold dim")
    return shown


def run(recipe: Recipe, *, limit: int | None = None, show: int = 1) -> Prepared:
    """`headstart data prepare`: prints what became of the rows, and the first `show` of them with their labels marked.

    limit: read so many rows of each source at most. No model is loaded.
    """
    section = recipe.target
    tokenizer = load_tokenizer(section.name, trust_remote_code=section.trust_remote_code, revision=section.revision)
    prepared = prepare(
        with_limit(recipe, limit), tokenizer, vocab_size=_vocab_size(tokenizer, section.trust_remote_code)
    )
    print(prepared.summary())
    console = Console(file=sys.stdout, highlight=False)
    for row in prepared.train[:show]:
        console.print(show_row(row, tokenizer), soft_wrap=True)
    return prepared


def _vocab_size(tokenizer: PreTrainedTokenizerBase, trust_remote_code: bool) -> int | None:
    """Output rows as the model's configuration beside the tokenizer has them; training asks the weights themselves."""
    try:
        config = AutoConfig.from_pretrained(tokenizer.name_or_path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError):
        return None
    return getattr(config.get_text_config(), "vocab_size", None)
