"""Retrieval: what followed the end of the text elsewhere, in a datastore of other texts, is proposed as a tree.

    drafter = RetrievalDrafter(load_datastore("stores/chats", target.tokenizer), target.end_token_ids)

REST, arXiv 2311.08252. The longest end of the text that occurs in the datastore is looked up; the continuations of its
occurrences make a trie whose nodes are weighted by how many of them run through, and the heaviest are drafted. The tree
follows from the text alone, so it is verified as any tree of fixed choices (the paper's own code is not lossless above
temperature 0: it draws a token per path, not per node).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from jaxtyping import Int
from torch import Tensor

from headstart.data.datastore import Datastore
from headstart.decode.drafters.base import Committed, Rows
from headstart.decode.drafters.branches import up_to_end, weighted_branches
from headstart.decode.tree import Branch, TokenTree


class RetrievalDrafter:
    """Trees of up to `num_nodes` nodes, root included, `length` tokens deep at most; no match, no drafts.

    max_ngram: tokens of the text's end that are looked up at most. occurrences: how many are read at most; of more,
    every so manyth. Nothing is drafted behind an end token.
    """

    wants: tuple[int, ...] = ()
    name = "retrieval"

    def __init__(
        self,
        store: Datastore,
        end_token_ids: Iterable[int],
        *,
        num_nodes: int = 16,
        length: int = 8,
        max_ngram: int = 16,
        occurrences: int = 64,
    ):
        self.store, self.end_token_ids = store, frozenset(end_token_ids)
        self.num_nodes, self.length = num_nodes, length
        self.max_ngram, self.occurrences = max_ngram, occurrences

    def start(self, rows: Rows, first: int) -> None: ...

    def propose(self, rows: Rows, budget: int) -> TokenTree:
        drafts = min(budget, self.num_nodes) - 1
        return TokenTree.from_branches([self._branches(ids, drafts) for ids in rows.ids], rows.device)

    def _branches(self, ids: Sequence[int], drafts: int) -> list[Branch]:
        if drafts < 1:
            return []
        start, end, length = self.store.longest_suffix(ids[-self.max_ngram :], self.max_ngram)
        if not length:
            return []
        found = self.store.continuations(start, end, length, most=self.occurrences, tokens=min(self.length, drafts))
        return weighted_branches(((up_to_end(tokens, self.end_token_ids), 1) for tokens in found), drafts)

    def commit(self, rows: Rows, first: int, committed: Committed) -> None: ...

    def select(self, keep: Int[Tensor, "kept"]) -> None: ...

    def num_parameters(self) -> int:
        return 0

    def num_bytes(self) -> int:
        """Of the datastore, which is mapped from the disk."""
        return self.store.num_bytes()
