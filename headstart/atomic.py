"""Files and folders that exist whole or not at all, whatever kills the process.

write_text(path, text)              # .NAME.partial, flushed to the disk, then renamed
with whole_folder(folder) as partial:   # .NAME.partial, empty
    ...                                 # write into it; flushed and renamed likewise
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def partial_name(path: Path) -> Path:
    """Under which a file or folder stands while it is written."""
    return path.with_name(f".{path.name}.partial")


def write_text(path: Path, text: str) -> None:
    """The file whole or not at all, in UTF-8; what had this name before is replaced."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """The file whole or not at all; what had this name before is replaced."""
    partial = partial_name(path)
    try:
        partial.write_bytes(content)
        _flush(partial)
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        error.filename = os.fspath(path)  # the name that the user gave
        raise
    _flush(path.parent)


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """An empty folder to write into, which gets its name at the end. Where the disk refuses something, what was there
    before stays, the room is given back, and the OSError names `folder`."""
    partial = partial_name(folder)
    try:
        start_folder(folder)
        yield partial
        publish(partial, folder)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        error.filename = os.fspath(folder)
        raise


def start_folder(folder: Path) -> Path:
    """An empty folder under another name, beside `folder`."""
    partial = partial_name(folder)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    return partial


def publish(partial: Path, folder: Path) -> None:
    """Flushes `partial` to the disk and gives it its name; what had this name before is replaced."""
    for path in [*partial.rglob("*"), partial]:
        _flush(path)
    replaced = folder.with_name(f".{folder.name}.replaced")
    if folder.exists():  # a folder can't be renamed onto one that isn't empty
        shutil.rmtree(replaced, ignore_errors=True)
        folder.rename(replaced)
    partial.rename(folder)
    _flush(folder.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def clear_leftovers(parent: Path) -> None:
    """Removes what a killed save left behind; a folder caught between the two renames is put back."""
    for leftover in parent.glob(".*.replaced"):
        original = leftover.with_name(leftover.name[1:].removesuffix(".replaced"))
        if not original.exists():
            leftover.rename(original)
    for leftover in [*parent.glob(".*.partial*"), *parent.glob(".*.replaced")]:
        shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
