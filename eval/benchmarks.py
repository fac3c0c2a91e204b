"""The benchmarks that `--bench` knows by name, and files of one's own: where the rows are, and what each row asks.

    parse_bench("spec-bench=question.jsonl")     # six groups, 13 categories, two turns in one of the groups
    parse_bench("gsm8k")                         # from the hub, through `datasets`
    parse_bench("gsm8k=copies/gsm8k")            # the same columns from the disk
    parse_bench("mine.jsonl")                    # any format that training reads

A prompt is what its row asks and no more: no examples before it, no instruction about how to answer. Every benchmark
is rendered with the chat template, arguments and system turn of the head's own training.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headstart.data.messages import SkipRow
from headstart.data.sources import SUFFIXES
from headstart.errors import DataError, RecipeError
from headstart.recipe import Source

Record = Mapping[str, Any]

MT_BENCH = "writing roleplay reasoning math coding extraction stem humanities".split()
SPEC_BENCH_GROUPS = {
    **dict.fromkeys(MT_BENCH, "MT conversation"),
    "translation": "translation",
    "summarization": "summarization",
    "qa": "QA",
    "math_reasoning": "math",
    "rag": "RAG",
}
"""Spec-Bench's 13 categories, and the six groups in which its paper (arXiv 2401.07851) reports them."""
SPEC_BENCH_MARK = frozenset({"math_reasoning", "summarization", "translation", "rag", "qa"})
"""A file with one of these is laid out as Spec-Bench, whatever it is called."""
ENOUGH = 1000
"""Rows read of a data set that has tens of thousands: a stream of its beginning, not all of it, is downloaded."""


@dataclass(frozen=True)
class Benchmark:
    """What is asked: a source of rows, how a row becomes a prompt, and how its categories are grouped."""

    name: str
    """Empty for a file of one's own."""
    source: Source
    to_record: Callable[[Any], Any] = lambda row: row
    """A row as it lies there, as a record of one of the formats that `data/formats.py` reads."""
    groups: Mapping[str, str] = field(default_factory=dict)
    """Category -> group, of a benchmark that has no other categories; empty: every category is its own group."""

    def check_categories(self, found: set[str]) -> None:
        """Raises DataError for a file that is another benchmark's."""
        strange = sorted(found - set(self.groups))
        if self.groups and strange:
            raise DataError(
                f"{self.source.source} has the category {strange[0]!r}, which {self.name} has not; to ask its "
                f"questions all the same, name the file alone: --bench {self.source.source}"
            )


def parse_bench(text: str, split: str | None = None) -> Benchmark:
    """The benchmark of NAME, NAME=PATH or FILE. split: of a data set or a folder, instead of the usual one. Raises
    RecipeError where a name lacks its file, DataError where there is none."""
    name, equals, place = text.partition("=")
    if name not in KNOWN:
        return Benchmark("", Source(source=text, split=split or "train"))
    if equals and not place:
        raise RecipeError(f"--bench {text} names no file; write {name}=PATH")
    known = KNOWN[name]
    if place:
        return known.from_disk(name, Path(place).expanduser(), split)
    if known.hub_id is None:
        raise RecipeError(f"--bench {name} needs its file; write {name}=PATH, {known.hint}")
    source = Source(source=known.hub_id, subset=known.subset, split=split or known.split, limit=known.limit)
    return Benchmark(name, source, known.to_record, known.groups)


@dataclass(frozen=True, kw_only=True)
class _Known:
    """One benchmark with a name."""

    to_record: Callable[[Any], Any]
    groups: Mapping[str, str] = field(default_factory=dict)
    hint: str = ""
    """What file to name, for those that are on no hub."""
    hub_id: str | None = None
    subset: str | None = None
    split: str = "train"
    limit: int | None = None

    def from_disk(self, name: str, path: Path, split: str | None) -> Benchmark:
        """From a file, or from a folder of files such as a copy of the hub's repository."""
        if path.is_dir():
            source = Source(source=str(self._files_in(path)), split=split or self.split, limit=self.limit)
        else:
            source = Source(source=str(path), split=split or "train", limit=self.limit)
        return Benchmark(name, source, self.to_record, self.groups)

    def _files_in(self, folder: Path) -> Path:
        """In a copy of a hub data set, the files lie in a folder of the subset's name, of its own, or in `data`."""
        own = (self.hub_id or "").rpartition("/")[2]
        places = [folder, *(folder / part for part in (self.subset, own, "data") if part)]
        folders = [place for place in places if place.is_dir()]
        return next((one for one in folders if any(file.name.endswith(SUFFIXES) for file in one.iterdir())), folder)


def _text(row: Any, key: str) -> str:
    """A column's text; a row without it is skipped, and says so."""
    if not isinstance(row, Mapping):
        raise SkipRow("not an object", f"found {type(row).__name__}")
    if not isinstance(row.get(key), str):
        raise SkipRow(f"no text in '{key}'", f"fields: {', '.join(map(str, row)) or 'none'}")
    return row[key]


def _turns(row: Any) -> Any:
    """FastChat's layout, which is Spec-Bench's too; the hub's copies of MT-bench call the turns `prompt`."""
    if isinstance(row, Mapping) and "turns" not in row and isinstance(row.get("prompt"), list):
        return {**row, "turns": row["prompt"]}
    return row


def _humaneval(row: Any) -> Record:
    code = _text(row, "prompt").rstrip()
    return {"id": row.get("task_id"), "turns": [f"Complete this Python function:\n\n```python\n{code}\n```"]}


def _gsm8k(row: Any) -> Record:
    return {"turns": [_text(row, "question")]}


def _alpaca(row: Any) -> Record:
    question = _text(row, "instruction")
    return {"turns": [f"{question}\n\n{row['input']}" if row.get("input") else question]}


def _cnn_dm(row: Any) -> Record:
    article = _text(row, "article")
    return {"id": row.get("id"), "turns": [f"Summarize: {article}"]}


KNOWN: dict[str, _Known] = {
    "spec-bench": _Known(
        to_record=_turns,
        groups=SPEC_BENCH_GROUPS,
        hint="a copy of data/spec_bench/question.jsonl from github.com/hemingkx/Spec-Bench",
    ),
    "mt-bench": _Known(
        to_record=_turns,
        groups={category: category for category in MT_BENCH},
        hint="a copy of question.jsonl of MT-bench from github.com/lm-sys/FastChat",
    ),
    "humaneval": _Known(to_record=_humaneval, hub_id="openai/openai_humaneval", split="test"),
    "gsm8k": _Known(to_record=_gsm8k, hub_id="openai/gsm8k", subset="main", split="test"),
    "alpaca": _Known(to_record=_alpaca, hub_id="tatsu-lab/alpaca", limit=ENOUGH),
    "cnn-dm": _Known(to_record=_cnn_dm, hub_id="abisee/cnn_dailymail", subset="3.0.0", split="test", limit=ENOUGH),
}
