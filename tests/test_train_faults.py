"""What breaks while training: signals, killed processes, full disks, flipped bits. Each ends in the result of a run
that nothing happened to, or in one sentence; nothing hangs and nothing is lost."""

from __future__ import annotations

import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import train_cases as cases
from parallel import ended, fork, in_two_processes, logs, start_two
from test_train_parallel import ROOT, write_recipe
from test_train_resume import same_bits

from headstart.errors import ANOTHER_IS_GONE, HeadError, TrainingError
from headstart.heads.store import load_head
from headstart.recipe import Recipe
from headstart.stopping import Stopped
from headstart.train.modes import MODES, start_processes
from headstart.train.preparation import user_errors

SETTINGS = ("train.save_every=5", "train.eval_every=4", "train.max_steps=8")


def signalled(training: Any, number: signal.Signals, at: int) -> Any:
    """A training whose own process gets a signal in the middle of that step."""
    take_step = training.step

    def step(progress, schedule, *more):
        if progress.step == at - 1:
            os.kill(os.getpid(), number)
        return take_step(progress, schedule, *more)

    training.step = step
    return training


# -- signals -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_saves_after_the_step_and_the_resumed_run_equals_straight(tmp_path, number, status):
    recipe = cases.recipe(*SETTINGS)
    cases.training(tmp_path / "straight", recipe).finish()
    before = signal.getsignal(number)
    with pytest.raises(Stopped, match=f"stopped by {number.name}: step 3 of 8 is saved in .*run; .* --resume") as left:
        signalled(cases.training(tmp_path / "run", recipe), number, 3).finish()
    assert left.value.exit_status == status and signal.getsignal(number) is before
    assert cases.newest(tmp_path / "run").name == "step-00000003"
    cases.training(tmp_path / "run", recipe, resume=True).finish()
    same_bits(tmp_path / "straight", tmp_path / "run")


def test_a_signal_in_the_last_step_ends_a_finished_run(tmp_path):
    signalled(cases.training(tmp_path / "run", cases.recipe(*SETTINGS)), signal.SIGTERM, 8).finish()
    assert load_head(tmp_path / "run/head")


def test_a_second_interrupt_ends_at_once_and_a_second_sigterm_does_not(tmp_path, monkeypatch):
    recipe = cases.recipe(*SETTINGS)
    with pytest.raises(Stopped, match="step 2 of 8"):  # the launcher of a ^C sends it on: one and the same
        signalled(signalled(cases.training(tmp_path / "echo", recipe), signal.SIGINT, 2), signal.SIGINT, 2).finish()
    with pytest.raises(Stopped, match="step 2 of 8"):
        signalled(signalled(cases.training(tmp_path / "both", recipe), signal.SIGTERM, 2), signal.SIGTERM, 2).finish()
    monkeypatch.setattr("headstart.stopping.ECHO_SECONDS", 0.0)
    with pytest.raises(KeyboardInterrupt):
        signalled(signalled(cases.training(tmp_path / "twice", recipe), signal.SIGINT, 2), signal.SIGINT, 2).finish()


PARALLEL = (*SETTINGS, "train.batch_size=1", "train.timeout=30")


def parallel_recipe(mode: str = "DDP", *more: str) -> Recipe:
    placement = next(name for name, modes in MODES.items() if mode in modes)
    return cases.recipe(*PARALLEL, f"target.placement={placement}", *more)


def train_as_a_script(folder: Path, recipe: Recipe, *, signal_rank_1_at: int | None = None) -> None:
    """What a training script does on each rank of a launch, resumed where there is a run; ends as it does."""
    with user_errors():
        processes = start_processes(recipe)
        training = cases.training(folder, recipe, resume=folder.exists(), processes=processes)
        if signal_rank_1_at is not None and processes.process_index == 1:
            signalled(training, signal.SIGTERM, signal_rank_1_at)
        training.finish()


