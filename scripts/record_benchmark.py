"""Puts the figures of a report into docs/benchmarks.json and writes the table of docs/benchmarks.md anew.

    python scripts/record_benchmark.py quickstart runs/quickstart/report.json --note "one `make quickstart`, 11 minutes"

An entry of the same name is replaced. A report of several drafters is kept with all of them and not in the table.
What stands outside the table in docs/benchmarks.md is written by hand and stays.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headstart.atomic import write_text

BEGIN, END = "<!-- table: written by scripts/record_benchmark.py -->", "<!-- end of table -->"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name")
    parser.add_argument("report", type=Path)
    parser.add_argument("--note", default="")
    parser.add_argument("--docs", type=Path, default=Path("docs"))
    options = parser.parse_args(arguments)
    store = options.docs / "benchmarks.json"
    entries = json.loads(store.read_text(encoding="utf-8")) if store.is_file() else {}
    report = json.loads(options.report.read_text(encoding="utf-8"))
    entries[options.name] = entry(report, options.note)
    write_text(store, json.dumps(entries, indent=1) + "\n")
    page = options.docs / "benchmarks.md"
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    write_text(page, f"{before}{BEGIN}\n{table(entries)}{END}{rest.partition(END)[2]}")
    return 0


def entry(report: dict[str, Any], note: str) -> dict[str, Any]:
    """The top level of the report, its settings, its verdict on identity, and the drafters that it compares."""
    top = {key: value for key, value in report.items() if key != "details"}
    details = report["details"]
    kept = {key: details[key] for key in ("settings", "answers", "by_category", "per_depth", "identity")}
    several = {key: details[key] for key in ("drafters", "temperatures", "batches") if len(details[key]) > 1}
    return {"note": note, **top, **kept, **several}


def table(entries: dict[str, dict[str, Any]]) -> str:
    """One line per entry of one drafter."""
    lines = [
        "| name | date, commit | device, dtype | speedup | τ | forecast | drafted / plain / generate tok/s | note |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, one in entries.items():
        if "drafters" in one:
            continue
        where = one["environment"]
        machine = f"{where['device']} ({where['threads']} threads)"
        forecast = [one["forecast_acceptance_length"], one["forecast_speedup"]]
        lines.append(
            f"| {name} | {where['date'][:10]}, {where['commit'][:10]} | {machine}, {where['dtype']} | "
            f"{_interval(one, 'speedup')} | {_interval(one, 'acceptance_length')} | "
            f"τ {_two(forecast[0])}, x{_two(forecast[1])} | {_two(one['drafted_tokens_per_second'])} / "
            f"{_two(one['plain_tokens_per_second'])} / {_two(one['transformers_generate_tokens_per_second'])} | "
            f"{one['note']} |"
        )
    return "\n".join(lines) + "\n"


def _two(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.2f}"


def _interval(one: dict[str, Any], key: str) -> str:
    interval = one[f"{key}_interval"]
    return _two(one[key]) + ("" if interval is None else f" [{_two(interval[0])}, {_two(interval[1])}]")


if __name__ == "__main__":
    raise SystemExit(main())
