"""`headstart sweep`: trains, tunes and measures every combination of a grid at equal budget, and compares them.

    headstart sweep --recipe smollm2-medusa.yaml --grid head.num_heads=3,4,5 --grid head.loss=soft-ce,kl,lk --dry-run
    headstart sweep --recipe smollm2-medusa.yaml --recipe smollm2-eagle3.yaml --grid head.loss=soft-ce,lk --jobs 2

Runs are trained `--jobs` at a time, and tuned and measured one by one with nothing else running, since speed is
measured. A budget of `train.cpu_seconds` is turned into steps before that, for each run while it is alone. What is done
is kept, a half-trained run goes on, and a run that fails stops no other: the same line takes up what is left. What each
run is, and how long its parts took, stands in sweep.json; what its verbs said in RUN.log.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from headstart.atomic import write_text
from headstart.errors import TrainingError, refuse_unwritable
from headstart.eval import compare
from headstart.eval.grid import RECIPE, Combination
from headstart.eval.trees import TREES
from headstart.eval.trials import Trial, headstart, in_parallel, sets, threads_each, train, write_features
from headstart.recipe import load_recipe, quoted
from headstart.train.progress_line import clock_face
from headstart.train.run_folder import FREE_KEYS, flat

STORED = "sweep.json"
TRAIN, TUNE, MEASURE = PARTS = ("train", "tune", "eval")
"""Of a run, each a verb."""


class Sweep:
    """The runs in their folder, and what stands of each."""

    def __init__(self, found: Sequence[Combination], folder: Path, jobs: int, launch: Sequence[str] = ()):
        self.found, self.folder, self.jobs, self.launch = list(found), folder, jobs, tuple(launch)
        self.threads = threads_each(jobs)
        self.failed: dict[str, str] = {}
        self._lock = threading.Lock()
        self.stored = _read(folder / STORED)
        for one in found:
            self._refuse_other(one)

    def path(self, one: Combination) -> Path:
        return self.folder / one.name

    def missing(self, one: Combination) -> list[str]:
        """The parts of a run that are still to be done."""
        run, record = self.path(one), self.stored.get(one.name, {})
        measured = record.get("measured") == one.recipe.eval.model_dump(mode="json")
        done = {
            TRAIN: (run / "head").is_dir(),
            TUNE: (run / "head" / TREES).is_file(),
            MEASURE: measured and (run / "report.json").is_file(),
        }
        return [part for part in PARTS if not done[part]]

    def state(self, one: Combination) -> str:
        missing = self.missing(one)
        if TRAIN in missing:
            return "half trained" if (self.path(one) / "recipe.yaml").is_file() else "new"
        return "trained" if missing else "done"

    def seconds_left(self) -> tuple[float, bool]:
        """Wall time of what is missing, as the finished parts took; and whether that is known of every part. A training
        that nobody has seen takes its CPU seconds over the threads that it has."""
        total, known = 0.0, True
        for one in self.found:
            for part in self.missing(one) if one.name not in self.failed else ():
                seconds = self._expected(one, part)
                known &= seconds is not None
                total += (seconds or 0.0) / (self.jobs if part == TRAIN else 1)
        return total, known

    def _expected(self, one: Combination, part: str) -> float | None:
        names = {each.name for each in self.found}
        took = [
            each["seconds"][part] for name, each in self.stored.items() if name in names and part in each["seconds"]
        ]
        if took:
            return sum(took) / len(took)
        key, value = one.budget
        return value / self.threads if part == TRAIN and key == "train.cpu_seconds" else None

    def do(self, one: Combination, part: str, work: Callable[[], None]) -> None:
        """One part of a run, if it is missing and nothing failed before; keeps how long it took."""
        if part not in self.missing(one) or one.name in self.failed:
            return
        fresh = not any((self.path(one) / "checkpoints").glob("step-*"))
        started = time.monotonic()
        try:
            work()
        except TrainingError as error:
            self.fail(one, error)
            return
        with self._lock:  # runs that train side by side end when they end
            record = self.stored[one.name]
            if part != TRAIN or fresh:  # half a training says nothing of a whole one
                record["seconds"][part] = time.monotonic() - started
            if part == MEASURE:
                record["measured"] = one.recipe.eval.model_dump(mode="json")
            self._keep()
        self._tell(one, part, time.monotonic() - started)

    def fail(self, one: Combination, error: TrainingError) -> None:
        self.failed[one.name] = str(error)
        print(f"{one.name}: {error}", flush=True)

    def _keep(self) -> None:
        write_text(self.folder / STORED, json.dumps(self.stored, indent=1) + "\n")

    def _tell(self, one: Combination, part: str, seconds: float) -> None:
        done = sum(not self.missing(each) for each in self.found)
        left, known = self.seconds_left()
        to_go = f"{'' if known else 'more than '}{clock_face(left)} left" if left or not known else "nothing left"
        print(f"{one.name}: {part} took {clock_face(seconds)}; {done} of {len(self.found)} done, {to_go}", flush=True)

    def begin(self) -> None:
        """Writes down what every run is, before the first."""
        for one in self.found:
            record = self.stored.setdefault(one.name, {"seconds": {}})
            record["settings"] = list(one.settings)
            record["recipe"] = one.recipe.model_dump(mode="json")
        self._keep()

    def _refuse_other(self, one: Combination) -> None:
        """TrainingError where a run of this name was started with another recipe."""
        run, record = self.path(one), self.stored.get(one.name)
        if record is None:
            if (run / "recipe.yaml").is_file():
                raise TrainingError(f"{run} is a run of no sweep; choose another --output")
            return
        before, now = flat(record["recipe"]), flat(one.recipe.model_dump(mode="json"))
        changed = [
            f"{key} was {before.get(key)}, is {now.get(key)}"
            for key in {**before, **now}
            if not key.startswith(FREE_KEYS) and before.get(key) != now.get(key)
        ]
        if changed and run.is_dir():
            raise TrainingError(
                f"{run} was started with another recipe ({'; '.join(changed)}); choose another --output"
            )


def _read(path: Path) -> dict[str, Any]:
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        assert all({"seconds", "recipe"} <= record.keys() for record in stored.values())
    except FileNotFoundError:
        return {}
    except (ValueError, AssertionError, AttributeError) as error:
        raise TrainingError(
            f"{path} is damaged ({error!r}); choose another --output, or remove it and its runs"
        ) from None
    return stored


def run(
    found: Sequence[Combination],
    *,
    output: str | None = None,
    jobs: int = 1,
    dry_run: bool = False,
    launch: Sequence[str] = (),
) -> int:
    """Does what is missing of these runs, then compares them: 0, or 1 where a run failed.

    launch: words for `headstart train`, such as --cpu.
    """
    console = Console()
    names = dict.fromkeys(one.differs.get(RECIPE, "") for one in found)
    folder = Path(output) if output else Path("runs") / f"{'-'.join(filter(None, names)) or _base(found[0])}-sweep"
    sweep = Sweep(found, folder, min(jobs, len(found)), launch)
    show_plan(sweep, console)
    if dry_run:
        return 0
    folder.mkdir(parents=True, exist_ok=True)
    refuse_unwritable(folder)
    sweep.begin()
    shared = _features(sweep)
    for first in range(0, len(found), sweep.jobs):
        _wave(sweep, found[first : first + sweep.jobs], shared)
    return _end(sweep, console)


def _base(one: Combination) -> str:
    return load_recipe(one.source, one.settings).name


def _features(sweep: Sweep) -> tuple[str, ...]:
    """Settings of the states that all heads read, which are computed first, where a recipe trains from disk and names
    no cache of its own."""
    offline = [one for one in sweep.found if one.recipe.data.features == "offline"]
    if not offline or any(one.recipe.data.feature_cache for one in offline):
        return ()
    cache = sweep.folder / "features"
    in_parallel(
        lambda one: write_features([each.recipe for each in offline], one.source, cache, one.settings), offline[:1], 1
    )
    return (f"data.feature_cache={quoted(str(cache))}",)


def _wave(sweep: Sweep, some: Sequence[Combination], shared: tuple[str, ...]) -> None:
    """Trains these runs side by side, and then, one by one, tunes and measures them."""
    trials = {one.name: Trial(one.source, sweep.path(one), (*one.settings, *shared), sweep.launch) for one in some}

    def calibrate(one: Combination) -> None:
        run = sweep.path(one)
        if len(some) < 2 or one.budget[0] != "train.cpu_seconds" or TRAIN not in sweep.missing(one):
            return
        if (run / "recipe.yaml").is_file() and load_recipe(run / "recipe.yaml").train.max_steps is not None:
            return
        try:
            train(trials[one.name], threads=sweep.threads, calibrate=True)
        except TrainingError as error:
            sweep.fail(one, error)

    def train_one(one: Combination) -> None:
        sweep.do(one, TRAIN, lambda: train(trials[one.name], threads=sweep.threads))

    def finish(one: Combination) -> None:
        path = sweep.path(one)
        words = ["--head", str(path), *sets(_changed(one, path))]
        for part in (TUNE, MEASURE):
            sweep.do(one, part, lambda part=part: headstart(path, part, *words))

    in_parallel(calibrate, some, 1)
    in_parallel(train_one, some, sweep.jobs)
    in_parallel(finish, some, 1)


def _changed(one: Combination, run: Path) -> list[str]:
    """Settings of the measurement that the run's own recipe does not have."""
    stored = run / "recipe.yaml"
    if not stored.is_file():
        return []
    before, now = (recipe.eval.model_dump(mode="json") for recipe in (load_recipe(stored), one.recipe))
    return [f"eval.{key}={json.dumps(now[key])}" for key in now if before[key] != now[key]]


