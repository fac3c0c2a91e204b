"""Two processes take the same steps as one, on data of their own; the launch lines of the README do what they say."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
import torch
import train_cases as cases
from parallel import in_two_processes

from headstart.recipe import load_recipe
from headstart.train.metrics import read_metrics
from headstart.train.modes import start_processes
from headstart.train.preparation import describe

ROOT = Path(__file__).resolve().parents[1]
SETTINGS = ("head.dropout=0", "train.eval_every=3", "train.save_every=5", "train.max_steps=9", "train.clip=0.5")


def test_one_process_equals_two(tmp_path):
    """26 rows: the last step of an epoch has one micro-batch of two rows, a row for each of the processes."""
    one = cases.recipe(*SETTINGS, "train.accumulation=4", "train.batch_size=1")
    two = cases.recipe(*SETTINGS, "train.accumulation=2", "train.batch_size=1", "train.world_size=2")

    def work(rank: int) -> str:
        training = cases.training(tmp_path / "two", two, processes=start_processes(two, smoke=True))
        accelerator = training.accelerator
        assert accelerator.num_processes == 2 and accelerator.process_index == rank
        assert type(training.wrapped.module).__name__ == "DistributedDataParallel"
        accelerator.print(describe(training))
        training.finish()
        return str(training.progress.tokens)

    tokens = in_two_processes(tmp_path / "logs", work)
    progress = cases.training(tmp_path / "one", one).finish()
    assert tokens == [str(progress.tokens)] * 2
    for name, value in cases.weights(tmp_path / "one/head").items():
        torch.testing.assert_close(cases.weights(tmp_path / "two/head")[name], value, rtol=1e-5, atol=1e-5)
    for kind in ("train", "held_out"):
        lines, twins = (read_metrics(tmp_path / name / "metrics.jsonl", kind) for name in ("one", "two"))
        assert [line["step"] for line in lines] == [line["step"] for line in twins], "one rank writes"
        for line, twin in zip(lines, twins, strict=True):
            assert line["loss"] == pytest.approx(twin["loss"], rel=1e-5)
            assert line["top_1"] == twin["top_1"]
    check_announcement((tmp_path / "logs/log-0").read_text())
    assert (tmp_path / "logs/log-1").read_text() == ""
    last = cases.newest(tmp_path / "two")
    assert sorted(file.name for file in last.glob("random-*")) == [f"random-0000{rank}.safetensors" for rank in (0, 1)]


def test_two_processes_resume_to_the_bit(tmp_path):
    recipe = cases.recipe(*SETTINGS, "head.dropout=0.3", "train.batch_size=1")

    def straight(rank: int) -> None:
        cases.training(tmp_path / "straight", recipe, processes=start_processes(recipe, smoke=True)).finish()

    def stopped(rank: int) -> None:
        training = cases.training(tmp_path / "resumed", recipe, processes=start_processes(recipe, smoke=True))
        cases.stop_after_save(training, 5)
        with pytest.raises(cases.Stopped):
            training.finish()

    def resumed(rank: int) -> None:
        torch.manual_seed(999 + rank)
        processes = start_processes(recipe, smoke=True)
        cases.training(tmp_path / "resumed", recipe, resume=True, processes=processes).finish()

    for number, work in enumerate((straight, stopped, resumed)):
        in_two_processes(tmp_path / f"logs-{number}", work)
    assert cases.losses(tmp_path / "straight") == cases.losses(tmp_path / "resumed")
    for name, value in cases.weights(tmp_path / "straight/head").items():
        assert torch.equal(value, cases.weights(tmp_path / "resumed/head")[name])


def check_announcement(text: str) -> None:
    """World size 2 is printed, and the two ranks begin with different rows."""
    assert re.search(r"world size 2, mode DDP, device cpu", text), text
    assert "trainable of" in text
    rows = [set(line.split(", ")) for line in re.findall(r"rank \d begins with rows: (.*)", text)]
    assert len(rows) == 2 and rows[0] and rows[1] and not rows[0] & rows[1]


def write_recipe(folder: Path) -> Path:
    """A recipe for the command line: a tiny target in a folder and a file of token rows."""
    tiny.save(folder / "target")
    with open(folder / "rows.jsonl", "w") as file:
        for row in cases.random_rows(26):
            file.write(json.dumps({"input_ids": row.input_ids, "loss_mask": list(map(int, row.supervised))}) + "\n")
    text = cases.recipe(
        *SETTINGS,
        f"target.name={folder / 'target'}",
        f"data.train=[{{source: {folder / 'rows.jsonl'}, format: ids}}]",
        "data.held_out={fraction: 0.1}",
    ).to_yaml()
    (folder / "tiny.yaml").write_text(text)
    return folder / "tiny.yaml"


def launch(words: list[str], folder: Path, **variables: str) -> str:
    """The output of a command from the repository's root; its errors too."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


