"""Trees told by what stands on the way to each node: how drafters that work with texts, not tensors, make theirs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import torch

from headstart.decode.tree import TokenTree, Topology

Branch = tuple[int, ...]
"""The tokens from a root's first child down to a node."""


def weighted_branches(continuations: Iterable[tuple[Sequence[int], float]], most: int) -> list[Branch]:
    """The `most` heaviest nodes of the trie of these continuations, each given with its weight; parents first.

    A node weighs what all continuations through it weigh, so a parent is never lighter than its child. Of equals the
    less deep one is kept, then the one that came first.
    """
    weights: Counter[Branch] = Counter()
    for tokens, weight in continuations:
        for depth in range(1, len(tokens) + 1):
            weights[tuple(tokens[:depth])] += weight  # pyright: ignore[reportArgumentType]  (weights may be fractions)
    ordered = sorted(weights, key=lambda branch: (-weights[branch], len(branch)))
    return sorted(ordered[: max(most, 0)], key=len)


def tree_of_branches(rows: Sequence[Sequence[Branch]], device: torch.device) -> TokenTree:
    """One tree per row from its branches, parents first; padded to the largest."""
    width = 1 + max(map(len, rows), default=0)
    tokens, parents, valid = [], [], []
    for branches in rows:
        index = {(): 0} | {branch: place for place, branch in enumerate(branches, 1)}
        padding = width - 1 - len(branches)
        tokens.append([0, *(branch[-1] for branch in branches), *[0] * padding])
        parents.append([-1, *(index[branch[:-1]] for branch in branches), *[0] * padding])
        valid.append([True] * (1 + len(branches)) + [False] * padding)
    topology = Topology(torch.tensor(parents, device=device), torch.tensor(valid, device=device))
    return TokenTree(torch.tensor(tokens, device=device), topology)


def up_to_end(tokens: Sequence[int], end_token_ids: Iterable[int]) -> Sequence[int]:
    """The tokens up to the first end token, that one included: nothing is written after it."""
    ends = set(end_token_ids)
    return next((tokens[: place + 1] for place, token in enumerate(tokens) if token in ends), tokens)