def _end(sweep: Sweep, console: Console) -> int:
    finished = [str(sweep.path(one)) for one in sweep.found if not sweep.missing(one)]
    if len(finished) > 1:
        compare.run(finished, output=str(sweep.folder), console=console)
    for name, sentence in sweep.failed.items():
        print(f"failed: {name}: {sentence}")
    if sweep.failed:
        print("mend what failed, and give the same line again: what is done is kept")
    return 1 if sweep.failed else 0


def show_plan(sweep: Sweep, console: Console) -> None:
    """The runs, what each differs in and how far it is, and how long they will take."""
    keys = list(dict.fromkeys(key for one in sweep.found for key in one.differs))
    table = Table(box=None)
    for heading in ("run", *keys, "state"):
        table.add_column(heading, overflow="fold")
    for one in sweep.found:
        table.add_row(one.name, *(one.differs.get(key, "-") for key in keys), sweep.state(one))
    console.print(table)
    key, value = sweep.found[0].budget
    same = len({one.budget for one in sweep.found}) == 1
    each = f"{key}={value:g} each" if same else "budgets as the grid says"
    console.print(
        f"{len(sweep.found)} runs in {sweep.folder}, {each}, {sweep.jobs} trained at a time",
        highlight=False,
        soft_wrap=True,
    )
    left, known = sweep.seconds_left()
    if not left and known:
        console.print("all of them are done")
        return
    hours = f"{left / 3600:.1f} hours" if left >= 360 else f"{left / 60:.1f} minutes"
    if known:
        console.print(f"{hours} to go, as the finished parts took", highlight=False, soft_wrap=True)
    elif left:
        console.print(
            f"{hours} to go for what is known; tuning and measuring, the first run will tell", highlight=False
        )
    else:
        console.print("how long that takes, the first run will tell")
