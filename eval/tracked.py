"""The report of an evaluation in the trackers of the run that it measured: its tables, and its headline as numbers."""

from __future__ import annotations

import json
from pathlib import Path

from headstart.eval.tables import Report, headline, tables
from headstart.recipe import Recipe
from headstart.train.metrics import read_metrics
from headstart.train.run_folder import RunFolder
from headstart.train.trackers import Trackers

NUMBERS = (
    "speedup",
    "acceptance_length",
    "drafted_tokens_per_second",
    "plain_tokens_per_second",
    "forecast_acceptance_length",
    "forecast_speedup",
)


def track_report(run: Path, recipe: Recipe, report: Report, name: str) -> None:
    """Goes on with the run of these trackers under its id, behind its last step. name: what stands before the names of
    the figures, `report` or that of a benchmark. Does nothing where the recipe names no tracker."""
    environment = run / "environment.json"
    if not recipe.logging.trackers or not environment.is_file():
        return
    folder = RunFolder(run, json.loads(environment.read_text(encoding="utf-8"))["run_id"], resumed=True)
    steps = [record["step"] for record in read_metrics(folder.metrics)] if folder.metrics.is_file() else []
    step = max(steps, default=0)
    trackers = Trackers(folder, recipe, step=step)
    trackers.log(step, {f"{name}/{key}": report[key] for key in NUMBERS if report[key] is not None})
    for table in [headline(report), *(one for one in tables(report) if not one.folded)]:
        trackers.table(step, f"{name}/{table.title.lower().replace(' ', '_')}", table.header, table.rows)
    trackers.close()
