"""`headstart compare`: runs side by side: what differs, what each brought, what it cost, and how sure that is.

    headstart compare runs/a runs/b
    headstart compare runs/sweep/num_heads-* --against runs/sweep/num_heads-3 --output runs/sweep
    headstart compare runs/a runs/b --bench question            # their reports on those prompts

Nothing is measured: the reports that `headstart eval` wrote are read. Differences are paired by answer: prompts are
drawn anew, and both sides are recomputed from the same ones. Runs that read other prompts, or read them otherwise, are
shown but not paired. Speedups are each over the plain decoding that was interleaved with them. An answer that loops in
either run is left out of their difference, as it is of both headlines.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from headstart.atomic import write_text
from headstart.errors import HeadstartError, refuse_unwritable
from headstart.eval.acceptance import Number
from headstart.eval.compare_page import show, to_html, to_markdown
from headstart.eval.intervals import group_sums
from headstart.eval.paired import ratio_difference, speedup_difference
from headstart.eval.run_records import RunRecord, read_runs
from headstart.recipe import Recipe
from headstart.train.run_folder import flat

SAME = ("target", "dtype"), ("temperature", "max_new_tokens")
"""What must be equal, of the environment and of the settings, for answers to be paired."""
SAME_SPEED = ("device", "threads"), ("batch_size",)
"""What must be equal besides for speedups to be paired."""
UNTOLD = ("name", "logging.", "export.", "data.distill.", "train.save_every", "train.keep", "data.feature_cache")
"""Settings whose differences explain no figure."""

Comparison = dict[str, Any]


def run(
    paths: Sequence[str],
    *,
    bench: str | None = None,
    against: str | None = None,
    output: str | None = None,
    console: Console | None = None,
) -> Comparison:
    """Prints the comparison, and writes comparison.json, .md and .html into `output` if that is given."""
    if len(paths) < 2:
        raise HeadstartError("there is one run; name two or more to compare")
    folder = Path(output) if output else None
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        refuse_unwritable(folder)
    records = read_runs(paths, bench)
    comparison = compare(records, _reference(records, against))
    console = console or Console()
    show(comparison, console)
    if folder is not None:
        texts = {
            "comparison.json": json.dumps(comparison, indent=1, allow_nan=False) + "\n",
            "comparison.md": to_markdown(comparison),
            "comparison.html": to_html(comparison),
        }
        for name, text in texts.items():
            write_text(folder / name, text)
            print(folder / name)
    return comparison


def _reference(records: Sequence[RunRecord], against: str | None) -> RunRecord:
    if against is None:
        return records[0]
    for record in records:
        if against == record.name or Path(against).resolve() == record.folder.resolve():
            return record
    raise HeadstartError(f"--against {against} is none of the runs: {', '.join(record.name for record in records)}")


def compare(records: Sequence[RunRecord], reference: RunRecord) -> Comparison:
    """All figures of a comparison, fastest run first. reference: one of the records."""
    ordered = sorted(records, key=lambda one: (-(_speedup(one) or 0), -(_tau(one) or 0)))
    figures = [_figures(record) for record in ordered]
    front = {
        "step_cost": pareto([(one["step_cost"], one["acceptance_length"]) for one in figures]),
        "parameters": pareto([(one["parameters"], one["speedup"]) for one in figures]),
    }
    for place, one in enumerate(figures):
        one["front"] = [name for name, members in front.items() if place in members]
    return {
        "reference": reference.name,
        "conditions": _conditions(records),
        "runs": figures,
        "differing": differing(ordered),
        "differences": {one.name: difference(one, reference) for one in ordered if one is not reference},
        "leaders": {
            key: _leader(ordered, key)
            for key in ("speedup", "acceptance_length")
            if figures and _measured(figures, key)
        },
    }


def _tau(record: RunRecord) -> Number | None:
    return record.report["acceptance_length"]


def _speedup(record: RunRecord) -> Number | None:
    return record.report["speedup"]


def _measured(figures: Sequence[dict[str, Any]], key: str) -> bool:
    return any(one[key] is not None for one in figures)


def _figures(record: RunRecord) -> dict[str, Any]:
    """The row of one run. step_cost: seconds of a drafted step over those of a plain one."""
    report, details = record.report, record.report["details"]
    cost, identity = record.cost, details["identity"]
    keys = ("acceptance_length", "acceptance_length_interval", "speedup", "speedup_interval")
    return {
        "name": record.name,
        "head": record.head_type or details["settings"]["drafter"],
        **{key: report[key] for key in keys},
        "by_depth": [row["conditional"] for row in details["per_depth"]],
        "step_cost": details["seconds_per_step"]["break_even_acceptance_length"],
        "draft_seconds": details["seconds_per_step"]["drafted"]["draft"],
        "nodes": details["settings"]["nodes_at_most"],
        "parameters": record.parameters,
        "bytes": record.bytes,
        "training": None if cost is None else asdict(cost),
        "answers": details["answers"]["in_headline"],
        "looping": details["answers"]["looping"],
        "identity": None if identity is None else identity["passed"],
    }


def _conditions(records: Sequence[RunRecord]) -> list[str]:
    """What was measured on what, one line where all agree."""
    lines = []
    for record in records:
        environment, settings = record.report["environment"], record.report["details"]["settings"]
        lines.append(
            f"{environment['target']} in {environment['dtype']} on {environment['device']}, "
            f"{environment['threads']} threads, batch {settings['batch_size']}, "
            f"temperature {settings['temperature']:g}, {settings['questions']} prompts, "
            f"{settings['max_new_tokens']} tokens at most"
        )
    return list(dict.fromkeys(lines))


def differing(records: Sequence[RunRecord]) -> dict[str, dict[str, Any]]:
    """The settings in which recipes differ: by dotted key, the value of every run; a run whose head has no such key, or
    that has no recipe, is left out. Of keys that only some heads have, those at their default follow from the type.
    Steps that CPU seconds were turned into are no setting."""
    recipes = {record.name: record.recipe for record in records if record.recipe}
    flattened = {name: flat(recipe.model_dump(mode="json")) for name, recipe in recipes.items()}
    for values in flattened.values():
        if values["train.cpu_seconds"] is not None:
            del values["train.max_steps"]
    told = {}
    for key in dict.fromkeys(key for values in flattened.values() for key in values):
        values = {name: of[key] for name, of in flattened.items() if key in of}
        distinct = {json.dumps(value) for value in values.values()}
        alone = len(values) < len(recipes) and any(not _is_default(recipes[name], key) for name in values)
        if not key.startswith(UNTOLD) and (len(distinct) > 1 or alone):
            told[key] = values
    return told


def _is_default(recipe: Recipe, key: str) -> bool:
    """Whether a setting of the head is what it would be if nobody had named it."""
    field = type(recipe.head).model_fields.get(key.removeprefix("head."))
    return field is not None and getattr(recipe.head, key.removeprefix("head.")) == field.default


# -- differences -------------------------------------------------------------------------------------------------------


def difference(one: RunRecord, other: RunRecord) -> dict[str, Any]:
    """τ and speedup of `one` less those of `other`, each with its interval, over the answers that both gave and that
    loop in neither. `refused` says why they are not paired; `speedup_refused` why their speedups are not."""
    reason = _unlike(one, other, *SAME) or _other_prompts(one, other)
    if reason:
        return {"refused": reason}
    pairs, changed = _pairs(one, other)
    kept = [pair for pair in pairs if not any(row["loops"] for row in pair)]
    found: dict[str, Any] = {"answers": len(kept), "looping": len(pairs) - len(kept), "other_context": changed}
    if not kept:
        return {"refused": "no answer is left that loops in neither"}
    steps = [_counts(kept, side, "emitted", "steps") for side in (0, 1)]
    found["acceptance_length"] = (
        ratio_difference(*steps) if all(sum(row[1] for row in each) for each in steps) else None
    )
    found["speedup_refused"] = _unlike(one, other, *SAME_SPEED) or _withheld(one, other)
    found["speedup"] = None
    if not found["speedup_refused"]:
        drafted = [_counts(kept, side, "drafted_tokens", "drafted_seconds") for side in (0, 1)]
        plain = [_counts(kept, side, "plain_tokens", "plain_seconds") for side in (0, 1)]
        found["speedup"] = speedup_difference(*drafted, *plain)
    return found


def _unlike(one: RunRecord, other: RunRecord, environment: Sequence[str], settings: Sequence[str]) -> str | None:
    for place, keys in (("environment", environment), ("settings", settings)):
        for key in keys:
            ours, theirs = (_part(record, place)[key] for record in (one, other))
            if ours != theirs:
                return f"{key.replace('_', ' ')} {ours} here, {theirs} there"
    return None


def _part(record: RunRecord, place: str) -> dict[str, Any]:
    return record.report["environment"] if place == "environment" else record.report["details"]["settings"]


def _withheld(one: RunRecord, other: RunRecord) -> str | None:
    missing = [record.name for record in (one, other) if _speedup(record) is None]
    return f"{missing[0]} has no speedup: its texts are not the target's own" if missing else None


def _keyed(record: RunRecord) -> dict[tuple[str, int], dict[str, Any]]:
    return {(row["question"], row["turn"]): row for row in record.prompts}


def _other_prompts(one: RunRecord, other: RunRecord) -> str | None:
    ours, theirs = _keyed(one), _keyed(other)
    for mine, name, rest in ((ours, one.name, theirs), (theirs, other.name, ours)):
        alone = [key for key in mine if key not in rest]
        if alone:
            question, turn = alone[0]
            more = f" and {len(alone) - 1} more" * (len(alone) > 1)
            return f"other prompts: {question}, turn {turn},{more} by {name} alone"
    changed = [key[0] for key in ours if key[1] == 1 and ours[key]["prompt"] != theirs[key]["prompt"]]
    if changed:
        return f"{changed[0]} and {len(changed) - 1} more were rendered otherwise: another template or system turn"
    return None


def _pairs(one: RunRecord, other: RunRecord) -> tuple[list[tuple[dict[str, Any], dict[str, Any]]], int]:
    """The answers of both to the same prompts, and how many follow on another answer, so on another prompt."""
    ours, theirs = _keyed(one), _keyed(other)
    same = [key for key in ours if ours[key]["prompt"] == theirs[key]["prompt"]]
    return [(ours[key], theirs[key]) for key in same], len(ours) - len(same)


def _counts(pairs: Sequence[tuple[dict[str, Any], dict[str, Any]]], side: int, *keys: str) -> list[list[Number]]:
    """Sums of one side by what was decoded together, which hangs together: a question with its turns."""
    groups = [ours["group"] for ours, _ in pairs]
    sums = [group_sums(groups, [pair[side][key] for pair in pairs]) for key in keys]
    return [list(row) for row in zip(*sums, strict=True)]


def _leader(records: Sequence[RunRecord], key: str) -> dict[str, Any]:
    """The run with the highest figure, those that these prompts do not tell from it, and those that were not paired."""
    best = max(records, key=lambda record: record.report[key] or 0.0)
    found = {"name": best.name, "value": best.report[key], "tied": [], "behind": [], "not_paired": []}
    for record in records:
        if record is not best:
            paired = difference(best, record).get(key)
            interval = paired and paired["interval"]
            place = "not_paired" if interval is None else "behind" if interval[0] > 0 else "tied"
            found[place].append(record.name)
    return found


def pareto(points: Sequence[tuple[Number | None, Number | None]]) -> list[int]:
    """The places of those (cost, gain) that no other beats in one and equals or beats in the other, cheapest first."""
    known = [(cost, gain, place) for place, (cost, gain) in enumerate(points) if cost is not None and gain is not None]
    front = [
        (cost, place)
        for cost, gain, place in known
        if not any(c <= cost and g >= gain and (c < cost or g > gain) for c, g, _ in known)
    ]
    return [place for _, place in sorted(front)]
