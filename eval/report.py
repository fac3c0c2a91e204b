"""The report of an evaluation: report.json for machines, report.md for a terminal, report.html to look at.

    report = build_report(figures, drafter_parameters=..., environment=..., ...)
    write_report(report, Path("runs/quickstart"))

report.json has the headline at its top level (HEADLINE) and everything else under `details`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from headstart.atomic import write_text
from headstart.eval.charts import columns, dots, horizontal_bars, stacked_bars
from headstart.eval.gates import gates, withhold
from headstart.eval.tables import Report, Table, headline, number, tables

HEADLINE = (
    "plain_tokens_per_second",
    "transformers_generate_tokens_per_second",
    "drafted_tokens_per_second",
    "speedup",
    "speedup_interval",
    "acceptance_length",
    "acceptance_length_interval",
    "forecast_acceptance_length",
    "forecast_speedup",
    "identical_outputs",
    "compared_outputs",
    "time_to_first_token",
    "inter_chunk_latency",
    "memory",
    "drafter_parameters",
    "environment",
)
"""The top level of report.json, in order; `details` follows."""


def build_report(
    figures: dict[str, Any],
    *,
    title: str,
    drafter_parameters: int,
    forecast: dict[str, Any],
    environment: dict[str, Any],
    settings: dict[str, Any],
    identity: dict[str, Any] | None = None,
    notes: Sequence[str] = (),
) -> Report:
    """One drafter's report from the figures of `summary.summarise`; a failed identity check withholds the speedup."""
    figures = {**figures, "details": {**figures["details"]}}
    found = gates(figures, identity, list(notes))
    withhold(figures, found)
    values = {
        **figures,
        "forecast_acceptance_length": forecast.get("acceptance_length"),
        "forecast_speedup": forecast.get("speedup"),
        "drafter_parameters": drafter_parameters,
        "environment": environment,
    }
    more = {
        "title": title,
        "gates": found,
        "identity": identity,
        "settings": settings,
        "drafters": [],
        "temperatures": [],
        "batches": [],
    }
    return {key: values[key] for key in HEADLINE} | {"details": figures["details"] | more}


def line(name: str, report: Report) -> dict[str, Any]:
    """A report as one row of a table that compares several."""
    keys, details = [key for key in HEADLINE if key not in ("memory", "environment")], report["details"]
    acceptance, seconds = details["acceptance"], details["seconds_per_step"]
    levels, plain = acceptance["mean_depth"], seconds["plain"]["all"]
    return {
        "name": name,
        **{key: report[key] for key in keys},
        **{key: acceptance[key] for key in ("draft_acceptance", "alpha", "mean_depth")},
        "draft_cost": seconds["drafted"]["draft"] / levels / plain if levels and plain else None,
        "conditional": [row["conditional"] for row in details["per_depth"]],
        "seconds_per_step": seconds["drafted"],
        "break_even_acceptance_length": seconds["break_even_acceptance_length"],
        **{key: details[key] for key in ("latency", "by_category", "by_kind", "by_context")},
        "identity_holds": None if details["identity"] is None else details["identity"]["passed"],
    }


