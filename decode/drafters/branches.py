"""Which branches of many continuations a tree takes: for drafters that work with texts, not tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from headstart.decode.tree import Branch


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


def up_to_end(tokens: Sequence[int], end_token_ids: Iterable[int]) -> Sequence[int]:
    """The tokens up to the first end token, that one included: nothing is written after it."""
    ends = set(end_token_ids)
    return next((tokens[: place + 1] for place, token in enumerate(tokens) if token in ends), tokens)
