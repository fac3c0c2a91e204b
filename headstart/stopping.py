"""SIGTERM, SIGHUP and ^C: long work ends where it can be gone on from, and with the status that a scheduler expects.

    with stop_requests():                    # training: a signal is remembered, and asked for after every step
        ...
        if signal := asked_to_stop():
            raise Stopped(signal, "step 7 is saved; the same command with --resume goes on")

    with unwinding():                        # work whose results are safe as they come: it ends at once, as by ^C
        ...

The status is 128 + the signal's number: 143 for SIGTERM, 130 for ^C, 129 for SIGHUP. A second ^C ends training at once.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from headstart.errors import HeadstartError

SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGHUP", "SIGTERM") if hasattr(signal, name))
"""A later one outweighs an earlier one. (Windows has no SIGHUP.)"""
ECHO_SECONDS = 2.0
"""A launcher sends ^C on to processes that the terminal has sent it to already; so long a second one is its echo."""

_asked: list[signal.Signals] = []
_last_interrupt = 0.0


class Stopped(HeadstartError):
    """Work that was asked to end and can be gone on with; every process of a launch raises it, the first one says it.

    `exit_status` is 128 + the number of the signal.
    """

    def __init__(self, by: signal.Signals, sentence: str):
        super().__init__(f"stopped by {by.name}: {sentence}")
        self.exit_status = 128 + by
        self.shared = True


class Terminated(KeyboardInterrupt):
    """What a signal raises within `unwinding`."""

    def __init__(self, by: signal.Signals):
        super().__init__(by.name)
        self.by = by


@contextmanager
def stop_requests() -> Iterator[None]:
    """Inside, a signal is only remembered; see `asked_to_stop`. SIGTERM may come again and again, as schedulers and
    launchers both send it."""
    _asked.clear()
    with _handled(_remember):
        yield


def asked_to_stop() -> signal.Signals | None:
    """The signal that this process has got since `stop_requests` began."""
    return max(_asked, key=SIGNALS.index, default=None)


def weight_of(asked: signal.Signals | None) -> float:
    """A number for the signal, to be summed over all processes; so every one of them learns of it in the same step."""
    return 0.0 if asked is None else 1e5 ** SIGNALS.index(asked)


def heaviest(total: int | float) -> signal.Signals | None:
    """The signal that any process was asked by, from the sum of the weights of up to a hundred thousand."""
    return next((one for one in reversed(SIGNALS) if total >= weight_of(one)), None)


@contextmanager
def unwinding() -> Iterator[None]:
    """Inside, SIGTERM and SIGHUP raise `Terminated` where the main thread stands, as ^C raises KeyboardInterrupt: what
    is open is closed, and what was written stays."""

    def end(number: int, _: Any) -> None:
        raise Terminated(signal.Signals(number))

    with _handled(end, SIGNALS[1:]):
        yield


def _remember(number: int, _: Any) -> None:
    global _last_interrupt
    if number == signal.SIGINT:
        since, _last_interrupt = time.monotonic() - _last_interrupt, time.monotonic()
        if signal.SIGINT in _asked and since > ECHO_SECONDS:
            raise KeyboardInterrupt
    _asked.append(signal.Signals(number))


@contextmanager
def _handled(handler: Any, signals: tuple[signal.Signals, ...] = SIGNALS) -> Iterator[None]:
    """`handler` for these signals, but for those that are ignored (`nohup` ignores SIGHUP). Only the main thread may
    say so; elsewhere everything stays as it is."""
    before = {}
    try:
        for one in signals:
            if signal.getsignal(one) is not signal.SIG_IGN:
                before[one] = signal.signal(one, handler)
    except ValueError:
        pass
    try:
        yield
    finally:
        for one, earlier in before.items():
            signal.signal(one, earlier)
