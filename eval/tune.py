"""`headstart tune`: the tree that makes most tokens per second with this head on this device.

headstart tune --head runs/quickstart

Measures the cost of a step for every width, ranks the held-out answers' tokens under the head, grows a tree of every
size and keeps the one with the highest forecast: tokens per step over seconds per step. For a head that reads its own
states the same is done with dynamic trees, whose depth and width are tuned for every size, and the better of the two
kinds is kept. For a student, chains of every length are compared. `trees.json` beside the head holds all sizes of both,
so that another device can choose again. All of it is done for every number of rows in `eval.batch_size`, since more
rows at a time leave less to gain from wide trees.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
from rich.console import Console
from rich.table import Table

from headstart.atomic import write_text
from headstart.data.packing import spread
from headstart.data.prepare import prepare
from headstart.decode.cost import (
    SIZES,
    CostCurve,
    DraftCosts,
    DynamicForecast,
    Forecast,
    best_size,
    grow_tree,
    measure_costs,
    tune,
    tune_dynamic,
)
from headstart.decode.decode_copy import linear_seconds, make_faster
from headstart.decode.forecast import grow_rows, rank_answer, record_rows
from headstart.errors import DataError, HeadError, refuse_unwritable
from headstart.eval.trained import find_named, load_named
from headstart.eval.trees import TREES
from headstart.heads.draft import DraftHead
from headstart.heads.store import load_head
from headstart.heads.unrolled import UnrolledHead
from headstart.target import Target
from headstart.train.forecasting import measure_draft_costs, tree_depth

NUM_ANSWERS = 96
"""Held-out answers that trees are grown on, at most."""
LARGEST_COMPARED = max(size for size in SIZES if size <= 16)
"""Nodes up to which dtypes are compared: larger trees do not pay on a CPU."""
WIDTHS = (2, 4, 8)
"""Widths of dynamic trees that are tried."""


def run(
    head: str,
    *,
    target: str | None = None,
    overrides: Sequence[str] = (),
    device: str | None = None,
    dtype: str | None = None,
    allow_other_target: bool = False,
) -> dict[str, Any]:
    """Tunes, writes `trees.json` beside the head, prints the table, and returns what was written."""
    named = find_named(head, target, overrides=overrides)
    if named.published:
        copied = Path("runs") / named.published.repo.partition("/")[2]
        raise HeadError(
            f"{named.published} lies in the hub's cache, where no tree can be kept; take a copy, "
            f"hf download {named.published.repo} --local-dir {copied}, and tune that: headstart tune --head {copied}"
        )
    trained = load_named(named, device=device, dtype=dtype)
    model = trained.target
    assert trained.head is not None
    refuse_unwritable(trained.head)
    make_faster(model)
    module = load_head(trained.head, model, allow_other_target)
    data = prepare(trained.recipe, model.tokenizer, vocab_size=model.vocab_size, max_positions=model.max_positions)
    texts = record_rows(model, spread(data.held_out, NUM_ANSWERS), module.wants)
    if len(texts) < 2:
        raise DataError(
            f"a tree is tuned on held-out answers, and the recipe holds out {len(texts)}; "
            "raise data.held_out.fraction or name held-out sources"
        )
    depth = tree_depth(module)
    drafting = copy.deepcopy(module).to(model.device, model.dtype).eval()
    answers = [rank_answer(drafting, model, text, depth=depth) for text in texts]
    grown = {}
    if isinstance(module, UnrolledHead):
        grown = {width: grow_rows(module, model, texts, depth=depth, width=width) for width in WIDTHS}
    by_rows = {}
    for rows in trained.recipe.eval.batch_size:
        costs = measure_costs(model, rows=rows)
        draft_costs = measure_draft_costs(module, model, depth, grow_tree(answers, 16), rows=rows)
        forecasts, dynamic = tune(answers, costs, draft_costs, chains=isinstance(module, DraftHead)), {}
        if grown:
            assert isinstance(draft_costs, DraftCosts)
            dynamic = tune_dynamic(grown, costs, draft_costs)
        show(forecasts, dynamic, costs, draft_costs, Console())
        if not by_rows and (advice := dtype_advice(model, forecasts, costs)):
            print(advice)
        by_rows[rows] = as_json(forecasts, dynamic, costs, draft_costs, len(answers))
    first, *others = by_rows
    trees = by_rows[first] | ({"by_rows": {str(rows): by_rows[rows] for rows in others}} if others else {})
    write_text(trained.head / TREES, json.dumps(trees, indent=1) + "\n")
    print(trained.head / TREES)
    return trees


def dtype_advice(target: Target, forecasts: dict[int, Forecast], costs: CostCurve) -> str | None:
    """A sentence where this CPU would decode faster in the other dtype, with the best static tree of each; by the
    seconds that the target's linear layers take in either."""
    names = {torch.bfloat16: "bfloat16", torch.float32: "float32"}
    if target.device.type != "cpu" or target.dtype not in names:
        return None
    copied = 2 * 4 * sum(parameter.numel() for parameter in target.model.parameters())  # in float32, and prepacked
    if copied > psutil.virtual_memory().available:
        return None
    compared = {size: forecast for size, forecast in forecasts.items() if size <= LARGEST_COMPARED}
    seconds = linear_seconds(target, tuple(compared))
    rates = {dtype: 0.0 for dtype in names}
    for size, forecast in compared.items():
        step = forecast.acceptance_length * costs.at(1) / forecast.speedup  # drafting included
        for dtype in names:
            changed = step + seconds[dtype][size] - seconds[target.dtype][size]
            rates[dtype] = max(rates[dtype], forecast.acceptance_length / changed)
    best = max(rates, key=lambda dtype: rates[dtype])
    if rates[best] < 1.1 * rates[target.dtype]:
        return None
    times = rates[best] / rates[target.dtype]
    return f"this CPU would decode {times:.1f} times faster in {names[best]}: try --dtype {names[best]}"


