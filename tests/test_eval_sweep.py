"""A sweep: what is trained when, what is kept, what goes on after a kill, and that nothing is left running."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import compare_cases as cases
import psutil
import pytest
import tiny

from headstart import cli
from headstart.errors import RecipeError, TrainingError
from headstart.eval import sweep, trials
from headstart.eval.grid import combinations
from headstart.recipe import load_recipe
from headstart.train.metrics import read_metrics

WEAK, STRONG = [(1,) * 10, (1, 0) * 6 + (1, 1)], [(2,) * 6 + (1,), (2, 0) * 6 + (1,)]
GRID = ["head.num_heads=2,3,4"]


class Verbs:
    """Stands in for the processes, which take minutes: leaves behind what they would, and says what was asked."""

    def __init__(self, monkeypatch):
        self.said: list[str] = []
        self.failing: set[str] = set()
        monkeypatch.setattr(sweep, "train", self.train)
        monkeypatch.setattr(sweep, "headstart", self.verb)

    def train(self, trial, *, threads, calibrate=False):
        if trial.run.name in self.failing:
            raise TrainingError(f"{trial.run.name} met a NaN")
        self.said.append(f"{'calibrate' if calibrate else 'train'} {trial.run.name}")
        recipe = load_recipe(trial.recipe, [*trial.settings, f"name={trial.run.name}"])
        trial.run.mkdir(parents=True, exist_ok=True)
        if calibrate:
            recipe = recipe.model_copy(update={"train": recipe.train.model_copy(update={"max_steps": 9})})
            (trial.run / "recipe.yaml").write_text(recipe.to_yaml())
        else:
            cases.run_folder(trial.run, None, *trial.settings)

    def verb(self, run, verb, *words):
        self.said.append(f"{verb} {run.name}")
        if verb == "tune":
            (run / "head/trees.json").write_text("{}")
        else:
            self.words = words
            cases.write_report(cases.report(STRONG if "4" in run.name else WEAK), run)


@pytest.fixture
def verbs(monkeypatch):
    return Verbs(monkeypatch)


def run(folder: Path, *settings: str, grid=GRID, **options) -> int:
    return sweep.run(combinations(["smollm2-medusa.yaml"], grid, settings), output=str(folder), **options)


def test_runs_are_calibrated_alone_trained_side_by_side_and_measured_alone(verbs, tmp_path, capsys):
    assert run(tmp_path / "out", jobs=2) == 0
    first, second, third = (f"num_heads-{number}" for number in (2, 3, 4))
    assert verbs.said[:2] == [f"calibrate {first}", f"calibrate {second}"]
    assert sorted(verbs.said[2:4]) == [f"train {first}", f"train {second}"]
    assert verbs.said[4:8] == [f"tune {first}", f"eval {first}", f"tune {second}", f"eval {second}"]
    assert verbs.said[8:] == [f"train {third}", f"tune {third}", f"eval {third}"], "alone, it calibrates by itself"
    said = capsys.readouterr().out
    assert "3 of 3 done, nothing left" in said and f"highest τ: 2.30 by 1 {third}" in said
    assert {path.name for path in (tmp_path / "out").glob("comparison.*")} == {
        "comparison.html",
        "comparison.json",
        "comparison.md",
    }

    verbs.said.clear()
    assert run(tmp_path / "out", jobs=2) == 0 and not verbs.said, "what is done is kept"
    assert run(tmp_path / "out", grid=["head.num_heads=2,3,4,5"]) == 0
    assert verbs.said == ["train num_heads-5", "tune num_heads-5", "eval num_heads-5"], "a grid may grow"
    verbs.said.clear()
    assert run(tmp_path / "out", "eval.num_prompts=7") == 0
    assert verbs.said == [f"eval {name}" for name in (first, second, third)], "measured otherwise, not trained anew"
    assert "eval.num_prompts=7" in verbs.words


def test_a_run_that_fails_stops_no_other_and_is_taken_up_again(verbs, tmp_path, capsys):
    verbs.failing = {"num_heads-3"}
    assert run(tmp_path / "out") == 1
    said = capsys.readouterr().out
    assert "failed: num_heads-3: num_heads-3 met a NaN" in said and "2 of 3 done" in said
    assert (
        verbs.said.count("eval num_heads-4") == 1 and "2 runs compared" in (tmp_path / "out/comparison.md").read_text()
    )
    verbs.failing, verbs.said = set(), []
    assert run(tmp_path / "out") == 0
    assert verbs.said == ["train num_heads-3", "tune num_heads-3", "eval num_heads-3"]


def test_a_finished_run_of_another_recipe_is_not_taken_for_this_one(verbs, tmp_path):
    run(tmp_path / "out")
    with pytest.raises(TrainingError, match=r"train\.lr was 0\.001, is 0\.002"):
        run(tmp_path / "out", "train.lr=2e-3")
    cases.run_folder(tmp_path / "mine" / "num_heads-2", None)
    with pytest.raises(TrainingError, match="a run of no sweep"):
        run(tmp_path / "mine")
    (tmp_path / "out/sweep.json").write_text("{")
    with pytest.raises(TrainingError, match=r"sweep\.json is damaged"):
        run(tmp_path / "out")


def test_the_plan_is_shown_before_anything_runs(verbs, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(sweep, "threads_each", lambda jobs: 2)
    assert run(tmp_path / "out", "train.cpu_seconds=3600", jobs=3, dry_run=True) == 0
    said = capsys.readouterr().out
    assert "3 runs in" in said and "train.cpu_seconds=3600 each, 3 trained at a time" in said
    assert "0.5 hours to go for what is known" in said and said.count(" new") == 3
    assert not verbs.said and not (tmp_path / "out").exists()
    run(tmp_path / "out", "train.cpu_seconds=3600")
    stored = json.loads((tmp_path / "out/sweep.json").read_text())
    for record in stored.values():
        record["seconds"] = {"train": 3000, "tune": 300, "eval": 300}
    (tmp_path / "out/sweep.json").write_text(json.dumps(stored))
    capsys.readouterr()
    assert run(tmp_path / "out", "train.cpu_seconds=3600", grid=["head.num_heads=2,3,4,5"], dry_run=True) == 0
    said = capsys.readouterr().out
    assert "1.0 hours to go, as the finished parts took" in said and said.count(" done") == 3


def test_the_verb_refuses_a_wrong_grid_at_once(tmp_path, capsys):
    words = ["sweep", "--recipe", "smollm2-medusa.yaml", "--output", str(tmp_path / "out")]
    assert cli.main([*words, "--grid", "head.num_heads=3,99", "--grid", "head.losss=lk"]) == RecipeError.exit_status
    said = capsys.readouterr().err
    assert "2 faults" in said and "at most 16" in said and "`head.loss`" in said and not (tmp_path / "out").exists()
    assert cli.main([*words, "--grid", "head.num_heads=3,4", "--dry-run", "--jobs", "2"]) == 0
    assert "2 runs in" in capsys.readouterr().out


# -- processes ---------------------------------------------------------------------------------------------------------


def a_verb_that_sleeps(folder: Path, monkeypatch) -> None:
    """Every verb becomes a shell that starts a child of its own, as accelerate does, says so and waits for it."""
    script = folder / "python"
    script.write_text('#!/bin/sh\nsleep 60 &\necho "$!"\nwait\n')
    script.chmod(0o755)
    monkeypatch.setattr(trials.sys, "executable", str(script))


def wait_until(true, seconds=10.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_kill_ends_the_verbs_and_what_they_started(tmp_path, monkeypatch):
    a_verb_that_sleeps(tmp_path, monkeypatch)
    started = []

    def kill() -> None:
        wait_until(lambda: all((tmp_path / f"{name}.log").is_file() for name in "ab"))
        wait_until(lambda: all((tmp_path / f"{name}.log").read_text().strip() for name in "ab"))
        started.extend(int((tmp_path / f"{name}.log").read_text()) for name in "ab")
        os.kill(os.getpid(), signal.SIGTERM)

    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(KeyboardInterrupt):
        trials.in_parallel(lambda name: trials.headstart(tmp_path / name, "train"), ["a", "b", "c"], 2)
    killer.join()
    assert len(started) == 2 and not any(map(psutil.pid_exists, started))
    assert not (tmp_path / "c.log").exists() and not list(tmp_path.glob(".*.pid"))
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_run_that_is_still_at_work_is_not_started_again(tmp_path, monkeypatch):
    left = subprocess.Popen(["sleep", "60"], start_new_session=True)
    try:
        (tmp_path / ".a.pid").write_text(f"{left.pid}\n")
        with pytest.raises(TrainingError, match=f"kill -- -{left.pid}"):
            trials.headstart(tmp_path / "a", "train")
    finally:
        left.kill()
        left.wait()
    trials.refuse_running(tmp_path / "a")  # it is gone


def test_a_verb_that_fails_says_why(tmp_path):
    with pytest.raises(TrainingError, match=r"`headstart train` of a ended with status 2: Found no file .*a\.log"):
        trials.headstart(tmp_path / "a", "train", "--recipe", "nothing.yaml")


@pytest.mark.slow
def test_a_real_sweep_goes_on_after_a_kill(tmp_path):
    """Two kinds of head of a tiny target, killed while both train."""
    place, train = tiny.save(tmp_path / "target", "llama"), '[{source: "bundled:chats", split: train, limit: 40}]'
    small = [f"target.name={place}", "target.architecture=null", "target.dtype=float32", f"data.train={train}"]
    small += ["data.max_length=96", "head.draft_vocab_size=64", "train.cpu_seconds=3", "train.save_every=5"]
    small += ["eval.num_prompts=4", "eval.max_new_tokens=8", "eval.identity_prompts=2", "logging.every=1"]
    small += ['data.held_out.sources=[{source: "bundled:chats", split: held_out_topics, limit: 40}]']
    for kind, own in {"medusa": [], "eagle3": ["head.layers=[1,2,3]", "head.unrolled_steps=2"]}.items():
        recipe = load_recipe(f"smollm2-{kind}.yaml", [*small, *own])
        (tmp_path / f"{kind}.yaml").write_text(recipe.to_yaml())
    command = [sys.executable, "-m", "headstart.cli", "sweep", "--output", "out", "--jobs", "2", "--cpu"]
    command += ["--recipe", "medusa.yaml", "--recipe", "eagle3.yaml", "--grid", "smollm2-medusa:head.num_heads=1"]
    out, names = tmp_path / "out", ["smollm2-medusa", "smollm2-eagle3"]
    log = (tmp_path / "log").open("w")
    with subprocess.Popen(command, cwd=tmp_path, stdout=log, stderr=log) as first:
        wait_until(lambda: list(out.glob("*/checkpoints/step-*")), 1200)
        first.terminate()
    assert first.returncode == 130 and "interrupted" in (tmp_path / "log").read_text()
    steps = {path.parent.name: load_recipe(path).train.max_steps for path in out.glob("*/recipe.yaml")}
    assert steps.keys() == set(names) and all(steps.values()), "both were calibrated"
    assert not [
        one.info["cmdline"] for one in psutil.process_iter(["cmdline", "cwd"]) if one.info["cwd"] == str(tmp_path)
    ]

    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert any("going on from" in (out / f"{name}.log").read_text() for name in names)
    comparison = json.loads((out / "comparison.json").read_text())
    assert {run["name"] for run in comparison["runs"]} == set(names)
    for name in names:
        (figures,) = [run for run in comparison["runs"] if run["name"] == name]
        lines = read_metrics(out / name / "metrics.jsonl", "train")
        total = load_recipe(out / name / "recipe.yaml").train.max_steps
        assert [line["step"] for line in lines] == list(range(1, total + 1)) and total == steps[name]
        assert figures["training"]["steps"] == total and 0 < figures["training"]["cpu_seconds"]
        assert figures["acceptance_length"] >= 1 and figures["identity"] and figures["bytes"]
    assert all("refused" not in one for one in comparison["differences"].values())
    assert set(comparison["differing"]) >= {"head.type", "head.num_heads"}
