"""A hub that never answers is found out once, in a bounded time, for models and data alike; what is cached works."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny


@pytest.fixture
def silent() -> Iterator[str]:
    """The address of a server that takes connections and says nothing."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(50)  # the system itself takes up the connections
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


SCRIPT = """
import time, warnings
from headstart import hub
from headstart.data.sources import read
from headstart.errors import DataError, TargetError, show_warnings_plainly
from headstart.loading import load_tokenizer
from headstart.recipe import Source

show_warnings_plainly()
hub.ANSWER_SECONDS = 2.0
begun = time.monotonic()
print(len(load_tokenizer("org/cached")), "words are cached")
for work in (lambda: load_tokenizer("org/mistyped"), lambda: list(read(Source(source="org/set"), {}))):
    try:
        work()
    except (TargetError, DataError) as error:
        print(type(error).__name__, error)
print("seconds", time.monotonic() - begun)
"""


def cached(home: Path, name: str) -> None:
    """A model in the hub's cache, as a download leaves it."""
    folder = home / "hub" / f"models--{name.replace('/', '--')}"
    tiny.save(folder / "snapshots" / "abc")
    (folder / "refs").mkdir()
    (folder / "refs/main").write_text("abc")


def test_a_hub_that_never_answers_costs_one_wait_and_one_warning(tmp_path, silent):
    cached(tmp_path / "home", "org/cached")
    environment = {**os.environ, "HF_HUB_OFFLINE": "0", "HF_ENDPOINT": silent, "HF_HOME": str(tmp_path / "home")}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    lines = done.stdout.splitlines()
    assert done.returncode == 0 and len(lines) == 4, done.stdout + done.stderr
    assert "261 words are cached" in lines[0]
    assert "TargetError org/mistyped could not be loaded: no copy is cached, and the hub cannot be reached" in lines[1]
    assert "DataError The data set 'org/set:train' can't be loaded" in lines[2]
    assert float(lines[3].split()[1]) < 40, "one wait, not one for each file"
    warnings = [line for line in done.stderr.splitlines() if "does not answer" in line]
    assert warnings == [
        f"warning: the hub at {silent} does not answer (ReadTimeout within 2 s); only what is cached on this machine "
        "is used"
    ]
