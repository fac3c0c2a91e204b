"""From the names on the command line to drafters (`ngram`, `head`, `head:RUN`), and the tree a head drafts along."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headstart.decode.drafters.base import Drafter
from headstart.decode.drafters.medusa import MedusaDrafter
from headstart.decode.drafters.ngram import NgramDrafter
from headstart.decode.tree import Path as TreePath
from headstart.errors import HeadError, RecipeError
from headstart.eval.timing import PLAIN
from headstart.eval.trained import find_head
from headstart.heads.store import load_head, read_description
from headstart.target import Target

KNOWN = f"{PLAIN}, ngram, head or head:RUN"
TREES = "trees.json"
"""Beside a head: the trees that `headstart tune` found, by number of nodes, the best size, and the forecast."""


@dataclass(frozen=True)
class DrafterPlan:
    """How to make one drafter for any copy of its target; a float32 copy needs its own."""

    name: str
    make: Callable[[Target], Drafter]
    budget: int
    """Nodes of its trees at most, root included."""
    tree: list[TreePath] | None = None
    """The static tree of a head."""
    forecast: dict[str, Any] = field(default_factory=dict)
    """`acceptance_length` and `speedup` as `headstart tune` forecast them; empty where it did not."""
    tuned_on: tuple[str, str] | None = None
    """Device and dtype that the tree is for."""


def plan_drafter(name: str, head: Path | None, size: int | str, allow_other_target: bool = False) -> DrafterPlan:
    """The plan of one name. head: the folder that plain `head` means. size: nodes of a tree, or "auto"."""
    kind, _, place = name.partition(":")
    if kind == "ngram" and not place:
        length = 8 if size == "auto" else int(size) - 1
        return DrafterPlan(name, lambda target: NgramDrafter(length), length + 1)
    if kind != "head":
        raise RecipeError(f"drafter {name!r} is not known; expected {KNOWN}")
    folder = find_head(Path(place))[1] if place else head
    if folder is None:
        raise RecipeError("drafter 'head' needs to know which; add --head RUN, or write head:RUN")
    tree, forecast, tuned_on = choose_tree(folder, size)
    return DrafterPlan(
        name,
        lambda target: MedusaDrafter(load_head(folder, target, allow_other_target), target, tree),
        len(tree) + 1,
        tree,
        forecast,
        tuned_on,
    )


def choose_tree(folder: Path, size: int | str) -> tuple[list[TreePath], dict[str, Any], tuple[str, str] | None]:
    """The tuned tree of `size` nodes (root included; "auto": the best size), its forecast, and the device and dtype
    that it was tuned on; untuned, a chain.

    Of a size that was not tuned, the next smaller one. Raises HeadError where the file cannot be used.
    """
    path = folder / TREES
    if not path.is_file():
        depth = read_description(folder)["head"]["num_heads"]
        depth = depth if size == "auto" else min(depth, int(size) - 1)
        return [(0,) * level for level in range(1, depth + 1)], {}, None
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        sizes = sorted(map(int, stored["choices"]))
        wanted = int(stored["best"] if size == "auto" else size)
        chosen = max((one for one in sizes if one <= wanted), default=sizes[0])
        tree = [tuple(map(int, node)) for node in stored["choices"][str(chosen)]]
        forecasts = dict(stored.get("forecasts") or {str(stored["best"]): stored["forecast"]})
        tuned_on = (str(stored["device"]), str(stored["dtype"]))
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise HeadError(f"{path} is no file of trees ({error!r}); make it anew with `headstart tune`") from None
    return tree, forecasts.get(str(chosen), {}), tuned_on
