"""What a run tells: `metrics.jsonl`, always, and the trackers that the recipe names, as far as they can be reached.

    {"step": 200, "kind": "train", "loss": 2.31, "rate": 0.00098, ...}
    {"step": 200, "kind": "held_out", "loss": 2.40, "top_1": [0.35, 0.24, null, null], ...}

`step` counts optimiser steps and never falls, and there is no other counter. null stands where nothing was scored.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from transformers import PreTrainedTokenizerBase

from headstart.atomic import write_text
from headstart.errors import naming
from headstart.recipe import Recipe
from headstart.train.forecasting import Forecast
from headstart.train.run_folder import RunFolder
from headstart.train.shown import samples_page, tree_page
from headstart.train.trackers import Trackers


class Metrics:
    """The one way out for numbers. Every rank holds one; only the main process writes.

    A resumed run starts behind its checkpoint: lines of later steps, which will come again, are dropped.
    """

    def __init__(self, run: RunFolder, recipe: Recipe, accelerator: Accelerator, *, step: int):
        self.last_step = step
        self._file = self._trackers = None
        if not accelerator.is_main_process:
            return
        drop_lines_after(run.metrics, step)
        self._file = run.metrics.open("a", encoding="utf-8")
        self._trackers = Trackers(run, recipe, step=step)

    def write(self, step: int, kind: str, values: Mapping[str, Any]) -> None:
        """One line of kind `train` or `held_out`; trackers get the same numbers as `kind/name`."""
        assert step >= self.last_step, f"metrics of step {step} after those of step {self.last_step}"
        self.last_step = step
        if self._file is None:
            return
        with naming(self._file.name):
            self._file.write(json.dumps({"step": step, "kind": kind, **values}) + "\n")
            self._file.flush()
        if self._trackers:
            self._trackers.log(step, plain_numbers(values, f"{kind}/"))

    def show(self, step: int, forecast: object, tokenizer: PreTrainedTokenizerBase) -> None:
        """To trackers alone: texts in which the drafts that a forecast accepts are coloured, and its tree."""
        if self._trackers and isinstance(forecast, Forecast):
            pages = samples_page(forecast.answers, forecast.paths, tokenizer), tree_page(forecast.paths)
            for name, page in zip(("samples", "tree"), pages, strict=True):
                self._trackers.page(step, f"held_out/{name}", page)

    def ship(self, folder: Path, name: str, record: Mapping[str, Any]) -> None:
        """To trackers alone: the finished head."""
        if self._trackers:
            self._trackers.ship(folder, name, record)

    def close(self) -> None:
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
        if self._trackers:
            self._trackers.close()


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
