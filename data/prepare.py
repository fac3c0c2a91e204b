"""Recipe to token rows: read, render, check, hold out, and say what became of every row.

    prepared = prepare(recipe, tokenizer, vocab_size=target.vocab_size)
    prepared.train, prepared.held_out        # RowStore: sequences of Row
    print(prepared.summary())

Nothing is cached: rows are tokenised each time, so a changed template, length or vocabulary can't meet stale tokens.
"""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass, field

from rich.console import Console
from rich.text import Text
from transformers import AutoConfig, PreTrainedConfig, PreTrainedTokenizerBase

from headstart.data.packing import RowStore
from headstart.data.reading import Part, Reader
from headstart.data.rendering import Row, decode, label_runs
from headstart.data.reports import SkipReport
from headstart.data.sources import with_limit
from headstart.data.streaming import ShareOfPrompts, StreamedRows
from headstart.recipe import Recipe
from headstart.recipe_target import load_recipe_tokenizer


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
        of_stream = ", the first of a stream" if isinstance(self.train, StreamedRows) else ""
        lines.append(
            f"training: {len(self.train)} rows, {tokens} tokens{of_stream}; "
            f"held out: {len(self.held_out)} rows, {held_out_tokens} tokens"
        )
        if not len(self.held_out):
            lines.append(
                "warning: nothing is held out: all rows have one prompt, or few were read; name held-out sources"
            )
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
    refused by name. Of a stream they are its first `data.buffer` rows, and `train` knows how to read all. Raises
    DataError where a file gives no row that can be learnt from.
    """
    reader = Reader(recipe, tokenizer, vocab_size, max_positions)
    if recipe.data.streaming:
        return _first_of_stream(recipe, reader)
    if recipe.data.held_out.sources:
        held_out = reader.read(recipe.data.held_out.sources, "held-out rows")
        train = reader.read(recipe.data.train, "training rows", kept_away=set(held_out.keys))
        return Prepared(train.rows, held_out.rows, train.reports, held_out.reports)
    part = reader.read(recipe.data.train, "training rows")
    chosen = choose_held_out(part.keys, recipe.data.held_out.fraction or 0.0)
    rest = [number for number in range(len(part.rows)) if number not in chosen]
    return Prepared(part.rows.take(rest), part.rows.take(sorted(chosen)), part.reports)


def _first_of_stream(recipe: Recipe, reader: Reader) -> Prepared:
    sources, fraction = recipe.data.held_out.sources, recipe.data.held_out.fraction
    if sources:
        held_out = reader.read(sources, "held-out rows")
        first = StreamedRows(recipe, reader, set(held_out.keys))
        return Prepared(first, held_out.rows, first.reports, held_out.reports)
    held_out = Part()
    first = StreamedRows(recipe, reader, ShareOfPrompts(fraction or 0.0), held_out)
    return Prepared(first, held_out.rows, first.reports)


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
    tokenizer = load_recipe_tokenizer(recipe)
    # output rows as the configuration has them; training asks the weights themselves
    vocab_size = getattr(published_config(tokenizer, section.trust_remote_code), "vocab_size", None)
    prepared = prepare(with_limit(recipe, limit), tokenizer, vocab_size=vocab_size)
    print(prepared.summary())
    console = Console(file=sys.stdout, highlight=False)
    for row in prepared.train[:show]:
        console.print(show_row(row, tokenizer), soft_wrap=True)
    return prepared


def published_config(tokenizer: PreTrainedTokenizerBase, trust_remote_code: bool) -> PreTrainedConfig | None:
    """The configuration of the model that the tokenizer lies beside, its text part; None where there is none."""
    try:
        config = AutoConfig.from_pretrained(tokenizer.name_or_path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError):
        return None
    return config.get_text_config()
