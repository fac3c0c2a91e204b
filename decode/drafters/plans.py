"""How a feature-level head drafts: along a static tree, a dynamic one, or a tree or chain of drawn tokens.

A plan is chosen per drafter and told by its class; `headstart tune` finds the best one for a head on a device.
`stop_below` is the same in all: a row is not drafted deeper than the first depth at which the likeliest of its nodes
has a cumulative probability (the head's own, at temperature 1) below it. That looks only at what is drafted already, so
it keeps every plan lossless.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headstart.decode.tree import Path
from headstart.errors import HeadstartError

DEEPEST = 32
"""Levels that any plan may have: a head that feeds on its own states drafts on, but not without end."""


def chain_paths(length: int) -> list[Path]:
    """A chain of first choices."""
    return [(0,) * depth for depth in range(1, length + 1)]


@dataclass(frozen=True, kw_only=True)
class StaticTree:
    """The same tree in every step: each node is a fixed rank among the choices below its parent."""

    paths: Sequence[Path]
    """In any order; no path is plain decoding."""
    stop_below: float = 0.0

    def __post_init__(self) -> None:
        check_stop(self.stop_below)

    @property
    def num_nodes(self) -> int:
        """Nodes of a tree at most, root included."""
        return len(self.paths) + 1


@dataclass(frozen=True, kw_only=True)
class DynamicTree:
    """EAGLE-2 (arXiv 2406.16858): the likeliest nodes of each level are expanded, the likeliest of all are kept.

    Deterministic: the head's choices are taken by rank, never drawn, so it is verified as any tree of fixed choices.
    """

    depth: int
    """Levels below the root; the head runs once per level, the first level coming with the committed tokens."""
    width: int
    """Nodes expanded per level, and choices looked at below each."""
    num_nodes: int
    """Nodes kept of all that were drafted, root included."""
    stop_below: float = 0.0

    def __post_init__(self) -> None:
        check_stop(self.stop_below)
        for name, value, most in [("depth", self.depth, DEEPEST), ("width", self.width, 64)]:
            if not 1 <= value <= most:
                raise HeadstartError(f"a dynamic tree of {name} {value} cannot be drafted; give 1 to {most}")
        if self.num_nodes < 1:
            raise HeadstartError(f"a tree of {self.num_nodes} nodes has no root; give 1 or more")


@dataclass(frozen=True, kw_only=True)
class SampledTree:
    """A static tree whose nodes are drawn: the children of a node one after the other, without replacement, from the
    head's distribution under the row's own settings. Verified by recursive rejection, where wide trees gain more than
    with fixed choices; a greedy row drafts the likeliest tokens.

    A node is drawn only after all its elder siblings, so ranks below a node have no gaps.
    """

    paths: Sequence[Path]
    """In any order; no path is plain decoding."""
    stop_below: float = 0.0

    @classmethod
    def shaped(cls, paths: Sequence[Path]) -> SampledTree:
        """The tree of this shape: the ranks below every node counted anew, without gaps."""
        children: dict[Path, list[Path]] = {}
        for path in sorted(paths, key=lambda path: (len(path), path)):
            children.setdefault(path[:-1], []).append(path)
        anew: dict[Path, Path] = {(): ()}
        for parent, siblings in children.items():  # in order of depth, so the parent is there
            anew |= {path: (*anew[parent], rank) for rank, path in enumerate(siblings)}
        return cls(paths=[anew[path] for path in paths])

    def __post_init__(self) -> None:
        check_stop(self.stop_below)
        there = {tuple(path) for path in self.paths}
        for path in sorted(there):
            if path and path[-1] > 0 and (*path[:-1], path[-1] - 1) not in there:
                raise HeadstartError(
                    f"tree node {list(path)} is drawn after its sibling {[*path[:-1], path[-1] - 1]}, which is not in "
                    "the tree; add it"
                )

    @property
    def num_nodes(self) -> int:
        """Nodes of a tree at most, root included."""
        return len(self.paths) + 1


@dataclass(frozen=True, kw_only=True)
class SampledChain:
    """The sampled tree of one child per node, which rejection verifies without recursion."""

    length: int
    """Drafted tokens."""
    stop_below: float = 0.0

    def __post_init__(self) -> None:
        check_stop(self.stop_below)
        if not 0 <= self.length <= DEEPEST:
            raise HeadstartError(f"a chain of {self.length} drafts cannot be drafted; give 0 to {DEEPEST}")

    @property
    def paths(self) -> list[Path]:
        return chain_paths(self.length)

    @property
    def num_nodes(self) -> int:
        """Nodes of a chain at most, root included."""
        return self.length + 1


Plan = StaticTree | DynamicTree | SampledTree | SampledChain


def as_plan(plan: Plan | Sequence[Path]) -> Plan:
    """A list of paths is a static tree."""
    return plan if isinstance(plan, Plan) else StaticTree(paths=plan)


def check_stop(stop_below: float) -> None:
    """Raises HeadstartError where it is no probability."""
    if not 0 <= stop_below <= 1:
        raise HeadstartError(f"stop_below={stop_below} is no probability; give a number from 0 to 1 (0: never stop)")
