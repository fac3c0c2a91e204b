"""Files of tensors: written so that a full disk is a fault of the disk, and known again by their bytes.

save_tensors(state, folder / "head.safetensors")
described = describe_file(folder / "head.safetensors")      # {"bytes": .., "sha256": ".."}
fault_of(folder / "head.safetensors", described)            # None, or what is wrong with it
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor


def save_tensors(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    """Writes a safetensors file; raises the OSError of a disk that refuses it, which safetensors hides in a text."""
    try:
        save_file(tensors, path, metadata=metadata)
    except SafetensorError as error:
        number = re.search(r"\(os error (\d+)\)", str(error))
        if number is None:
            raise
        code = int(number[1])
        raise OSError(code, os.strerror(code), os.fspath(path)) from None


def describe_file(path: Path) -> dict[str, Any]:
    """By what a file is known again: `bytes`, its size, and `sha256`. Reads it whole, at about a GB a second."""
    return {"bytes": path.stat().st_size, "sha256": sha256_of(path)}


def fault_of(path: Path, described: Mapping[str, Any]) -> str | None:
    """What is wrong with a file that was described before; None: it has the same bytes."""
    if not path.is_file():
        return f"{path.name} is missing"
    size = path.stat().st_size
    if size != described["bytes"]:
        return f"{path.name} has {size} bytes, {described['bytes']} were written"
    if sha256_of(path) != described["sha256"]:
        return f"the bytes of {path.name} are not those that were written"
    return None


def sha256_of(path: Path) -> str:
    """SHA-256 of a file's bytes, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
