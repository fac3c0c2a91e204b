"""The one family of errors that a user's mistake can end in."""

from __future__ import annotations


class HeadstartError(Exception):
    """A mistake that the user can mend: one sentence saying what was found, what was expected and what to type next.

    The command line prints the message alone, without a traceback, and ends with `exit_status`.
    """

    exit_status = 1


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
