"""Lookahead decoding: the target guesses ahead by itself, at many positions at once; n-grams of guesses are drafts.

    drafter = LookaheadDrafter(window=7, level=5, guesses=7)

Fu et al., "Break the Sequential Dependency of LLM Inference Using Lookahead Decoding", https://arxiv.org/abs/2402.02057;
code: github.com/hao-ai-lab/LookaheadDecoding. Two branches share one forward of the target. The lookahead branch keeps
the last N - 1 steps of a Jacobi iteration over the next W positions; each step guesses every position anew from the
guesses before it, and the N tokens along one column are an n-gram that the target might write. The verification branch
drafts the n-grams of the pool that begin with the text's last token, and they are verified like any deterministic tree:
greedy rows are token-identical, sampling rows keep their distribution. The lookahead branch is always greedy.

A step carries (N - 1) * W - 1 extra queries beside the root, and a tree of up to G * (N - 1) drafts.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import torch
from jaxtyping import Int
from torch import Tensor

from headstart.decode.drafters.base import Committed, Rows
from headstart.decode.tree import Branch, ExtraQueries, TokenTree
from headstart.errors import HeadstartError


class Window:
    """The guesses of one row: up to N - 1 levels, a level being one step of the Jacobi iteration, the oldest first.

    Column c of level l stands c + l positions behind the root. The root itself is column 0 of the first level, and is
    not kept. A guess was made from the one above it (same column, the level before), from all above that, and in the
    first level from the columns before its own: so it is asked again, and so the n-grams read. The first level begins
    as tokens of the prompt, drawn at random, W + N - 2 columns with the root; each of N - 2 steps fills one level more
    and uses up one column. From then on there are W columns, and every step drops the oldest level for a new one.
    """

    def __init__(self, first: list[int], levels: int):
        self.levels, self.num_levels = [first], levels

    @property
    def full(self) -> bool:
        return len(self.levels) == self.num_levels

    def queries(self) -> tuple[list[int], list[int], list[int]]:
        """Tokens, the query above each (-1: the root), and the queries whose next tokens `move` takes."""
        tokens = list(self.levels[0])
        column = [-1, *range(len(tokens))]
        parents = column[:-1]
        for level in self.levels[1:]:
            parents += column
            column = list(range(len(tokens), len(tokens) + len(level)))
            tokens += level
        return tokens, parents, column if self.full else column[1:]

    def move(self, root: int, guesses: list[int]) -> list[tuple[int, ...]]:
        """On by one position, however many tokens the step wrote, with the target's new guesses as the last level.

        Gives the n-grams of all columns, once the window is full.
        """
        if not self.full:
            self.levels = [*(level[1:] for level in self.levels), guesses]
            return []
        first, *others = self.levels
        ngrams = list(zip([root, *first], *others, guesses, strict=True))
        self.levels = [others[0][1:], *others[1:], guesses]
        return ngrams


class NgramPool:
    """By their first token the latest `guesses` different n-grams."""

    def __init__(self, guesses: int):
        self.guesses = guesses
        self._after: dict[int, dict[Branch, None]] = {}
        """First token -> the others, the latest last."""

    def add(self, ngram: tuple[int, ...]) -> None:
        known = self._after.setdefault(ngram[0], {})
        known.pop(ngram[1:], None)
        known[ngram[1:]] = None
        if len(known) > self.guesses:
            del known[next(iter(known))]

    def branches(self, token: int) -> Iterator[Branch]:
        """What followed this token, as the branches of a tree: each once, behind its beginning, the latest n-gram's
        first."""
        latest = reversed(self._after.get(token, {}))
        yield from dict.fromkeys(ngram[:depth] for ngram in latest for depth in range(1, len(ngram) + 1))

    def num_bytes(self) -> int:
        return sys.getsizeof(self._after) + sum(
            sys.getsizeof(known) + sum(map(sys.getsizeof, known)) for known in self._after.values()
        )


@dataclass
class _Row:
    window: Window
    pool: NgramPool
    root: int = 0
    """Of the step under way."""
    num_wanted: int = 0
    """Guesses that the step under way brings."""
    num_read: int = 0
    """Tokens of the text whose n-grams are in the pool."""


class LookaheadDrafter:
    """Trees of the pool's n-grams; of `num_nodes` at most, a smaller budget keeps the latest n-grams.

    window: W, the positions guessed at once. level: N, tokens of an n-gram, its first among them; 3 or more. guesses:
    G, the n-grams kept per first token. from_text: the n-grams of prompt and answer enter the pool too. A row whose
    window would reach past the target's last position moves it no more, and drafts on from the pool.
    """

    wants: tuple[int, ...] = ()
    name = "lookahead"

    def __init__(self, window: int = 7, level: int = 5, guesses: int = 7, *, from_text: bool = False):
        for what, value, least in [("window", window, 1), ("level", level, 3), ("guesses", guesses, 1)]:
            if value < least:
                raise HeadstartError(f"lookahead with {what}={value} cannot look ahead; give {least} or more")
        self.window, self.level, self.guesses, self.from_text = window, level, guesses, from_text
        self._rows: list[_Row] = []

    @property
    def num_nodes(self) -> int:
        """Nodes of a tree at most, root included."""
        return 1 + self.guesses * (self.level - 1)

    @property
    def reach(self) -> int:
        """How many positions behind the root the farthest query stands."""
        return self.window + self.level - 3

    def start(self, rows: Rows, first: int) -> None:
        for row in range(first, len(rows)):
            prompt = rows.ids[row]
            drawn = rows.streams[row].integers(len(prompt), size=self.reach)
            window = Window([prompt[place] for place in drawn.tolist()], self.level - 1)
            self._rows.append(_Row(window, NgramPool(self.guesses)))

    def propose(self, rows: Rows, budget: int) -> TokenTree:
        branches, asked = [], []
        for one, ids in zip(self._rows, rows.ids, strict=True):
            if self.from_text:
                self._read(one, ids)
            branches.append(list(islice(one.pool.branches(ids[-1]), budget - 1)))
            fits = len(ids) + self.reach <= rows.max_positions
            asked.append(one.window.queries() if fits else ([], [], []))
            one.root, one.num_wanted = ids[-1], len(asked[-1][2])
        tree = TokenTree.from_branches(branches, rows.device)
        if not any(one.num_wanted for one in self._rows):
            return tree
        tokens, parents, wanted = zip(*asked, strict=True)
        extra = ExtraQueries(
            tokens=_padded(tokens, 0, rows.device),
            parents=_padded(parents, -1, rows.device),
            wanted=_padded(wanted, 0, rows.device),
        )
        return replace(tree, extra=extra)

    def _read(self, one: _Row, ids: list[int]) -> None:
        for end in range(max(one.num_read + 1, self.level), len(ids) + 1):
            one.pool.add(tuple(ids[end - self.level : end]))
        one.num_read = len(ids)

    def commit(self, rows: Rows, first: int, committed: Committed) -> None:
        if committed.extra_logits is None:  # a prompt, or a step that no window took part in
            return
        for one, guesses in zip(self._rows, committed.extra_logits.argmax(-1).tolist(), strict=True):
            if one.num_wanted:
                for ngram in one.window.move(one.root, guesses[: one.num_wanted]):
                    one.pool.add(ngram)

    def select(self, keep: Int[Tensor, "kept"]) -> None:
        self._rows = [self._rows[row] for row in keep.tolist()]

    def num_parameters(self) -> int:
        return 0

    def num_bytes(self) -> int:
        """The pools and windows, as Python counts them."""
        windows = sum(sys.getsizeof(level) for one in self._rows for level in one.window.levels)
        return windows + sum(one.pool.num_bytes() for one in self._rows)


def _padded(rows: Sequence[Sequence[int]], value: int, device: torch.device) -> Int[Tensor, "batch most"]:
    most = max(map(len, rows))
    return torch.tensor([[*row, *[value] * (most - len(row))] for row in rows], device=device)
