"""Prompt lookup: what followed earlier occurrences of the text's last n-gram is proposed again.

Saxena, "Prompt Lookup Decoding" (github.com/apoorvumang/prompt-lookup-decoding). The longest n-gram that occurs earlier
wins; an occurrence near the end is used as far as it goes. Of several occurrences a drafter takes

- `latest`: the latest one,
- `frequent`: token by token what most of them go on with; of equals, what the latest does,
- `tree`: all, merged over shared prefixes: those of the longest n-gram first, then those of shorter ones, and of these
  the heaviest nodes, the later before the earlier.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

import torch
from jaxtyping import Int
from torch import Tensor

from headstart.decode.drafters.base import Committed, Rows
from headstart.decode.drafters.branches import up_to_end, weighted_branches
from headstart.decode.tree import Branch, TokenTree, Topology

MATCHES = 16
"""Occurrences of one n-gram that are looked at, the latest ones: so a step costs as much in a long text."""


class NgramDrafter:
    """Chains of up to `length` tokens from the row's own prompt and answer, or trees of as many levels and up to
    `num_nodes` nodes, root included; no match, no drafts.

    end_token_ids: nothing is drafted behind one, as it may follow in a prompt of several turns.
    """

    wants: tuple[int, ...] = ()
    name = "ngram"

    def __init__(
        self,
        length: int = 8,
        max_ngram: int = 3,
        min_ngram: int = 1,
        *,
        take: Literal["latest", "frequent", "tree"] = "latest",
        num_nodes: int = 16,
        end_token_ids: Iterable[int] = (),
    ):
        self.length, self.max_ngram, self.min_ngram = length, max_ngram, min_ngram
        self.take, self.num_nodes, self.end_token_ids = take, num_nodes, frozenset(end_token_ids)
        self._tables: list[dict[tuple[int, ...], list[int]]] = []
        """Per row: n-gram -> indices of the tokens that followed it, the latest last."""
        self._indexed: list[int] = []
        """Per row: how many tokens of the text are in the table."""

    def start(self, rows: Rows, first: int) -> None:
        for _ in range(first, len(rows)):
            self._tables.append({})
            self._indexed.append(0)

    def propose(self, rows: Rows, budget: int) -> TokenTree:
        for row, ids in enumerate(rows.ids):
            self._index(row, ids)
        if self.take == "tree":
            drafts = min(budget, self.num_nodes) - 1
            branches = [self._branches(row, ids, drafts) for row, ids in enumerate(rows.ids)]
            return TokenTree.from_branches(branches, rows.device)
        chains = [self._chain(row, ids)[: max(budget - 1, 0)] for row, ids in enumerate(rows.ids)]
        length = max(map(len, chains))
        topology = Topology.chain(length, rows.device).expand(len(rows))
        counts = torch.tensor([len(chain) for chain in chains], device=rows.device)
        tokens = torch.tensor([[0, *chain, *[0] * (length - len(chain))] for chain in chains], device=rows.device)
        return TokenTree(tokens, topology.within(counts))

    def _matches(self, row: int, ids: Sequence[int]) -> Iterator[tuple[int, list[int]]]:
        """(n, what followed the last n tokens, the latest first), from the longest n-gram that occurs earlier on."""
        for size in range(min(self.max_ngram, len(ids) - 1), self.min_ngram - 1, -1):
            followers = self._tables[row].get(tuple(ids[-size:]))
            if followers:
                yield size, followers[: -MATCHES - 1 : -1]

    def _after(self, ids: Sequence[int], follower: int) -> Sequence[int]:
        return up_to_end(ids[follower : follower + self.length], self.end_token_ids)

    def _chain(self, row: int, ids: Sequence[int]) -> Sequence[int]:
        _, followers = next(self._matches(row, ids), (0, []))
        if self.take == "latest" or len(followers) < 2:
            return self._after(ids, followers[0]) if followers else []
        going, chain = [self._after(ids, follower) for follower in followers], []
        while going := [one for one in going if len(one) > len(chain)]:
            token, _ = Counter(one[len(chain)] for one in going).most_common(1)[0]
            going = [one for one in going if one[len(chain)] == token]
            chain.append(token)
        return chain

    def _branches(self, row: int, ids: Sequence[int], drafts: int) -> list[Branch]:
        found: dict[int, float] = {}
        """By follower; what a longer n-gram finds outweighs all that shorter ones do."""
        for size, followers in self._matches(row, ids):
            for follower in followers:
                found.setdefault(follower, float((MATCHES + 1) ** (size - self.min_ngram)))
        return weighted_branches(((self._after(ids, one), weight) for one, weight in found.items()), drafts)

    def _index(self, row: int, ids: Sequence[int]) -> None:
        """Enters every n-gram that has a follower: the last token of the text closes none yet."""
        table = self._tables[row]
        for follower in range(max(self._indexed[row], 1), len(ids)):
            for size in range(self.min_ngram, min(self.max_ngram, follower) + 1):
                table.setdefault(tuple(ids[follower - size : follower]), []).append(follower)
        self._indexed[row] = len(ids)

    def commit(self, rows: Rows, first: int, committed: Committed) -> None: ...

    def select(self, keep: Int[Tensor, "kept"]) -> None:
        self._tables = [self._tables[row] for row in keep.tolist()]
        self._indexed = [self._indexed[row] for row in keep.tolist()]

    def num_parameters(self) -> int:
        return 0

    def num_bytes(self) -> int:
        """The tables, as Python counts them (the n-grams themselves apart)."""
        lists = sum(sys.getsizeof(followers) for table in self._tables for followers in table.values())
        return lists + sum(sys.getsizeof(table) for table in self._tables)
