"""The files of a feature cache: shards and manifests, each there whole or not at all, and what tells a damaged one."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headstart.errors import DataError

FORMAT = 1
INDEX = ("hashes", "starts", "checksums")
"""The tensors of a shard that say which rows it holds; the manifest has their SHA-256."""


@dataclass(frozen=True)
class Shard:
    """What a manifest says of one shard."""

    file: str
    bytes: int
    sha256: str
    index_sha256: str
    rows: int
    tokens: int


def read_manifest(path: Path) -> dict[str, Any]:
    """`key` and `shards` of a manifest; raises DataError where it isn't one."""
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        found, key = manifest["format"], manifest["key"]
        manifest["shards"] = [Shard(**entry) for entry in manifest["shards"]]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} is damaged ({error!r}); restore it, or remove the folder and write it anew.") from None
    if found != FORMAT:
        raise DataError(f"{path} has format {found}, this version reads {FORMAT}; write the cache anew.")
    if not isinstance(key, dict):
        raise DataError(f"{path} is damaged (its key is {key!r}); restore it, or remove the folder and write it anew.")
    return manifest


@contextmanager
def on_disk(folder: Path) -> Iterator[None]:
    """Turns a full disk into one sentence."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise DataError(
            f"The disk of {folder} is full; the rows of all its shards are kept. Make room there, and the same command "
            "goes on."
        ) from None


def lock(path: Path) -> int:
    """The descriptor that holds the lock of one writer; the operating system frees it when the process ends."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise DataError(
            f"Another process is writing into {path.parent} already; wait for it, name another folder, or launch "
            "several processes together (torchrun -m headstart.cli data features ...)."
        ) from None
    return descriptor


def index_sha256(tensors: dict[str, Tensor]) -> str:
    return hashlib.sha256(b"".join(_bytes(tensors[name]) for name in INDEX)).hexdigest()


def checksum(tensor: Tensor) -> int:
    """CRC-32 of a tensor's bytes."""
    return zlib.crc32(_bytes(tensor))


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.contiguous().view(torch.uint8).numpy().data.cast("B")
