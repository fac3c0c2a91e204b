"""The target's states of token rows, on disk: what training reads instead of running the target.

    with FeatureWriter(folder, cache_key(target, recipe, layers, "bfloat16")) as cache:     # one for each process
        cache.add(row_hash(ids, mask), ids, mask, {"final": ..., "layer.2": ...})
    cache = FeatureCache(folder, cache_key(target, recipe, layers, None))                   # reads what all wrote
    states = cache.read(row_hash(ids, mask), device)

    folder/manifest-00000.json                the key, and each shard of writer 0: its size, SHA-256, rows and tokens
    folder/shard-00000-000000.safetensors     ids, mask, bounds, hashes and checksums of some rows, and their states

Every writer has its number, its own shards and its own manifest; a reader sees the union. A shard is written under
another name, flushed to the disk and renamed, then its manifest likewise. Whatever kills a writer costs the rows of the
shard that was open: the next start removes what no manifest names and goes on. Shards are memory-mapped. Of a shard its
size and its index are checked when it is opened, the states of a row by a checksum when they are first read.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from headstart.atomic import write_bytes
from headstart.data.feature_codec import FINAL, decode, encode, state_name, stored_names
from headstart.data.feature_key import check_key
from headstart.data.feature_shards import (
    FORMAT,
    INDEX,
    Shard,
    checksum,
    index_sha256,
    lock,
    on_disk,
    read_manifest,
)
from headstart.errors import DataError
from headstart.loading import DTYPES

SHARD_BYTES = 256 * 2**20
"""When an open shard is published: the most that a kill can cost, and what a writer holds in memory."""


@dataclass(frozen=True)
class _Place:
    """Where the row number `row` of a shard stands: tokens start..end."""

    shard: Shard
    row: int
    start: int
    end: int


def manifests(folder: Path) -> list[Path]:
    """Of every process that has written into this cache."""
    return sorted(folder.glob("manifest-*.json"))


def refuse_no_cache(folder: Path) -> None:
    """DataError if there is no feature cache."""
    if not manifests(folder):
        raise DataError(
            f"There is no feature cache in {folder}; write it with `headstart data features --recipe ... --output "
            f"{folder}`, or let training fill it (--set data.features=hybrid)."
        )


class FeatureCache:
    """The rows that all manifests of a folder name, read only.

    key: from `cache_key`; its layers may be fewer than the cache holds. Raises DataError where the folder is no cache,
    was made from other ingredients, or has a shard that is missing, short or damaged.
    """

    def __init__(self, folder: str | Path, key: dict[str, Any]):
        self.folder, self.wanted = Path(folder), key
        self._seen: dict[str, tuple[int, int]] = {}
        self._places: dict[bytes, _Place] = {}
        self._shards: dict[str, Any] = {}
        self._checked: set[bytes] = set()
        self.key = key
        if not self._may_be_new:
            refuse_no_cache(self.folder)
        self.refresh()

    _may_be_new = False

    @property
    def storage(self) -> str:
        """What states are stored as."""
        return self.key["dtype"]

    @property
    def layers(self) -> list[int]:
        """The HF[k] that each row has beside the final state."""
        return self.key["layers"]

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, row: bytes) -> bool:
        return row in self._places

    def hashes(self) -> Iterator[bytes]:
        """The rows, by the hash of each."""
        return iter(self._places)

    def num_tokens(self) -> int:
        return sum(place.end - place.start for place in self._places.values())

    def refresh(self) -> None:
        """Takes in what writers have published since this was opened."""
        for path in manifests(self.folder):
            stat = path.stat()
            state = (stat.st_mtime_ns, stat.st_size)
            if self._seen.get(path.name) == state:
                continue
            manifest = read_manifest(path)
            check_key(manifest["key"], self.wanted, self.folder)
            if self._seen and manifest["key"] != self.key:
                raise DataError(f"{path} has another key than the manifests beside it; remove the folder.")
            self.key = manifest["key"]
            for shard in manifest["shards"]:
                self._take(shard)
            self._seen[path.name] = state

    def read(self, row: bytes, device: torch.device | str = "cpu") -> dict[str, Float[Tensor, "tokens dim"]]:
        """The wanted states of a row by name, `final` and `layer.K`, in the target's dtype, on `device`."""
        stored = self._stored(row)
        dtype, device = DTYPES[self.key["target dtype"]], torch.device(device)
        names = [FINAL, *map(state_name, self.wanted["layers"])]
        return {name: decode(stored, name, self.storage, dtype, device) for name in names}

    def verify(self, each: Callable[[int], None] = lambda rows: None) -> None:
        """Reads every shard whole and compares its SHA-256; raises DataError for the first that is not as written.

        each: is told the rows of every shard that is.
        """
        for shard in {place.shard.file: place.shard for place in self._places.values()}.values():
            with (self.folder / shard.file).open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != shard.sha256:
                    raise self._damaged(shard, "its bytes are not those that were written")
            each(shard.rows)

    def _take(self, shard: Shard) -> None:
        """Adds the rows of a shard; those that another has too stay where they were found first.

        A shard that was removed, as a damaged one is to be, is forgotten, whoever wrote it: its rows are not there.
        """
        if shard.file in self._shards:
            return
        path = self.folder / shard.file
        if not path.is_file():
            return
        if path.stat().st_size != shard.bytes:
            raise self._damaged(shard, f"it has {path.stat().st_size} bytes, {shard.bytes} were written")
        try:
            file = safe_open(path, framework="pt")
            index = {name: file.get_tensor(name) for name in INDEX}
        except SafetensorError as error:
            raise self._damaged(shard, str(error)) from None
        if index_sha256(index) != shard.index_sha256:
            raise self._damaged(shard, "its index is not the one that was written")
        self._shards[shard.file] = file
        starts = index["starts"].tolist()
        for number, row in enumerate(index["hashes"].numpy()):
            self._places.setdefault(row.tobytes(), _Place(shard, number, starts[number], starts[number + 1]))

    def _stored(self, row: bytes) -> dict[str, Tensor]:
        """The wanted tensors of a row as they are stored; the first time their checksums are compared."""
        place = self._places[row]
        names = stored_names(self.wanted["layers"], self.storage)
        file = self._shards[place.shard.file]
        try:
            stored = {name: file.get_slice(name)[place.start : place.end] for name in names}
            if row not in self._checked:
                expected = file.get_slice("checksums")[place.row].tolist()
                for name, written in zip(stored_names(self.layers, self.storage), expected, strict=True):
                    if name in stored and checksum(stored[name]) != written:
                        raise self._damaged(place.shard, f"the {name} of its row {place.row} is not what was written")
                self._checked.add(row)
        except SafetensorError as error:
            raise self._damaged(place.shard, str(error)) from None
        return stored

    def _damaged(self, shard: Shard, fault: str) -> DataError:
        return DataError(
            f"{self.folder / shard.file} is damaged ({fault}); remove that file and run the `headstart data features` "
            f"command of this cache again: it computes the {shard.rows} rows anew."
        )


