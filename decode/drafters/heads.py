"""From a trained head to its drafter: the one place that tells the kinds of heads apart while decoding."""

from __future__ import annotations

from collections.abc import Sequence

from headstart.decode.drafters.eagle import EagleDrafter
from headstart.decode.drafters.medusa import MedusaDrafter
from headstart.decode.drafters.plans import Plan, SampledChain, StaticTree, as_plan, chain_paths
from headstart.decode.drafters.student import StudentDrafter
from headstart.decode.tree import Path
from headstart.errors import HeadstartError
from headstart.heads.base import Head
from headstart.heads.draft import DraftHead
from headstart.heads.medusa import MedusaHead
from headstart.heads.unrolled import UnrolledHead
from headstart.target import Target


def head_drafter(
    head: Head, target: Target, plan: Plan | Sequence[Path] | None = None, *, widen: bool = True
) -> MedusaDrafter | EagleDrafter | StudentDrafter:
    """The drafter of a head; None: a chain as deep as it was trained, of a student one of four. Raises HeadstartError
    where the head cannot draft after this plan."""
    if isinstance(head, UnrolledHead):
        return EagleDrafter(head, target, plan, widen=widen)
    if isinstance(head, DraftHead):
        return _student(head, target, as_plan(chain_paths(4) if plan is None else plan), widen)
    assert isinstance(head, MedusaHead)
    return MedusaDrafter(head, target, plan, widen=widen)


def _student(head: DraftHead, target: Target, plan: Plan, widen: bool) -> StudentDrafter:
    length = plan.num_nodes - 1
    drawn = isinstance(plan, SampledChain)
    if not drawn and not (isinstance(plan, StaticTree) and sorted(plan.paths) == chain_paths(length)):
        raise HeadstartError(f"students draft chains and cannot follow {plan}; give a chain")
    return StudentDrafter(head, target, length, drawn=drawn, stop_below=plan.stop_below, widen=widen)
