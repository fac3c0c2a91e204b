"""Rows that say whether they are as they were written: a flipped bit in a text is still good JSON."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from typing import Any

from headstart.data.messages import SkipRow

KEY, KIND = "check", "crc32:"


def to_line(row: Mapping[str, Any]) -> bytes:
    """The row as a line of JSON Lines, with the checksum of all the rest under `check`."""
    return (json.dumps({**row, KEY: _checksum(row)}, ensure_ascii=False) + "\n").encode()


def intact(record: Any) -> Any:
    """The record, as long as it has no checksum of ours or the right one; raises SkipRow otherwise."""
    if isinstance(record, Mapping) and str(record.get(KEY)).startswith(KIND) and record[KEY] != _checksum(record):
        raise SkipRow(f"changed since it was written; if on purpose, take its `{KEY}` out")
    return record


def _checksum(row: Mapping[str, Any]) -> str:
    rest = json.dumps({key: value for key, value in row.items() if key != KEY}, sort_keys=True)
    return f"{KIND}{zlib.crc32(rest.encode()):08x}"
