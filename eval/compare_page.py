"""A comparison as tables and plots: on a terminal, as Markdown, and as one page that needs no network and no script."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from rich.console import Console
from rich.table import Table as RichTable

from headstart.eval.comparison_charts import COLOURS, depth_lines, named_bars, scatter
from headstart.eval.paired import as_text, figure
from headstart.eval.report import fill, html_table, markdown_table
from headstart.eval.tables import DEPTHS_SHOWN, Table, number

Comparison = dict[str, Any]
MEANING = {"speedup": "speedup", "acceptance_length": "τ"}
FRONT = {"step_cost": "τ for its step", "parameters": "speedup for its size"}
"""What no other run gives more of for less, where a run is on the front."""
RAYS = (0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0)
SHORTEST = 40
"""Letters of a setting's value in a table."""


def findings(comparison: Comparison) -> list[str]:
    """What the figures say, in sentences."""
    said = []
    for key, leader in comparison["leaders"].items():
        sentence = f"highest {MEANING[key]}: {leader['name']}, {leader['value']:.2f}"
        others = [("not told from it by these prompts", "tied"), ("not paired with it", "not_paired")]
        parts = [f"{words}: {', '.join(leader[group])}" for words, group in others if leader[group]]
        if not parts:
            parts = ["all others are behind it beyond chance"]
        said.append(f"{sentence}; {'; '.join(parts)}")
    said += [
        f"{name} is not paired with {comparison['reference']}: {one['refused']}"
        for name, one in comparison["differences"].items()
        if "refused" in one
    ]
    failed = [run["name"] for run in comparison["runs"] if run["identity"] is False]
    said += [f"{name} fails the check of identity: its texts are not the target's own" for name in failed]
    unchecked = [run["name"] for run in comparison["runs"] if run["identity"] is None]
    said += [f"identity was not checked for {', '.join(unchecked)}"] * bool(unchecked)
    return said


def tables(comparison: Comparison) -> list[Table]:
    """All tables; runs have the numbers of the first."""
    found = [_runs(comparison), _differences(comparison), _training(comparison), _settings(comparison)]
    return [table for table in found if table.rows]


def _numbered(comparison: Comparison) -> list[tuple[str, dict[str, Any]]]:
    return [(str(place), run) for place, run in enumerate(comparison["runs"], 1)]


def _runs(comparison: Comparison) -> Table:
    rows = [
        [
            f"{place} {run['name']}",
            _with(run, "speedup"),
            _with(run, "acceptance_length"),
            " ".join(number(share).lstrip("0") for share in run["by_depth"][:DEPTHS_SHOWN]) or "-",
            number(run["step_cost"]),
            str(run["nodes"]),
            f"{run['parameters'] / 1e6:.2f}",
            "n/a" if run["bytes"] is None else f"{run['bytes'] / 2**20:.2f}",
            {True: "holds", False: "FAILS", None: "-"}[run["identity"]],
            ", ".join(FRONT[name] for name in run["front"]) or "-",
        ]
        for place, run in _numbered(comparison)
    ]
    header = ["run", "speedup", "τ", "by depth", "step cost", "nodes", "M parameters", "MiB", "identity", "most"]
    note = (
        "Fastest first. Step cost: seconds of a drafted step over those of a plain one; speedup = τ / step cost, end "
        "effects apart. By depth: of the steps that accepted all drafts before it, the share that accepted this one. "
        "Size: what is shipped, the target's own rows apart. Most: no other run has more of it for less. Intervals: "
        "95%, by bootstrap over prompts. Answers that loop are left out."
    )
    return Table("Runs", header, rows, note)


def _differences(comparison: Comparison) -> Table:
    rows = []
    for place, run in _numbered(comparison):
        one = comparison["differences"].get(run["name"])
        if one is None or "refused" in one:
            continue
        cells = [
            "n/a" if one[key] is None else as_text(one[key], signed=True) for key in ("speedup", "acceptance_length")
        ]
        remarks = [f"{one['looping']} that loop left out"] * bool(one["looping"])
        remarks += [f"{one['other_context']} on other earlier answers left out"] * bool(one["other_context"])
        remarks += [f"speedups are not paired: {one['speedup_refused']}"] * bool(one["speedup_refused"])
        rows.append([f"{place} {run['name']}", *cells, str(one["answers"]), "; ".join(remarks)])
    note = "Paired by answer: what prompts have in common cancels. An interval that holds 0 tells nothing apart."
    header = ["less the reference", "speedup", "τ", "answers", ""]
    return Table(f"Against {comparison['reference']}", header, rows, note, words=[4])


