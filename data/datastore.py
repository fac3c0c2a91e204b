"""Texts with an index of all that occurs in them: what retrieval drafts from.

    build_datastore("stores/chats", ["chats.jsonl", "manual.txt"], tokenizer)
    store = load_datastore("stores/chats", tokenizer)
    start, end, length = store.longest_suffix([.., 7, 8, 9], most=16)
    store.continuations(start, end, length, most=64, tokens=10)

All tokens stand in one array, a separator behind every document, and a suffix array orders all their suffixes; both are
memory-mapped, so a store need not fit into memory to be used (REST, arXiv 2311.08252). To build one takes about 30
bytes of memory per token. The suffix array is libdivsufsort's.
"""

from __future__ import annotations

import hashlib
import io
import json
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

from headstart.atomic import write_bytes, write_text
from headstart.data.rendering import ChatRenderer
from headstart.data.reports import SkipReport
from headstart.data.sources import SUFFIXES as ROWS
from headstart.data.sources import read_all
from headstart.errors import DataError, refuse_unwritable
from headstart.fingerprint import PROBES
from headstart.recipe import ChatSection, Source
from headstart.tensor_files import describe_file, fault_of

FORMAT = 2
MANIFEST, TOKENS, SUFFIXES = "manifest.json", "tokens.npy", "suffixes.npy"
UNCUT = 1 << 31
"""A document's most tokens: any number."""


@dataclass(frozen=True)
class Datastore:
    """Documents as tokens, and their suffixes in order."""

    tokens: np.ndarray
    """[tokens], unsigned, every document followed by `separator`."""
    suffixes: np.ndarray
    """[tokens]: where each suffix begins, in the order of what it says."""
    separator: int
    """An id that no token has: so what is looked up never spans two documents."""

    def longest_suffix(self, text: Sequence[int], most: int) -> tuple[int, int, int]:
        """(start, end, length): the longest end of `text`, of at most `most` tokens, that occurs, and which entries of
        `suffixes` begin with it. A length of 0: not even the last token does.

        What occurs occurs with any part of it, so the length is searched for by halves, as the entries are.
        """
        found, low, high = (0, 0, 0), 1, min(most, len(text))
        while low <= high:
            length = (low + high) // 2
            start, end = self.entries(text[len(text) - length :])
            if start < end:
                found, low = (start, end, length), length + 1
            else:
                high = length - 1
        return found

    def entries(self, pattern: Sequence[int]) -> tuple[int, int]:
        """The entries of `suffixes` that begin with the pattern: start and end, equal if there are none."""
        wanted, length = list(pattern), len(pattern)
        beginning = lambda place: self.tokens[place : place + length].tolist()  # noqa: E731  (places are numpy's)
        start = bisect_left(self.suffixes, wanted, key=beginning)
        return start, bisect_right(self.suffixes, wanted, lo=start, key=beginning)

    def continuations(self, start: int, end: int, length: int, *, most: int, tokens: int) -> list[list[int]]:
        """What follows in up to `most` of these entries behind their first `length` tokens: up to `tokens` tokens each,
        none from another document.

        Of more entries, some at even distances; as entries are in order of what follows, every continuation keeps its
        share of them.
        """
        chosen = np.linspace(start, end - 1, min(most, end - start)).round().astype(np.int64)
        places = self.suffixes[chosen].astype(np.int64)[:, None] + length + np.arange(tokens)
        rows = self.tokens[np.minimum(places, len(self.tokens) - 1)].tolist()  # the last of all is a separator
        return [row[: row.index(self.separator)] if self.separator in row else row for row in rows]

    def num_bytes(self) -> int:
        """Of both arrays; they are mapped, and read where they are needed."""
        return self.tokens.nbytes + self.suffixes.nbytes


def build_datastore(
    folder: str | Path,
    files: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    *,
    chat: ChatSection | None = None,
    limit: int | None = None,
) -> dict[str, SkipReport]:
    """Writes a datastore of these files and returns what became of their rows, by file.

    files: conversations as training reads them (.jsonl, .json, .parquet, a folder, a hub data set, `bundled:chats`),
    rendered by the tokenizer's chat template; and .txt files, each one document, also those of a folder. limit: rows of
    each source. The manifest is written last: without it there is no datastore. Raises DataError where the folder
    holds something, a file cannot be read, or no token is left.
    """
    folder, reports = Path(folder), {}
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise DataError(f"{folder} holds something already; name a new folder for the datastore, or remove this one.")
    # a place that cannot be written shows before the work
    refuse_unwritable(next(place for place in (folder, *folder.absolute().parents) if place.exists()))
    separator = max(len(tokenizer), 1 + max(tokenizer.get_vocab().values(), default=0))
    dtype = np.uint16 if separator < 1 << 16 else np.uint32
    documents = [
        np.array([*ids, separator], dtype)
        for ids in _documents(files, ChatRenderer(tokenizer, chat or ChatSection()), reports, limit)
        if ids
    ]
    if not documents:
        skipped = Counter(reason for report in reports.values() for reason in report.skipped)
        raise DataError(
            f"No text for a datastore was found in {', '.join(files) or 'no files'} ({'; '.join(skipped) or 'empty'}); "
            "name files of conversations or .txt files that hold some."
        )
    tokens = np.concatenate(documents)
    folder.mkdir(parents=True, exist_ok=True)
    _write_array(folder / TOKENS, tokens)
    _write_array(folder / SUFFIXES, suffix_array(tokens))
    manifest = {
        "format": FORMAT,
        "tokenizer": tokenizer_key(tokenizer),
        "separator": separator,
        "documents": len(documents),
        "tokens": len(tokens) - len(documents),
        "files": [Path(name).name for name in files],
        "arrays": {name: describe_file(folder / name) for name in (TOKENS, SUFFIXES)},
    }
    write_text(folder / MANIFEST, json.dumps(manifest, indent=1) + "\n")
    return reports


