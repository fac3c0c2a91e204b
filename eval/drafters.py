"""From the names on the command line to drafters: `ngram`, `head@chain3:RUN`, `union:ngram+head:RUN`.

A name is KIND, KIND@PLAN, KIND:PLACE or KIND@PLAN:PLACE. Plans: `chainN` (N drafts one after the other), for heads also
`treeN` or `dynamicN` (N nodes with the root, as tuned), and `drawnN` (a chain of N tokens drawn from the head's own
distribution, for temperatures above 0).

    none                    plain decoding
    ngram                   what followed the text's last words before
    model:MODEL             a smaller causal model with the target's tokenizer: hub id, folder, or run of train/draft.py
    layer-skip@exitE        the target's first E layers (default: half of them)
    layer-skip:RUN          the target without the blocks that a search found
    head, head:RUN          a trained head; without RUN, that of --head
    union:A+B               the trees of several drafters in one
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from headstart.decode.decode_copy import make_faster
from headstart.decode.drafters.base import Drafter
from headstart.decode.drafters.heads import head_drafter
from headstart.decode.drafters.layer_skip import EarlyExitDrafter, skipping_drafter
from headstart.decode.drafters.model import ModelDrafter
from headstart.decode.drafters.ngram import NgramDrafter
from headstart.decode.drafters.plans import Plan, StaticTree
from headstart.decode.drafters.union import UnionDrafter
from headstart.decode.skip_search import LONGEST
from headstart.decode.tree import Path as TreePath
from headstart.errors import RecipeError
from headstart.eval.timing import PLAIN
from headstart.eval.trained import find_head
from headstart.eval.trees import TunedOn, check_number, choose_plan
from headstart.heads.store import load_head
from headstart.target import Target, load_target

HEAD_PLANS = ("chain", "tree", "dynamic", "drawn")
CHAIN = 4
"""Drafts of a step where nothing says how many."""


@dataclass(frozen=True)
class DrafterPlan:
    """How to make one drafter for any copy of its target; a float32 copy needs its own."""

    name: str
    make: Callable[[Target], Drafter]
    budget: int
    """Nodes of its trees at most, root included."""
    plan: Plan | None = None
    """What a head drafts along."""
    forecast: dict[str, Any] = field(default_factory=dict)
    """`acceptance_length` and `speedup` as `headstart tune` forecast them; empty where it did not."""
    tuned_on: TunedOn = None

    @property
    def tree(self) -> list[TreePath] | dict[str, Any] | None:
        """The plan as a report has it: the paths of a static tree, or the numbers of another plan."""
        if isinstance(self.plan, StaticTree):
            return list(self.plan.paths)
        return None if self.plan is None else asdict(self.plan)


@dataclass(frozen=True)
class _Name:
    """A drafter's name in its parts, and what else its plan may follow from."""

    whole: str
    kind: str
    plan: str
    """chain, tree, ..; empty where none was asked for."""
    number: int | None
    """Behind the plan."""
    place: str
    head: Path | None
    size: int | str
    allow_other_target: bool
    rows: int
    by_rank: bool

    def chain_length(self) -> int:
        """Drafts of a step: of `@chainN`, else of the tree's size that the recipe asks for, else CHAIN."""
        if self.plan == "chain" and self.number is not None:
            return self.number
        return CHAIN if self.size == "auto" else int(self.size) - 1


def plan_drafter(
    name: str,
    head: Path | None,
    size: int | str,
    allow_other_target: bool = False,
    rows: int = 1,
    by_rank: bool = False,
) -> DrafterPlan:
    """The plan of one name. head: the folder that plain `head` means. size: nodes of a tree, or "auto". rows: how many
    are decoded at a time. by_rank: models take their likeliest tokens at any temperature. Raises RecipeError for a name
    that means nothing."""
    described, _, place = name.partition(":")
    matched = re.fullmatch(r"([a-z-]+?)(?:@([a-z]+)(\d*))?", described)
    known = _KINDS.get(matched[1]) if matched else None
    if matched is None or known is None:
        raise RecipeError(f"drafter {name!r} is not known; expected {PLAIN}, {', '.join(_KINDS)}")
    number = int(matched[3]) if matched[3] else None
    return known(
        _Name(name, matched[1], matched[2] or "", number, place, head, size, allow_other_target, rows, by_rank)
    )


