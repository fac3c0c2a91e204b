"""Any drafter, drafting as much as pays: the depth of every step is chosen from what was accepted in the steps before.

    costs = measure_depths(drafter, target, budgets=range(1, 10))      # chains of up to eight
    drafter = AdaptiveDrafter(drafter, costs)                          # the policy is AdaptiveLength

The policies and their reasons stand in `decode.draft_length`. Depth 0 is plain decoding: the drafter is not asked, and
what is committed meanwhile is kept from it until it drafts again, so that it costs nothing.

Texts stay the target's own, drawn drafts included. A depth is chosen before anything is drafted, from outcomes of
earlier steps; at each depth it is then settled by the text alone whether a draft is made there, and the rejection rule
gives the target's distribution with a draft and without one. The same holds for a drafter that stops on its own where
the drafts made so far look doubtful: what it looks at are those drafts, never the one that is to be drawn or its trial.
Choosing a depth by the drafts that it would hold, or keeping the better of two proposals, would not be exact.

Greedy rows learn together, since they also pay together: one forward is as wide as its widest row. A row that samples
learns from nothing but its own text, and a drawn chain is cut to the row's own depth, its unused random numbers put
back: so a seed gives one text in every batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Int
from torch import Tensor

from headstart.decode.draft_length import AdaptiveLength, LengthPolicy, StepCosts
from headstart.decode.drafters.base import Committed, Drafter, NoDraft, Rows, take
from headstart.decode.tree import TokenTree
from headstart.errors import HeadstartError
from headstart.target import Features

MOST_HELD = 64
"""Plain steps after which a drafter that is not asked is told of them all the same, which bounds what is kept."""


@runtime_checkable
class Doubting(Protocol):
    """A drafter that stops where its own confidence in all that it has drafted so far is below `stop_below`."""

    stop_below: float | Sequence[float]
    """A probability; one for all rows, or one for each."""


class AdaptiveDrafter:
    """Drafts with `drafter`, in each step to the depth that the policy chooses among those of `costs`.

    new_policy: makes one from the costs; by default `AdaptiveLength`. The budgets of `costs` say how many nodes of
    `drafter` a depth takes. A drafter that can doubt (`stop_below`) is told how sure it must be to go on.
    """

    def __init__(
        self, drafter: Drafter, costs: StepCosts, new_policy: Callable[[StepCosts], LengthPolicy] = AdaptiveLength
    ):
        self.drafter, self.costs = drafter, costs
        self.name, self.wants = f"adaptive:{drafter.name}", drafter.wants
        self._new_policy = lambda: new_policy(costs)
        self._shared = self._new_policy()
        """Of all greedy rows."""
        self._own: list[LengthPolicy | None] = []
        """Per row that samples."""
        self._plain = NoDraft()
        self._held: list[Committed] = []
        """Of plain steps: one token of every row each."""
        stop_below = drafter.stop_below if isinstance(drafter, Doubting) else 0.0
        self._least = max(stop_below) if isinstance(stop_below, Sequence) else stop_below
        """What the drafter was told before."""
        self._steps: list[tuple[int, int]] | None = None
        """Per row, the depth that was chosen and the depth of its tree, in the step under way; None between steps."""
        self._lengths: list[int] = []
        """Per row, tokens of its text when that tree was drafted."""

    def start(self, rows: Rows, first: int) -> None:
        self._steps = None
        self._deliver(rows)
        self.drafter.start(rows, first)
        self._own += [None if request.settings.greedy else self._new_policy() for request in rows.requests[first:]]

    def propose(self, rows: Rows, budget: int) -> TokenTree:
        depths = self._choose(budget)
        self._lengths = [len(ids) for ids in rows.ids]
        if not any(depths):
            self._steps = [(0, 0)] * len(rows)
            return self._plain.propose(rows, budget)
        self._deliver(rows)
        if isinstance(self.drafter, Doubting):
            self.drafter.stop_below = [max(self._least, self._policy(row).stop_below()) for row in range(len(rows))]
        before = [stream.bit_generator.state for stream in rows.streams]
        tree = self.drafter.propose(rows, self.costs.budgets[max(depths)])
        drafted = (tree.topology.depth * tree.topology.valid).amax(1).tolist()
        if tree.drawn is not None:
            if not tree.topology.is_chain:
                raise HeadstartError(f"{self.drafter.name} draws a tree; of what is drawn, only chains have a length")
            for row, depth in enumerate(depths):
                if tree.drawn.sampled[row] and depth < drafted[row]:
                    rows.streams[row].bit_generator.state = before[row]
                    rows.streams[row].random(depth)  # one number for each draft that stays
                    drafted[row] = depth
            limits = torch.tensor(drafted, device=tree.tokens.device)
            tree = replace(tree, topology=tree.topology.within(limits))
        # whoever drafts along with a deeper row learns of its own depth, and of what lies further down
        self._steps = [(max(one), one[1]) for one in zip(depths, drafted, strict=True)]
        return tree

    def commit(self, rows: Rows, first: int, committed: Committed) -> None:
        steps, self._steps = self._steps, None
        if steps is None:  # a prompt's tokens
            self.drafter.commit(rows, first, committed)
            return
        for row, ((chosen, drafted), count) in enumerate(zip(steps, committed.counts, strict=True)):
            if len(rows.ids[row]) - self._lengths[row] == count:  # not cut short
                self._policy(row).observe(chosen=chosen, drafted=drafted, accepted=count - 1)
        if any(chosen for chosen, _ in steps):
            self.drafter.commit(rows, first, committed)
            return
        self._held.append(committed)
        if len(self._held) == MOST_HELD:
            self._deliver(rows)

    def select(self, keep: Int[Tensor, "kept"]) -> None:
        self.drafter.select(keep)
        kept = keep.tolist()
        self._own = [self._own[row] for row in kept]
        self._held = [
            Committed(one.tokens[keep], [one.counts[row] for row in kept], take(one.features, keep))
            for one in self._held
            if kept
        ]

    def num_parameters(self) -> int:
        return self.drafter.num_parameters()

    def num_bytes(self) -> int:
        return self.drafter.num_bytes()

    def _policy(self, row: int) -> LengthPolicy:
        return self._own[row] or self._shared

    def _choose(self, budget: int) -> list[int]:
        """Per row the depth that its policy chooses, if it fits into the budget, else the deepest that does."""
        fitting = [depth for depth, nodes in enumerate(self.costs.budgets) if 1 <= nodes <= budget]
        common = 0 if all(self._own) else self._shared.choose()
        chosen = [common if own is None else own.choose() for own in self._own]
        return [max((depth for depth in fitting if depth <= one), default=0) for one in chosen]

    def _deliver(self, rows: Rows) -> None:
        """Tells the drafter of the plain steps since it was last asked, in one go."""
        if not self._held:
            return
        features = [one.features for one in self._held]
        joined = Features(
            torch.cat([one.final for one in features], dim=1),
            {layer: torch.cat([one.taps[layer] for one in features], dim=1) for layer in self.wants},
        )
        tokens = torch.cat([one.tokens for one in self._held], dim=1)
        counts = [len(self._held)] * len(tokens)
        self._held = []
        self.drafter.commit(rows, 0, Committed(tokens, counts, joined))
