"""What a run left on the disk, read for a comparison: recipe, head, cost of its training, and report. Nothing is loaded
or measured.

    records = read_runs(["runs/a", "runs/b"])      # every fault at once

A folder with a report.json alone will do too, such as that of n-grams: it has no recipe and cost nothing to train.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headstart.errors import DataError, HeadError, HeadstartError
from headstart.eval.acceptance import Number
from headstart.eval.report import HEADLINE
from headstart.eval.tables import Report
from headstart.heads.store import WEIGHTS, read_description
from headstart.recipe import Recipe, load_recipe
from headstart.train.metrics import read_metrics

REPORT = "report.json"
NEEDED = ("prompt", "group", "emitted", "steps", "drafted_seconds", "plain_seconds")
"""Of every answer in a report, so that it can be paired with another's."""


@dataclass(frozen=True)
class Cost:
    """What training took, evaluations and checkpoints apart. None: not on record.

    cpu_seconds: process time of all threads and processes. device_seconds: wall time times processes, which is GPU
    seconds where they train on GPUs. tokens: read, padding apart.
    """

    steps: int
    tokens: int
    cpu_seconds: Number | None
    device_seconds: Number | None
    device: str


@dataclass(frozen=True)
class RunRecord:
    """One run. recipe, head, cost: None where there is a report alone. parameters, bytes: of the head as it is shipped,
    what it borrows from the target apart."""

    name: str
    folder: Path
    report: Report
    recipe: Recipe | None
    head_type: str | None
    parameters: int
    bytes: int | None
    cost: Cost | None

    @property
    def prompts(self) -> list[dict[str, Any]]:
        """Every answer of its report."""
        return self.report["details"]["prompts"]


def read_runs(paths: Sequence[str | Path], bench: str | None = None) -> list[RunRecord]:
    """bench: reads the reports of `RUN/bench-NAME`. Raises one HeadstartError with the fault of every run that cannot
    be compared yet, and what to type for it."""
    folders = [Path(path) for path in paths]
    folders = [folder.parent if folder.name == "head" else folder for folder in folders]
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise HeadstartError("one of the runs is named twice; name each once")
    records, faults = [], []
    for folder, name in zip(folders, _names(folders), strict=True):
        try:
            records.append(_read(folder, name, bench))
        except HeadstartError as error:
            faults.append(str(error))
    if faults:
        raise HeadstartError("\n".join(faults))
    return records


def _names(folders: Sequence[Path]) -> list[str]:
    """The last parts of the paths that tell all of them apart."""
    parts = [folder.resolve().parts for folder in folders]
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(each[-length:]) for each in parts]
        if len(set(names)) == len(names):
            return names
    return [str(folder) for folder in folders]


def _read(folder: Path, name: str, bench: str | None) -> RunRecord:
    if not folder.is_dir():
        raise HeadstartError(f"there is no run {folder}; name a folder that training or `headstart eval` wrote")
    has_recipe, has_report = (folder / "recipe.yaml").is_file(), (folder / REPORT).is_file()
    if not has_recipe and not has_report and not (folder / "head").is_dir():
        raise HeadstartError(f"{folder} is no run: it has neither recipe.yaml nor {REPORT}; name a run's folder")
    if has_recipe and not (folder / "head").is_dir():
        words = ["--recipe", str(folder / "recipe.yaml"), "--name", folder.name, "--output", str(folder.parent)]
        raise HeadError(
            f"{folder} is not trained to the end; go on with it: headstart train {shlex.join(words)} --resume"
        )
    report = _read_report(folder, bench)
    described = read_description(folder / "head") if (folder / "head").is_dir() else None
    weights = folder / "head" / WEIGHTS
    return RunRecord(
        name=name,
        folder=folder,
        report=report,
        recipe=load_recipe(folder / "recipe.yaml") if has_recipe else None,
        head_type=described["head"]["type"] if described else None,
        parameters=report["drafter_parameters"],
        bytes=weights.stat().st_size if weights.is_file() else None,
        cost=_cost(folder, described),
    )


def _read_report(folder: Path, bench: str | None) -> Report:
    path = (folder / f"bench-{bench}" if bench else folder) / REPORT
    again = f"headstart eval --head {shlex.quote(str(folder))}" + (" --bench ..." if bench else "")
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
        missing = [key for key in HEADLINE if key not in report]
        rows = report["details"]["prompts"]
        missing += [key for key in NEEDED if rows and key not in rows[0]]
    except FileNotFoundError:
        raise DataError(f"{folder} has no report{' of ' + bench if bench else ''} yet; measure it: {again}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} is no report ({error!r}); write it anew: {again}") from None
    if missing:
        raise DataError(f"{path} was written by another version (no {missing[0]}); write it anew: {again}")
    return report


def _cost(folder: Path, described: dict[str, Any] | None) -> Cost | None:
    """From the lines of metrics.jsonl: they hold what was trained and kept, a part that was lost to a kill left out."""
    path = folder / "metrics.jsonl"
    if described is None or not path.is_file():
        return None
    try:
        lines = read_metrics(path, "train")
        environment = json.loads((folder / "environment.json").read_text(encoding="utf-8"))
    except (ValueError, KeyError, OSError):
        return None
    if not lines:
        return None
    processes = described.get("training", {}).get("world_size", 1)
    seconds = {
        key: processes * sum(line[key] for line in lines) if all(key in line for line in lines) else None
        for key in ("cpu_seconds", "seconds")
    }
    last = lines[-1]
    device = str(environment.get("device", "unknown"))
    return Cost(last["step"], last["tokens"], seconds["cpu_seconds"], seconds["seconds"], device)
