"""What can befall a run: a scheduler's signal, flipped bits, a full disk, a process that is killed. Each ends in the
same weights as a run that met with nothing, or in one sentence; nothing hangs."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import time
from pathlib import Path

import parallel
import pytest
import torch
import train_cases as cases
from safetensors.torch import load_file

from headstart.errors import HeadError, TrainingError, disk_fault
from headstart.recipe import Recipe
from headstart.train.checkpoint import latest_checkpoint
from headstart.train.leaving import Interrupted, Leaving
from headstart.train.modes import lost_process, start_processes
from headstart.train.preparation import user_errors

SETTINGS = ("train.save_every=3", "train.eval_every=4", "train.max_steps=12")


def same_heads(one: Path, other: Path) -> None:
    first, second = cases.weights(one / "head"), cases.weights(other / "head")
    assert first.keys() == second.keys()
    assert all(torch.equal(value, second[name]) for name, value in first.items())


def signalled(training, step: int, number: int):
    """The training, which gets a signal within that step."""
    take = training.step

    def with_signal(progress, *rest):
        taken = take(progress, *rest)
        if progress.step == step:
            signal.raise_signal(number)
        return taken

    training.step = with_signal
    return training


@pytest.fixture(scope="module")
def straight(tmp_path_factory) -> Path:
    """A run that met with nothing."""
    folder = tmp_path_factory.mktemp("straight") / "run"
    cases.training(folder, cases.recipe(*SETTINGS)).finish()
    return folder


# -- signals -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_the_step_saves_it_and_leaves(tmp_path, straight, number, status):
    recipe, before = cases.recipe(*SETTINGS), signal.getsignal(number)
    with pytest.raises(
        Interrupted, match=rf"stopped by {number.name} after step 5 of 12, .* go on with --resume"
    ) as left:
        signalled(cases.training(tmp_path / "run", recipe), 5, number).finish()
    assert left.value.exit_status == status and signal.getsignal(number) is before
    assert cases.newest(tmp_path / "run").name == "step-00000005"
    cases.training(tmp_path / "run", recipe, resume=True).finish()
    same_heads(tmp_path / "run", straight)


def test_a_signal_in_the_last_step_finishes_the_run(tmp_path, straight):
    signalled(cases.training(tmp_path / "run", cases.recipe(*SETTINGS)), 12, signal.SIGTERM).finish()
    same_heads(tmp_path / "run", straight)


def test_a_second_signal_ends_at_once():
    training = cases.Accelerator(cpu=True, mixed_precision="no")
    with pytest.raises(KeyboardInterrupt), Leaving(training) as leaving:
        signal.raise_signal(signal.SIGINT)
        assert leaving.asked() == signal.SIGINT
        signal.raise_signal(signal.SIGINT)


def test_a_signal_to_one_process_is_one_to_all(tmp_path):
    recipe = cases.recipe(*SETTINGS, "train.batch_size=1", "head.dropout=0")

    def work(rank: int) -> str:
        training = cases.training(tmp_path / "run", recipe, processes=start_processes(recipe, smoke=True))
        try:
            (signalled(training, 4, signal.SIGTERM) if rank == 1 else training).finish()
        except Interrupted as left:
            return f"{left.exit_status} {training.progress.step}"
        return "finished"

    def go_on(rank: int) -> str:
        processes = start_processes(recipe, smoke=True)
        return str(cases.training(tmp_path / "run", recipe, resume=True, processes=processes).finish().step)

    assert parallel.in_two_processes(tmp_path / "logs", work) == ["143 4", "143 4"]
    assert parallel.in_two_processes(tmp_path / "logs", go_on) == ["12", "12"]


# -- damage on the disk ------------------------------------------------------------------------------------------------


def flip(path: Path, place: float = 0.9) -> None:
    """One bit of the file, so far into it."""
    content = bytearray(path.read_bytes())
    content[int(place * (len(content) - 1))] ^= 4
    path.write_bytes(content)


DAMAGES = {
    "head": lambda folder: flip(folder / "head.safetensors"),
    "optimiser": lambda folder: flip(folder / "optimizer.safetensors"),
    "generators": lambda folder: flip(folder / "random-00000.safetensors"),
    "configuration": lambda folder: flip(folder / "config.json", 0.5),
    "progress": lambda folder: (folder / "state.json").write_text(
        (folder / "state.json").read_text().replace('"tokens": ', '"tokens": 1')
    ),
    "cut": lambda folder: os.truncate(folder / "optimizer.safetensors", 100),
    "gone": lambda folder: (folder / "random-00000.safetensors").unlink(),
    "no state": lambda folder: (folder / "state.json").write_bytes(b""),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(tmp_path, straight, damage, capsys):
    shutil.copytree(straight / "checkpoints/step-00000009", tmp_path / "step-00000009")
    shutil.copytree(straight / "checkpoints/step-00000012", tmp_path / "step-00000012")
    damage(tmp_path / "step-00000012")
    assert latest_checkpoint(tmp_path) == tmp_path / "step-00000009"
    assert "step-00000012 is damaged" in capsys.readouterr().err
    damage(tmp_path / "step-00000009")
    with pytest.raises(TrainingError, match="none of the 2 checkpoints in .* is as it was written"):
        latest_checkpoint(tmp_path)


def test_a_run_whose_newest_checkpoint_is_damaged_ends_alike(tmp_path, straight):
    recipe = cases.recipe(*SETTINGS)
    stopped = cases.training(tmp_path / "run", recipe)
    cases.stop_after_save(stopped, 9)
    with pytest.raises(cases.Stopped):
        stopped.finish()
    flip(tmp_path / "run/checkpoints/step-00000009/optimizer.safetensors")
    resumed = cases.training(tmp_path / "run", recipe, resume=True)
    assert resumed.progress.step == 6
    resumed.finish()
    same_heads(tmp_path / "run", straight)


def test_a_best_head_that_was_damaged_is_not_shipped(tmp_path):
    training = cases.training(tmp_path / "run", cases.recipe(*SETTINGS))
    ship = training._ship

    def damaged() -> None:
        flip(tmp_path / "run/checkpoints/best/head.safetensors")
        ship()

    training._ship = damaged
    with pytest.raises(HeadError, match=r"best/head.safetensors is damaged"):
        training.finish()
    assert not (tmp_path / "run/head").exists()


def test_a_full_disk_in_earnest(tmp_path, straight):
    """The checkpoint that found no room is not there, the one before is, and with room the run goes on from it."""
    small = tmp_path / "small"
    small.mkdir()
    one = sum(file.stat().st_size for file in (straight / "checkpoints/step-00000012").iterdir())
    size = f"size={int(2.5 * one) + 2**16}"
    if subprocess.run(["mount", "-t", "tmpfs", "-o", size, "tmpfs", str(small)], capture_output=True).returncode:
        pytest.skip("mounting a small disk takes the rights of root")
    try:
        recipe = cases.recipe(*SETTINGS, "train.eval_every=null", "train.keep=9")
        with pytest.raises(OSError) as full:
            cases.training(small / "run", recipe).finish()
        sentence = str(disk_fault(full.value))
        assert "cannot be written or read (no space left on device); make room" in sentence
        shutil.copytree(small / "run", tmp_path / "run")
    finally:
        subprocess.run(["umount", "-l", str(small)], check=True)
    assert cases.newest(tmp_path / "run").name == "step-00000006"
    cases.training(tmp_path / "run", recipe, resume=True).finish()
    last = "checkpoints/step-00000012/head.safetensors"
    first, second = load_file(straight / last), load_file(tmp_path / "run" / last)
    assert all(torch.equal(value, second[name]) for name, value in first.items())


# -- killed processes --------------------------------------------------------------------------------------------------


def start_two(folder: Path, run: Path, recipe: Recipe, mode: str = "DDP") -> list[int]:
    """Two forked processes on their way with a run, which goes on from its newest checkpoint."""

    def work(rank: int) -> object:
        with user_errors():
            processes = start_processes(recipe, smoke=mode == "DDP")
            return cases.training(run, recipe, resume=True, processes=processes).finish()

    return parallel.start_two_processes(folder, work, mode)


def wait_for(children: list[int], seconds: float) -> list[int | None]:
    """Exit statuses as a shell has them; None of those that are still there after so many seconds, which are killed."""
    statuses: dict[int, int] = {}
    end = time.monotonic() + seconds
    while len(statuses) < len(children) and time.monotonic() < end:
        for child in children:
            if child not in statuses:
                found, status = os.waitpid(child, os.WNOHANG)
                if found:
                    statuses[child] = os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    for child in children:
        if child not in statuses:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    return [statuses.get(child) for child in children]


DISTRIBUTED = ("head.dropout=0.3", "train.batch_size=1", "train.max_steps=60", "train.save_every=4", "logging.every=20")


def kill_again_and_again(tmp_path: Path, recipe: Recipe, mode: str, kills: int, seed: int) -> None:
    draw = random.Random(seed)
    assert wait_for(start_two(tmp_path / "logs", tmp_path / "straight", recipe, mode), 120) == [0, 0]
    killed = 0
    while killed < kills:
        children = start_two(tmp_path / "logs", tmp_path / "run", recipe, mode)
        checkpoint = latest_checkpoint(tmp_path / "run/checkpoints")
        begun = time.monotonic()
        while latest_checkpoint(tmp_path / "run/checkpoints") == checkpoint and time.monotonic() < begun + 60:
            time.sleep(0.02)  # so that every launch comes further, and the run ends some day
        time.sleep(draw.uniform(0, 0.5))
        victim = draw.randrange(2)
        os.kill(children[victim], signal.SIGKILL)
        statuses = wait_for(children, 60)
        said = (tmp_path / f"logs/log-{1 - victim}").read_text()
        if statuses == [0, 0]:
            break  # finished before
        killed += 1
        assert statuses[victim] in (-9, 0) and statuses[1 - victim] in (0, 1), f"seed {seed}: {statuses}\n{said}"
        if statuses[1 - victim] == 1:
            assert "another process of this run has gone" in said and "Traceback" not in said, said
    assert killed >= kills / 2, "the run was over too early to be killed often"
    assert wait_for(start_two(tmp_path / "logs", tmp_path / "run", recipe, mode), 120) == [0, 0]
    same_heads(tmp_path / "run", tmp_path / "straight")


@pytest.mark.slow
def test_ten_random_kills_equal_a_straight_run(tmp_path):
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")
    kill_again_and_again(tmp_path, cases.recipe(*DISTRIBUTED, "train.max_steps=200"), "DDP", 10, seed)


def test_only_errors_of_the_transport_are_taken_for_lost_processes():
    assert lost_process(RuntimeError("[../gloo/transport/tcp/pair.cc:544] Connection closed by peer [127.0.0.1]:1"))
    assert lost_process(torch.distributed.DistNetworkError("timed out"))
    assert lost_process(RuntimeError("mat1 and mat2 shapes cannot be multiplied")) is None
    assert lost_process(ValueError("x")) is None