def check_same_weights(one: Path, other: Path) -> None:
    assert cases.losses(one) == cases.losses(other)
    for name, value in cases.weights(one / "head").items():
        assert torch.equal(value, cases.weights(other / "head")[name]), name


def check_stop_and_kill(tmp_path: Path, mode: str) -> None:
    """One rank alone gets SIGTERM, all leave at the same step; then one is killed, the other says so; then it ends."""
    recipe = parallel_recipe(mode)
    run, log = tmp_path / "run", tmp_path / "logs"
    in_two_processes(log, lambda rank: train_as_a_script(tmp_path / "straight", recipe), mode)

    children = start_two(log, lambda rank: train_as_a_script(run, recipe, signal_rank_1_at=3), mode)
    assert ended(children, 120) == [143, 143], logs(log)
    assert logs(log).count("stopped by SIGTERM: step 3 of 8 is saved") == 1, "said once, though both have left"
    assert cases.newest(run).name == "step-00000003"

    def killed_in_step_7(rank: int) -> None:
        if rank == 1:
            with_kill = cases.training

            def training(*words: Any, **named: Any) -> Any:
                return signalled(with_kill(*words, **named), signal.SIGKILL, 7)

            cases.training = training
        train_as_a_script(run, recipe)

    begun = time.monotonic()
    assert ended(start_two(log, killed_in_step_7, mode), 120) == [ANOTHER_IS_GONE, -signal.SIGKILL], logs(log)
    assert time.monotonic() - begun < 100
    said = (log / "log-0").read_text()
    assert "rank 0: another process of this launch has ended" in said and "Traceback" not in said, said
    assert cases.newest(run).name == "step-00000005"

    assert ended(start_two(log, lambda rank: train_as_a_script(run, recipe), mode), 120) == [0, 0], logs(log)
    check_same_weights(tmp_path / "straight", run)


def test_all_ranks_leave_together_and_none_waits_for_one_that_was_killed(tmp_path):
    check_stop_and_kill(tmp_path, "DDP")


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["ZeRO-2", "ZeRO-3", "FSDP2"])
def test_so_they_do_in_sharded_modes(tmp_path, mode):
    check_stop_and_kill(tmp_path, mode)


def test_a_rank_that_hangs_is_given_up_after_the_time_limit(tmp_path):
    recipe = parallel_recipe("DDP", "train.timeout=3")

    def work(rank: int) -> None:
        if rank == 1:
            start = cases.training

            def training(*words: Any, **named: Any) -> Any:
                return signalled(start(*words, **named), signal.SIGSTOP, 3)

            cases.training = training
        train_as_a_script(tmp_path / "run", recipe)

    children = start_two(tmp_path / "logs", work)
    try:
        assert ended(children[:1], 60) == [ANOTHER_IS_GONE], logs(tmp_path / "logs")
        assert "has not answered within train.timeout" in (tmp_path / "logs/log-0").read_text()
    finally:
        os.kill(children[1], signal.SIGKILL)
        os.waitpid(children[1], 0)


@pytest.mark.slow
def test_ten_random_kills_of_a_rank_equal_straight(tmp_path):
    """Either rank, at any moment: while the processes find each other, some steps later, or in a save."""
    recipe = parallel_recipe("DDP", "train.save_every=1", "train.max_steps=60", "train.keep=2", "train.timeout=20")
    log, run, seed = tmp_path / "logs", tmp_path / "run", 0
    in_two_processes(log, lambda rank: train_as_a_script(tmp_path / "straight", recipe))
    moments, reached = random.Random(seed), set()
    for kill in range(1, 11):
        children = start_two(log, lambda rank: train_as_a_script(run, recipe))
        victim, steps, in_a_save = moments.randrange(2), moments.randrange(-2, 6), moments.random() < 0.5
        wait_for_steps(run, steps, in_a_save)
        time.sleep(moments.random() * (0.02 if steps > 0 else 1.0))
        os.kill(children[victim], signal.SIGKILL)
        statuses, name = ended(children, 90), newest_name(run)
        print(f"seed {seed}, kill {kill}: rank {victim}, {steps} steps on, in a save {in_a_save}: {statuses}, {name}")
        assert statuses[victim] == -signal.SIGKILL and statuses[1 - victim] == ANOTHER_IS_GONE, logs(log)
        assert "Traceback" not in logs(log), logs(log)
        reached.add(name)
    assert len(reached) > 4, "the kills hardly met a step: the test has shown little"
    assert ended(start_two(log, lambda rank: train_as_a_script(run, recipe)), 120) == [0, 0], logs(log)
    check_same_weights(tmp_path / "straight", run)


