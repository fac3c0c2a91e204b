"""From a trained head to its drafter: the one place that tells the kinds of heads apart while decoding."""

from __future__ import annotations

from collections.abc import Sequence

from headstart.decode.drafters.eagle import EagleDrafter
from headstart.decode.drafters.medusa import MedusaDrafter
from headstart.decode.drafters.plans import Plan
from headstart.decode.tree import Path
from headstart.heads.base import Head
from headstart.heads.medusa import MedusaHead
from headstart.heads.unrolled import UnrolledHead
from headstart.target import Target


def head_drafter(
    head: Head, target: Target, plan: Plan | Sequence[Path] | None = None, *, widen: bool = True
) -> MedusaDrafter | EagleDrafter:
    """The drafter of a head; None: a chain as deep as it was trained. Raises HeadstartError where the head cannot draft
    after this plan."""
    if isinstance(head, UnrolledHead):
        return EagleDrafter(head, target, plan, widen=widen)
    assert isinstance(head, MedusaHead)
    return MedusaDrafter(head, target, plan, widen=widen)
