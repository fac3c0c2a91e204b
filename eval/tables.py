"""The tables of a report, as text cells: the one source of report.md, report.html and what the terminal shows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from headstart.eval.acceptance import Number

Report = dict[str, Any]
DEPTHS_SHOWN = 5
"""In a table of several drafters."""
CONTEXT_NOTE = "Tokens in the cache before a step; an answer stands in every row that it passes through."


@dataclass(frozen=True)
class Table:
    """One table. folded: long enough to be closed at first where that can be done."""

    title: str
    header: list[str]
    rows: list[list[str]]
    note: str = ""
    folded: bool = False
    words: list[int] = field(default_factory=list)
    """Columns of prose."""


def headline(report: Report) -> Table:
    """The figures that are quoted, each with what it means."""
    details = report["details"]
    answers, steps, generate = details["answers"], details["seconds_per_step"], details["transformers_generate"]
    same = f"{report['identical_outputs']} of {report['compared_outputs']}"
    rows = [
        ["speedup over plain decoding", _with(report["speedup"], report["speedup_interval"]), "95% interval"],
        [
            "acceptance length",
            _with(report["acceptance_length"], report["acceptance_length_interval"]),
            "tokens a step",
        ],
        ["drafted", _figure(report["drafted_tokens_per_second"]), "tokens/s"],
        ["plain, same engine", _figure(report["plain_tokens_per_second"]), "tokens/s"],
        ["transformers.generate", _figure(report["transformers_generate_tokens_per_second"]), "tokens/s"],
        ["plain over transformers.generate", number(generate["plain_over_transformers"]), "on the same answers"],
        ["forecast speedup", number(report["forecast_speedup"]), "by headstart tune"],
        ["forecast acceptance length", number(report["forecast_acceptance_length"]), "by headstart tune"],
        ["break-even acceptance length", number(steps["break_even_acceptance_length"]), "drafted step / plain step"],
        ["identical texts", same, "drafted and plain, as measured"],
        ["answers that loop, left out", str(answers["looping"]), f"of {answers['decoded']}"],
        ["drafter", f"{report['drafter_parameters']:,}", "parameters"],
    ]
    return Table(
        "Headline", ["figure", "value", ""], rows, "Rates are pooled: all tokens / all seconds, prefill apart."
    )


def tables(report: Report) -> list[Table]:
    """All tables below the headline that have something to say."""
    details = report["details"]
    grouped = _differs(details)
    found = [
        _groups("By group" if grouped else "By category", details["by_category"]),
        _groups("By category", details["by_kind"] if grouped else []),
        _groups("By context length", details["by_context"], CONTEXT_NOTE),
        _groups("Held out or seen", details["by_novelty"]),
        _depths(details["per_depth"]),
        _over_prompts(details["over_prompts"]),
        _latency(details["latency"]),
        _step_times(details["seconds_per_step"]),
        _memory(report["memory"]),
        _groups("Answers that loop", details["looping"], "An 8-gram occurs three times. In no other figure."),
        _identity(details["identity"]),
        _several("All drafters", details["drafters"]),
        _beside("All drafters by group", details["drafters"] if grouped else [], "by_category"),
        _beside("All drafters by category", details["drafters"], "by_kind"),
        _beside("All drafters by context length", details["drafters"], "by_context"),
        _latencies(details["drafters"]),
        *(
            _several(title, details[key] if len(details[key]) > len(details["drafters"]) else [])
            for title, key in (("By temperature", "temperatures"), ("By rows decoded at a time", "batches"))
        ),
        _prompts(details["prompts"]),
        _pairs("Settings", details["settings"]),
        _pairs("Environment", report["environment"]),
        Table("Formulas", ["name", "formula"], [[*pair] for pair in details["formulas"].items()], words=[1]),
    ]
    return [table for table in found if table.rows]


def number(value: Number | None, digits: int = 2) -> str:
    return "n/a" if value is None else f"{value:.{digits}f}"


def _figure(value: Number | None) -> str:
    return number(value, 1)


def _with(value: Number | None, interval: Sequence[Number] | None) -> str:
    return number(value) + (f" [{interval[0]:.2f}, {interval[1]:.2f}]" if interval else "")


def _differs(details: dict[str, Any]) -> bool:
    return [row["name"] for row in details["by_kind"]] != [row["name"] for row in details["by_category"]]


def _groups(title: str, rows: list[dict[str, Any]], note: str = "") -> Table:
    return Table(
        title,
        ["", "answers", "acceptance length", "speedup", "plain tok/s", "drafted tok/s"],
        [
            [
                row["name"],
                str(row["answers"]),
                _with(row["acceptance_length"], row["acceptance_length_interval"]),
                _with(row["speedup"], row["speedup_interval"]),
                _figure(row["plain_tokens_per_second"]),
                _figure(row["drafted_tokens_per_second"]),
            ]
            for row in rows
        ],
        note,
    )


def _depths(rows: list[dict[str, Any]]) -> Table:
    return Table(
        "By depth",
        ["depth", "steps that reach it", "earlier ones accepted", "accepted", "conditional", "per position"],
        [
            [*(str(row[key]) for key in ("depth", "reached", "tested", "accepted")), number(row["conditional"])]
            + [number(row["per_position"])]
            for row in rows
        ],
    )


def _over_prompts(figures: dict[str, Any]) -> Table:
    rows = [
        [name.replace("_", " "), number(values.get("pooled")), number(values["mean"]), number(values["median"])]
        for name, values in figures.items()
    ]
    return Table("Over answers, each counted once", ["", "pooled", "mean", "median"], rows)


def _latency(waits: dict[str, Any]) -> Table:
    rows = [
        [f"{key.replace('_', ' ')}, {arm}", *map(_milliseconds, seconds.values())]
        for key, arms in waits.items()
        for arm, seconds in arms.items()
    ]
    return Table("Latency in ms", ["", *next(iter(waits.values()))["plain"]], rows)


def _milliseconds(seconds: Number | None) -> str:
    return number(None if seconds is None else seconds * 1000, 1)


def _step_times(steps: dict[str, Any]) -> Table:
    parts = ("draft", "verify", "host", "other", "all")
    rows = [[arm, *(_milliseconds(steps[arm][part]) for part in parts)] for arm in ("plain", "drafted")]
    return Table("Time of a step in ms, mean", ["", *parts], rows)


def _memory(memory: dict[str, Any]) -> Table:
    keys = ("cache_bytes", "mask_bytes", "drafter_bytes", "total_bytes", "gpu_peak_bytes")
    rows = [
        [arm, *("n/a" if memory[arm][key] is None else f"{memory[arm][key] / 2**20:.2f}" for key in keys)]
        for arm in ("plain", "drafted")
    ]
    note = "Bytes counted, beside the target's weights. A GPU's peak holds the weights and all arms' caches too."
    return Table("Memory in MiB", ["", "cache", "largest mask", "drafter", "total", "GPU peak"], rows, note)


def _identity(identity: dict[str, Any] | None) -> Table:
    rows = []
    for outcome in (identity or {}).values():
        if not isinstance(outcome, dict):
            continue
        for key, value in outcome.items():
            if isinstance(value, list):
                value = f"{len(value)}" + (f", first {value[0]}" if value else "")
            rows.append([f"{outcome['dtype']}: {key.replace('_', ' ')}", _cell(value)])
    return Table("Identity", ["", ""], rows, words=[1])


def _several(title: str, rows: list[dict[str, Any]]) -> Table:
    """By depth: of the steps that accepted all drafts before it, the share that accepted this one."""
    return Table(
        title,
        ["", "speedup", "acceptance length", "by depth", "draft ms", "verify ms", "drafted tok/s", "plain tok/s"]
        + ["same text", "identity"],
        [
            [
                row["name"],
                _with(row["speedup"], row["speedup_interval"]),
                _with(row["acceptance_length"], row["acceptance_length_interval"]),
                " ".join(number(share).lstrip("0") for share in row["conditional"][:DEPTHS_SHOWN]) or "-",
                *(_milliseconds(row["seconds_per_step"][part]) for part in ("draft", "verify")),
                _figure(row["drafted_tokens_per_second"]),
                _figure(row["plain_tokens_per_second"]),
                f"{row['identical_outputs']} of {row['compared_outputs']}",
                {True: "holds", False: "FAILS", None: "not checked"}[row["identity_holds"]],
            ]
            for row in rows
        ]
        if len(rows) > 1
        else [],
    )


def _beside(title: str, drafters: list[dict[str, Any]], key: str) -> Table:
    """The same rows for every drafter: a benchmark's groups or categories, and last all of them."""
    if len(drafters) < 2 or len(drafters[0][key]) < 2:
        return Table(title, [], [])
    by_name = [{row["name"]: row for row in one[key]} for one in drafters]
    header = ["", "answers", "plain tok/s"]
    for one in drafters:
        header += [f"{one['name']}: τ", "speedup"]
    rows = []
    for name, first in by_name[0].items():
        cells = [name, str(first["answers"]), _figure(first["plain_tokens_per_second"])]
        for found in by_name:
            row = found.get(name, {})
            cells += [number(row.get("acceptance_length")), _with(row.get("speedup"), row.get("speedup_interval"))]
        rows.append(cells)
    cells = ["all", "", _figure(drafters[0]["plain_tokens_per_second"])]
    for one in drafters:
        cells += [number(one["acceptance_length"]), _with(one["speedup"], one["speedup_interval"])]
    return Table(title, header, [*rows, cells])


