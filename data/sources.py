"""Conversations from local files, hub data sets and the bundled chats; every row is yielded, or counted with a reason.

    reports = {}
    for conversation in read(Source(source="chats.jsonl"), reports): ...
    print(reports["chats.jsonl"].summary())

JSON Lines are read line by line and every line is judged alone, so a field that is text on one line and a list on the
next is no fault (a columnar reader ends in a type error there). A source that can't be opened at all raises DataError.
"""

from __future__ import annotations

import gzip
import itertools
import json
import random
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from headstart.data.checked_rows import intact
from headstart.data.formats import parse
from headstart.data.messages import Conversation, SkipRow, check_exchange
from headstart.data.reports import SkipReport
from headstart.errors import DataError
from headstart.hub import look_for_hub
from headstart.recipe import Recipe, Source

SUFFIXES = (".jsonl", ".ndjson", ".jsonl.gz", ".json", ".parquet")


@dataclass(frozen=True)
class Share:
    """What one process reads of a source in one pass: every `world_size`-th row from row `rank` on, or whole files of a
    hub data set where they can be dealt out evenly. Files come in an order of their own in every pass."""

    rank: int
    world_size: int
    order: str
    """What the order of the files follows from: seed and pass."""


def read(
    source: Source,
    reports: dict[str, SkipReport],
    *,
    answers: bool = True,
    announce: Callable[[int], None] = lambda rows: None,
    share: Share | None = None,
    to_record: Callable[[Any], Any] = lambda row: row,
) -> Iterator[Conversation]:
    """The conversations of one source, in order; rows that can't be used are counted in the report of their file.

    reports: file name (or data set) -> its report; files met for the first time are added.
    answers: False reads prompts, for distilling and decoding: chats need no answers then, and questions may follow
    each other.
    announce: is told how many rows there will be, where that is known beforehand.
    share: what one process of several reads of it, from the hub without downloading it; None: all.
    to_record: makes a row of another layout a record of a known format, or raises SkipRow.
    Raises DataError where the source can't be opened, and where it holds no rows at all.
    """
    place = ""
    total, records = _records(source, answers, share)
    if total is not None:
        announce(min(total, source.limit or total))
    for place, record in records:
        name, _, number = place.rpartition(":")
        report = reports.setdefault(name, SkipReport(name))
        report.rows += 1
        try:
            if isinstance(record, SkipRow):
                raise record
            conversation = parse(
                to_record(intact(record)),
                format=source.format,
                merge=source.non_alternating == "merge",
                origin=place,
                row_id=f"{Path(name).name}:{number}",
            )
            if answers and conversation.messages is not None:
                check_exchange(conversation.messages)
        except SkipRow as why:
            report.skip(place, why)
        else:
            yield conversation
    if not place and (share is None or not share.rank):
        raise DataError(f"{display_name(source)} holds no rows; expected at least one, for example as JSON Lines.")


def read_all(sources: Iterable[Source], reports: dict[str, SkipReport], **options: Any) -> Iterator[Conversation]:
    """`read` of one source after the other; a row id that was met before is made unique: `17`, `17#2`."""
    seen: Counter[str] = Counter()
    for source in sources:
        for conversation in read(source, reports, **options):
            seen[conversation.row_id] += 1
            count = seen[conversation.row_id]
            yield replace(conversation, row_id=f"{conversation.row_id}#{count}") if count > 1 else conversation


def with_limit(recipe: Recipe, limit: int | None) -> Recipe:
    """The recipe with at most `limit` rows of each source."""
    if limit is None:
        return recipe

    def limited(sources: list[Source]) -> list[Source]:
        return [source.model_copy(update={"limit": min(limit, source.limit or limit)}) for source in sources]

    held_out = recipe.data.held_out.model_copy(update={"sources": limited(recipe.data.held_out.sources)})
    data = recipe.data.model_copy(update={"train": limited(recipe.data.train), "held_out": held_out})
    return recipe.model_copy(update={"data": data})


def display_name(source: Source) -> str:
    """How reports name a source: its file, or its data set with subset and split."""
    if local_files(source):
        return source.source
    return ":".join(part for part in (source.source, source.subset, source.split) if part)


def check_source(source: Source, *, answers: bool = True) -> None:
    """Raises DataError where it names no file and no bundled set; no file is read, and no hub data set asked for."""
    if source.source.startswith("bundled:"):
        _bundled_rows(source, answers)
    else:
        local_files(source)


def _records(source: Source, answers: bool, share: Share | None) -> tuple[int | None, Iterator[tuple[str, Any]]]:
    """How many rows, if known, and (place, record) of each. A line that is no JSON comes as the SkipRow saying so."""
    total, records, dealt = _all_records(source, answers, share)
    records = itertools.islice(records, source.limit)
    if share is not None and not dealt:
        records = itertools.islice(records, share.rank, None, share.world_size)
    return total, records


def _all_records(
    source: Source, answers: bool, share: Share | None
) -> tuple[int | None, Iterator[tuple[str, Any]], bool]:
    """The same without the limit, and whether these are the rows of the share alone already."""
    name = display_name(source)
    if source.source.startswith("bundled:"):
        rows = _bundled_rows(source, answers)
        return len(rows), _number(name, rows), False
    files = local_files(source)
    if not files:
        rows, dealt = _hub_rows(source, share)
        return len(rows) if hasattr(rows, "__len__") else None, _from_hub(name, rows), dealt
    if share is not None and source.limit is None:
        random.Random(share.order).shuffle(files)
    totals = [None if share else _count_rows(path) for path in files]
    records = itertools.chain.from_iterable(map(_file_records, files))
    return None if None in totals else sum(filter(None, totals)), records, False


