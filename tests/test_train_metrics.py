"""Numbers that come out: one step count that never falls, one tracker run however often resumed, and no harm done."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import train_cases as cases
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker

from headstart.train import trackers
from headstart.train.metrics import drop_lines_after, plain_numbers, read_metrics
from headstart.train.progress_line import Meter, clock_face

SETTINGS = ("train.accumulation=4", "train.max_steps=8", "train.eval_every=2", "train.save_every=4")
TRACKED = (*SETTINGS, "logging.trackers=[wandb]")


class FakeTracker(GeneralTracker):
    """Records every call; fails where it is told to."""

    name = "wandb"
    requires_logging_directory = False
    calls: list[tuple] = []
    fails_in: str | None = None

    def __init__(self, project: str, **options: object):
        super().__init__()
        self.note("init", project, options)

    @property
    def tracker(self):
        return self

    def note(self, call: str, *values: object) -> None:
        type(self).calls.append((call, *values))
        if call == type(self).fails_in:
            raise ConnectionError("no network\nand a long story")

    def start(self):
        self.note("start")

    def store_init_configuration(self, values):
        self.note("configuration", values)

    def log(self, values, step=None, **kwargs):
        self.note("log", step, values)

    def log_artifact(self, artifact):
        self.note("artifact", artifact.name, artifact.type)

    def finish(self):
        self.note("finish")


@pytest.fixture
def tracker(monkeypatch):
    class Tracker(FakeTracker):
        calls: list[tuple] = []

    monkeypatch.setenv("WANDB_MODE", "offline")  # no key is looked for
    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "wandb", Tracker)
    return Tracker


def test_steps_never_fall_and_a_resumed_run_is_the_same_run(tmp_path, tracker):
    training = cases.training(tmp_path / "run", cases.recipe(*TRACKED))
    cases.stop_after_save(training, 4)
    with pytest.raises(cases.Stopped):
        training.finish()
    first, tracker.calls = tracker.calls, []
    cases.training(tmp_path / "run", cases.recipe(*TRACKED), resume=True).finish()

    inits = [call for call in first + tracker.calls if call[0] == "init"]
    assert len(inits) == 2 and inits[0] == inits[1], "one per launch, with the same id"
    assert inits[0][2]["id"] == json.loads((tmp_path / "run/environment.json").read_text())["run_id"]
    logged = [call for call in first + tracker.calls if call[0] == "log"]
    steps = [step for _, step, _ in logged]
    assert steps == sorted(steps) == [1, 2, 2, 3, 4, 4, 5, 6, 6, 7, 8, 8]
    held_out = [step for _, step, values in logged if "held_out/loss" in values]
    assert held_out == [2, 4, 6, 8]
    assert all(isinstance(value, int | float) for _, _, values in logged for value in values.values())
    rates = [values["train/rate"] for _, _, values in logged if "train/rate" in values]
    assert len(rates) == 8
    assert tracker.calls[-2:] == [("artifact", "demo", "model"), ("finish",)]


@pytest.mark.parametrize("call", ["init", "start", "configuration", "log", "finish"])
def test_a_tracker_that_fails_never_stops_a_run(tmp_path, tracker, capsys, call):
    tracker.fails_in = call
    progress = cases.training(tmp_path / "run", cases.recipe(*TRACKED)).finish()
    warnings = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: the tracker wandb")]
    assert progress.step == 8 and len(warnings) == 1 and "ConnectionError: no network" in warnings[0]
    assert len(read_metrics(tmp_path / "run/metrics.jsonl")) == 12
    if call == "log":
        assert [entry[0] for entry in tracker.calls].count("log") == 1


def test_a_tracker_that_is_not_installed_never_stops_a_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(trackers, "get_available_trackers", list)
    progress = cases.training(tmp_path / "run", cases.recipe(*TRACKED)).finish()
    assert progress.step == 8
    assert "wandb is not installed (pip install wandb)" in capsys.readouterr().err


def test_lines_behind_the_checkpoint_are_dropped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"step": step, "kind": "train"}) + "\n" for step in (2, 4, 4, 6)]
    path.write_text("".join(lines) + '{"step": 3, "ki')
    drop_lines_after(path, 4)
    assert path.read_text() == "".join(lines[:3])
    drop_lines_after(Path(tmp_path / "none"), 4)


def test_what_is_not_available_is_null_in_the_file_and_left_out_elsewhere():
    values = {"loss": 1.5, "top_1": [0.5, None, 0.25]}
    assert plain_numbers(values, "held_out/") == {
        "held_out/loss": 1.5,
        "held_out/top_1/1": 0.5,
        "held_out/top_1/3": 0.25,
    }


def test_rate_share_and_time_to_go():
    now = [0.0]
    meter = Meter(lambda: now[0], lambda: 2 * now[0])  # two threads
    meter.start(10, 110)
    with meter.waiting():
        now[0] += 1
    now[0] += 3
    speed = meter.lap(20, 800)
    assert (speed.tokens_per_second, speed.wait_share) == (200, 0.25)
    assert (speed.seconds, speed.cpu_seconds) == (4, 8)
    assert speed.seconds_left == pytest.approx(0.4 * 90)
    assert str(speed) == "200 tok/s  data wait 25%  0:36 left"
    with meter.paused():
        now[0] += 50
    now[0] += 1
    speed = meter.lap(21, 100)
    assert (speed.tokens_per_second, speed.wait_share) == (100, 0)
    assert (speed.seconds, speed.cpu_seconds) == (1, 2), "evaluations are no part of what training costs"
    assert clock_face(3723.0) == "1:02:03"
