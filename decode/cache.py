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

    Storage is one tensor for keys and one for values, [layers, slots, kv_heads, capacity, head_dim] each, so that
    compaction moves all layers in one operation; a layer whose heads have another shape goes to tensors of that shape.
    They are zeroed, not empty: a masked NaN would still be a NaN.
    """

    def __init__(self, num_layers: int, slots: int, capacity: int):
        self.num_layers = num_layers
        self.slots = slots
        self.capacity = capacity
        self.lengths: list[int] = []
        """Tokens of each active row that are in the cache."""
        self._storage: dict[tuple[str, int, int], Float[Tensor, "layers slots heads capacity dim"]] = {}
        """By "keys" or "values", number of heads, and their size: keys and values differ under latent attention."""
        self._kinds: dict[int, list[tuple[str, int, int]]] = {}
        """Where the keys and the values of each layer are."""
        self.layers = [_KVLayer(self, index) for index in range(num_layers)]
        self.as_transformers = Cache(layers=[*self.layers])
        self._first = 0
        self._width = 0
        self._places: tuple[Tensor, Tensor] | None = None
        """Rows and slots that a forward of uneven rows writes to: the same for all its layers."""

    # -- writing -----------------------------------------------------------------------------------------------------

    def begin(self, first: int, count: int) -> None:
        """The next forward carries rows first..first+count-1, each written behind its own length."""
        self._first, self._width, self._places = first, count, None

    def key_length(self, num_tokens: int) -> int:
        """Keys that a forward of `num_tokens` per row sees, for the rows named by `begin`."""
        return max(self.lengths[self._first : self._first + self._width]) + num_tokens

    def write(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Puts [batch, heads, tokens, dim] behind each row's length; returns all keys and values up to the longest."""
        if layer not in self._kinds:
            self._kinds[layer] = [
                ("keys", keys.shape[1], keys.shape[3]),
                ("values", values.shape[1], values.shape[3]),
            ]
        stored_keys, stored_values = (
            self._put(self._stored(kind, states)[layer], states)
            for kind, states in zip(self._kinds[layer], (keys, values), strict=True)
        )
        return stored_keys, stored_values

    def _put(
        self, store: Float[Tensor, "slots heads capacity dim"], states: Float[Tensor, "batch heads tokens dim"]
    ) -> Float[Tensor, "batch heads keys dim"]:
        lengths = self.lengths[self._first : self._first + self._width]
        batch, _, num_tokens, _ = states.shape
        assert batch == len(lengths), (batch, lengths)
        slab = store[self._first : self._first + batch]
        if min(lengths) == max(lengths):
            slab[:, :, lengths[0] : lengths[0] + num_tokens] = states
        else:
            if self._places is None:
                ends = torch.tensor(lengths, device=states.device)[:, None]
                rows = torch.arange(batch, device=states.device)[:, None]
                self._places = rows, ends + torch.arange(num_tokens, device=states.device)
            rows, slots = self._places
            slab[rows, :, slots] = states.transpose(1, 2)
        return slab[:, :, : max(lengths) + num_tokens]

    def _stored(self, kind: tuple[str, int, int], states: Tensor) -> Float[Tensor, "layers slots heads capacity dim"]:
        if kind not in self._storage:
            _, heads, dim = kind
            size = (self.num_layers, self.slots, heads, self.capacity, dim)
            self._storage[kind] = torch.zeros(size, dtype=states.dtype, device=states.device)
        return self._storage[kind]

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
                store[:, rows, :, slots] = store[:, rows, :, sources]
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
                store[:, new, :, :end] = store[:, old, :, :end]
        self.lengths = [self.lengths[row] for row in kept]

    def grow(self, slots: int, capacity: int) -> None:
        """Makes room for more rows or longer ones; what is written stays."""
        if slots <= self.slots and capacity <= self.capacity:
            return
        slots, capacity = max(slots, self.slots), max(capacity, self.capacity)
        for kind, store in self._storage.items():
            layers, old_slots, heads, old_capacity, dim = store.shape
            bigger = store.new_zeros(layers, slots, heads, capacity, dim)
            bigger[:, :old_slots, :, :old_capacity] = store
            self._storage[kind] = bigger
        self.slots, self.capacity = slots, capacity

    # -- looking -----------------------------------------------------------------------------------------------------

    def read(
        self, layer: int, row: int
    ) -> tuple[Float[Tensor, "heads length dim"], Float[Tensor, "heads length value_dim"]]:
        """Keys and values of one row as far as they are committed (for tests and for sharing drafters)."""
        keys, values = (self._storage[kind][layer, row, :, : self.lengths[row]] for kind in self._kinds[layer])
        return keys, values

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