def _latencies(drafters: list[dict[str, Any]]) -> Table:
    """What matters to a user, for every drafter and for plain decoding."""
    shown = [("time_to_first_token", "p50"), ("time_per_output_token", "p50"), ("time_per_output_token", "p95")]
    shown += [("request_latency", "p50"), ("request_latency", "p95")]
    arms = [("plain", drafters[0]["latency"], "plain")] if len(drafters) > 1 else []
    arms += [(one["name"], one["latency"], "drafted") for one in drafters if len(drafters) > 1]
    rows = [[name, *(_milliseconds(waits[key][arm][which]) for key, which in shown)] for name, waits, arm in arms]
    header = ["", *(f"{key.replace('_', ' ')}, {which}" for key, which in shown)]
    return Table("Latency of all drafters in ms", header, rows)


def _prompts(rows: list[dict[str, Any]]) -> Table:
    header = ["question", "kind", "turn", "prompt", "plain", "drafted", "differs at", "loops", "tau", "speedup"]
    cells = [
        [
            row["question"],
            row["kind"],
            str(row["turn"]),
            *(str(row[key]) for key in ("prompt_tokens", "plain_tokens", "drafted_tokens")),
            "" if row["first_difference"] is None else str(row["first_difference"]),
            "yes" if row["loops"] else "",
            number(row["acceptance_length"]),
            number(row["speedup"]),
        ]
        for row in rows
    ]
    return Table("Every answer", header, cells, "Lengths in tokens.", folded=True)


def _pairs(title: str, values: dict[str, Any]) -> Table:
    rows = [[key.replace("_", " "), _cell(value)] for key, value in values.items()]
    return Table(title, ["", ""], rows, words=[1])


def _cell(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_cell(one)}" for key, one in value.items())
    if isinstance(value, float):
        return f"{value:.4g}"
    return "n/a" if value is None else str(value)
