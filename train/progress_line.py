"""Rate, time to go, and the share of time that was spent waiting for data."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Speed:
    """Since the last line, evaluations and checkpoints apart. wait_share: share of the time in which the next batch was
    not ready. seconds_left: to the last step, at the pace of this launch so far, with its evaluations."""

    tokens_per_second: float
    wait_share: float
    seconds_left: float

    def __str__(self) -> str:
        return (
            f"{self.tokens_per_second:.0f} tok/s  data wait {self.wait_share:.0%}  {clock_face(self.seconds_left)} left"
        )


class Meter:
    """Measures the loop; `clock` is replaced in tests."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self._clock = clock
        self._waited = 0.0

    def start(self, step: int, total: int) -> None:
        self._first_step, self._total = step, total
        self._start = self._last = self._clock()
        self._waited = 0.0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Time inside is waiting for data."""
        before = self._clock()
        yield
        self._waited += self._clock() - before

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Time inside is no part of the rate, but of the time to go: evaluations and checkpoints."""
        before = self._clock()
        yield
        self._last += self._clock() - before

    def lap(self, step: int, tokens: int) -> Speed:
        """The speed since the last lap, in which `tokens` tokens were read."""
        now = self._clock()
        seconds = max(now - self._last, 1e-9)
        pace = (now - self._start) / max(step - self._first_step, 1)
        speed = Speed(tokens / seconds, min(1.0, self._waited / seconds), pace * (self._total - step))
        self._last, self._waited = now, 0.0
        return speed


def clock_face(seconds: float) -> str:
    """`1:02:03`, or `2:03` under an hour."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
