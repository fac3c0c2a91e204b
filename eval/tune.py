"""`headstart tune`: the static tree that makes most tokens per second with this head on this device.

headstart tune --head runs/quickstart

Measures the cost of a step for every width, ranks the held-out answers' tokens under the head, grows a tree of every
size and keeps the one with the highest forecast: tokens per step over seconds per step. `trees.json` beside the head
holds all sizes, so that another device can choose again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from headstart.data.prepare import prepare
from headstart.decode.cost import SIZES, CostCurve, Forecast, best_size, grow_tree, measure_costs, tune
from headstart.decode.decode_copy import linear_seconds, make_faster
from headstart.decode.forecast import measure_drafting, rank_rows
from headstart.errors import DataError, refuse_unwritable
from headstart.eval.drafters import TREES
from headstart.eval.trained import open_trained
from headstart.heads.store import load_head
from headstart.target import Target

NUM_ANSWERS = 96
"""Held-out answers that trees are grown on, at most."""
LARGEST_COMPARED = max(size for size in SIZES if size <= 16)
"""Nodes up to which dtypes are compared: larger trees do not pay on a CPU."""


def run(
    head: str, *, overrides: Sequence[str] = (), device: str | None = None, dtype: str | None = None
) -> dict[str, Any]:
    """Tunes, writes `trees.json` beside the head, prints the table, and returns what was written."""
    trained = open_trained(head, overrides=overrides, device=device, dtype=dtype)
    target = trained.target
    assert trained.head is not None
    refuse_unwritable(trained.head)
    make_faster(target)
    medusa = load_head(trained.head, target)
    data = prepare(trained.recipe, target.tokenizer, vocab_size=target.vocab_size, max_positions=target.max_positions)
    answers = rank_rows(medusa, target, data.held_out[:NUM_ANSWERS])
    if len(answers) < 2:
        raise DataError(
            f"a tree is tuned on held-out answers, and the recipe holds out {len(answers)}; "
            "raise data.held_out.fraction or name held-out sources"
        )
    costs = measure_costs(target)
    draft_seconds = measure_drafting(medusa, target, grow_tree(answers, 16))
    forecasts = tune(answers, costs, draft_seconds)
    trees = as_json(forecasts, costs, draft_seconds, len(answers))
    _write(trained.head / TREES, trees)
    show(forecasts, costs, draft_seconds, Console())
    if advice := dtype_advice(target, forecasts, costs, draft_seconds):
        print(advice)
    print(trained.head / TREES)
    return trees


def dtype_advice(target: Target, forecasts: dict[int, Forecast], costs: CostCurve, draft_seconds: float) -> str | None:
    """A sentence where this CPU would decode faster in the other dtype, with the best tree of each; by the seconds that
    the target's linear layers take in either."""
    names = {torch.bfloat16: "bfloat16", torch.float32: "float32"}
    if target.device.type != "cpu" or target.dtype not in names:
        return None
    sizes = [size for size in forecasts if size <= LARGEST_COMPARED]
    seconds = linear_seconds(target, tuple(sizes))
    rates = {}
    for dtype in names:
        steps = {size: costs.at(size) + seconds[dtype][size] - seconds[target.dtype][size] for size in sizes}
        rates[dtype] = max(
            forecasts[size].acceptance_length / (steps[size] + (draft_seconds if size > 1 else 0)) for size in sizes
        )
    best = max(rates, key=lambda dtype: rates[dtype])
    if rates[best] < 1.1 * rates[target.dtype]:
        return None
    times = rates[best] / rates[target.dtype]
    return f"this CPU would decode {times:.1f} times faster in {names[best]}: try --dtype {names[best]}"


def as_json(forecasts: dict[int, Forecast], costs: CostCurve, draft_seconds: float, num_answers: int) -> dict[str, Any]:
    """What `trees.json` holds: per size the tree and its forecast, the best size, and what it was chosen by."""
    best = best_size(forecasts)
    figures = {
        str(size): {
            "acceptance_length": round(forecast.acceptance_length, 4),
            "speedup": round(forecast.speedup, 4),
        }
        for size, forecast in forecasts.items()
    }
    return {
        "device": costs.device,
        "dtype": costs.dtype,
        "context_length": costs.context_length,
        "answers": num_answers,
        "step_seconds": {str(width): seconds for width, seconds in costs.seconds.items()},
        "draft_seconds": draft_seconds,
        "best": best,
        "forecast": figures[str(best)],
        "forecasts": figures,
        "choices": {str(size): [list(path) for path in forecast.paths] for size, forecast in forecasts.items()},
    }


def show(forecasts: dict[int, Forecast], costs: CostCurve, draft_seconds: float, console: Console) -> None:
    """One line per size: cost, forecast acceptance length and forecast speedup; the best one marked."""
    console.print(
        f"one step of one token takes {costs.at(1) * 1e3:.1f} ms at about {costs.context_length} tokens of context, "
        f"drafting {draft_seconds * 1e3:.1f} ms ({costs.device}, {costs.dtype})"
    )
    table = Table(box=None)
    for heading in ("nodes", "t(n)/t(1)", "depth", "acceptance length", "speedup", ""):
        table.add_column(heading, justify="right")
    best = best_size(forecasts)
    for size, forecast in forecasts.items():
        table.add_row(
            str(size),
            f"{costs.ratio(size):.2f}",
            str(max(map(len, forecast.paths), default=0)),
            f"{forecast.acceptance_length:.3f}",
            f"{forecast.speedup:.3f}",
            "best" if size == best else "",
        )
    console.print(table)
    if best == 1:
        console.print("plain decoding is the fastest here: these drafts cost more than they bring")


def _write(path: Path, trees: dict[str, Any]) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(trees, indent=1) + "\n", encoding="utf-8")
    os.replace(partial, path)
