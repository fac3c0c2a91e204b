"""The one family of errors that a user's mistake can end in."""

from __future__ import annotations

import errno
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

ANOTHER_IS_GONE = 75
"""Exit status of a process that could not go on without another one of its launch (EX_TEMPFAIL: worth another try)."""


class HeadstartError(Exception):
    """A mistake that the user can mend: one sentence saying what was found, what was expected and what to type next.

    The command line prints the message alone, without a traceback, and ends with `exit_status`.
    """

    exit_status = 1
    shared = False
    """All processes of a launch raise it, and the main one says it for them."""


class RecipeError(HeadstartError):
    """A recipe or a command line that cannot be run as it stands; nothing was loaded yet."""

    exit_status = 2


class TargetError(HeadstartError):
    """A target model that cannot be loaded, or that cannot be decoded exactly with trees."""


class DataError(HeadstartError):
    """Data that cannot be used; the message names the file, the line and the reason."""


class HeadError(HeadstartError):
    """A head that cannot be built, saved, loaded, or used with this target."""


class TrainingError(HeadstartError):
    """Training that must not go on: a NaN, a lost checkpoint, a run folder that exists."""


class HeadstartWarning(UserWarning):
    """What a user should know though the work goes on; the command line prints it as one sentence."""


def warn(sentence: str) -> None:
    """Says so, through Python's own warnings: once for each place that asked."""
    warnings.warn(sentence, HeadstartWarning, stacklevel=3)


def show_warnings_plainly() -> None:
    """From now on a HeadstartWarning is its sentence alone on stderr; others look as they always do."""
    before = warnings.showwarning

    def show(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
        if issubclass(category, HeadstartWarning):
            print(f"warning: {message}", file=sys.stderr, flush=True)
        else:
            before(message, category, *where, **more)

    warnings.showwarning = show


_DISK_FAULTS = {
    getattr(errno, name, None)  # Windows has not all of them
    for name in "ENOENT EACCES EPERM EROFS ENOSPC EDQUOT EFBIG EEXIST ENOTDIR EISDIR ENAMETOOLONG".split()
}


def disk_fault(error: OSError) -> HeadstartError | None:
    """The sentence for a file that the user's disk or permissions refuse; None for what is no matter of theirs."""
    if error.errno not in _DISK_FAULTS or error.strerror is None:
        return None
    place = f"{error.filename}" if error.filename is not None else "a file"
    return HeadstartError(
        f"{place} cannot be written or read ({error.strerror[0].lower()}{error.strerror[1:]}); "
        "make room or mend its permissions, or name another place, with --output where files are written"
    )


@contextmanager
def naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Gives an OSError from within the file that it is about; a write to a full disk doesn't name it."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            error.filename = os.fspath(path)
        raise


def refuse_unwritable(folder: str | os.PathLike[str]) -> None:
    """Raises the OSError of a folder that no file can be made in, before the work whose result goes there."""
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), os.fspath(folder))
