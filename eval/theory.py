"""`headstart theory`: how much speed follows from a rate of acceptance, a draft length and what drafting costs.

    headstart theory --alpha 0.9 --k 5
    headstart theory --rates 0.8,0.7,0.6 --cost 0.1               # a rate of its own for every depth
    headstart theory --alpha 0.6 --tree 4,2,1                     # four children of the root, two of each of those, ..
    headstart theory --alpha 0.8 --head runs/quickstart           # with the costs that `headstart tune` measured here
    headstart theory --alpha 0.9 --k 5 --output theory.html       # the same to play with, in a browser
    headstart theory --report runs/mine/report.json --output theory.html      # with what was measured drawn in

The closed forms are those of `decode.closed_form`. Without --head a draft costs `--cost` plain steps and verifying is
free, as in the papers; with it a step costs what it took on this device, where verifying more tokens takes longer, and
the best draft is shorter. With --report, every drafter of a report of `headstart eval` stands beside the forms: rate α,
drafts K, cost of a draft c and speedup as measured, and what it would be if verifying were free, τ / (1 + K c).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files
from itertools import accumulate, product
from operator import mul
from pathlib import Path
from string import Template
from typing import Any

from rich.console import Console
from rich.table import Table

from headstart.atomic import write_text
from headstart.decode.closed_form import (
    Number,
    best_length,
    expected_accepted,
    expected_tokens_of_tree,
    operations_factor,
    walltime_factor,
)
from headstart.decode.cost import CostCurve, DraftCosts
from headstart.decode.drafters.plans import chain_paths
from headstart.decode.tree import Path as TreePath
from headstart.errors import HeadstartError
from headstart.eval.trained import find_head
from headstart.eval.trees import TREES, read_trees

LENGTHS = 12
"""Draft lengths of the table and the page."""
MOST_NODES = 100_000
"""Of a tree that is computed node by node."""


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What a step costs, in plain steps."""

    chain: Callable[[int], Number]
    """Of drafting and verifying a chain of so many drafts; 1 for none."""
    draft: Number
    """Of one draft."""
    longest: int
    """The longest chain whose cost is known."""
    source: str
    measured: bool = False


def paper_costs(cost: Number) -> Costs:
    """Leviathan's: every draft costs `cost`, verifying costs one plain step however many tokens it is."""
    if not 0 <= cost < float("inf"):
        raise HeadstartError(f"--cost is {cost:g}, expected a number from 0 on")
    return Costs(chain=lambda k: 1 + k * cost, draft=cost, longest=64, source=f"a draft costs {cost:g} plain steps")


def measured_costs(head: str) -> Costs:
    """Those that `headstart tune` wrote beside a head."""
    folder = find_head(Path(head))[1]
    stored = read_trees(folder)
    if not stored:
        raise HeadstartError(f"{folder} has no {TREES}; measure the costs first: headstart tune --head {head}")
    try:
        seconds = {int(width): float(value) for width, value in stored["step_seconds"].items()}
        drafting = draft_costs(stored["draft_seconds"])
        device = f"{stored['device']}, {stored['dtype']}"
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise HeadstartError(f"{folder / TREES} lacks the measured costs ({error!r}); tune the head again") from None
    curve = CostCurve(seconds=seconds, context_length=0, rows=1, device=device, dtype="")

    def chain(length: int) -> Number:
        if not length:
            return 1.0
        draft = drafting.of(chain_paths(length)) if isinstance(drafting, DraftCosts) else drafting
        return (curve.at(length + 1) + draft) / curve.at(1)

    draft = (drafting.static_level[1] if isinstance(drafting, DraftCosts) else drafting) / curve.at(1)
    return Costs(
        chain=chain,
        draft=draft,
        longest=max(seconds) - 1,
        source=f"costs as measured for {folder} ({device})",
        measured=True,
    )


def draft_costs(stored: Number | dict[str, Any]) -> float | DraftCosts:
    """`draft_seconds` of a file of trees."""
    if not isinstance(stored, dict):
        return float(stored)
    levels = {
        kind: {int(width): float(seconds) for width, seconds in stored[kind].items()}
        for kind in ("static_level", "dynamic_level")
    }
    return DraftCosts(first=float(stored["first"]), **levels)


@dataclass(frozen=True)
class Measured:
    """A drafter of a report. speedup: measured, over plain decoding; free: the same if verifying a tree cost what a
    plain step does, τ / (1 + K c)."""

    name: str
    alpha: Number
    length: Number
    cost: Number
    acceptance_length: Number
    speedup: Number
    free: Number


def read_report(path: str) -> list[Measured]:
    """The drafters of a report.json, at its first temperature; those that drafted nothing or whose speedup is withheld
    are left out."""
    keys = ("name", "alpha", "mean_depth", "draft_cost", "acceptance_length", "speedup")
    try:
        lines = json.loads(Path(path).read_text(encoding="utf-8"))["details"]["drafters"]
        rows = [[line[key] for key in keys] for line in lines]
    except OSError as error:
        raise HeadstartError(f"--report {path}: {error.strerror or error}; give the report.json of an eval") from None
    except (ValueError, KeyError, TypeError) as error:
        raise HeadstartError(
            f"--report {path} has no alpha and cost of each drafter ({error!r}); write it anew by headstart eval"
        ) from None
    known = [row for row in rows if None not in row]
    if not known:
        raise HeadstartError(f"--report {path} has no drafter with a measured speedup; name some with --drafters")
    return [Measured(*row, free=row[4] / (1 + row[2] * row[3])) for row in known]


