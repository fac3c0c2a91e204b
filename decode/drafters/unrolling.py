"""The running state of a head that feeds on its own states: its KV cache, and one tree's levels of it.

The cache holds true pairs alone: (embedding of token j + 1, the target's feature at j) for every j before the root.
What a tree adds, pairs of drafted tokens and the head's own states, stands behind them until the tree is done and is
then forgotten, so that states never drift from round to round.

Letters in shapes: rows of the batch, pairs that a commit brings, width (nodes of one level), slots (nodes of the tree
that have been expanded so far), keys.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from headstart.decode.attention import tree_attention
from headstart.decode.cache import KVCache
from headstart.heads.unrolled import StepStates, UnrolledHead
from headstart.target import Embedding, Features


class PairCache:
    """The true pairs of every row, and what the head gave at the last of them.

    The head is in the dtype and on the device in which it drafts.
    """

    def __init__(self, head: UnrolledHead, embedding: Embedding, dtype: torch.dtype, device: torch.device):
        self.head, self.embedding = head, embedding
        self.cache = KVCache(head.num_layers, slots=0, capacity=0)
        self.output: Float[Tensor, "rows dim"] = torch.zeros(0, head.hidden_size, dtype=dtype, device=device)
        """What the output rows read to draft the first token behind the root; zeros before a row has a pair."""
        self.carried: Float[Tensor, "rows dim"] = self.output.clone()
        """The state that the next step of the head goes on from."""

    def join(self, count: int, slots: int, capacity: int) -> None:
        """Rows without pairs join at the end; the cache is given room for `slots` rows of `capacity` pairs."""
        self.cache.grow(slots, capacity)
        self.cache.join(count)
        self.output = torch.cat([self.output, self.output.new_zeros(count, self.output.shape[1])])
        self.carried = torch.cat([self.carried, self.carried.new_zeros(count, self.carried.shape[1])])

    def select(self, keep: Int[Tensor, "kept"]) -> None:
        self.cache.select(keep)
        self.output, self.carried = self.output[keep], self.carried[keep]

    def append(
        self, first: int, texts: Sequence[Sequence[int]], counts: Sequence[int], features: Features
    ) -> StepStates:
        """Takes in the features of the next `counts` tokens of rows first.., whose texts reach one token further.

        A text that ends sooner belongs to a row that is about to leave: any token stands in for the missing one.
        Returns what the head gave at every pair.
        """
        lengths = self.cache.lengths[first : first + len(counts)]
        most = max(counts)
        device = self.output.device
        following = [
            list(text[length + 1 : length + 1 + count])
            for text, length, count in zip(texts, lengths, counts, strict=True)
        ]
        tokens = torch.tensor([ids + [0] * (most - len(ids)) for ids in following], device=device)
        before = torch.tensor(lengths, device=device)
        positions = before[:, None] + torch.arange(most, device=device)
        self.cache.begin(first, len(counts))
        mask = None
        if min(lengths) < max(lengths):
            keys = torch.arange(self.cache.key_length(most), device=device)
            mask = keys <= positions[..., None]
        states = self.head.step(self.embedding.embed(tokens), self.head.fuse(features), positions, self._attend(mask))
        came = [row for row, count in enumerate(counts) if count]
        at = torch.tensor([[row, counts[row] - 1] for row in came], device=device).unbind(1)
        rows = at[0] + first
        self.output[rows], self.carried[rows] = states.output[at], states.carried[at]
        for row in came:
            self.cache.extend(first + row, counts[row])
        return states

    def beginnings(self, states: StepStates, lengths: Sequence[int], room: int) -> PairCache:
        """A cache whose rows hold the first so many pairs of this one's only row, with `room` nodes behind them.

        states: what the head gave at the pairs of that row.
        """
        count, longest = len(lengths), self.cache.lengths[0]
        made = PairCache(self.head, self.embedding, self.output.dtype, self.output.device)
        made.join(count, count, longest + room)
        made.cache.begin(0, count)
        for layer in range(self.head.num_layers):
            keys, values = self.cache.read(layer, 0)
            made.cache.write(layer, keys.expand(count, -1, -1, -1), values.expand(count, -1, -1, -1))
        made.cache.lengths = list(lengths)
        last = torch.tensor(lengths, device=self.output.device) - 1
        made.output, made.carried = states.output[0, last], states.carried[0, last]
        return made

    def _attend(self, mask: Bool[Tensor, "rows queries keys"] | None):
        """Writes keys and values behind the rows' lengths and attends to all of them under the mask (None: causal)."""
        wide = None if mask is None else mask[:, None]

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            keys, values = self.cache.write(layer, key, value)
            return tree_attention(self.head, query, keys, values, wide)[0].transpose(1, 2)

        return attend

    def num_bytes(self) -> int:
        return self.cache.num_bytes()


