"""Verbs of `headstart` as processes of their own, for work that trains and measures several heads.

What a verb says goes to RUN.log, beside the run; every half minute its last line is shown. Nothing is left running: ^C
and SIGTERM end the verbs too, and a run that a killed parent left in training is not started a second time. Free of
torch.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TypeVar

import psutil

from headstart.atomic import write_text
from headstart.errors import RecipeError, TrainingError
from headstart.heads.configs import Eagle3Config
from headstart.recipe import Recipe

LOOK_EVERY = 30.0
"""Seconds between two looks at what a verb says."""
PATIENCE = 10.0
"""Seconds that a verb has to end once it was told to."""
ONE_CPU = ("--cpu",)
"""How a head is launched: one process on the CPU."""
DONE = "complete"
"""Beside states on the disk: all of them are there."""

Item = TypeVar("Item")
Result = TypeVar("Result")
_running: set[subprocess.Popen[bytes]] = set()
_ended: set[int] = set()
"""Those that were told to end: their status says nothing of their work."""


@dataclass(frozen=True)
class Trial:
    """One head to be trained. recipe: a file or a packaged one, which `settings` change, as `--set` takes them."""

    recipe: str
    run: Path
    settings: tuple[str, ...]
    launch: tuple[str, ...] = ONE_CPU


def train(trial: Trial, *, threads: int, calibrate: bool = False) -> None:
    """Trains a head; one that stands already is kept, and a run that was stopped goes on. calibrate: only works out how
    many steps `train.cpu_seconds` are."""
    run = trial.run
    if (run / "head").is_dir():
        return
    words = ["train", "--recipe", trial.recipe, "--name", run.name, "--output", str(run.parent), *trial.launch]
    words += sets(trial.settings)
    words += ["--calibrate"] * calibrate + ["--resume"] * (run / "recipe.yaml").is_file()
    headstart(run, *words, OMP_NUM_THREADS=str(threads))


def threads_each(jobs: int) -> int:
    """Of a job's: its share of the cores, and no more than OMP_NUM_THREADS says."""
    share = max(1, (os.cpu_count() or 1) // jobs)
    asked = os.environ.get("OMP_NUM_THREADS", "")
    return min(share, int(asked)) if asked.isdecimal() and int(asked) else share


def in_parallel(work: Callable[[Item], Result], items: Sequence[Item], jobs: int) -> list[Result]:
    """`work` of every item, `jobs` at a time; the first error ends all that is running and starts nothing more."""
    with ThreadPoolExecutor(jobs) as pool, nothing_left_running():
        return list(pool.map(work, items))


def sets(settings: Sequence[str]) -> list[str]:
    """The words of a command line that apply these settings."""
    return [word for setting in settings for word in ("--set", setting)]


def write_features(recipes: Sequence[Recipe], recipe: str, folder: Path, settings: Sequence[str]) -> None:
    """Computes, once, the states that any of the recipes' heads reads; `recipe` names one of them, which has the same
    data."""
    if (folder / DONE).is_file():
        return
    layers: set[int] = set()
    for one in recipes:
        if isinstance(one.head, Eagle3Config):
            if one.head.layers is None:
                raise RecipeError(f"{one.name}: head.layers is null; name them, the states are computed beforehand")
            layers |= set(one.head.layers)
    words = ["data", "features", "--recipe", recipe, "--output", str(folder)]
    words += ["--layers", ",".join(map(str, sorted(layers)))] if layers else []
    headstart(folder, *words, *sets(settings))
    write_text(folder / DONE, "")


def refuse_other_data(recipes: Sequence[Recipe]) -> None:
    """RecipeError where two recipes learn from other data, or from another target."""
    first, *others = recipes
    for other in others:
        for section in ("target", "data"):
            ours, theirs = (getattr(one, section).model_dump() for one in (first, other))
            differing = [key for key in ours if ours[key] != theirs[key] and key not in ("features", "feature_cache")]
            if differing:
                raise RecipeError(
                    f"{first.name} and {other.name} differ in {section}.{differing[0]}; heads are compared on equal "
                    f"data: --set {section}.{differing[0]}=..."
                )


# -- processes ---------------------------------------------------------------------------------------------------------


def headstart(run: Path, *words: str, **environment: str) -> None:
    """Runs one verb to its end; TrainingError with the last line that it said, if it failed."""
    refuse_running(run)
    print(f"$ headstart {' '.join(words)}", flush=True)
    log = run.with_name(f"{run.name}.log")
    with log.open("ab") as file:
        command = [sys.executable, "-m", "headstart.cli", *words]
        # a session of its own: what accelerate starts belongs to it, and ends with it
        child = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, env={**os.environ, **environment}, start_new_session=True
        )
        _running.add(child)
    write_text(_pid_file(run), f"{child.pid}\n")
    try:
        status = _wait(child, run.name, log)
    finally:
        _running.discard(child)
    _pid_file(run).unlink(missing_ok=True)
    if child.pid in _ended:
        raise KeyboardInterrupt
    if status:
        raise TrainingError(
            f"`headstart {words[0]}` of {run.name} ended with status {status}: {last_line(log)} (all of it: {log})"
        )


def _wait(child: subprocess.Popen[bytes], name: str, log: Path) -> int:
    shown = ""
    while True:
        try:
            return child.wait(LOOK_EVERY)
        except subprocess.TimeoutExpired:
            line = last_line(log)
            if line != shown:
                print(f"  {name}: {line}", flush=True)
            shown = line


def last_line(log: Path) -> str:
    """What a log ends with; a line that is rewritten in place counts as it stands."""
    lines = log.read_text(encoding="utf-8", errors="replace").replace("\r", "\n").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")


@contextmanager
def nothing_left_running() -> Iterator[None]:
    """Ends the verbs that still run when something is raised within; SIGTERM is raised there, as ^C is."""
    on_main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, _interrupt) if on_main else None
    try:
        yield
    except BaseException:
        for child in list(_running):
            _ended.add(child.pid)
            _end(child.pid)
        raise
    finally:
        if on_main:
            signal.signal(signal.SIGTERM, before)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _end(group: int) -> None:
    """Ends a session's processes, those that do not listen after a while."""
    members = [one for one in psutil.process_iter() if _group(one.pid) == group]
    for number in (signal.SIGTERM, signal.SIGKILL):
        for one in members:
            try:
                one.send_signal(number)
            except psutil.NoSuchProcess:
                continue
        _, members = psutil.wait_procs(members, timeout=PATIENCE)


def _group(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except OSError:
        return None


def refuse_running(run: Path) -> None:
    """TrainingError where a parent that was killed left a verb of this run at work."""
    try:
        group, since = int(_pid_file(run).read_text(encoding="utf-8")), _pid_file(run).stat().st_mtime
    except (OSError, ValueError):
        return
    # processes of that number that are younger are others
    left = [one for one in psutil.process_iter() if _group(one.pid) == group]
    if any(one.pid == group and one.create_time() > since + 1 for one in left) or not left:
        return
    raise TrainingError(
        f"{run} is still being worked on by process group {group}, which was left behind; wait for it, or end it with "
        f"`kill -- -{group}`, and give the same line again"
    )


def _pid_file(run: Path) -> Path:
    return run.with_name(f".{run.name}.pid")
