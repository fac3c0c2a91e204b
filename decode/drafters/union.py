"""Several drafters at once: their trees merged into one, shared prefixes once, the likeliest nodes kept.

    drafter = UnionDrafter([NgramDrafter(), head_drafter(head, target)])

A node's chance is how often the same place of the same drafter's tree was right so far, in any row: the n-grams' second
token, the head's tree's fifth node. Where two drafters propose the same path, the better chance counts. So the budget
goes to whoever is right in this text, from step to step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from jaxtyping import Int
from torch import Tensor

from headstart.decode.drafters.base import Committed, Drafter, Rows
from headstart.decode.tree import Branch, ExtraQueries, TokenTree
from headstart.errors import HeadstartError

PRIOR_RATE, PRIOR_WEIGHT = 0.5, 2.0
"""What a place starts from: PRIOR_RATE to the power of its depth, worth PRIOR_WEIGHT observations."""


class UnionDrafter:
    """Drafts what all of `drafters` draft, within the budget. They must take tokens by rank or by rule: a token that
    was drawn needs its own distribution to be verified by, and a merged tree has none. States that one of them has
    computed already (`TokenTree.verify_from`) are of its own nodes alone: a merged tree is verified from the start."""

    def __init__(self, drafters: Sequence[Drafter]):
        if not drafters:
            raise HeadstartError("a union of no drafters drafts nothing; name at least one")
        self.drafters = list(drafters)
        self.name = "+".join(one.name for one in self.drafters)
        self.wants = tuple(sorted({layer for one in self.drafters for layer in one.wants}))
        self._seen: list[list[list[float]]] = [[] for _ in self.drafters]
        """Per drafter and place in its tree: how often it was right, and how often that was found out."""
        self._proposed: list[list[list[Branch]]] = []
        """Per row and drafter, the branch of every place of its last tree; empty where the place was not filled."""
        self._lengths: list[int] = []
        """Per row, tokens of its text when that tree was drafted."""

    def start(self, rows: Rows, first: int) -> None:
        for one in self.drafters:
            one.start(rows, first)
        self._proposed += [[] for _ in range(first, len(rows))]
        self._lengths += [0] * (len(rows) - first)

    def propose(self, rows: Rows, budget: int) -> TokenTree:
        trees = [one.propose(rows, budget) for one in self.drafters]
        for one, tree in zip(self.drafters, trees, strict=True):
            if tree.drawn is not None and any(tree.drawn.sampled):
                raise HeadstartError(f"{one.name} draws its drafts, which no union can verify; give it a tree")
        by_drafter = [_branches(tree) for tree in trees]
        self._proposed = [[branches[row] for branches in by_drafter] for row in range(len(rows))]
        self._lengths = [len(ids) for ids in rows.ids]
        merged = TokenTree.from_branches([self._best(one, budget - 1) for one in self._proposed], rows.device)
        return replace(merged, extra=self._extra(trees))

    def _extra(self, trees: Sequence[TokenTree]) -> ExtraQueries | None:
        """The extra queries of the one drafter that has any: of their logits nobody could tell whose they are."""
        asking = [place for place, tree in enumerate(trees) if tree.extra is not None]
        if len(asking) > 1:
            names = " and ".join(self.drafters[place].name for place in asking)
            raise HeadstartError(f"{names} both have extra queries, and a union has room for one's; leave one out")
        return trees[asking[0]].extra if asking else None

    def commit(self, rows: Rows, first: int, committed: Committed) -> None:
        for one in self.drafters:
            one.commit(rows, first, committed)
        for row in range(first, first + len(committed.counts)):
            if self._proposed[row]:
                self._learn(self._proposed[row], rows.ids[row][self._lengths[row] :])
                self._proposed[row] = []

    def select(self, keep: Int[Tensor, "kept"]) -> None:
        for one in self.drafters:
            one.select(keep)
        self._proposed = [self._proposed[row] for row in keep.tolist()]
        self._lengths = [self._lengths[row] for row in keep.tolist()]

    def num_parameters(self) -> int:
        return sum(one.num_parameters() for one in self.drafters)

    def num_bytes(self) -> int:
        return sum(one.num_bytes() for one in self.drafters)

    # -- which nodes are worth their place ---------------------------------------------------------------------------

    def chance(self, drafter: int, place: int, depth: int) -> float:
        """How likely the whole branch at this place of a drafter's tree is right."""
        seen = self._seen[drafter]
        right, tested = seen[place] if place < len(seen) else (0.0, 0.0)
        return (right + PRIOR_WEIGHT * PRIOR_RATE**depth) / (tested + PRIOR_WEIGHT)

    def _best(self, proposed: Sequence[Sequence[Branch]], most: int) -> list[Branch]:
        """The branches of at most so many nodes, every node's parent among them, shorter ones first."""
        chances: dict[Branch, float] = {}
        for drafter, branches in enumerate(proposed):
            for place, branch in enumerate(branches):
                if branch:
                    chance = self.chance(drafter, place, len(branch))
                    for depth in range(len(branch), 0, -1):  # a parent is at least as likely as its child
                        chances[branch[:depth]] = max(chances.get(branch[:depth], 0.0), chance)
        ordered = sorted(chances, key=lambda branch: (-chances[branch], len(branch)))
        return sorted(ordered[: max(most, 0)], key=len)

    def _learn(self, proposed: Sequence[Sequence[Branch]], written: Sequence[int]) -> None:
        """What the step wrote tells of every branch no longer than it, and of longer ones that had left it before."""
        text = tuple(written)
        for drafter, branches in enumerate(proposed):
            seen = self._seen[drafter]
            seen += [[0.0, 0.0] for _ in range(len(branches) - len(seen))]
            for place, branch in enumerate(branches):
                known = min(len(branch), len(text))
                right = branch[:known] == text[:known]
                if branch and (known == len(branch) or not right):
                    seen[place][0] += right
                    seen[place][1] += 1


def _branches(tree: TokenTree) -> list[list[Branch]]:
    """Per row the branch of every node but the root; empty where the node is padding."""
    found = []
    rows = zip(tree.tokens.tolist(), tree.topology.parents.tolist(), tree.topology.valid.tolist(), strict=True)
    for tokens, parents, valid in rows:
        branches: list[Branch] = [()]
        for node in range(1, len(tokens)):
            branches.append((*branches[parents[node]], tokens[node]) if valid[node] else ())
        found.append(branches[1:])
    return found