def check_datastore(folder: str | Path) -> Path:
    """The folder; raises DataError where it holds no datastore. Whether it is whole shows when it is loaded."""
    if not (Path(folder) / MANIFEST).is_file():
        raise DataError(
            f"There is no datastore in {folder}; build one: "
            f"headstart data datastore FILE --target NAME --output {folder}"
        )
    return Path(folder)


def load_datastore(folder: str | Path, tokenizer: PreTrainedTokenizerBase) -> Datastore:
    """Maps a datastore; raises DataError where there is none, where it is damaged, empty, or of another tokenizer.

    Both arrays are read once, about a second for a GB, to compare their SHA-256: a wrong entry would point beyond the
    text, or draft an id that no token has.
    """
    folder = check_datastore(folder)
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        found, key, separator = manifest["format"], manifest["tokenizer"], int(manifest["separator"])
        tokens, suffixes = (np.load(folder / name, mmap_mode="r") for name in (TOKENS, SUFFIXES))
        whole = len(tokens) == len(suffixes) == manifest["tokens"] + manifest["documents"]
        faults = [fault_of(folder / name, manifest["arrays"][name]) for name in (TOKENS, SUFFIXES) if found == FORMAT]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"The datastore {folder} is damaged ({error!r}); build it anew.") from None
    if found != FORMAT:
        raise DataError(f"The datastore {folder} has format {found}, this version reads {FORMAT}; build it anew.")
    if not whole:
        raise DataError(f"The datastore {folder} is damaged (its arrays have other lengths); build it anew.")
    if damaged := next(filter(None, faults), None):
        raise DataError(f"The datastore {folder} is damaged ({damaged}); build it anew.")
    if not manifest["tokens"]:
        raise DataError(
            f"The datastore {folder} is empty, and nothing can be drafted from it; build it from more files."
        )
    if key != tokenizer_key(tokenizer):
        raise DataError(
            f"The datastore {folder} was made with another tokenizer, whose ids are other words; build it anew with "
            "this target's."
        )
    return Datastore(tokens, suffixes, separator)


def suffix_array(tokens: np.ndarray) -> np.ndarray:
    """Where each suffix begins, in lexicographic order; a suffix stands before those that go on where it ends."""
    from pydivsufsort import divsufsort

    return divsufsort(np.ascontiguousarray(tokens)).astype(np.int32 if len(tokens) < 1 << 31 else np.int64)


def tokenizer_key(tokenizer: PreTrainedTokenizerBase) -> str:
    """Equal for tokenizers that give texts the same ids: a hash of the vocabulary and of the ids of some odd texts."""
    probes = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in PROBES]
    facts = json.dumps([sorted(tokenizer.get_vocab().items()), probes])
    return hashlib.sha256(facts.encode()).hexdigest()[:32]


def _documents(
    files: Sequence[str], renderer: ChatRenderer, reports: dict[str, SkipReport], limit: int | None
) -> Iterator[list[int]]:
    texts, others = _sort_out(files)
    for path in texts:
        reports[str(path)] = SkipReport(str(path), rows=1)
        yield renderer.tokenizer(_read_text(path), add_special_tokens=False, verbose=False)["input_ids"]
    sources = [Source(source=name, limit=limit) for name in others]
    for rendered in renderer.rows(read_all(sources, reports), UNCUT):
        if rendered.row is None:
            assert rendered.why is not None
            reports[rendered.conversation.file].skip(rendered.conversation.origin, rendered.why)
        else:
            yield rendered.row.input_ids


def _sort_out(files: Sequence[str]) -> tuple[list[Path], list[str]]:
    """(.txt files, those of folders among them; what holds conversations), every name once."""
    texts: list[Path] = []
    others = []
    for name in dict.fromkeys(files):
        path = Path(name).expanduser()
        inside = sorted(path.iterdir()) if path.is_dir() else [path]
        found = [file for file in inside if file.suffix.lower() == ".txt"]
        holds_rows = any(file.name.endswith(ROWS) for file in inside)
        if path.exists() and not found and not holds_rows:
            raise DataError(f"{path} is of no known kind; expected a name ending in {', '.join(('.txt', *ROWS))}.")
        texts += found
        if holds_rows or not found:  # the ids of hub data sets too
            others.append(name)
    return texts, others


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise DataError(f"There is no file {path}; write the path of a text file.") from None
    except UnicodeDecodeError:
        raise DataError(
            f"{path} is not UTF-8 text; convert it first, for example with iconv -f ISO-8859-1 -t UTF-8."
        ) from None


def _write_array(path: Path, array: np.ndarray) -> None:
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=False)
    write_bytes(path, buffer.getvalue())