class TreeLevels:
    """One tree of drafts for every row, unrolled level by level behind the true pairs; a context manager, because the
    pairs of the tree are forgotten when it is done."""

    def __init__(self, pairs: PairCache):
        self._pairs = pairs
        self._lengths = list(pairs.cache.lengths)
        self._depth = 0
        self._carried = pairs.carried[:, None]
        self._seen: Bool[Tensor, "rows width slots"] = torch.zeros(
            len(self._lengths), 1, 0, dtype=torch.bool, device=pairs.carried.device
        )
        """Which slots of the tree each node of the last level has above it, itself included."""
        self._is_chain = True

    def __enter__(self) -> TreeLevels:
        return self

    def __exit__(self, *_: object) -> None:
        self._pairs.cache.lengths = self._lengths

    def expand(
        self, tokens: Int[Tensor, "rows width"], above: Int[Tensor, "rows width"]
    ) -> Float[Tensor, "rows width dim"]:
        """Runs the head at nodes one level further down; returns what the output rows read to draft below them.

        above: the place in the last level expanded (the first time: 0, the root) that each node hangs below.
        """
        rows, width = tokens.shape
        self._depth += 1
        self._is_chain = self._is_chain and width == 1
        cache, device = self._pairs.cache, tokens.device
        cache.begin(0, rows)
        own = torch.eye(width, dtype=torch.bool, device=device).expand(rows, -1, -1)
        self._seen = torch.cat([_take(self._seen, above), own], dim=-1)
        lengths = torch.tensor(self._lengths, device=device)
        positions = (lengths + self._depth - 1)[:, None].expand(-1, width)
        states = self._pairs.head.step(
            self._pairs.embedding.embed(tokens),
            _take(self._carried, above),
            positions,
            self._pairs._attend(self._mask(lengths, cache.key_length(width))),
        )
        self._carried = states.carried
        cache.lengths = [length + width for length in cache.lengths]
        return states.output

    def _mask(self, lengths: Int[Tensor, "rows"], num_keys: int) -> Bool[Tensor, "rows width keys"] | None:
        """A node sees all true pairs, its ancestors and itself."""
        even = min(self._lengths) == max(self._lengths)
        if even and self._is_chain:
            return None
        rows, width, slots = self._seen.shape
        if even:
            pairs = self._seen.new_ones(rows, width, num_keys - slots)
            return torch.cat([pairs, self._seen], dim=-1)
        slot = torch.arange(num_keys, device=lengths.device) - lengths[:, None]
        in_tree = (slot >= 0) & (slot < slots)
        seen = self._seen.gather(2, slot.clamp(0, slots - 1)[:, None].expand(rows, width, num_keys))
        return (slot < 0)[:, None] | (in_tree[:, None] & seen)


def _take(states: Tensor, places: Int[Tensor, "rows width"]) -> Tensor:
    """[rows, from, dim] at [rows, width] places: [rows, width, dim]."""
    if states.shape[1] == 1 and places.shape[1] == 1:
        return states
    return states.gather(1, places[..., None].expand(-1, -1, states.shape[2]))
