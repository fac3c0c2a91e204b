"""Drafters whose acceptance is known beforehand, so that counts can be asserted exactly without training."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from headstart.decode.drafters.base import NoDraft, Rows
from headstart.decode.tree import Path, Topology, TokenTree


class StubDrafter(NoDraft):
    """Proposes along a fixed tree; `token_at(row, depth, rank, truth)` names the token of a node.

    `truth` is what the target will write at that depth, taken from `answers` by request id (a repeated last token
    beyond its end). Siblings are told apart by rank, the last element of their path.
    """

    def __init__(
        self,
        answers: Mapping[Any, list[int]],
        token_at: Callable[[int, int, int, int], int],
        paths: list[Path],
        name: str = "stub",
    ):
        super().__init__()
        self.answers, self.token_at, self.paths, self.name = answers, token_at, paths, name
        self._shape = Topology.from_paths(paths)
        self.committed: list[tuple[int, list[int]]] = []
        """(first row, counts) of every commit, for tests of the contract."""

    def propose(self, rows: Rows, budget: int) -> TokenTree:
        trees = []
        for row in range(len(rows)):
            answer = self.answers[rows.requests[row].request_id]
            done = rows.num_new(row)
            tokens = [0]
            for path in self.paths:
                position = done + len(path) - 1
                truth = answer[min(position, len(answer) - 1)]
                tokens.append(self.token_at(position, len(path), path[-1], truth))
            trees.append(tokens)
        return TokenTree(torch.tensor(trees), self._shape.expand(len(rows)))

    def commit(self, rows, first, committed) -> None:
        self.committed.append((first, list(committed.counts)))


def chain(length: int) -> list[Path]:
    return [(0,) * depth for depth in range(1, length + 1)]


def full_tree(branches: int, depth: int) -> list[Path]:
    """Every node has `branches` children, by depth."""
    levels: list[list[Path]] = [[()]]
    for _ in range(depth):
        levels.append([(*path, rank) for path in levels[-1] for rank in range(branches)])
    return [path for level in levels[1:] for path in level]


def oracle(answers, paths, vocab: int) -> StubDrafter:
    """The target's own next token at the last rank of each level's first branch order: rank 0 is right, others differ."""
    return StubDrafter(answers, lambda pos, depth, rank, truth: (truth + rank) % vocab, paths, "oracle")


def anti_oracle(answers, paths, vocab: int) -> StubDrafter:
    """Never the target's next token."""
    return StubDrafter(answers, lambda pos, depth, rank, truth: (truth + 1 + rank) % vocab, paths, "anti-oracle")


def mixed(answers, paths, vocab: int) -> StubDrafter:
    """Wrong at every third token of the answer; where right, at rank 1 of wide levels every other time."""

    def token_at(position: int, depth: int, rank: int, truth: int) -> int:
        if position % 3 == 2:
            return (truth + 1 + rank) % vocab
        return (truth + (rank + position % 2)) % vocab if position % 2 == 0 else (truth + (rank ^ 1)) % vocab

    return StubDrafter(answers, token_at, paths, "mixed")


def random_drafts(answers, paths, vocab: int, seed: int = 0) -> StubDrafter:
    """Random tokens from a small set, so that some are right by chance and siblings may be equal."""
    generator = torch.Generator().manual_seed(seed)

    def token_at(position: int, depth: int, rank: int, truth: int) -> int:
        draw = int(torch.randint(0, 4, (1,), generator=generator))
        return truth if draw == 0 else int(torch.randint(0, vocab, (1,), generator=generator))

    return StubDrafter(answers, token_at, paths, "random")
