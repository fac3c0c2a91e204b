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
Runs = Sequence[tuple[str, dict[str, Any]]]
"""The figures of every run with its number, perhaps with its name."""
MEANING = {"speedup": "speedup", "acceptance_length": "τ"}
FRONT = {"step_cost": "τ for its step", "parameters": "speedup for its size"}
"""What no other run gives more of for less, where a run is on the front."""
RAYS = (0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0)
RUNS, ON_TERMINAL = "Runs", 6
"""The table of all figures, and how many of its columns a narrow terminal has room for."""
LONGEST = 40
"""Letters of a setting's value in a table."""


def findings(comparison: Comparison) -> list[str]:
    """What the figures say, in sentences."""
    said, runs = [], comparison["runs"]
    numbers = {run["name"]: str(place) for place, run in enumerate(runs, 1)}
    for key, leader in comparison["leaders"].items():
        sentence = f"highest {MEANING[key]}: {leader['value']:.2f} by {numbers[leader['name']]} {leader['name']}"
        others = [("not told from it by these prompts", "tied"), ("not paired with it", "not_paired")]
        parts = [
            f"{words}: {', '.join(numbers[name] for name in leader[group])}" for words, group in others if leader[group]
        ]
        said.append("; ".join([sentence, *(parts or ["all others are behind it beyond chance"])]))
    said += [
        f"{name} is not paired with {comparison['reference']}: {one['refused']}"
        for name, one in comparison["differences"].items()
        if "refused" in one
    ]
    failed = [run["name"] for run in runs if run["identity"] is False]
    said += [f"{name} fails the check of identity: its texts are not the target's own" for name in failed]
    unchecked = [numbers[run["name"]] for run in runs if run["identity"] is None]
    which = "any" if len(unchecked) == len(runs) else ", ".join(unchecked)
    said += [f"identity was not checked for {which}"] * bool(unchecked)
    return said


def tables(comparison: Comparison, *, named: bool = True) -> list[Table]:
    """All tables. named: a run has its name beside its number, else the number alone, where there is little room."""
    runs = [(f"{place} {run['name']}" if named else str(place), run) for place, run in enumerate(comparison["runs"], 1)]
    found = [_runs(runs), _differences(comparison, runs), _training(runs), _settings(comparison)]
    return [table for table in found if table.rows]


def _runs(runs: Runs) -> Table:
    rows = [
        [
            label,
            _with(run, "speedup"),
            _with(run, "acceptance_length"),
            " ".join(number(share).lstrip("0") for share in run["by_depth"][:DEPTHS_SHOWN]) or "-",
            number(run["step_cost"]),
            f"{run['parameters'] / 1e6:.2f}",
            str(run["nodes"]),
            "n/a" if run["bytes"] is None else f"{run['bytes'] / 2**20:.2f}",
            {True: "holds", False: "FAILS", None: "-"}[run["identity"]],
            ", ".join(FRONT[name] for name in run["front"]) or "-",
        ]
        for label, run in runs
    ]
    header = ["run", "speedup", "τ", "by depth", "step cost", "M parameters", "nodes", "MiB", "identity", "most"]
    note = (
        "Fastest first. Step cost: seconds of a drafted step over those of a plain one; speedup = τ / step cost, end "
        "effects apart. By depth: of the steps that accepted all drafts before it, the share that accepted this one. "
        "Size: what is shipped, the target's own rows apart. Most: no other run has more of it for less. Intervals: "
        "95%, by bootstrap over prompts. Answers that loop are left out."
    )
    return Table(RUNS, header, rows, note)


def _differences(comparison: Comparison, runs: Runs) -> Table:
    rows = []
    for label, run in runs:
        one = comparison["differences"].get(run["name"])
        if one is None or "refused" in one:
            continue
        cells = [
            "n/a" if one[key] is None else as_text(one[key], signed=True) for key in ("speedup", "acceptance_length")
        ]
        remarks = [f"{one['looping']} that loop left out"] * bool(one["looping"])
        remarks += [f"{one['other_context']} on other earlier answers left out"] * bool(one["other_context"])
        remarks += [f"speedups are not paired: {one['speedup_refused']}"] * bool(one["speedup_refused"])
        rows.append([label, *cells, str(one["answers"]), "; ".join(remarks)])
    note = "Paired by answer: what prompts have in common cancels. An interval that holds 0 tells nothing apart."
    header = ["less the reference", "speedup", "τ", "answers", ""]
    return Table(f"Against {comparison['reference']}", header, rows, note, words=[4])


def _training(runs: Runs) -> Table:
    rows = []
    for label, run in runs:
        cost = run["training"]
        if cost is not None:
            seconds = [number(cost[key], 0) for key in ("cpu_seconds", "device_seconds")]
            rows.append([label, f"{cost['steps']:,}", f"{cost['tokens']:,}", *seconds, cost["device"]])
    note = (
        "Steps alone: evaluations, checkpoints, and states that were computed beforehand are not in it. CPU seconds "
        "are those of all threads, device seconds are wall time times processes."
    )
    header = ["run", "steps", "tokens", "CPU seconds", "device seconds", "device"]
    return Table("Cost of training", header, rows, note, words=[5])


def _settings(comparison: Comparison) -> Table:
    names = [run["name"] for run in comparison["runs"]]
    places = [str(place) for place, _ in enumerate(names, 1)]
    rows = [
        [key, *(_value(values[name]) if name in values else "-" for name in names)]
        for key, values in comparison["differing"].items()
    ]
    note = "Numbers are those of the runs above; -: no such setting."
    return Table("What differs in their recipes", ["setting", *places], rows, note)


def _value(value: Any) -> str:
    words = _written(value)
    return words if len(words) <= LONGEST else f"{words[: LONGEST - 1]}…"


def _written(value: Any) -> str:
    """As a recipe has it."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_written(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return f"[{', '.join(map(_written, value))}]"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _with(run: dict[str, Any], key: str) -> str:
    return "n/a" if run[key] is None else as_text(figure(run[key], run[f"{key}_interval"]))


def show(comparison: Comparison, console: Console) -> None:
    """On a terminal, which may be narrow: names stand above the tables, which have their numbers."""
    for line in comparison["conditions"]:
        console.print(line, style="dim", highlight=False)
    for place, run in enumerate(comparison["runs"], 1):
        console.print(f"{place} {run['name']}", highlight=False)
    for table in tables(comparison, named=False):
        drawn = RichTable(title=table.title, title_justify="left", box=None)
        columns = range(len(table.header))[: ON_TERMINAL if table.title == RUNS else None]
        for place in columns:
            words = place == 0 or place in table.words
            drawn.add_column(table.header[place], justify="left" if words else "right", overflow="fold")
        for row in table.rows:
            drawn.add_row(*(row[place] for place in columns))
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
    runs = [(str(place), run) for place, run in enumerate(comparison["runs"], 1)]
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


def _scatter(runs: Runs, title: str, across: str, up: str, words: str) -> list[str]:
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
