"""From the names on the command line to drafters: `ngram`, `head@chain3:RUN`, `union:ngram+head:RUN`.

A name is KIND, KIND@PLAN, KIND:PLACE or KIND@PLAN:PLACE. Plans: `chainN` (N drafts one after the other), for heads also
`treeN` or `dynamicN` (N nodes with the root, as tuned), and for temperatures above 0 `drawnN` (a chain of N tokens
drawn from the head's own distribution) or `sampledN` (a tree of the shape of `treeN` whose nodes are drawn). In a union
all are taken by rank.

    none                    plain decoding
    ngram                   what followed the text's last words before; @tree16, @frequent8: see NgramDrafter
    retrieval:STORE         what followed them in other texts, from `headstart data datastore`
    lookahead, :W-N-G       the target's own guesses, made beside verification (window, level, guesses)
    model:MODEL             a smaller causal model with the target's tokenizer: hub id, folder, or run of train/draft.py
    quantised:int8, :int4   the target's own weights in fewer bits
    layer-skip@exitE        the target's first E layers (default: half of them)
    layer-skip:RUN          the target without the blocks that a search found
    head, head:RUN          a trained head; without RUN, that of --head
    union:A+B               the trees of several drafters in one
    adaptive:A              another drafter, as deep in every step as pays; @heuristic: by transformers' rule of thumb
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from headstart.data.datastore import check_datastore, load_datastore
from headstart.decode.decode_copy import make_faster
from headstart.decode.draft_length import AdaptiveLength, ConstantLength, HeuristicLength, LengthPolicy, StepCosts
from headstart.decode.drafters.adaptive import AdaptiveDrafter
from headstart.decode.drafters.base import Drafter
from headstart.decode.drafters.heads import head_drafter
from headstart.decode.drafters.layer_skip import EarlyExitDrafter, skipping_drafter
from headstart.decode.drafters.lookahead import LookaheadDrafter
from headstart.decode.drafters.model import ModelDrafter
from headstart.decode.drafters.ngram import NgramDrafter
from headstart.decode.drafters.plans import DynamicTree, Plan, SampledChain, SampledTree, StaticTree
from headstart.decode.drafters.quantised import QuantisedDrafter
from headstart.decode.drafters.retrieval import RetrievalDrafter
from headstart.decode.drafters.student import student_drafter
from headstart.decode.drafters.union import UnionDrafter
from headstart.decode.forecast import measure_depths
from headstart.decode.skip_search import LONGEST
from headstart.decode.skips import read_skips
from headstart.decode.tree import Path as TreePath
from headstart.errors import RecipeError
from headstart.eval.timing import PLAIN
from headstart.eval.trained import find_head
from headstart.eval.trees import TunedOn, check_number, choose_plan
from headstart.heads.store import WEIGHTS, load_head
from headstart.recipe import EvalSection
from headstart.target import Target, load_target

HEAD_PLANS = ("chain", "tree", "dynamic", "drawn", "sampled")
CHAIN = 4
"""Drafts of a step where nothing says how many."""
TREE, DEPTH = 16, 8
"""Nodes with the root, and levels, of a tree from what texts hold, where nothing says how many."""
MOST = 256
"""Tokens of a step that a name may ask for: no device gains from so many, and memory grows with them."""


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
    depth: int | None = None
    """Levels of its trees at most, where they are no chains and follow no plan."""
    reads: tuple[Path, ...] = ()
    """The folders that it is made from: of heads, models, datastores."""

    @property
    def heads(self) -> list[Path]:
        """Of those, the folders of trained heads and students, which say how their prompts were rendered."""
        return [folder for folder in self.reads if (folder / WEIGHTS).is_file()]

    @property
    def depths(self) -> list[int]:
        """Nodes of its tree down to every depth from 0 on, as `StepCosts` has them; 0: the depth is not on offer."""
        if isinstance(self.plan, StaticTree | SampledTree):
            levels = [len(path) for path in self.plan.paths]
            return [1 + sum(level <= depth for level in levels) for depth in range(max(levels, default=0) + 1)]
        depth = self.plan.depth if isinstance(self.plan, DynamicTree) else self.depth
        return list(range(1, self.budget + 1)) if depth is None else [1, *[0] * (depth - 1), self.budget]

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
    drawn: bool

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
    drawn: bool = True,
) -> DrafterPlan:
    """The plan of one name. head: the folder that plain `head` means. size: nodes of a tree, or "auto". rows: how many
    are decoded at a time. drawn: models draw their drafts where a temperature is above 0. Raises RecipeError for a name
    that means nothing."""
    described, _, place = name.partition(":")
    matched = re.fullmatch(r"([a-z-]+?)(?:@([a-z]+)(\d*))?", described)
    known = KINDS.get(matched[1]) if matched else None
    if matched is None or known is None:
        raise RecipeError(f"drafter {name!r} is not known; expected {PLAIN}, {', '.join(KINDS)}")
    number = int(matched[3]) if matched[3] else None
    return known(_Name(name, matched[1], matched[2] or "", number, place, head, size, allow_other_target, rows, drawn))


def plan_drafters(
    names: Sequence[str], head: Path | None, settings: EvalSection, allow_other_target: bool = False
) -> dict[int, list[DrafterPlan]]:
    """The plans of all names, for every number of rows that are decoded at a time."""
    return {
        rows: [plan_drafter(name, head, settings.tree, allow_other_target, rows) for name in names]
        for rows in settings.batch_size
    }


def _check_plan(name: _Name, *plans: str) -> None:
    """Refuses a plan of another kind, and one that drafts nothing."""
    if name.plan and name.plan not in plans:
        known = " or ".join(f"{name.kind}@{plan}N" for plan in plans) or f"{name.kind} without a plan"
        raise RecipeError(f"drafter {name.whole!r} has a plan that is not known; expected {known}")
    if name.number == 0:
        raise RecipeError(f"drafter {name.whole!r} drafts nothing; give 1 or more, or {PLAIN}")
    _check_most(name, name.number or 0)


def _check_most(name: _Name, tokens: int) -> None:
    if tokens > MOST:
        raise RecipeError(f"drafter {name.whole!r} asks for {tokens} tokens in a step; give numbers up to {MOST}")


def _ngram(name: _Name) -> DrafterPlan:
    _check_plan(name, "chain", "frequent", "tree")
    if name.place:
        raise RecipeError(f"drafter {name.whole!r} looks in the text itself and takes no place; expected ngram")
    if name.plan == "tree":
        nodes = name.number or TREE

        def tree(target: Target) -> Drafter:
            return NgramDrafter(DEPTH, take="tree", num_nodes=nodes, end_token_ids=target.end_token_ids)

        return DrafterPlan(name.whole, tree, nodes, depth=min(DEPTH, max(nodes - 1, 1)))
    length = name.number or (DEPTH if name.size == "auto" else int(name.size) - 1)
    take = "frequent" if name.plan == "frequent" else "latest"
    return DrafterPlan(name.whole, lambda target: NgramDrafter(length, take=take), length + 1)


def _retrieval(name: _Name) -> DrafterPlan:
    _check_plan(name, "tree")
    if not name.place:
        raise RecipeError(
            f"drafter {name.whole!r} needs texts; write retrieval:STORE, a folder of `headstart data datastore`"
        )
    check_datastore(name.place)
    nodes = name.number or (TREE if name.size == "auto" else int(name.size))

    def make(target: Target) -> Drafter:
        store = load_datastore(name.place, target.tokenizer)
        return RetrievalDrafter(store, target.end_token_ids, num_nodes=nodes, length=DEPTH)

    depth = min(DEPTH, max(nodes - 1, 1))
    return DrafterPlan(name.whole, make, nodes, depth=depth, reads=(Path(name.place),))


def _lookahead(name: _Name) -> DrafterPlan:
    _check_plan(name)
    numbers = re.fullmatch(r"(\d+)-(\d+)-(\d+)", name.place)
    if name.place and numbers is None:
        raise RecipeError(f"drafter {name.whole!r} is not known; expected lookahead:W-N-G, such as lookahead:7-5-7")
    drafter = LookaheadDrafter(*map(int, numbers.groups())) if numbers else LookaheadDrafter()
    window, level, guesses = drafter.window, drafter.level, drafter.guesses
    _check_most(name, max(drafter.num_nodes, window * (level - 1)))
    nodes = drafter.num_nodes if name.size == "auto" else int(name.size)
    return DrafterPlan(
        name.whole, lambda target: LookaheadDrafter(window, level, guesses), nodes, depth=min(level, nodes) - 1
    )


def _quantised(name: _Name) -> DrafterPlan:
    _check_plan(name, "chain")
    bits = re.fullmatch(r"int([48])", name.place)
    if bits is None:
        raise RecipeError(f"drafter {name.whole!r} needs to know how many bits; write quantised:int8 or quantised:int4")
    length = name.chain_length()

    def make(target: Target) -> Drafter:
        return QuantisedDrafter(target, int(bits[1]), length, drawn=name.drawn)

    return DrafterPlan(name.whole, make, length + 1)


def _model(name: _Name) -> DrafterPlan:
    _check_plan(name, "chain")
    if not name.place:
        raise RecipeError(f"drafter {name.whole!r} needs to know which; write model:MODEL, a hub id or a folder")
    length, forecast, tuned_on = name.chain_length(), {}, None
    student = Path(name.place) / "head"
    if student.is_dir() and not name.plan and name.size == "auto":
        tuned, forecast, tuned_on = choose_plan(student, None, "auto", name.rows)
        length = max(1, tuned.num_nodes - 1)

    def make(target: Target) -> Drafter:
        if student.is_dir():
            allow = name.allow_other_target
            return student_drafter(name.place, target, length, drawn=name.drawn, allow_other_target=allow)
        return ModelDrafter(open_draft_model(name.place, target), target, length, drawn=name.drawn)

    folder = student if student.is_dir() else Path(name.place)
    reads = (folder,) if folder.is_dir() else ()
    return DrafterPlan(name.whole, make, length + 1, forecast=forecast, tuned_on=tuned_on, reads=reads)


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
        read_skips(folder)
        length = name.chain_length() if name.plan or name.size != "auto" else None

        def skipping(target: Target) -> Drafter:
            return skipping_drafter(
                folder, target, length, drawn=name.drawn, allow_other_target=name.allow_other_target
            )

        return DrafterPlan(name.whole, skipping, (length or LONGEST) + 1, reads=(folder,))
    length = name.chain_length()

    def early(target: Target) -> Drafter:
        layer = name.number if name.plan == "exit" and name.number else max(1, target.num_layers // 2)
        return EarlyExitDrafter(target, layer, length, drawn=name.drawn)

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
    if not name.drawn and isinstance(plan, SampledChain | SampledTree):
        plan = StaticTree(paths=plan.paths)

    def make(target: Target) -> Drafter:
        return head_drafter(load_head(folder, target, name.allow_other_target), target, plan)

    return DrafterPlan(name.whole, make, plan.num_nodes, plan, forecast, tuned_on, reads=(folder,))


def _union(name: _Name) -> DrafterPlan:
    _check_plan(name)
    parts = [part for part in name.place.split("+") if part]
    if len(parts) < 2 or PLAIN in parts:
        raise RecipeError(f"drafter {name.whole!r} is no union; expected union:A+B, such as union:ngram+head:RUN")
    plans = [plan_drafter(part, name.head, name.size, name.allow_other_target, name.rows, False) for part in parts]
    budget = max(plan.budget for plan in plans) if name.size == "auto" else int(name.size)
    depth = min(max(len(plan.depths) for plan in plans), budget) - 1
    reads = tuple(folder for plan in plans for folder in plan.reads)

    def make(target: Target) -> Drafter:
        return UnionDrafter([plan.make(target) for plan in plans])

    return DrafterPlan(name.whole, make, budget, depth=depth, reads=reads)


def _adaptive(name: _Name) -> DrafterPlan:
    _check_plan(name, "heuristic", "constant")
    if not name.place or name.place == PLAIN:
        raise RecipeError(f"drafter {name.whole!r} needs another one to adapt; expected adaptive:A, as adaptive:ngram")
    inner = plan_drafter(name.place, name.head, name.size, name.allow_other_target, name.rows, name.drawn)
    known: list[StepCosts] = []

    def make(target: Target) -> Drafter:
        drafter = inner.make(target)
        if not known:  # other copies of the target decode by the same costs
            known.append(measure_depths(drafter, target, inner.depths, rows=name.rows))
        return AdaptiveDrafter(drafter, known[0], _POLICIES[name.plan])

    return DrafterPlan(name.whole, make, inner.budget, depth=len(inner.depths) - 1, reads=inner.reads)


_POLICIES: dict[str, Callable[[StepCosts], LengthPolicy]] = {
    "": AdaptiveLength,
    "heuristic": lambda costs: HeuristicLength(costs.longest),
    "constant": lambda costs: ConstantLength(costs.longest),
}


KINDS: dict[str, Callable[[_Name], DrafterPlan]] = {
    "ngram": _ngram,
    "retrieval": _retrieval,
    "lookahead": _lookahead,
    "model": _model,
    "quantised": _quantised,
    "layer-skip": _layer_skip,
    "head": _head,
    "union": _union,
    "adaptive": _adaptive,
}
"""By the first word of a name, beside PLAIN."""