def _training(comparison: Comparison) -> Table:
    rows = []
    for place, run in _numbered(comparison):
        cost = run["training"]
        if cost is not None:
            seconds = [number(cost[key], 0) for key in ("cpu_seconds", "device_seconds")]
            rows.append(
                [f"{place} {run['name']}", f"{cost['steps']:,}", f"{cost['tokens']:,}", *seconds, cost["device"]]
            )
    note = (
        "Steps alone: evaluations, checkpoints, and states that were computed beforehand are not in it. CPU seconds "
        "are those of all threads, device seconds are wall time times processes."
    )
    header = ["run", "steps", "tokens", "CPU seconds", "device seconds", "device"]
    return Table("Cost of training", header, rows, note, words=[5])


def _settings(comparison: Comparison) -> Table:
    names = [run["name"] for run in comparison["runs"]]
    rows = [
        [key, *(_value(values[name]) if name in values else "-" for name in names)]
        for key, values in comparison["differing"].items()
    ]
    note = "Numbers are those of the runs above; -: no such setting."
    header = ["setting", *(place for place, _ in _numbered(comparison))]
    return Table("What differs in their recipes", header, rows, note)


def _value(value: Any) -> str:
    words = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    return words if len(words) <= SHORTEST else f"{words[: SHORTEST - 1]}…"


def _with(run: dict[str, Any], key: str) -> str:
    return "n/a" if run[key] is None else as_text(figure(run[key], run[f"{key}_interval"]))


def show(comparison: Comparison, console: Console) -> None:
    """On a terminal; names fold where it is narrow."""
    for line in comparison["conditions"]:
        console.print(line, style="dim", highlight=False)
    for table in tables(comparison):
        drawn = RichTable(title=table.title, title_justify="left", box=None)
        for place, heading in enumerate(table.header):
            words = place == 0 or place in table.words
            drawn.add_column(heading, justify="left" if words else "right", overflow="fold")
        for row in table.rows:
            drawn.add_row(*row)
        console.print(drawn)
    for sentence in findings(comparison):
        console.print(f"- {sentence}", highlight=False)


def to_markdown(comparison: Comparison) -> str:
    parts = [f"# {_title(comparison)}", *comparison["conditions"]]
    parts.append("\n".join(f"- {sentence}" for sentence in findings(comparison)))
    for table in tables(comparison):
        parts += [f"## {table.title}", markdown_table(table)]
    return "\n\n".join(parts) + "\n"


def to_html(comparison: Comparison) -> str:
    """A page for screens of any width, light or dark."""
    cards = []
    for key, leader in comparison["leaders"].items():
        sign = "×" if key == "speedup" else ""
        words = f"highest {MEANING[key]}: {leader['name']}"
        cards.append(f'<div class="card"><b>{leader["value"]:.2f}{sign}</b><span>{escape(words)}</span></div>')
    return fill(
        "compare.html",
        title=escape(_title(comparison)),
        lead="".join(f'<p class="lead">{escape(line)}</p>' for line in comparison["conditions"]),
        cards="".join(cards),
        findings="<ul>" + "".join(f"<li>{escape(sentence)}</li>" for sentence in findings(comparison)) + "</ul>",
        plots="".join(_plots(comparison)),
        tables="".join(map(html_table, tables(comparison))),
    )


def _title(comparison: Comparison) -> str:
    return f"{len(comparison['runs'])} runs compared"


def _plots(comparison: Comparison) -> list[str]:
    runs = _numbered(comparison)
    plots = []
    if any(run["speedup"] is not None for _, run in runs):
        title = "Speedup, 95% intervals; dashed: plain decoding"
        rows = [(f"{place} {run['name']}", run["speedup"]) for place, run in runs]
        plots.append(named_bars(title, rows, [run["speedup_interval"] for _, run in runs], reference=1.0, unit="×"))
    drawn = [(f"{place} {run['name']}", run["by_depth"]) for place, run in runs]
    if any(values for _, values in drawn):
        fastest = f", the {COLOURS} fastest" if len(drawn) > COLOURS else ""
        plots.append(depth_lines(f"Acceptance by depth, where all before was accepted{fastest}", drawn))
    plots += _scatter(runs, "τ and what a step costs", "step_cost", "acceptance_length", "step cost, in plain steps")
    plots += _scatter(runs, "Speedup and size", "parameters", "speedup", "parameters")
    return plots


def _scatter(runs: Sequence[tuple[str, dict[str, Any]]], title: str, across: str, up: str, words: str) -> list[str]:
    """A plot of the runs that have both figures; dashed: the Pareto front."""
    known = [(place, run) for place, run in runs if run[across] and run[up] is not None]
    if len(known) < 2:
        return []
    on_front = [index for index, (_, run) in enumerate(known) if across in run["front"]]
    front = sorted(on_front, key=lambda index: known[index][1][across])
    points = [(place, run[across], run[up]) for place, run in known]
    log = across == "parameters" and max(x for _, x, _ in points) > 3 * min(x for _, x, _ in points)
    rays = RAYS if across == "step_cost" else ()
    return [scatter(title, points, across=words, up=MEANING[up], front=front, rays=rays, log=log)]
