"""Rate, time to go, and the share of time that was spent waiting for data."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Speed:
    """Since the last line, evaluations and checkpoints apart. wait_share: share of the time in which the next batch was
    not ready. seconds_left: to the last step, at the pace of this launch so far, with its evaluations. cpu_seconds: of
    this process, all threads."""

    tokens_per_second: float
    wait_share: float
    seconds_left: float
    seconds: float
    cpu_seconds: float

    def __str__(self) -> str:
        return (
            f"{self.tokens_per_second:.0f} tok/s  data wait {self.wait_share:.0%}  {clock_face(self.seconds_left)} left"
        )


class Meter:
    """Measures the loop; the clocks, wall time and process time, are replaced in tests."""

    def __init__(
        self, clock: Callable[[], float] = time.perf_counter, cpu_clock: Callable[[], float] = time.process_time
    ):
        self._clock, self._cpu_clock = clock, cpu_clock
        self._waited = 0.0

    def start(self, step: int, total: int) -> None:
        self._first_step, self._total = step, total
        self._start = self._last = self._clock()
        self._last_cpu = self._cpu_clock()
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
        before, before_cpu = self._clock(), self._cpu_clock()
        yield
        self._last += self._clock() - before
        self._last_cpu += self._cpu_clock() - before_cpu

    def lap(self, step: int, tokens: int) -> Speed:
        """The speed since the last lap, in which `tokens` tokens were read."""
        now, now_cpu = self._clock(), self._cpu_clock()
        seconds = max(now - self._last, 1e-9)
        pace = (now - self._start) / max(step - self._first_step, 1)
        left = pace * (self._total - step)
        speed = Speed(tokens / seconds, min(1.0, self._waited / seconds), left, seconds, now_cpu - self._last_cpu)
        self._last, self._last_cpu, self._waited = now, now_cpu, 0.0
        return speed


def clock_face(seconds: float) -> str:
    """`1:02:03`, or `2:03` under an hour."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
