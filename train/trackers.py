"""The trackers that a recipe names: wandb, tensorboard, trackio. They are Accelerate's, fed by a thread of their own.

    trackers = Trackers(run, recipe, step=0)
    trackers.log(200, {"train/loss": 2.31})
    trackers.page(200, "held_out/samples", "<p>...</p>")
    trackers.ship(run.head, record)
    trackers.close()

Training never waits for a tracker and never stops for one: what a tracker cannot take is told once, in a sentence, and
`metrics.jsonl` has all numbers anyway. wandb that cannot be reached keeps its records in the run's folder, to be sent
later. A resumed run goes on under the id that its folder keeps.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker, get_available_trackers

from headstart.recipe import Recipe
from headstart.train.run_folder import RunFolder

WAITING = 10_000
"""Calls that may wait for a slow tracker; with more, it is given up."""
LAST_SECONDS = 300.0
"""How long the end of a run waits for what is still to be sent, the head among it."""

Job = Callable[[Any], object]  # given one of Accelerate's trackers, whose class does not declare all that it has


class Trackers:
    """All trackers of one run. Every call returns at once."""

    def __init__(self, run: RunFolder, recipe: Recipe, *, step: int):
        """step: behind which the run goes on. Says which trackers are not installed, and how they are."""
        self._jobs: queue.Queue[Job | None] = queue.Queue(WAITING)
        installed = {str(name) for name in get_available_trackers()}
        names = [name for name in recipe.logging.trackers if name in installed]
        for name in recipe.logging.trackers:
            if name not in installed:
                _warn(f"logging.trackers: {name} is not installed (pip install {name}); going on without it")
        self._thread = threading.Thread(target=self._serve, args=(names, run, recipe, step), daemon=True)
        self._open = bool(names)
        if self._open:
            self._thread.start()

    def __bool__(self) -> bool:
        """Whether anyone listens: what is only for trackers need not be made otherwise."""
        return self._open

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Numbers of one optimiser step."""
        self._put(lambda tracker: tracker.log(dict(numbers), step=step))

    def page(self, step: int, name: str, html: str) -> None:
        """A small page to look at; tensorboard shows its text and its bold."""
        self._put(lambda tracker: _page(tracker, step, name, html))

    def table(self, step: int, name: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        self._put(lambda tracker: _table(tracker, step, name, header, rows))

    def ship(self, folder: Path, name: str, record: Mapping[str, Any]) -> None:
        """A trained head as an artifact (tensorboard knows none)."""
        self._put(lambda tracker: _ship(tracker, folder, name, record))

    def close(self) -> None:
        """Waits a while for what is still to be sent."""
        if not self._open:
            return
        self._put(None)
        self._open = False
        self._thread.join(LAST_SECONDS)
        if self._thread.is_alive():
            _warn(f"the trackers have not taken everything after {LAST_SECONDS:.0f} s; going on without them")

    def _put(self, job: Job | None) -> None:
        if not self._open:
            return
        try:
            self._jobs.put_nowait(job)
        except queue.Full:
            self._open = False
            _warn(f"the trackers are {WAITING} calls behind; going on without them")

    def _serve(self, names: Sequence[str], run: RunFolder, recipe: Recipe, step: int) -> None:
        """The thread: starts the trackers, and hands them one call after the other."""
        trackers = {name: started for name in names if (started := start_tracker(name, run, recipe, step))}
        while (job := self._jobs.get()) is not None:
            for name, tracker in list(trackers.items()):
                try:
                    job(tracker)
                except Exception as error:  # whatever a tracker does, the run goes on
                    del trackers[name]
                    _warn(f"the tracker {name} failed ({_short(error)}); going on without it")
        for name, tracker in trackers.items():
            try:
                tracker.finish()
            except Exception as error:
                _warn(f"the tracker {name} did not finish ({_short(error)})")


def start_tracker(name: str, run: RunFolder, recipe: Recipe, step: int) -> GeneralTracker | None:
    """Starts one of Accelerate's trackers under the id of the run; None, after one sentence, if it can't be started."""
    try:
        if name != "wandb" or os.environ.get("WANDB_MODE", "online") != "online":
            return _started(name, run, recipe, step)
        return _started_online(run, recipe, step)
    except Exception as error:
        _warn(f"the tracker {name} could not be started ({_short(error)}); going on with {run.metrics.name} alone")
        return None


def _started(name: str, run: RunFolder, recipe: Recipe, step: int, **more: Any) -> GeneralTracker:
    project, options = recipe.logging.project, {}
    if name == "wandb":
        options = {"id": run.run_id, "name": recipe.name, "resume": "allow", "dir": str(run.path)}
    elif name == "trackio":  # which knows a run by its name alone
        options = {"name": f"{recipe.name}-{run.run_id}", "resume": "allow"}
    elif name == "tensorboard":  # which knows a run by its folder, and hides what a resumed run will say again
        project, options = name, {"logging_dir": str(run.path)} | ({"purge_step": step + 1} if run.resumed else {})
    tracker = LOGGER_TYPE_TO_CLASS[name](project, **options, **more)
    tracker.start()
    tracker.store_init_configuration(plain_values(recipe.model_dump()))
    return tracker


def _started_online(run: RunFolder, recipe: Recipe, step: int) -> GeneralTracker:
    """wandb with its server; where there is no key or no server, what it keeps on the disk."""
    import wandb

    why = "no key is known: `wandb login`"
    try:
        if wandb.login(prompt=False):  # never asks: nobody may be there to answer
            return _started("wandb", run, recipe, step)
    except Exception as error:
        why = _short(error)
        wandb.teardown()  # which holds the id of the run
    tracker = _started("wandb", run, recipe, step, mode="offline")
    _warn(f"wandb is not reached ({why}); its records are kept: wandb sync --append {run.path}/wandb/offline-run-*")
    return tracker


def _page(tracker: Any, step: int, name: str, html: str) -> None:
    if tracker.name == "tensorboard":
        tracker.tracker.add_text(name, html, step)
    else:  # trackio has wandb's names
        tracker.log({name: import_module(tracker.name).Html(html)}, step=step)


def _table(tracker: Any, step: int, name: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    if tracker.name == "tensorboard":
        lines = [header, ["---"] * len(header), *rows]
        cells = (" | ".join(cell.replace("|", "\\|") for cell in line) for line in lines)
        tracker.tracker.add_text(name, "\n".join(f"| {line} |" for line in cells), step)
    else:
        data = [list(row) for row in rows]
        tracker.log({name: import_module(tracker.name).Table(columns=list(header), data=data)}, step=step)


def _ship(tracker: Any, folder: Path, name: str, record: Mapping[str, Any]) -> None:
    if tracker.name == "tensorboard":
        return
    artifact = import_module(tracker.name).Artifact(name, type="model", metadata=plain_values(record))
    artifact.add_dir(str(folder))
    tracker.tracker.log_artifact(artifact)


def plain_values(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings under dotted names, as numbers and texts, which is what all trackers take."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat.update(plain_values(value, f"{prefix}{key}."))
        else:
            flat[prefix + key] = value if isinstance(value, int | float | str) else str(value)
    return flat


def _warn(sentence: str) -> None:
    print(f"warning: {sentence}", file=sys.stderr, flush=True)


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"