def newest_name(run: Path) -> str:
    return max((folder.name for folder in run.glob("checkpoints/step-????????")), default="step-00000000")


def wait_for_steps(run: Path, steps: int, in_a_save: bool) -> None:
    """Until a run has saved so many steps more, and if asked for until it writes another one; 0 or less: not at all."""
    first, until = int(newest_name(run)[5:]), time.monotonic() + 60
    while steps > 0 and time.monotonic() < until:
        if int(newest_name(run)[5:]) >= first + steps and (not in_a_save or list(run.glob("checkpoints/.*.partial"))):
            return
        time.sleep(0.0005)


# -- damaged files -----------------------------------------------------------------------------------------------------


def flip(path: Path, place: int) -> None:
    """One bit of a file."""
    content = bytearray(path.read_bytes())
    content[place % len(content)] ^= 1 << (place % 8)
    path.write_bytes(content)


def test_a_flipped_bit_anywhere_in_a_checkpoint_is_passed_over_aloud(tmp_path, capsys):
    recipe = cases.recipe("train.save_every=2", "train.max_steps=8", "train.keep=2")
    target = tiny.target()
    cases.training(tmp_path / "straight", recipe, target=target).finish()
    training = cases.training(tmp_path / "run", recipe, target=target)
    cases.stop_after_save(training, 6)
    with pytest.raises(cases.Stopped):
        training.finish()
    newest, draw = cases.newest(tmp_path / "run"), random.Random(0)
    for file in sorted(newest.iterdir()):
        whole = file.read_bytes()
        for place in (0, len(whole) // 2, draw.randrange(len(whole)), len(whole) - 1):
            flip(file, place)
            if file.name == "state.json" and same_state(file.read_bytes(), whole):
                continue  # a blank between two words is no news
            assert cases.newest(tmp_path / "run").name == "step-00000004", (file.name, place)
            assert f"{newest} is damaged ({file.name}" in capsys.readouterr().err.replace("the bytes of ", "")
            file.write_bytes(whole)
        file.write_bytes(whole[:-1])
        assert cases.newest(tmp_path / "run").name == "step-00000004", f"{file.name} cut short"
        file.write_bytes(whole)
    assert cases.newest(tmp_path / "run") == newest

    flip(newest / "optimizer.safetensors", 999)
    capsys.readouterr()
    cases.training(tmp_path / "run", recipe, target=target, resume=True).finish()
    said = capsys.readouterr()
    assert "step-00000006 is damaged (the bytes of optimizer.safetensors" in said.err
    assert "going on from" in said.out and "step-00000004" in said.out
    same_bits(tmp_path / "straight", tmp_path / "run")
    names = {folder.name for folder in (tmp_path / "run/checkpoints").iterdir()}
    assert names == {"best", "step-00000006", "step-00000006.damaged", "step-00000008"}, "kept, and no longer counted"


def same_state(one: bytes, other: bytes) -> bool:
    try:
        return json.loads(one) == json.loads(other)
    except ValueError:
        return False


def test_a_damaged_checkpoint_never_costs_the_sound_one_before_it(tmp_path):
    """With one kept, a damaged one of a later step would outlive all others."""
    recipe = cases.recipe("train.save_every=2", "train.max_steps=6", "train.keep=2")
    training = cases.training(tmp_path / "run", recipe)
    cases.stop_after_save(training, 4)
    with pytest.raises(cases.Stopped):
        training.finish()
    flip(tmp_path / "run/checkpoints/step-00000004/head.safetensors", 500)
    recipe = cases.recipe("train.save_every=1", "train.max_steps=6", "train.keep=1")
    training = cases.training(tmp_path / "run", recipe, resume=True)
    cases.stop_after_save(training, 3)
    with pytest.raises(cases.Stopped):
        training.finish()
    assert cases.newest(tmp_path / "run").name == "step-00000003"


def test_where_no_checkpoint_is_sound_nothing_starts_again_in_silence(tmp_path):
    recipe = cases.recipe("train.save_every=2", "train.max_steps=4")
    training = cases.training(tmp_path / "run", recipe)
    cases.stop_after_save(training, 2)
    with pytest.raises(cases.Stopped):
        training.finish()
    flip(tmp_path / "run/checkpoints/step-00000002/head.safetensors", 500)
    lines = (tmp_path / "run/metrics.jsonl").read_text()
    with pytest.raises(TrainingError, match=r"no checkpoint in .* is as it was written \(step-00000002\); restore one"):
        cases.training(tmp_path / "run", recipe, resume=True)
    assert (tmp_path / "run/metrics.jsonl").read_text() == lines


def test_a_damaged_head_is_refused_by_name_and_never_shipped(tmp_path):
    recipe = cases.recipe("train.save_every=2", "train.eval_every=2", "train.max_steps=4")
    training = cases.training(tmp_path / "run", recipe)
    ship, best = training._ship, tmp_path / "run/checkpoints/best"

    def damaged_before() -> None:
        flip(best / "head.safetensors", -3)
        ship()

    training._ship = damaged_before
    with pytest.raises(TrainingError, match="best is damaged .the bytes of head.safetensors are not .*remove it, and"):
        training.finish()
    assert not (tmp_path / "run/head").exists()
    with pytest.raises(HeadError, match="best is damaged .*take `weights` out of its config.json"):
        load_head(best)
    shutil.rmtree(best)
    cases.training(tmp_path / "run", recipe, resume=True).finish()
    assert load_head(tmp_path / "run/head")


# -- full disks --------------------------------------------------------------------------------------------------------


@contextmanager
def small_disk(folder: Path, kilobytes: int) -> Iterator[Path]:
    """A file system of that size; skips, and says so, where this machine lets nobody mount one."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting needs root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_disk_that_fills_up_keeps_the_last_checkpoint_and_the_run_goes_on(tmp_path):
    recipe = cases.recipe("train.save_every=2", "train.max_steps=8", "train.keep=9")
    cases.training(tmp_path / "straight", recipe).finish()
    with small_disk(tmp_path / "small", 700) as small:
        with pytest.raises(TrainingError, match="no checkpoint could be written .*no space left on device.; make room"):
            cases.training(small / "run", recipe).finish()
        reached = cases.newest(small / "run")
        assert reached.name in ("step-00000002", "step-00000004", "step-00000006")
        assert not list((small / "run/checkpoints").glob(".*")), "the room of the half-written one is given back"
        shutil.copytree(small / "run", tmp_path / "run")
    cases.training(tmp_path / "run", recipe, resume=True).finish()
    same_bits(tmp_path / "straight", tmp_path / "run")


def test_a_file_that_the_disk_takes_no_more_of_is_one_sentence_on_every_rank(tmp_path):
    """A limit on the size of a file stands for the disk: that needs no root. Both ranks end, and one says why."""
    recipe = parallel_recipe("DDP", "train.save_every=2")

    def work(rank: int, limited: bool) -> None:
        if limited and not rank:
            keep = cases.training

            def training(*words: Any, **named: Any) -> Any:
                made = keep(*words, **named)
                save = made._save

                def save_with_little_room() -> None:
                    if made.progress.step == 4:
                        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
                    save()

                made._save = save_with_little_room
                return made

            cases.training = training
        train_as_a_script(tmp_path / "run", recipe)

    log = tmp_path / "logs"
    assert ended(start_two(log, lambda rank: work(rank, True)), 60) == [1, 1], logs(log)
    assert logs(log).count("no checkpoint could be written") == 1 and "Traceback" not in logs(log)
    assert "rank 0: no checkpoint could be written" in logs(log) and "goes on from step-00000002" in logs(log)
    assert cases.newest(tmp_path / "run").name == "step-00000002"
    assert ended(start_two(log, lambda rank: work(rank, False)), 60) == [0, 0], logs(log)


def test_metrics_that_find_no_room_are_named(tmp_path):
    recipe = cases.recipe("train.max_steps=40", "train.save_every=null")

    def work() -> None:
        with user_errors():
            training = cases.training(tmp_path / "run", recipe)
            resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
            training.finish()

    assert ended([fork(work, tmp_path / "log")], 60) == [1]
    said = (tmp_path / "log").read_text()
    assert "run/metrics.jsonl cannot be written or read (file too large)" in said and "Traceback" not in said, said


# -- the command -------------------------------------------------------------------------------------------------------


def start_command(folder: Path, *words: str) -> subprocess.Popen[str]:
    """`headstart train` for a tiny recipe in `folder`, with two thousand steps to go."""
    recipe = ["--recipe", str(folder / "tiny.yaml"), "--output", str(folder), "--set", "train.max_steps=2000"]
    command = [sys.executable, "-m", "headstart.cli", "train", *recipe, "--set", "train.save_every=20", *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def read_until(process: subprocess.Popen[str], words: str) -> None:
    assert process.stdout is not None
    said = []
    for line in process.stdout:
        said.append(line)
        if words in line:
            return
    assert process.stderr is not None
    raise AssertionError(f"it never said {words!r}: {''.join(said)}{process.stderr.read()}")


@pytest.mark.slow
def test_the_command_of_one_process_saves_on_sigterm_and_says_so(tmp_path):
    write_recipe(tmp_path)
    process = start_command(tmp_path, "--cpu")
    read_until(process, "step 3/2000")
    process.terminate()
    output, said = process.communicate(timeout=120)
    assert process.returncode == 143, output + said
    sentence = re.search(r"stopped by SIGTERM: step (\d+) of 2000 is saved in .*demo; .* --resume goes on", said)
    assert sentence is not None and "Traceback" not in said, said
    assert newest_name(tmp_path / "demo") == f"step-{int(sentence[1]):08d}"


@pytest.mark.slow
def test_the_command_of_two_processes_ends_in_a_sentence_whether_bereft_or_stopped(tmp_path):
    write_recipe(tmp_path)
    launch_file = ("--accelerate", "two-cpu.yaml", "--set", "train.batch_size=1")
    process = start_command(tmp_path, *launch_file)
    read_until(process, "step 25/2000")
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    ranks = {variable(int(one), "RANK"): int(one) for one in children}
    os.kill(ranks["1"], signal.SIGKILL)
    output, said = process.communicate(timeout=200)
    assert process.returncode == 137, output + said
    assert f"rank 1 (process {ranks['1']}) was ended by SIGKILL" in said and "Traceback" not in said, said

    process = start_command(tmp_path, *launch_file, "--resume")
    read_until(process, "going on from")
    read_until(process, "loss")
    process.terminate()
    output, said = process.communicate(timeout=200)
    assert process.returncode == 143 and "Traceback" not in said, output + said
    assert said.count("stopped by SIGTERM: step ") == 1


def variable(process: int, name: str) -> str:
    """An environment variable of a process; empty where it has none."""
    words = Path(f"/proc/{process}/environ").read_bytes().decode(errors="replace").split("\0")
    return next((word.partition("=")[2] for word in words if word.startswith(f"{name}=")), "")