class FeatureWriter(FeatureCache):
    """A cache that rows are added to; what was added is there at once, and on the disk after `flush`.

    key: a dtype of None goes on with what is there; a new cache keeps states as the target computes them. writer: the
    number of this process among those that write into the folder. Shards that were removed by hand are forgotten, so
    that their rows are written anew.
    """

    _may_be_new = True

    def __init__(self, folder: str | Path, key: dict[str, Any], *, writer: int = 0, shard_bytes: int = SHARD_BYTES):
        self._manifest = Path(folder) / f"manifest-{writer:05d}.json"
        self._prefix, self.shard_bytes = f"shard-{writer:05d}-", shard_bytes
        self._open: dict[bytes, dict[str, Tensor]] = {}
        self._open_bytes = 0
        with on_disk(Path(folder)):
            Path(folder).mkdir(parents=True, exist_ok=True)
            self._lock: int | None = lock(Path(folder) / f".writer-{writer:05d}.lock")
        self._own: list[Shard] = []
        try:
            if self._manifest.exists():
                self._own = read_manifest(self._manifest)["shards"]
            super().__init__(folder, key)
        except DataError:
            self.close(publish=False)
            raise
        if self.key["dtype"] is None:
            self.key = {**key, "dtype": key["target dtype"]}
        self._clear_leftovers()

    def __enter__(self) -> FeatureWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(publish=kind is None or not issubclass(kind, DataError | OSError))

    def __len__(self) -> int:
        return len(self._places) + len(self._open)

    def __contains__(self, row: bytes) -> bool:
        return row in self._open or row in self._places

    def add(
        self, row: bytes, input_ids: np.ndarray, supervised: np.ndarray, states: dict[str, Float[Tensor, "tokens dim"]]
    ) -> None:
        """Adds a row that is not there yet. states: `final` and one `layer.K` for each layer of the cache."""
        if row in self:
            return
        record = {
            "ids": torch.from_numpy(np.array(input_ids, dtype=np.int32)),
            "supervised": torch.from_numpy(np.array(supervised, dtype=np.bool_)),
        }
        for name in [FINAL, *map(state_name, self.layers)]:
            record |= encode(states[name], name, self.storage)
        self._open[row] = record
        self._open_bytes += sum(tensor.nbytes for tensor in record.values())
        if self._open_bytes >= self.shard_bytes:
            self.flush()

    def flush(self) -> None:
        """Publishes the open shard: what was added until now survives whatever happens next."""
        if not self._open:
            return
        number = max((int(shard.file[len(self._prefix) :].split(".")[0]) for shard in self._own), default=-1) + 1
        name = f"{self._prefix}{number:06d}.safetensors"
        tensors = self._shard_tensors()
        content = save(tensors, metadata={"format": str(FORMAT)})
        shard = Shard(
            file=name,
            bytes=len(content),
            sha256=hashlib.sha256(content).hexdigest(),
            index_sha256=index_sha256(tensors),
            rows=len(self._open),
            tokens=len(tensors["ids"]),
        )
        with on_disk(self.folder):
            write_bytes(self.folder / name, content)
        self._own.append(shard)
        self._write_manifest()
        self._open, self._open_bytes = {}, 0
        self._take(shard)

    def close(self, *, publish: bool = True) -> None:
        """Lets another process write under this number; publish: what is open goes to the disk first."""
        if publish:
            self.flush()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _stored(self, row: bytes) -> dict[str, Tensor]:
        return self._open[row] if row in self._open else super()._stored(row)

    def _shard_tensors(self) -> dict[str, Tensor]:
        names = stored_names(self.layers, self.storage)
        records = list(self._open.values())
        lengths = torch.tensor([0, *(len(record["ids"]) for record in records)])
        checksums = [[checksum(record[name]) for name in names] for record in records]
        hashes = np.frombuffer(b"".join(self._open), dtype=np.uint8).reshape(len(records), -1)
        return {
            "hashes": torch.from_numpy(hashes.copy()),
            "starts": lengths.cumsum(0),
            "checksums": torch.tensor(checksums),
            **{name: torch.cat([record[name] for record in records]) for name in ("ids", "supervised", *names)},
        }

    def _write_manifest(self) -> None:
        text = json.dumps(
            {"format": FORMAT, "key": self.key, "shards": [asdict(shard) for shard in self._own]}, indent=1
        )
        with on_disk(self.folder):
            write_bytes(self._manifest, text.encode())

    def _clear_leftovers(self) -> None:
        """Removes what a killed writer of this number left: half a file, or a shard that no manifest names."""
        named = {shard.file for shard in self._own}
        for pattern in (f".{self._prefix}*", f".{self._manifest.name}*", f"{self._prefix}*"):
            for path in self.folder.glob(pattern):
                if path.name not in named:
                    path.unlink()

    def _take(self, shard: Shard) -> None:
        if (self.folder / shard.file).is_file():
            super()._take(shard)
        elif shard in self._own:  # taken out by hand, as a damaged one is to be
            self._own.remove(shard)
