"""A run that was stopped, or killed at any moment, ends with the same bits as one that ran straight through."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest
import tiny
import torch
import train_cases as cases
from parallel import fork
from safetensors.torch import load_file

from headstart import atomic
from headstart.errors import TrainingError
from headstart.heads.store import load_head, read_description
from headstart.recipe import Recipe, load_recipe
from headstart.train import loop
from headstart.train.checkpoint import latest_checkpoint, sealed
from headstart.train.metrics import read_metrics
from headstart.train.random_state import random_state, set_random_state

SETTINGS = ("train.save_every=5", "train.eval_every=4")  # step 5 lies within the first epoch of 7 steps


def run_stopped_at(folder: Path, recipe: Recipe, step: int) -> None:
    training = cases.training(folder, recipe)
    cases.stop_after_save(training, step)
    with pytest.raises(cases.Stopped):
        training.finish()


TIMED = ("tokens_per_second", "data_wait_share")


def same_bits(one: Path, other: Path) -> None:
    """Heads, optimiser, generators, progress and losses of two finished runs are equal."""
    last = cases.newest(one)
    twin = other / "checkpoints" / last.name
    for name in ("head.safetensors", "optimizer.safetensors", "random-00000.safetensors"):
        tensors, twins = load_file(last / name), load_file(twin / name)
        assert tensors.keys() == twins.keys()
        for key, value in tensors.items():
            if key.startswith("python"):
                continue  # training does not draw from it, beartype's checks of shapes do
            assert torch.equal(value, twins[key]), f"{name} {key}"
    assert state_of(last) == state_of(twin)
    assert (one / "head/config.json").read_text() == (other / "head/config.json").read_text()
    for name, value in cases.weights(one / "head").items():
        assert torch.equal(value, cases.weights(other / "head")[name])
    timeless = [
        [{k: v for k, v in line.items() if k not in TIMED} for line in lines]
        for lines in (read_metrics(one / "metrics.jsonl"), read_metrics(other / "metrics.jsonl"))
    ]
    assert timeless[0] == timeless[1]


def state_of(checkpoint: Path) -> dict:
    """What state.json says, but for the checksums of the generators' files, among which Python's own is."""
    state = json.loads((checkpoint / "state.json").read_text())
    files = {name: said for name, said in state["files"].items() if not name.startswith("random")}
    return {**state, "files": files, "sha256": None}


@pytest.mark.parametrize("packing", ["false", "true"])
def test_resumed_from_the_middle_of_an_epoch_equals_straight(tmp_path, packing):
    recipe = cases.recipe(*SETTINGS, f"data.packing={packing}")
    cases.training(tmp_path / "straight", recipe).finish()
    run_stopped_at(tmp_path / "resumed", recipe, 5)
    torch.manual_seed(999)
    random.seed(999)  # the process that resumes comes from somewhere else
    training = cases.training(tmp_path / "resumed", recipe, resume=True)
    assert training.progress.step == 5 and 0 < training.progress.position
    training.finish()
    same_bits(tmp_path / "straight", tmp_path / "resumed")


def test_dropout_has_its_part_in_that_test(tmp_path):
    recipe = cases.recipe(*SETTINGS)
    cases.training(tmp_path / "straight", recipe).finish()
    run_stopped_at(tmp_path / "resumed", recipe, 5)
    training = cases.training(tmp_path / "resumed", recipe, resume=True)
    torch.manual_seed(999)
    training.finish()
    with pytest.raises(AssertionError):
        same_bits(tmp_path / "straight", tmp_path / "resumed")


def run_in_child(folder: Path, recipe: Recipe) -> int:
    """Starts, or takes up, a run in a child process; its process id."""
    return fork(lambda: cases.training(folder, recipe, resume=folder.exists()).finish(), folder.parent / "child.log")


def kill_again_and_again(folder: Path, recipe: Recipe, kills: int, moments: random.Random) -> int:
    """Kills a run that often, or more often until one kill has met a save, then lets it end; how many met one. A kill
    comes some milliseconds after the folder of a checkpoint that is being written has shown up, or at any time."""
    met = done = 0
    while done < kills or (met == 0 and done < 5 * kills):
        done += 1
        child = run_in_child(folder, recipe)
        begun = time.monotonic()
        in_a_save = moments.random() < 0.7
        while time.monotonic() - begun < 0.3 + 0.5 * moments.random() or (
            in_a_save and not list(folder.glob("checkpoints/.*")) and time.monotonic() - begun < 10
        ):
            time.sleep(0.0005)
        time.sleep(moments.random() * 0.01)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        met += bool(list(folder.glob("checkpoints/.*")))
        if latest_checkpoint(folder / "checkpoints"):
            load_head(cases.newest(folder), tiny.target())
    _, status = os.waitpid(run_in_child(folder, recipe), 0)
    assert status == 0, (folder.parent / "child.log").read_text()
    return met


KILLED = ("train.save_every=1", "train.eval_every=3", "train.max_steps=60", "train.keep=60")


def test_killed_during_saves_equals_straight(tmp_path):
    recipe = cases.recipe(*KILLED)
    cases.training(tmp_path / "straight", recipe).finish()
    met = kill_again_and_again(tmp_path / "killed", recipe, 4, random.Random(3))
    assert met > 0, "no kill met a save: the test has shown nothing"
    same_bits(tmp_path / "straight", tmp_path / "killed")
    assert not list((tmp_path / "killed").glob("checkpoints/.*")), "nothing half written is left"


@pytest.mark.slow
def test_killed_forty_times_equals_straight(tmp_path):
    recipe = cases.recipe(*KILLED, "train.max_steps=400", "train.keep=400")
    cases.training(tmp_path / "straight", recipe).finish()
    met = kill_again_and_again(tmp_path / "killed", recipe, 40, random.Random(0))
    assert met > 5
    same_bits(tmp_path / "straight", tmp_path / "killed")


def test_every_folder_loads_and_a_half_written_one_is_never_the_latest(tmp_path, monkeypatch):
    recipe = cases.recipe("train.max_steps=6", "train.save_every=2")
    target = tiny.target()
    training = cases.training(tmp_path / "run", recipe, target=target)
    published = []

    def dies_at_the_third(partial, folder):
        published.append(folder)
        if "step-00000006" in folder.name:
            raise KeyboardInterrupt
        publish(partial, folder)

    publish = atomic.publish
    monkeypatch.setattr(atomic, "publish", dies_at_the_third)
    with pytest.raises(KeyboardInterrupt):
        training.finish()
    folder = tmp_path / "run/checkpoints"
    assert (folder / ".step-00000006.partial").is_dir()
    assert cases.newest(tmp_path / "run").name == "step-00000004"
    (folder / "step-00000005").mkdir()  # what a copy that broke off would leave
    assert cases.newest(tmp_path / "run").name == "step-00000004"
    short = folder / "step-00000004/optimizer.safetensors"
    whole = short.read_bytes()
    short.write_bytes(whole[:-1])
    assert cases.newest(tmp_path / "run").name == "step-00000002"
    short.write_bytes(whole)
    shutil.rmtree(folder / "step-00000005")

    monkeypatch.undo()
    cases.training(tmp_path / "run", recipe, target=target, resume=True).finish()
    assert not list(folder.glob(".*"))
    for name in ("checkpoints/step-00000002", "checkpoints/step-00000004", "checkpoints/step-00000006", "head"):
        head = load_head(tmp_path / "run" / name, target)
        assert head.draft_logits(torch.randn(5, 64), target.output).isfinite().all()
        assert read_description(tmp_path / "run" / name)["target"]["name"] == "tiny-llama"


def test_old_checkpoints_go_and_the_best_stays(tmp_path):
    recipe = cases.recipe("train.save_every=2", "train.eval_every=2", "train.keep=2")
    cases.training(tmp_path / "run", recipe).finish()
    names = sorted(folder.name for folder in (tmp_path / "run/checkpoints").iterdir())
    assert names == ["best", "step-00000010", "step-00000012"]


def test_rate_and_best_survive_a_resume(tmp_path, monkeypatch):
    recipe = cases.recipe(
        *("train.lr=1e-3", "train.schedule=linear", "train.warmup=0.1", "train.max_steps=100", "train.eval_every=20"),
        *("train.save_every=20", "train.batch_size=1", "train.accumulation=1", "logging.every=1"),
    )
    score = 1.0

    def evaluate_as_told(wrapped, rows, recipe, *, step):
        totals = evaluate(wrapped, rows, recipe, step=step)
        assert totals is not None
        totals.loss_sum = totals.token_count * (score if step == 40 else score + 0.2)
        return totals

    evaluate = loop.evaluate
    monkeypatch.setattr(loop, "evaluate", evaluate_as_told)
    rows = cases.random_rows(20, longest=10)
    training = cases.training(tmp_path / "run", recipe, rows=rows)
    cases.stop_after_save(training, 40)
    with pytest.raises(cases.Stopped):
        training.finish()
    best = read_description(tmp_path / "run/checkpoints/best")["training"]
    assert (best["step"], best["best_value"]) == (40, 1.0)

    training = cases.training(tmp_path / "run", recipe, rows=rows, resume=True)
    assert training.schedule.rate(training.progress.step) == pytest.approx(6.67e-4, abs=1e-6)
    cases.stop_after_save(training, 60)
    with pytest.raises(cases.Stopped):
        training.finish()
    lines = read_metrics(tmp_path / "run/metrics.jsonl", "train")
    assert lines[40]["step"] == 41 and lines[40]["rate"] == pytest.approx(6.67e-4, abs=1e-6)
    best = read_description(tmp_path / "run/checkpoints/best")["training"]
    assert (best["step"], best["best_value"]) == (40, 1.0), "1.2 is no better than 1.0"


def test_looking_at_held_out_rows_leaves_no_trace(tmp_path):
    settings = ("train.accumulation=4", "train.max_steps=8", "train.save_every=4", "head.dropout=0.5")
    looks = cases.recipe(*settings, "train.eval_every=2")
    training = cases.training(tmp_path / "looks", looks)
    modes = []
    look = training._evaluate

    def look_and_note() -> None:
        look()
        modes.append(training.wrapped.module.training and training.head.training)

    training._evaluate = look_and_note
    training.finish()
    cases.training(tmp_path / "blind", cases.recipe(*settings)).finish()

    assert modes == [True] * 4
    steps = {kind: [line["step"] for line in read_metrics(tmp_path / "looks/metrics.jsonl", kind)] for kind in KINDS}
    assert steps == {"train": list(range(1, 9)), "held_out": [2, 4, 6, 8]}
    saved = sorted(folder.name for folder in (tmp_path / "looks/checkpoints").glob("step-*"))
    assert saved == ["step-00000004", "step-00000008"]
    assert cases.losses(tmp_path / "looks") == cases.losses(tmp_path / "blind")


KINDS = ("train", "held_out")


def test_a_budget_of_cpu_seconds_becomes_steps_and_is_rewound_to_the_bit(tmp_path, monkeypatch):
    ticks = iter(range(1000))
    monkeypatch.setattr(loop, "steps_within", with_clock(loop.steps_within, lambda: next(ticks) * 19.0))
    budget = cases.recipe(*SETTINGS, "train.max_steps=null", "train.cpu_seconds=12")
    run_stopped_at(tmp_path / "budget", budget, 5)  # 19 timed steps took 19 s
    stored = load_recipe(tmp_path / "budget/recipe.yaml")
    assert stored.train.max_steps == 12 and stored.train.cpu_seconds == 12

    monkeypatch.setattr(loop, "steps_within", None)  # a resumed run does not measure again
    cases.training(tmp_path / "budget", budget, resume=True).finish()
    cases.training(tmp_path / "straight", cases.recipe(*SETTINGS)).finish()
    assert cases.losses(tmp_path / "budget") == cases.losses(tmp_path / "straight")
    for name, value in cases.weights(tmp_path / "straight/head").items():
        assert torch.equal(value, cases.weights(tmp_path / "budget/head")[name])


def with_clock(steps_within, clock):
    return lambda *positional, **named: steps_within(*positional, **named, clock=clock)


def test_epochs_become_steps(tmp_path):
    recipe = cases.recipe("train.max_steps=null", "train.epochs=2")
    progress = cases.training(tmp_path / "run", recipe).finish()
    assert (progress.step, progress.epoch) == (14, 1)  # 26 rows: 13 micro-batches of two, 7 steps of two or one


def test_what_cannot_be_continued_is_refused_in_a_sentence(tmp_path):
    recipe = cases.recipe("train.save_every=5", "train.max_steps=6")
    cases.training(tmp_path / "run", recipe).finish()
    with pytest.raises(TrainingError, match="holds a run already; go on with it by --resume"):
        cases.training(tmp_path / "run", recipe)
    changed = cases.recipe("train.save_every=5", "train.max_steps=6", "train.lr=2e-2")
    with pytest.raises(TrainingError, match=r"another recipe \(train.lr was 0.01, is 0.02\)"):
        cases.training(tmp_path / "run", changed, resume=True)
    changed = cases.recipe("train.save_every=2", "train.max_steps=6", "eval.num_prompts=3")
    cases.training(tmp_path / "run", changed, resume=True).finish()
    environment = (tmp_path / "run/environment.json").read_text()
    (tmp_path / "run/environment.json").write_text(environment[:40])
    with pytest.raises(TrainingError, match="environment.json is damaged"):
        cases.training(tmp_path / "run", changed, resume=True)
    (tmp_path / "run/environment.json").write_text(environment)
    state = tmp_path / "run/checkpoints/step-00000006/state.json"
    for other in (sealed({**json.loads(state.read_text()), "format": 9}), {"format": 2, "files": {}}):
        state.write_text(json.dumps(other))
        with pytest.raises(TrainingError, match="has format [29], this version reads 3; start another run"):
            cases.training(tmp_path / "run", changed, resume=True)
    for folder in (tmp_path / "run/checkpoints").glob("step-*"):
        (folder / "state.json").write_text("{}")
    with pytest.raises(TrainingError, match="no checkpoint in .* is as it was written .*step-00000006.; restore one"):
        cases.training(tmp_path / "run", changed, resume=True)


def test_what_two_processes_have_read_is_twice_as_much_for_one(tmp_path):
    recipe = cases.recipe("train.save_every=2", "train.max_steps=6")
    stopped = cases.training(tmp_path / "run", recipe)
    cases.stop_after_save(stopped, 2)
    with pytest.raises(cases.Stopped):
        stopped.finish()
    state = cases.newest(tmp_path / "run") / "state.json"
    state.write_text(json.dumps(sealed({**json.loads(state.read_text()), "world_size": 2})))
    resumed = cases.training(tmp_path / "run", recipe, resume=True)
    assert (stopped.progress.position, resumed.progress.position) == (4, 8) and resumed.progress.step == 2


def test_a_resume_before_the_first_checkpoint_starts_again(tmp_path, capsys):
    recipe = cases.recipe("train.max_steps=4")
    cases.training(tmp_path / "straight", recipe).finish()
    training = cases.training(tmp_path / "run", recipe)
    training.step(training.progress, training.schedule)
    training.metrics.close()
    cases.training(tmp_path / "run", recipe, resume=True).finish()
    assert "no checkpoint yet" in capsys.readouterr().out
    same_bits(tmp_path / "straight", tmp_path / "run")


def test_the_environment_is_recorded(tmp_path):
    recipe = cases.recipe("train.max_steps=1")
    cases.training(tmp_path / "run", recipe).finish()
    cases.training(tmp_path / "run", recipe, resume=True).finish()
    record = json.loads((tmp_path / "run/environment.json").read_text())
    assert record["packages"]["torch"] == torch.__version__ and record["command"] == ["test"]
    assert len(record["resumed"]) == 1 and record["run_id"]
    assert load_recipe(tmp_path / "run/recipe.yaml") == recipe


def test_generators_go_back_to_where_they_were():
    import numpy

    random.gauss(0, 1)  # leaves a second number in store
    state = random_state()
    drawn = [random.gauss(0, 1), random.random(), numpy.random.rand(), numpy.random.randn(), torch.rand(3).tolist()]
    set_random_state(state)
    assert drawn == [
        random.gauss(0, 1),
        random.random(),
        numpy.random.rand(),
        numpy.random.randn(),
        torch.rand(3).tolist(),
    ]


def test_other_data_are_noticed(tmp_path):
    recipe = cases.recipe("train.save_every=5")
    run_stopped_at(tmp_path / "run", recipe, 5)
    with pytest.raises(TrainingError, match="step-00000005 has rows "):
        cases.training(tmp_path / "run", recipe, resume=True, rows=cases.random_rows(26, seed=7))


def test_a_finished_run_that_is_resumed_keeps_what_was_tuned_for_its_head(tmp_path):
    made = cases.recipe("train.max_steps=4")
    cases.training(tmp_path / "run", made).finish()
    before = cases.weights(tmp_path / "run/head")
    (tmp_path / "run/head/trees.json").write_text("{}")
    again = cases.training(tmp_path / "run", made, resume=True)
    assert again.finish().step == 4 and (tmp_path / "run/head/trees.json").read_text() == "{}"
    for name, value in cases.weights(tmp_path / "run/head").items():
        assert torch.equal(value, before[name])
