"""Small files are there whole or not at all, and nothing is left where one could not be written."""

from __future__ import annotations

import ast
import errno
import os

import pytest
import torch
from test_rooms import MODULES

from headstart.atomic import save_tensors, whole_folder, write_bytes, write_text
from headstart.errors import disk_fault


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
"""They write into a folder that gets its name when it is whole."""


def test_no_room_writes_a_file_in_another_way():
    for module in MODULES.keys() - {"headstart.atomic"}:
        for node in ast.walk(ast.parse(MODULES[module].read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and module not in WHOLE_FOLDERS:
                assert node.attr not in ("write_text", "write_bytes"), f"{module}: use headstart.atomic"
            if isinstance(node, ast.ImportFrom) and node.module == "safetensors.torch":
                # of a full disk it raises an error that nobody takes for one
                assert "save_file" not in [name.name for name in node.names], f"{module}: use atomic.save_tensors"


def test_tensors_that_a_disk_refuses_are_a_fault_of_the_disk(tmp_path):
    with pytest.raises(FileNotFoundError) as caught:
        save_tensors({"a": torch.zeros(3)}, tmp_path / "gone/a.safetensors")
    assert caught.value.filename == str(tmp_path / "gone/a.safetensors")
    assert "cannot be written or read (no such file or directory)" in str(disk_fault(caught.value))


def test_a_folder_that_was_not_finished_leaves_what_was_there(tmp_path):
    with whole_folder(tmp_path / "head") as fresh:
        (fresh / "a").write_text("first")
    with pytest.raises(KeyboardInterrupt), whole_folder(tmp_path / "head") as fresh:
        (fresh / "a").write_text("second")
        raise KeyboardInterrupt
    assert (tmp_path / "head/a").read_text() == "first" and os.listdir(tmp_path) == ["head"]
