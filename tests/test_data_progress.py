"""Progress says how many, how fast and how long still, and never disturbs what is printed."""

from __future__ import annotations

from headstart.data import progress as module
from headstart.data.progress import Progress


def test_a_line_has_counts_a_rate_and_the_time_left():
    progress = Progress("rendering")
    progress.add(50)
    assert progress.line(10.0) == "rendering 50 rows, 5/s"
    progress.expect(3000)
    progress.expect(50)
    assert progress.line(10.0) == "rendering 50 of 3050 rows, 5/s, 0:10:00 left"
    answering = Progress("answering", total=4, extra="tokens")
    answering.add(1, 300)
    answering.add(0, 100)
    assert answering.line(2.0) == "answering 1 of 4 rows, 0.5/s, 400 tokens, 200/s, 0:00:06 left"


def test_a_log_gets_a_line_now_and_then(monkeypatch, capsys):
    clock = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: clock[0])
    with Progress("rendering", total=100) as progress:
        for _ in range(100):
            clock[0] += 1
            progress.add()
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.splitlines()[0] == "rendering 30 of 100 rows, 1/s, 0:01:10 left"
    assert len(shown.err.splitlines()) == 3