def _check_plan(name: _Name, *plans: str) -> None:
    """Refuses a plan of another kind, and one that drafts nothing."""
    if name.plan and name.plan not in plans:
        known = " or ".join(f"{name.kind}@{plan}N" for plan in plans) or f"{name.kind} without a plan"
        raise RecipeError(f"drafter {name.whole!r} has a plan that is not known; expected {known}")
    if name.number == 0:
        raise RecipeError(f"drafter {name.whole!r} drafts nothing; give 1 or more, or {PLAIN}")


def _ngram(name: _Name) -> DrafterPlan:
    _check_plan(name, "chain")
    if name.place:
        raise RecipeError(f"drafter {name.whole!r} looks in the text itself and takes no place; expected ngram")
    length = 8 if name.size == "auto" and not name.plan else name.chain_length()
    return DrafterPlan(name.whole, lambda target: NgramDrafter(length), length + 1)


def _model(name: _Name) -> DrafterPlan:
    _check_plan(name, "chain")
    if not name.place:
        raise RecipeError(f"drafter {name.whole!r} needs to know which; write model:MODEL, a hub id or a folder")
    length = name.chain_length()

    def make(target: Target) -> Drafter:
        return ModelDrafter(open_draft_model(name.place, target), target, length, by_rank=name.by_rank)

    return DrafterPlan(name.whole, make, length + 1)


def open_draft_model(place: str, target: Target) -> Target:
    """The draft model of that hub id or folder, on the target's device and in its dtype, as fast as the target is."""
    model = load_target(place, dtype=target.dtype, device=target.device)
    if target.swapped:
        make_faster(model)
    return model


def _layer_skip(name: _Name) -> DrafterPlan:
    _check_plan(name, *(("chain",) if name.place else ("chain", "exit")))
    folder = Path(name.place)
    if name.place:
        length = name.chain_length() if name.plan or name.size != "auto" else None

        def skipping(target: Target) -> Drafter:
            return skipping_drafter(
                folder, target, length, by_rank=name.by_rank, allow_other_target=name.allow_other_target
            )

        return DrafterPlan(name.whole, skipping, (length or LONGEST) + 1)
    length = name.chain_length()

    def early(target: Target) -> Drafter:
        layer = name.number if name.plan == "exit" and name.number else max(1, target.num_layers // 2)
        return EarlyExitDrafter(target, layer, length, by_rank=name.by_rank)

    return DrafterPlan(name.whole, early, length + 1)


def _head(name: _Name) -> DrafterPlan:
    _check_plan(name, *HEAD_PLANS)
    folder = find_head(Path(name.place))[1] if name.place else name.head
    if folder is None:
        raise RecipeError("drafter 'head' needs to know which; add --head RUN, or write head:RUN")
    if name.number:
        check_number(folder, name.whole, name.plan, name.number)
    size = name.number or name.size
    plan, forecast, tuned_on = choose_plan(folder, name.plan or None, size, name.rows)

    def make(target: Target) -> Drafter:
        return head_drafter(load_head(folder, target, name.allow_other_target), target, plan)

    return DrafterPlan(name.whole, make, plan.num_nodes, plan, forecast, tuned_on)


def _union(name: _Name) -> DrafterPlan:
    _check_plan(name)
    parts = [part for part in name.place.split("+") if part]
    if len(parts) < 2 or PLAIN in parts:
        raise RecipeError(f"drafter {name.whole!r} is no union; expected union:A+B, such as union:ngram+head:RUN")
    plans = [plan_drafter(part, name.head, name.size, name.allow_other_target, name.rows, True) for part in parts]
    budget = max(plan.budget for plan in plans) if name.size == "auto" else int(name.size)
    return DrafterPlan(name.whole, lambda target: UnionDrafter([plan.make(target) for plan in plans]), budget)


_KINDS: dict[str, Callable[[_Name], DrafterPlan]] = {
    "ngram": _ngram,
    "model": _model,
    "layer-skip": _layer_skip,
    "head": _head,
    "union": _union,
}