def write_report(report: Report, folder: Path) -> list[Path]:
    """Writes report.json, report.md and report.html into `folder`, each whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = {
        "report.json": json.dumps(report, indent=1, allow_nan=False) + "\n",
        "report.md": to_markdown(report),
        "report.html": to_html(report),
    }
    for name, text in texts.items():
        write_text(folder / name, text)
    return [folder / name for name in texts]


def lead(report: Report) -> str:
    """What was measured on what, in one line."""
    environment, settings = report["environment"], report["details"]["settings"]
    return (
        f"{environment['target']} in {environment['dtype']} on {environment['device']}, "
        f"{environment['threads']} threads, batch {settings['batch_size']}, temperature {settings['temperature']:g}; "
        f"{environment['date']}, "
        f"commit {(environment['commit'] or 'unknown')[:10]}"
    )


def to_markdown(report: Report) -> str:
    parts = [f"# {report['details']['title']}", lead(report), markdown_table(headline(report))]
    parts += [
        "\n".join(f"- {_mark(gate['passed'])} {gate['name']}: {gate['text']}" for gate in report["details"]["gates"])
    ]
    for table in tables(report):
        if not table.folded:
            parts += [f"## {table.title}", markdown_table(table)]
    return "\n\n".join(parts) + "\n"


def markdown_table(table: Table) -> str:
    """A table as GitHub shows it, its note below."""
    align = ["---" if index == 0 or index in table.words else "---:" for index in range(len(table.header))]
    rows = [table.header, align, *table.rows]
    text = "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows)
    return f"{text}\n\n{table.note}" if table.note else text


def _mark(passed: bool | None) -> str:
    return {True: "holds", False: "FAILS", None: "note"}[passed]


def to_html(report: Report) -> str:
    """A page that needs no network and no script."""
    details = report["details"]
    classes = {True: "good", False: "bad", None: ""}
    gate_items = "".join(
        f'<li><b class="{classes[gate["passed"]]}">{_mark(gate["passed"])}</b> '
        f"{escape(gate['name'])}: {escape(gate['text'])}</li>"
        for gate in details["gates"]
    )
    return fill(
        "report.html",
        title=escape(details["title"]),
        lead=escape(lead(report)),
        cards="".join(
            f'<div class="card"><b>{escape(value)}</b><span>{escape(name)}, {escape(unit)}</span></div>'
            for name, value, unit in headline(report).rows
        ),
        gates=f"<ul>{gate_items}</ul>",
        plots="".join(_plots(report)),
        tables="".join(map(html_table, tables(report))),
    )


def fill(template: str, **parts: str) -> str:
    """A page of this package with its parts in place, and the style that all pages share."""
    room = files("headstart.eval")
    style = room.joinpath("page.css").read_text(encoding="utf-8")
    return Template(room.joinpath(template).read_text(encoding="utf-8")).substitute(parts, style=style)


def html_table(table: Table) -> str:
    """A table that scrolls by itself where it is wider than the page."""

    def row(cells: Sequence[str], tag: str) -> str:
        marks = [' class="words"' if index in table.words and tag == "td" else "" for index in range(len(cells))]
        return "<tr>" + "".join(f"<{tag}{m}>{escape(c)}</{tag}>" for c, m in zip(cells, marks, strict=True)) + "</tr>"

    body = "".join(row(cells, "td") for cells in table.rows)
    inner = f'<div class="scroll"><table><thead>{row(table.header, "th")}</thead><tbody>{body}</tbody></table></div>'
    note = f'<p class="lead">{escape(table.note)}</p>' if table.note else ""
    if table.folded:
        return f"<details><summary>{escape(table.title)}</summary>{note}{inner}</details>"
    return f"<h2>{escape(table.title)}</h2>{note}{inner}"


def _plots(report: Report) -> list[str]:
    details = report["details"]
    depths, kinds, steps = details["per_depth"], details["by_kind"], details["seconds_per_step"]
    speedups = [row["speedup"] for row in details["prompts"] if row["speedup"] is not None and not row["loops"]]
    parts = ("draft", "verify", "host", "other")
    plots = []
    if depths:
        series = [(name, [row[key] for row in depths]) for name, key in _DEPTH_SERIES]
        plots.append(columns("Acceptance by depth", [str(row["depth"]) for row in depths], series))
    if kinds:
        rows = [(row["name"], row["acceptance_length"]) for row in kinds]
        whiskers = [row["acceptance_length_interval"] for row in kinds]
        title = "Acceptance length by kind, 95% intervals; dashed: no drafts"
        plots.append(horizontal_bars(title, rows, intervals=whiskers, reference=1.0))
    contexts = [row for row in details["by_context"] if row["acceptance_length"] is not None]
    if len(contexts) > 1:
        rows = [(row["name"], row["acceptance_length"]) for row in contexts]
        whiskers = [row["acceptance_length_interval"] for row in contexts]
        title = "Acceptance length by tokens of context, 95% intervals; dashed: no drafts"
        plots.append(horizontal_bars(title, rows, intervals=whiskers, reference=1.0))
    if speedups:
        title = f"Speedup of each answer, median {number(details['over_prompts']['speedup']['median'])}; dashed: plain"
        plots.append(dots(title, speedups, reference=1.0, unit="×"))
    if steps["plain"]["all"] and steps["drafted"]["all"]:
        bars = [(arm, [(steps[arm][part] or 0) * 1000 for part in parts]) for arm in ("plain", "drafted")]
        plots.append(stacked_bars("Time of a step", bars, parts, "ms"))
    return plots


_DEPTH_SERIES = (("given the earlier ones", "conditional"), ("of all steps", "per_position"))
