"""What must not leave this machine: paths, keys, and the names of its user and host, looked for in a folder's files.

Everything is read before anything is sent: text line by line, of safetensors the header and of PNG the notes (numbers
and pixels hold no words), of anything else the runs of printable characters.
"""

from __future__ import annotations

import getpass
import os
import re
import socket
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import get_token

TEXT = {".json", ".md", ".py", ".txt", ".yaml"}
PATTERNS = {
    "an absolute path": r"(?<![\w:/.<>~%-])(?:~|/[\w.@+-]+)(?:/[\w.@+ -]*[\w.@+-])+"
    r"|\bfile:/+\w[\w./-]*|\b[A-Za-z]:\\{1,2}\w[\w\\. -]*",
    "a key of the hub": r"\bhf_[A-Za-z0-9]{20,}|\bapi_org_[A-Za-z0-9]{20,}",
    "a key of wandb": r"\bwandb_v\d+_\w{20,}|(?<![\w@])[0-9a-f]{40}(?!\w)",
    "a key": r"\bsk-[\w-]{20,}|\bgh[pousr]_\w{30,}|\bgithub_pat_\w{30,}|\bAKIA[0-9A-Z]{16}\b"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY",
    "a password in an address": r"\w+://[^/\s:@]+:[^/\s@]+@",
}
COMMIT = re.compile(r"commit|revision", re.IGNORECASE)
"""Lines in which 40 hexadecimal digits are a commit, not a key of wandb's."""
SECRET = re.compile(r"TOKEN|SECRET|PASSWORD|API_?KEY", re.IGNORECASE)
"""Environment variables whose values are nobody's business."""
COMMON = set(
    "root user users admin administrator nobody guest test ubuntu debian fedora centos ec2-user jovyan runner docker "
    "vagrant default localhost".split()
)
"""Names of accounts and hosts that name nobody, and are ordinary words."""


@dataclass(frozen=True)
class Leak:
    """One finding. what: `an absolute path`, `the name of this host`, ...; shown: as much of it as may be printed."""

    file: str
    line: int
    what: str
    shown: str

    def __str__(self) -> str:
        return f"{self.file} line {self.line} holds {self.what} ({self.shown})"


def find_leaks(folder: Path, *, allowed: Iterable[str] = (), ordinary: Iterable[str] = ()) -> list[Leak]:
    """Every leak in the files of a folder, in their order. allowed: public texts that are no leaks wherever they stand,
    such as the name of the repository. ordinary: words of our own, in which a user's name cannot be told apart."""
    secrets = _secrets(set(ordinary))
    found = []
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = path.relative_to(folder).as_posix()
        lines = [(0, name), *enumerate(_lines(path), start=1)]
        for number, line in lines:
            for text in allowed:
                line = line.replace(text, " ")
            found += [Leak(name, number, what, shown) for what, shown in _in_line(line, secrets)]
    return found


def _in_line(line: str, secrets: dict[str, re.Pattern[str]]) -> Iterator[tuple[str, str]]:
    for what, pattern in PATTERNS.items():
        for match in re.finditer(pattern, line):
            if what == "a key of wandb" and COMMIT.search(line):
                continue
            yield what, match[0] if what == "an absolute path" else match[0][:6] + "…"
    for what, pattern in secrets.items():
        if match := pattern.search(line):
            yield what, match[0] if what.startswith("the name") else match[0][:2] + "…"


def _secrets(ordinary: set[str]) -> dict[str, re.Pattern[str]]:
    """Patterns for what is known of this machine, by what to call it."""
    found = {}
    host = socket.gethostname()
    for what, name in {"the name of this user": _user(), "the name of this host": host}.items():
        if len(name) > 2 and name.lower() not in COMMON and name.lower() not in ordinary:
            found[what] = re.compile(rf"(?<![A-Za-z0-9]){re.escape(name)}(?![A-Za-z0-9])", re.IGNORECASE)
    values = {name: value for name, value in os.environ.items() if SECRET.search(name) and len(value) >= 8}
    if token := get_token():
        values["the hub's token"] = token
    for name, value in values.items():
        found[f"the value of {name}"] = re.compile(re.escape(value))
    return found


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # an account without a name
        return ""


def _lines(path: Path) -> list[str]:
    """What there is to read in a file."""
    content = path.read_bytes()
    if path.suffix == ".safetensors":
        content = content[8 : 8 + int.from_bytes(content[:8], "little")]
    elif path.suffix == ".png":
        content = b"\n".join(_png_notes(content))
    elif path.suffix not in TEXT:
        return [run.decode("ascii") for run in re.findall(rb"[ -~]{8,}", content)]
    return content.decode("utf-8", errors="replace").splitlines()


def _png_notes(content: bytes) -> Iterator[bytes]:
    """The chunks of a PNG but for the pixels, which are compressed, and noise to whoever reads them as text."""
    place = 8
    while place + 8 <= len(content):
        length = int.from_bytes(content[place : place + 4], "big")
        if content[place + 4 : place + 8] != b"IDAT":
            yield content[place + 8 : place + 8 + length]
        place += length + 12
