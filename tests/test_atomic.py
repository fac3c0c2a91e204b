"""Small files are there whole or not at all, and nothing is left where one could not be written."""

from __future__ import annotations

import ast
import errno
import os

import pytest
from test_rooms import MODULES

from headstart.atomic import write_bytes, write_text


def test_a_file_that_cannot_be_written_keeps_what_it_was(tmp_path, monkeypatch):
    path = tmp_path / "trees.json"
    write_text(path, "año\n")
    assert path.read_bytes() == "año\n".encode()

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError) as caught:
        write_text(path, "new")
    assert caught.value.filename == str(path), "the name that the user knows"
    assert path.read_bytes() == "año\n".encode() and list(tmp_path.iterdir()) == [path]
    monkeypatch.undo()
    write_bytes(path, b"new")
    assert path.read_bytes() == b"new" and list(tmp_path.iterdir()) == [path]
    with pytest.raises(FileNotFoundError) as caught:
        write_text(tmp_path / "gone/trees.json", "new")
    assert caught.value.filename == str(tmp_path / "gone/trees.json")


WHOLE_FOLDERS = {"headstart.heads.store", "headstart.heads.formats.files", "headstart.train.checkpoint"}
WHOLE_FOLDERS |= {"headstart.scripts.hub_folder"}
"""They write into a folder that gets its name when it is whole."""


def test_no_room_writes_a_file_in_another_way():
    for module in MODULES.keys() - WHOLE_FOLDERS - {"headstart.atomic"}:
        for node in ast.walk(ast.parse(MODULES[module].read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute):
                assert node.attr not in ("write_text", "write_bytes"), f"{module}: use headstart.atomic"
