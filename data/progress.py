"""Progress of work over rows: how many, how fast, how long still."""

from __future__ import annotations

import sys
import time
from types import TracebackType

TERMINAL_SECONDS, LOG_SECONDS = 0.2, 30.0  # one line rewritten on a terminal, a new line now and then in a log


class Progress:
    """Counts rows on standard error.

        with Progress("rendering", total=60_000) as progress:
            for row in rows: progress.add()

    `extra` is counted too, in its own unit: `Progress("answering", total, unit="rows", extra="tokens")`.
    """

    def __init__(self, label: str, total: int | None = None, *, unit: str = "rows", extra: str | None = None):
        self.label, self.total, self.unit, self.extra = label, total, unit, extra
        self.done = self.extra_done = 0
        self._start = self._shown = time.monotonic()
        self._on_terminal = sys.stderr.isatty()

    def expect(self, rows: int) -> None:
        """Adds to the total, once it is known."""
        self.total = (self.total or 0) + rows

    def add(self, rows: int = 1, extra: int = 0) -> None:
        self.done += rows
        self.extra_done += extra
        now = time.monotonic()
        if now - self._shown >= (TERMINAL_SECONDS if self._on_terminal else LOG_SECONDS):
            self._shown = now
            print(self.line(now - self._start), end="\r" if self._on_terminal else "\n", file=sys.stderr, flush=True)

    def line(self, seconds: float) -> str:
        """`rendering 1200 of 60000 rows, 410/s, 2:23 left` after so many seconds."""
        rate = self.done / seconds if seconds > 0 else 0.0
        of = f" of {self.total}" if self.total is not None else ""
        parts = [f"{self.label} {self.done}{of} {self.unit}", f"{rate:.3g}/s"]
        if self.extra:
            parts.append(f"{self.extra_done} {self.extra}, {self.extra_done / max(seconds, 1e-9):.3g}/s")
        if self.total is not None and rate > 0:
            left = int(max(self.total - self.done, 0) / rate)
            parts.append(f"{left // 3600}:{left // 60 % 60:02}:{left % 60:02} left")
        line = ", ".join(parts)
        return line.ljust(79) if self._on_terminal else line

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._on_terminal and self._shown > self._start:
            print("\r" + " " * 79, end="\r", file=sys.stderr, flush=True)
