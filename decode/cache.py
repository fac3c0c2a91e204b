"""One pre-allocated KV cache for a batch of rows of different lengths.

Every row is written at its own offset. The keys and values of a verified tree are written behind the row's prefix and
then compacted: the accepted nodes are gathered to where a plain decoding would have put them, the rest is forgotten.
That is exact because a node's rotary position, prefix + depth, is the position of the slot it ends in.

Sliding-window layers keep all their entries too: a window that has dropped keys could not be rolled back.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


class KVCache:
    """Keys and values of `num_layers` layers for the rows of a batch; rows are the first `len(lengths)` slots.

    Storage is one tensor [layers, 2, slots, kv_heads, capacity, head_dim] (layers of another shape get their own), so
    that compaction moves all layers in one operation. It is zeroed, not empty: a masked NaN would still be a NaN.
    """

    def __init__(self, num_layers: int, slots: int, capacity: int):
        self.num_layers = num_layers
        self.slots = slots
        self.capacity = capacity
        self.lengths: list[int] = []
        """Tokens of each active row that are in the cache."""
        self._storage: dict[tuple, Float[Tensor, "layers 2 slots heads capacity dim"]] = {}
        self._layers = [_KVLayer(self, index) for index in range(num_layers)]
        self.as_transformers = Cache(layers=self._layers)
        self._first = 0
        self._width = 0

    # -- writing -----------------------------------------------------------------------------------------------------

    def begin(self, first: int, count: int) -> None:
        """The next forward carries rows first..first+count-1, each written behind its own length."""
        self._first, self._width = first, count

    def key_length(self, num_tokens: int) -> int:
        """Keys that a forward of `num_tokens` per row sees, for the rows named by `begin`."""
        return max(self.lengths[self._first : self._first + self._width]) + num_tokens

    def write(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        store = self._slab(layer, keys)
        batch, _, num_tokens, _ = keys.shape
        lengths = self.lengths[self._first : self._first + self._width]
        assert batch == len(lengths), (batch, lengths)
        end = max(lengths) + num_tokens
        slab = store[:, self._first : self._first + batch]
        if min(lengths) == max(lengths):
            slab[0, :, :, lengths[0] : end] = keys
            slab[1, :, :, lengths[0] : end] = values
        else:
            rows = torch.arange(batch, device=keys.device)[:, None]
            slots = torch.tensor(lengths, device=keys.device)[:, None] + torch.arange(num_tokens, device=keys.device)
            slab[0][rows, :, slots] = keys.transpose(1, 2)
            slab[1][rows, :, slots] = values.transpose(1, 2)
        return slab[0, :, :, :end], slab[1, :, :, :end]

    def _slab(self, layer: int, keys: Tensor) -> Float[Tensor, "2 slots heads capacity dim"]:
        _, heads, _, dim = keys.shape
        shape = (heads, dim)
        if shape not in self._storage:
            size = (self.num_layers, 2, self.slots, heads, self.capacity, dim)
            self._storage[shape] = torch.zeros(size, dtype=keys.dtype, device=keys.device)
        return self._storage[shape][layer]

    # -- keeping -----------------------------------------------------------------------------------------------------

    def compact(self, paths: Sequence[Sequence[int]]) -> None:
        """Keeps of each active row's last tree the nodes of its path (root first), in order; lengths grow by them."""
        moves = [
            (row, self.lengths[row] + node, self.lengths[row] + slot)
            for row, path in enumerate(paths)
            for slot, node in enumerate(path)
            if node != slot
        ]
        if moves:
            for store in self._storage.values():
                rows, sources, slots = torch.tensor(moves, device=store.device).unbind(1)
                # Advanced indexing copies before it writes, so overlapping sources and slots are safe.
                store[:, :, rows, :, slots] = store[:, :, rows, :, sources]
        for row, path in enumerate(paths):
            self.lengths[row] += len(path)

    def extend(self, row: int, count: int) -> None:
        """Counts `count` tokens that a prefill has just written for `row`."""
        self.lengths[row] += count

    def join(self, count: int) -> None:
        """Empty rows join at the end of the batch."""
        assert len(self.lengths) + count <= self.slots, (len(self.lengths), count, self.slots)
        self.lengths += [0] * count

    def select(self, keep: Int[Tensor, "kept"]) -> None:
        """The rows that stay, in their new order; only rows whose slot changes are copied."""
        kept = keep.tolist()
        moved = [(new, old) for new, old in enumerate(kept) if new != old]
        if moved:
            for store in self._storage.values():
                new, old = torch.tensor(moved, device=store.device).unbind(1)
                end = max((self.lengths[row] for row in kept), default=0)
                store[:, :, new, :, :end] = store[:, :, old, :, :end]
        self.lengths = [self.lengths[row] for row in kept]

    def grow(self, slots: int, capacity: int) -> None:
        """Makes room for more rows or longer ones; what is written stays."""
        if slots <= self.slots and capacity <= self.capacity:
            return
        slots, capacity = max(slots, self.slots), max(capacity, self.capacity)
        for shape, store in self._storage.items():
            layers, two, old_slots, heads, old_capacity, dim = store.shape
            bigger = store.new_zeros(layers, two, slots, heads, capacity, dim)
            bigger[:, :, :old_slots, :, :old_capacity] = store
            self._storage[shape] = bigger
        self.slots, self.capacity = slots, capacity

    # -- looking -----------------------------------------------------------------------------------------------------

    def read(self, layer: int, row: int) -> tuple[Float[Tensor, "heads length dim"], Float[Tensor, "heads length dim"]]:
        """Keys and values of one row as far as they are committed (for tests and for sharing drafters)."""
        for store in self._storage.values():
            return store[layer, 0, row, :, : self.lengths[row]], store[layer, 1, row, :, : self.lengths[row]]
        raise ValueError("the cache is empty")

    def num_bytes(self) -> int:
        return sum(store.numel() * store.element_size() for store in self._storage.values())


class _KVLayer(CacheLayerMixin):
    """What transformers' attention modules talk to: hands keys and values on to the KVCache that owns it."""

    is_sliding = False

    def __init__(self, owner: KVCache, index: int):
        super().__init__()
        self.owner, self.index = owner, index

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        self.is_initialized = True
        return self.owner.write(self.index, key_states, value_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.owner.key_length(query_length), 0

    def get_seq_length(self) -> int:
        return self.owner.key_length(0)

    def get_max_length(self) -> int:
        return self.owner.capacity