def tree_paths(children: Sequence[int]) -> list[TreePath]:
    """The full tree with so many children of every node of each level."""
    return [
        path for depth in range(1, len(children) + 1) for path in product(*(range(count) for count in children[:depth]))
    ]


def run(
    *,
    alpha: Number | None = None,
    rates: Sequence[Number] | None = None,
    length: int = 5,
    cost: Number = 0.05,
    tree: Sequence[int] | None = None,
    head: str | None = None,
    report: str | None = None,
    output: str | None = None,
) -> dict[str, Any]:
    """Prints the table, writes the page where `output` says, and gives back the figures.

    alpha: one rate of acceptance for all depths; rates: one for each depth instead, where all before were accepted; by
    default the rate of the first drafter of `report`.
    """
    drawn = read_report(report) if report else []
    if drawn and alpha is None and rates is None:
        alpha = drawn[0].alpha
    if (alpha is None) == (rates is None):
        raise HeadstartError("give either --alpha, one rate of acceptance, or --rates, one for each depth")
    if output and not output.endswith(".html"):
        raise HeadstartError(f"--output is {output}, expected a file that ends in .html")
    costs = measured_costs(head) if head else paper_costs(cost)
    if rates is None:
        assert alpha is not None
        rates = [alpha] * costs.longest
    else:
        length = min(length, len(rates))
    if not 1 <= length <= costs.longest:
        raise HeadstartError(f"--k is {length}, expected 1 to {costs.longest} drafts, whose costs are known")
    best = best_length(rates[: costs.longest], costs.chain)
    shown = sorted({*range(1, min(len(rates), costs.longest, LENGTHS) + 1), length, best} - {0})
    figures = {
        "costs": costs.source,
        "asked": length,
        "best": best,
        "lengths": [_chain(rates[:k], costs) for k in shown],
        "tree": _tree(rates, tree) if tree else None,
        "measured": [asdict(one) for one in drawn],
    }
    console = Console()
    show(figures, console)
    if output:
        write_text(Path(output), to_html(rates[0], length, costs, drawn))
        console.print(output)
    return figures


def _chain(rates: Sequence[Number], costs: Costs) -> dict[str, Any]:
    step = costs.chain(len(rates))
    return {
        "length": len(rates),
        "accepted": expected_accepted(rates),
        "step_cost": step,
        "speedup": walltime_factor(rates, step),
        "operations": None if costs.measured else operations_factor(rates, costs.draft),
    }


def _tree(rates: Sequence[Number], children: Sequence[int]) -> dict[str, Any]:
    """A full tree; a node's r-th child is right at its depth's rate where all children before it were wrong."""
    if len(children) > len(rates):
        raise HeadstartError(f"--tree has {len(children)} levels, and rates are given for {len(rates)}; give as many")
    nodes = 1 + sum(accumulate(children, mul))
    if nodes > MOST_NODES:
        raise HeadstartError(f"--tree has {nodes} nodes, expected {MOST_NODES} at most; give fewer children or levels")
    paths = tree_paths(children)
    tokens = expected_tokens_of_tree(paths, lambda path: rates[len(path) - 1] * (1 - rates[len(path) - 1]) ** path[-1])
    return {"children": list(children), "nodes": nodes, "tokens": tokens}


def show(figures: dict[str, Any], console: Console) -> None:
    """One line for every draft length, the asked one and the best one marked; a sentence on the tree."""
    console.print(figures["costs"], highlight=False)
    table = Table(box=None)
    for heading in ("drafts", "accepted", "tokens/step", "step cost", "speedup", "arithmetic", ""):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in figures["lengths"]:
        numbers = (row["accepted"], row["accepted"] + 1, row["step_cost"], row["speedup"], row["operations"])
        cells = ["" if number is None else f"{number:.2f}" for number in numbers]
        marks = [mark for mark in ("asked", "best") if row["length"] == figures[mark]]
        table.add_row(str(row["length"]), *cells, ", ".join(marks))
    console.print(table)
    if figures["best"] == 0:
        console.print("plain decoding is the fastest: at this rate, drafts cost more than they bring")
    if figures["tree"]:
        tree = figures["tree"]
        console.print(f"a tree of {tree['nodes']} nodes: {tree['tokens']:.2f} tokens per step", highlight=False)
    if figures["measured"]:
        table = Table("as measured", box=None)
        for heading in ("α", "drafts K", "cost c", "tokens/step", "speedup", "if verifying were free"):
            table.add_column(heading, justify="right")
        for one in figures["measured"]:
            digits = {"alpha": 2, "length": 2, "cost": 3, "acceptance_length": 2, "speedup": 2, "free": 2}
            table.add_row(one["name"], *(f"{one[key]:.{places}f}" for key, places in digits.items()))
        console.print(table)


# -- the page ----------------------------------------------------------------------------------------------------------


def to_html(alpha: Number, length: int, costs: Costs, drawn: Sequence[Measured] = ()) -> str:
    """A page with sliders, which needs no network. `costs`: where its sliders begin, and a curve of its own if they
    were measured; drawn: points in the plot."""
    template = Template(files("headstart.eval").joinpath("theory.html").read_text(encoding="utf-8"))
    longest = min(LENGTHS, costs.longest)
    values = {
        "alpha": alpha,
        "length": min(length, longest),
        "cost": round(costs.draft, 4),
        "longest": longest,
        "measured": [costs.chain(k) for k in range(longest + 1)] if costs.measured else None,
        "source": costs.source,
        "points": [asdict(one) for one in drawn],
    }
    return template.substitute(values=json.dumps(values).replace("</", "<\\/"))
