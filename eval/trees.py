"""The plan that a head drafts by: what `headstart tune` found best, or the shape that a name asks for.

`trees.json` beside a head holds the trees of every number of nodes, static and dynamic ones, by rows decoded at a time.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from headstart.decode.drafters.plans import DynamicTree, Plan, SampledChain, SampledTree, StaticTree, chain_paths
from headstart.decode.tree import Path as TreePath
from headstart.errors import HeadError, RecipeError
from headstart.heads.configs import HEADS, UnrolledConfig
from headstart.heads.store import read_description

TREES = "trees.json"
"""Beside a head: the trees that `headstart tune` found, by number of nodes, the best size, and the forecast."""
UNTUNED_DEPTH, UNTUNED_WIDTH = 5, 4
"""Of a dynamic tree where none was tuned."""
UNTUNED_CHAIN = 3
"""Drafts of a head that reads its own states, where nothing was tuned and it was not trained deeper."""

STUDENT_CHAIN = 4
"""Drafts of a student, where nothing was tuned."""

TunedOn = tuple[str, str] | None
"""Device and dtype that a tree was tuned on; None: not tuned."""


def check_number(folder: Path, name: str, shape: str, number: int) -> None:
    """Refuses a plan that would be another than its name says."""
    least = 1 if shape in ("chain", "drawn") else 2
    if number < least:
        what = "drafts" if least == 1 else "nodes, the root among them"
        raise RecipeError(f"drafter {name!r} drafts nothing: {number} {what}; give {least} or more, or none")
    if shape in ("chain", "drawn"):
        return
    stored = read_trees(folder)
    try:
        sizes = sorted(map(int, (stored.get("dynamic", {}) if shape == "dynamic" else stored).get("choices", {})))
    except (ValueError, TypeError, AttributeError) as error:
        raise _no_file_of_trees(folder, error) from None
    if shape != "dynamic" and not sizes:
        raise HeadError(f"drafter {name!r}: no trees were tuned for {folder}; `headstart tune` makes them")
    if sizes and number not in sizes:
        raise HeadError(f"drafter {name!r}: trees were tuned for {', '.join(map(str, sizes))} nodes; take one of these")


def choose_plan(
    folder: Path, shape: str | None, size: int | str, rows: int = 1
) -> tuple[Plan, dict[str, Any], TunedOn]:
    """The plan of this shape (None: what tuning found best), its forecast, and what it was tuned on.

    size: drafts of a `chain` or `drawn` one, else nodes of the tree, root included; "auto": the best size, and for
    chains as deep as the head was trained. A `sampled` tree has the shape of the static one, and no forecast: its nodes
    are drawn, and tuning looked at ranks.
    """
    if shape in ("chain", "drawn"):
        length = trained_depth(folder) if size == "auto" else int(size)
        return (SampledChain(length=length) if shape == "drawn" else StaticTree(paths=chain_paths(length))), {}, None
    if shape is None and size == "auto":
        shape = read_trees(folder, rows).get("plan", "tree")
    if shape == "dynamic":
        return choose_dynamic(folder, size, rows)
    paths, forecast, tuned_on = choose_tree(folder, size, rows)
    if shape == "sampled":
        return SampledTree.shaped(paths), {}, tuned_on
    return StaticTree(paths=paths), forecast, tuned_on


def choose_tree(folder: Path, size: int | str, rows: int = 1) -> tuple[list[TreePath], dict[str, Any], TunedOn]:
    """The tuned static tree of `size` nodes (root included; "auto": the best size), its forecast, and the device and
    dtype that it was tuned on; untuned, a chain.

    Of a size that was not tuned, the next smaller one. Raises HeadError where the file cannot be used.
    """
    stored = read_trees(folder, rows)
    if not stored:
        depth = trained_depth(folder)
        return chain_paths(depth if size == "auto" else min(depth, int(size) - 1)), {}, None
    chosen, forecast, tuned_on = _of_size(folder, stored, stored, size)
    try:
        return [tuple(map(int, node)) for node in chosen], forecast, tuned_on
    except (ValueError, TypeError) as error:
        raise _no_file_of_trees(folder, error) from None


def choose_dynamic(folder: Path, size: int | str, rows: int = 1) -> tuple[DynamicTree, dict[str, Any], TunedOn]:
    """The same for dynamic trees: depth and width as tuned for this size, or as good as any where none was tuned."""
    stored = read_trees(folder, rows)
    if "dynamic" not in stored:
        nodes = 2 * UNTUNED_WIDTH if size == "auto" else int(size)
        depth = max(1, min(UNTUNED_DEPTH, nodes - 1))
        return DynamicTree(depth=depth, width=UNTUNED_WIDTH, num_nodes=nodes), {}, None
    chosen, forecast, tuned_on = _of_size(folder, stored, stored["dynamic"], size)
    try:
        return DynamicTree(**{key: int(value) for key, value in chosen.items()}), forecast, tuned_on
    except (ValueError, TypeError, AttributeError) as error:
        raise _no_file_of_trees(folder, error) from None


def trained_depth(folder: Path) -> int:
    """How many tokens the head in this folder drafts one after another unless it is told otherwise."""
    described = read_description(folder)["head"]
    if "num_heads" in described:
        return described["num_heads"]
    config = HEADS[described["type"]].model_validate(described)
    return max(config.most_unrolled_steps, UNTUNED_CHAIN) if isinstance(config, UnrolledConfig) else STUDENT_CHAIN


def read_trees(folder: Path, rows: int = 1) -> dict[str, Any]:
    """What tuning wrote beside the head, for so many rows at a time or the next smaller number that was tuned (else
    the first that was); empty where nothing was."""
    path = folder / TREES
    if not path.is_file():
        return {}
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise _no_file_of_trees(folder, error) from None
    if not isinstance(stored, dict) or not stored:
        raise _no_file_of_trees(folder, TypeError("no object"))
    try:
        others = {int(number): trees for number, trees in stored.get("by_rows", {}).items()}
        known = {int(stored.get("rows", 1)): stored} | others
    except (ValueError, TypeError, AttributeError) as error:
        raise _no_file_of_trees(folder, error) from None
    return known[max((number for number in known if number <= rows), default=next(iter(known)))]


def _of_size(
    folder: Path, stored: dict[str, Any], trees: dict[str, Any], size: int | str
) -> tuple[Any, dict[str, Any], TunedOn]:
    """(what stands there, forecast, tuned on) of this size or the next smaller one. trees: `stored`, or a part of it
    with the same keys."""
    try:
        sizes = sorted(map(int, trees["choices"]))
        wanted = int(trees["best"] if size == "auto" else size)
        chosen = max((one for one in sizes if one <= wanted), default=sizes[0])
        forecasts = dict(trees.get("forecasts") or {str(trees["best"]): trees["forecast"]})
        tuned_on = (str(stored["device"]), str(stored["dtype"]))
        return trees["choices"][str(chosen)], forecasts.get(str(chosen), {}), tuned_on
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise _no_file_of_trees(folder, error) from None


def _no_file_of_trees(folder: Path, error: Exception) -> HeadError:
    return HeadError(f"{folder / TREES} is no file of trees ({error!r}); make it anew with `headstart tune`")