def local_files(source: Source) -> list[Path]:
    """The files that a local source names; empty for a hub data set. Raises DataError for a path that isn't there.

    A folder gives its files in order of name: those whose name begins with the split where there are such, else all.
    """
    if source.source.startswith("bundled:"):
        return []
    path = Path(source.source).expanduser()
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.name.endswith(SUFFIXES))
        if not files:
            raise DataError(f"The folder {path} holds no data; expected files ending in {', '.join(SUFFIXES)}.")
        return [file for file in files if file.name.startswith(source.split)] or files
    if path.is_file():
        if source.split != "train":
            raise DataError(f"{path} is one file and has no split {source.split!r}; name the file of that split.")
        if not path.name.endswith(SUFFIXES):
            raise DataError(f"{path} is of no known kind; expected a name ending in {', '.join(SUFFIXES)}.")
        return [path]
    if path.name.endswith(SUFFIXES) or source.source.startswith((".", "/", "~")):
        raise DataError(f"There is no file {path}; write the path of a data file, or the id of a hub data set.")
    return []


def _number(name: str, rows: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    return ((f"{name}:{number}", row) for number, row in enumerate(rows, start=1))


def _count_rows(path: Path) -> int | None:
    """Rows of a file where that is cheap to know; for progress only, so blank lines may be counted."""
    if path.name.endswith((".jsonl", ".ndjson")):
        with path.open("rb") as lines:
            return sum(1 for _ in lines)
    return None


def _file_records(path: Path) -> Iterator[tuple[str, Any]]:
    if path.name.endswith(".parquet"):
        return _number(str(path), _parquet_rows(path))
    if path.name.endswith(".json"):
        return _number(str(path), _json_rows(path))
    return _json_lines(path)


def _json_lines(path: Path) -> Iterator[tuple[str, Any]]:
    opened = gzip.open(path, "rb") if path.name.endswith(".gz") else path.open("rb")
    try:
        with opened as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield f"{path}:{number}", _json_line(line)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"{path} can't be unpacked ({error}); copy it again, or give the .jsonl itself.") from None


def _json_line(line: bytes) -> Any:
    try:
        return json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError:
        return SkipRow("not UTF-8 text")
    except (ValueError, RecursionError) as error:
        return SkipRow("not JSON", str(error))


def _json_rows(path: Path) -> Iterator[Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    except ValueError as error:
        raise DataError(
            f"{path} is not JSON ({error}); expected one list of rows. If every line is a row, name the file .jsonl."
        ) from None
    if isinstance(content, dict):  # {"data": [...]}, or one row
        lists = [
            value for key, value in content.items() if key in ("data", "rows", "train") and isinstance(value, list)
        ]
        content = lists[0] if lists else [content]
    if not isinstance(content, list):
        raise DataError(f"{path} holds neither a list of rows nor an object; expected [row, row, ...].")
    return iter(content)


def _parquet_rows(path: Path) -> Iterator[Any]:
    import pyarrow
    import pyarrow.parquet

    try:
        for batch in pyarrow.parquet.ParquetFile(path).iter_batches(batch_size=256):
            yield from batch.to_pylist()
    except pyarrow.ArrowException as error:
        raise DataError(f"{path} can't be read as Parquet ({error}); write it anew, or give JSON Lines.") from None


def _bundled_rows(source: Source, answers: bool) -> list[Any]:
    from headstart.data import bundled

    if source.source == "bundled:wordings":
        if answers:
            raise DataError(
                "bundled:wordings has no answers; make them with `headstart data distill`, name its output."
            )
        return list(bundled.prompts(source.split, wordings=True))
    if source.source != "bundled:chats":
        raise DataError(f"No bundled data set is called {source.source!r}; name bundled:chats or bundled:wordings.")
    return list(bundled.rows(source.split, answers=answers))


def _hub_rows(source: Source, share: Share | None) -> tuple[Any, bool]:
    """The rows of a hub data set, and whether they are those of the share alone."""
    import datasets
    from datasets.distributed import split_dataset_by_node

    name = display_name(source)
    # a limit of rows must not download the whole set
    streaming = source.limit is not None or share is not None
    look_for_hub()
    try:
        rows = datasets.load_dataset(source.source, source.subset, split=source.split, streaming=streaming)
    except _hub_faults() as error:
        raise DataError(
            f"The data set {name!r} can't be loaded ({_first_line(error)}); check its id, subset and split, or give a "
            "local file."
        ) from None
    if share is None or source.limit is not None:
        return rows, False
    assert isinstance(rows, datasets.IterableDataset)
    rows = rows.shuffle(seed=zlib.crc32(share.order.encode()), buffer_size=1)  # the order of its files
    if rows.num_shards % share.world_size:
        return rows, False
    return split_dataset_by_node(rows, share.rank, share.world_size), True


def _from_hub(name: str, rows: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    number = 0
    try:
        for number, row in enumerate(rows, start=1):
            yield f"{name}:{number}", row
    except _hub_faults() as error:  # datasets has tried again for minutes
        raise DataError(
            f"The data set {name!r} broke off after {number} rows ({_first_line(error)}); run the same command again, "
            "or give a local file."
        ) from None


def _hub_faults() -> tuple[type[Exception], ...]:
    import httpx2
    from datasets.exceptions import DatasetsError

    return OSError, ValueError, RuntimeError, DatasetsError, httpx2.HTTPError


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