ACCELERATE = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch"]
TWO_CPU = [*ACCELERATE, "--config_file", "recipes/accelerate/two-cpu.yaml"]


@pytest.mark.slow
def test_launched_by_accelerate_two_processes_equal_one(tmp_path):
    recipe = ["--recipe", str(write_recipe(tmp_path)), "--output", str(tmp_path)]
    one = ["--set", "train.accumulation=4", "--set", "train.batch_size=1", "--name", "one"]
    two = ["--set", "train.accumulation=2", "--set", "train.batch_size=1", "--name", "two"]
    text = launch([sys.executable, "train/medusa.py", *recipe, *one], tmp_path)
    assert "world size 1" in text and f"headstart eval --head {tmp_path / 'one'}" in text
    text = launch([*TWO_CPU, "train/medusa.py", *recipe, *two], tmp_path, ACCELERATE_USE_CPU="true")
    check_announcement(text)
    for name, value in cases.weights(tmp_path / "one/head").items():
        torch.testing.assert_close(cases.weights(tmp_path / "two/head")[name], value, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_launch_lines(tmp_path):
    """`-m headstart.train.medusa` is launched from the wheel, in test_wheel.py."""
    one_process = ["--cpu", "--num_processes", "1", "--num_machines", "1", "--mixed_precision", "no"]
    words = [*ACCELERATE, *one_process, "--dynamo_backend", "no"]
    words += ["train/medusa.py", "--recipe", "llama70b.yaml", "--smoke"]
    text = launch([*words, "--output", str(tmp_path)], tmp_path)
    assert "world size 1" in text and (tmp_path / "llama70b-smoke/head/head.safetensors").is_file()


@pytest.mark.slow
def test_two_processes_smoke_a_packaged_recipe(tmp_path):
    words = [*TWO_CPU, "train/medusa.py", "--recipe", "quickstart.yaml", "--smoke", "--output", str(tmp_path)]
    check_announcement(launch(words, tmp_path, ACCELERATE_USE_CPU="true"))


@pytest.mark.slow
def test_a_sharded_recipe_is_rehearsed_on_two_processes_then_evaluated(tmp_path):
    """The 70B recipe, small, with half of the target on each process; the report rebuilds its target from the run."""
    launch_file = ["--config_file", "recipes/accelerate/zero3-cpu.yaml"]
    recipe = ["--recipe", "llama70b.yaml", "--smoke", "--output", str(tmp_path)]
    text = launch([*ACCELERATE, *launch_file, "train/medusa.py", *recipe], tmp_path)
    assert "world size 2, mode ZeRO-3, device cpu" in text and "1/2 on each process" in text
    assert re.search(r"acceptance decoded on 3 held-out prompts: τ [1-9]\.\d\d with a chain", text), text
    run = tmp_path / "llama70b-smoke"
    assert load_recipe(run / "recipe.yaml").target.placement == "shard"
    cli = [sys.executable, "-m", "headstart.cli"]
    launch([*cli, "eval", "--head", str(run), "--set", "eval.num_prompts=2", "--device", "cpu"], tmp_path)
    assert json.loads((run / "report.json").read_text())
    assert {file.suffix for file in run.glob("report.*")} == {".json", ".md", ".html"}


@pytest.mark.slow
def test_a_launch_that_becomes_another_ends_in_one_sentence(tmp_path):
    """Both start quietly: one process for two, and plain data parallelism for ZeRO-3."""
    smoke = ["train/medusa.py", "--recipe", "quickstart.yaml", "--smoke", "--output", str(tmp_path)]
    for words, variables, message in (
        (["--num_processes", "2", "--cpu"], {}, "asks for several processes, and this one would train alone"),
        (
            ["--config_file", "recipes/accelerate/zero3-cpu.yaml"],
            {"ACCELERATE_USE_CPU": "true"},
            "asks for ZeRO-3 and became 2 processes in DDP mode",
        ),
    ):
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
        done = subprocess.run(
            [*ACCELERATE, "--quiet", *words, *smoke],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode != 0 and message in done.stderr, done.stdout + done.stderr
    assert not (tmp_path / "quickstart-smoke").exists()
