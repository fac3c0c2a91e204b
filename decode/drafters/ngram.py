"""Prompt lookup: what followed the last occurrence of the text's last n-gram is proposed again.

Saxena, "Prompt Lookup Decoding" (github.com/apoorvumang/prompt-lookup-decoding). The longest n-gram that occurs earlier
wins, and of its occurrences the latest; an occurrence near the end is used as far as it goes.
"""

from __future__ import annotations

import sys

import torch
from jaxtyping import Int
from torch import Tensor

from headstart.decode.drafters.base import Committed, Rows
from headstart.decode.tree import TokenTree, Topology


class NgramDrafter:
    """Chains of up to `length` tokens from the row's own prompt and answer; no match, no drafts."""

    wants: tuple[int, ...] = ()
    name = "ngram"

    def __init__(self, length: int = 8, max_ngram: int = 3, min_ngram: int = 1):
        self.length, self.max_ngram, self.min_ngram = length, max_ngram, min_ngram
        self._tables: list[dict[tuple[int, ...], int]] = []
        """Per row: n-gram -> index of the token that followed it last."""
        self._indexed: list[int] = []
        """Per row: how many tokens of the text are in the table."""

    def start(self, rows: Rows, first: int) -> None:
        for _ in range(first, len(rows)):
            self._tables.append({})
            self._indexed.append(0)

    def propose(self, rows: Rows, budget: int) -> TokenTree:
        drafts = [self._continuation(row, ids)[: max(budget - 1, 0)] for row, ids in enumerate(rows.ids)]
        length = max(map(len, drafts))
        chain = Topology.chain(length, rows.device)
        counts = torch.tensor([len(draft) for draft in drafts], device=rows.device)
        tokens = torch.tensor([[0] + draft + [0] * (length - len(draft)) for draft in drafts], device=rows.device)
        return TokenTree(tokens, chain.expand(len(rows)).within(counts))

    def _continuation(self, row: int, ids: list[int]) -> list[int]:
        self._index(row, ids)
        for size in range(min(self.max_ngram, len(ids) - 1), self.min_ngram - 1, -1):
            follower = self._tables[row].get(tuple(ids[-size:]))
            if follower is not None:
                return ids[follower : follower + self.length]
        return []

    def _index(self, row: int, ids: list[int]) -> None:
        """Enters every n-gram that has a follower: the last token of the text closes none yet."""
        table = self._tables[row]
        for follower in range(max(self._indexed[row], 1), len(ids)):
            for size in range(self.min_ngram, min(self.max_ngram, follower) + 1):
                table[tuple(ids[follower - size : follower])] = follower
        self._indexed[row] = len(ids)

    def commit(self, rows: Rows, first: int, committed: Committed) -> None: ...

    def select(self, keep: Int[Tensor, "kept"]) -> None:
        self._tables = [self._tables[row] for row in keep.tolist()]
        self._indexed = [self._indexed[row] for row in keep.tolist()]

    def num_parameters(self) -> int:
        return 0

    def num_bytes(self) -> int:
        """The tables, as Python counts them (the n-grams themselves apart)."""
        return sum(sys.getsizeof(table) for table in self._tables)