def as_json(
    forecasts: dict[int, Forecast],
    dynamic: dict[int, DynamicForecast],
    costs: CostCurve,
    draft_costs: float | DraftCosts,
    num_answers: int,
) -> dict[str, Any]:
    """What `trees.json` holds for one number of rows: per size the tree and its forecast, the best size, and what it
    was chosen by; the same under `dynamic` where such trees were tuned, and then `plan`, the better of the two kinds.
    """
    trees: dict[str, Any] = {
        "rows": costs.rows,
        "device": costs.device,
        "dtype": costs.dtype,
        "context_length": costs.context_length,
        "answers": num_answers,
        "step_seconds": {str(width): seconds for width, seconds in costs.seconds.items()},
        "draft_seconds": _level_seconds(draft_costs) if isinstance(draft_costs, DraftCosts) else draft_costs,
        **_figures(forecasts),
        "choices": {str(size): [list(path) for path in forecast.paths] for size, forecast in forecasts.items()},
    }
    if dynamic:
        choices = {
            str(size): {"depth": one.plan.depth, "width": one.plan.width, "num_nodes": one.plan.num_nodes}
            for size, one in dynamic.items()
        }
        trees["dynamic"] = {**_figures(dynamic), "choices": choices}
        trees["plan"] = "dynamic" if _speedup(dynamic) > _speedup(forecasts) else "tree"
    return trees


def _figures(forecasts: Mapping[int, Forecast] | Mapping[int, DynamicForecast]) -> dict[str, Any]:
    best = best_size(forecasts)
    figures = {
        str(size): {"acceptance_length": round(one.acceptance_length, 4), "speedup": round(one.speedup, 4)}
        for size, one in forecasts.items()
    }
    return {"best": best, "forecast": figures[str(best)], "forecasts": figures}


def _speedup(forecasts: Mapping[int, Forecast] | Mapping[int, DynamicForecast]) -> float:
    """Of the best size."""
    return forecasts[best_size(forecasts)].speedup


def _level_seconds(costs: DraftCosts) -> dict[str, Any]:
    by_width = {"static_level": costs.static_level, "dynamic_level": costs.dynamic_level}
    levels = {kind: {str(width): seconds for width, seconds in by.items()} for kind, by in by_width.items()}
    return {"first": costs.first, **levels}


def show(
    forecasts: dict[int, Forecast],
    dynamic: dict[int, DynamicForecast],
    costs: CostCurve,
    draft_costs: float | DraftCosts,
    console: Console,
) -> None:
    """One line per size: cost, forecast acceptance length and forecast speedup of the static tree, and of the dynamic
    one where there is one; the best of all marked."""
    drafting = (
        f"drafting {draft_costs.first * 1e3:.1f} ms and {draft_costs.static_level[1] * 1e3:.1f} ms for each level more"
        if isinstance(draft_costs, DraftCosts)
        else f"drafting {draft_costs * 1e3:.1f} ms"
    )
    each, ms = "" if costs.rows == 1 else f" for each of {costs.rows} rows", costs.at(1) * 1e3
    console.print(
        f"one step of one token{each} takes {ms:.1f} ms at about {costs.context_length} tokens of context, "
        f"{drafting} ({costs.device}, {costs.dtype})"
    )
    table = Table(box=None)
    headings = ["nodes", "t(n)/t(1)", "depth", "acceptance length", "speedup", ""]
    headings += ["dynamic: depth x width", "acceptance length", "speedup", ""] if dynamic else []
    for heading in headings:
        table.add_column(heading, justify="right")
    best = best_size(forecasts)
    on_top = bool(dynamic) and _speedup(dynamic) > _speedup(forecasts)
    for size, forecast in forecasts.items():
        cells = [str(size), f"{costs.ratio(size):.2f}", str(max(map(len, forecast.paths), default=0))]
        cells += [f"{forecast.acceptance_length:.3f}", f"{forecast.speedup:.3f}"]
        cells.append("best" if size == best and not on_top else "")
        if size in dynamic:
            one = dynamic[size]
            cells += [f"{one.plan.depth} x {one.plan.width}", f"{one.acceptance_length:.3f}", f"{one.speedup:.3f}"]
            cells.append("best" if on_top and size == best_size(dynamic) else "")
        table.add_row(*cells)
    console.print(table)
    if best == 1 and not on_top:
        console.print("plain decoding is the fastest here: these drafts cost more than they bring")
