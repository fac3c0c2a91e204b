"""What a run tells: `metrics.jsonl`, always, and the trackers that the recipe names, as far as they can be reached.

    {"step": 200, "kind": "train", "loss": 2.31, "rate": 0.00098, ...}
    {"step": 200, "kind": "held_out", "loss": 2.40, "top_1": [0.35, 0.24, null, null], ...}

`step` counts optimiser steps and never falls, and there is no other counter. null stands where nothing was scored.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker, get_available_trackers

from headstart.atomic import write_text
from headstart.errors import naming
from headstart.recipe import Recipe
from headstart.train.run_folder import RunFolder

START_SECONDS = 30
"""How long all processes wait for wandb's server, whose own limit is 90; $WANDB_INIT_TIMEOUT says otherwise."""
FINISH_SECONDS = 60.0
"""How long a tracker may take to send the rest."""


class Metrics:
    """The one way out for numbers. Every rank holds one; only the main process writes.

    A resumed run starts behind its checkpoint: lines of later steps, which will come again, are dropped.
    """

    def __init__(self, run: RunFolder, recipe: Recipe, accelerator: Accelerator, *, step: int):
        self.last_step = step
        self._file = None
        self._trackers: dict[str, GeneralTracker] = {}
        if not accelerator.is_main_process:
            return
        drop_lines_after(run.metrics, step)
        self._file = run.metrics.open("a", encoding="utf-8")
        for name in recipe.logging.trackers:
            tracker = start_tracker(name, run, recipe)
            if tracker is not None:
                self._trackers[name] = tracker

    def write(self, step: int, kind: str, values: Mapping[str, Any]) -> None:
        """One line of kind `train` or `held_out`; trackers get the same numbers as `kind/name`."""
        assert step >= self.last_step, f"metrics of step {step} after those of step {self.last_step}"
        self.last_step = step
        if self._file is None:
            return
        with naming(self._file.name):
            self._file.write(json.dumps({"step": step, "kind": kind, **values}) + "\n")
            self._file.flush()
        numbers = plain_numbers(values, f"{kind}/")
        for name, tracker in list(self._trackers.items()):
            try:
                tracker.log(numbers, step=step)
            except Exception as error:  # whatever a tracker does, the run goes on
                del self._trackers[name]
                _warn(f"the tracker {name} failed ({_short(error)}); going on without it")

    def close(self) -> None:
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
        for name, tracker in self._trackers.items():
            try:
                within(FINISH_SECONDS, tracker.finish)
            except Exception as error:
                _warn(f"the tracker {name} did not finish ({_short(error)})")


def within(seconds: int | float, work: Callable[[], Any]) -> None:
    """`work()` in a thread of its own; raises what it raises, or TimeoutError once so many seconds have gone."""
    faults: list[Exception] = []

    def guarded() -> None:
        try:
            work()
        except Exception as error:
            faults.append(error)

    thread = threading.Thread(target=guarded, daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        raise TimeoutError(f"still busy after {seconds:g} s")
    if faults:
        raise faults[0]


def start_tracker(name: str, run: RunFolder, recipe: Recipe) -> GeneralTracker | None:
    """Starts one of Accelerate's trackers under the id of the run; None, after one warning, if it can't be started."""
    if name not in {str(available) for available in get_available_trackers()}:
        _warn(f"logging.trackers: {name} is not installed (pip install {name}); going on with {run.metrics.name} alone")
        return None
    os.environ.setdefault("WANDB_INIT_TIMEOUT", str(START_SECONDS))
    options = {"id": run.run_id, "name": recipe.name, "resume": "allow", "dir": str(run.path)}  # wandb's own
    try:
        tracker = LOGGER_TYPE_TO_CLASS[name](recipe.logging.project, **options)
        tracker.start()
        tracker.store_init_configuration(plain_values(recipe.model_dump()))
    except Exception as error:
        _warn(f"the tracker {name} could not be started ({_short(error)}); going on with {run.metrics.name} alone")
        return None
    return tracker


def drop_lines_after(path: Path, step: int) -> None:
    """Keeps the lines of a metrics file up to `step`; a line that a kill cut short goes too."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            break
        if line.endswith("\n") and record["step"] <= step:
            kept.append(line)
    write_text(path, "".join(kept))


def read_metrics(path: Path, kind: str | None = None) -> list[dict[str, Any]]:
    """The lines of a metrics file, oldest first, of one kind or of all."""
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [record for record in records if kind in (None, record["kind"])]


def plain_numbers(values: Mapping[str, Any], prefix: str) -> dict[str, float]:
    """Lists become `name/1`, `name/2`, ...; what is null is left out, since trackers know no n/a."""
    numbers = {}
    for name, value in values.items():
        items = {f"/{i}": item for i, item in enumerate(value, 1)} if isinstance(value, list) else {"": value}
        numbers.update({f"{prefix}{name}{end}": item for end, item in items.items() if isinstance(item, int | float)})
    return numbers


def plain_values(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings under dotted names, as numbers and texts, which is what all trackers take."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat.update(plain_values(value, f"{prefix}{key}."))
        else:
            flat[prefix + key] = value if isinstance(value, int | float | str) else str(value)
    return flat


def _warn(message: str) -> None:
    print(f"warning: {message}", file=sys.stderr, flush=True)


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"
