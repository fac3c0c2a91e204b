"""Token rows to batches: packed or padded, isolated exactly, in an order that follows from (seed, epoch) alone.

    plan = batches(rows, batch_size=2, max_length=2048, packing=True, seed=0, epoch=3, rank=0, world_size=8)
    for batch in plan[resume_at:]:
        tokens = collate(rows, batch)

A batch is a list of sequences, a sequence a list of row numbers. Sequences are laid out once for all ranks and dealt in
turn, so ranks share no row, lose none, and take the same number of steps.
"""

from __future__ import annotations

import itertools
import random
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import overload

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from headstart.data.rendering import Row

WINDOW = 1024  # rows that are laid out together: wide enough to pack well, narrow enough to mix lengths over an epoch
RUN = 8  # neighbours of like length when padding


@dataclass
class TokenBatch:
    """Sequences of one or more documents each, padded on the right to the longest."""

    input_ids: Int[Tensor, "batch seq"]
    supervised: Bool[Tensor, "batch seq"]
    """Token j is a label. False in padding, which is told by `document_ids` and never by a token's value."""
    position_ids: Int[Tensor, "batch seq"]
    """From 0 in each document; 0 in padding."""
    document_ids: Int[Tensor, "batch seq"]
    """0, 1, 2.. within the sequence; -1 is padding."""

    def attention(self) -> tuple[Bool[Tensor, "batch query key"], Int[Tensor, "batch query key"]]:
        """(allowed, distance): causal within the document; distance is query position - key position.

        A padding token sees itself alone, so that no row of the softmax is empty.
        """
        same = self.document_ids[:, :, None] == self.document_ids[:, None, :]
        real = self.document_ids >= 0
        length = self.document_ids.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool, device=same.device).tril()
        itself = torch.eye(length, dtype=torch.bool, device=same.device)
        allowed = (same & real[:, None, :] & causal) | itself
        return allowed, self.position_ids[:, :, None] - self.position_ids[:, None, :]

    def labels_at(self, shift: int) -> tuple[Int[Tensor, "batch seq"], Bool[Tensor, "batch seq"]]:
        """(labels, scored) of the tokens `shift` further on.

        labels[j] is token j + shift. It is scored where that token is supervised and of the same document as token j;
        where it isn't, the label is 0 and means nothing.
        """
        labels = torch.zeros_like(self.input_ids)
        scored = torch.zeros_like(self.supervised)
        rest = max(self.input_ids.shape[1] - shift, 0)
        here, there = slice(0, rest), slice(shift, shift + rest)
        scored[:, here] = self.supervised[:, there] & (self.document_ids[:, here] == self.document_ids[:, there])
        labels[:, here] = self.input_ids[:, there].where(scored[:, here], 0)
        return labels, scored

    @property
    def num_tokens(self) -> int:
        """Tokens without the padding."""
        return int((self.document_ids >= 0).sum())

    def sequence(self, line: int) -> TokenBatch:
        """One sequence alone, without its padding (one token of it where there is nothing else)."""
        length = max(1, int((self.document_ids[line] >= 0).sum()))  # padding stands behind the documents
        return TokenBatch(**{field.name: getattr(self, field.name)[line : line + 1, :length] for field in fields(self)})

    def documents(self, line: int) -> list[slice]:
        """Where the documents of a sequence stand, in order."""
        counts = torch.bincount(self.document_ids[line] + 1)[1:].tolist()
        ends = list(itertools.accumulate(counts))
        return [slice(end - count, end) for end, count in zip(ends, counts, strict=True)]

    def to(self, device: torch.device | str) -> TokenBatch:
        return TokenBatch(**{field.name: getattr(self, field.name).to(device) for field in fields(self)})


def spread(rows: Sequence[Row], count: int) -> list[Row]:
    """`count` of the rows, or all, at even distances: sources come one after another, and a kind's rows together, so
    that the first few would speak for their kind alone."""
    count = min(count, len(rows))
    return [rows[place * len(rows) // count] for place in range(count)]


class RowStore(Sequence[Row]):
    """Rows kept as arrays: 5 bytes a token instead of the 80 or so of Python lists."""

    def __init__(self, rows: Sequence[Row] = ()):
        self._rows: list[Row] = []
        self._ids: list[np.ndarray] = []
        self._supervised: list[np.ndarray] = []
        for row in rows:
            self.append(row)

    def append(self, row: Row) -> None:
        self._ids.append(np.array(row.input_ids, dtype=np.int32))
        self._supervised.append(np.array(row.supervised, dtype=np.bool_))
        self._rows.append(replace(row, input_ids=[], supervised=[]))

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        if isinstance(index, slice):
            return [self[number] for number in range(len(self))[index]]
        return replace(
            self._rows[index], input_ids=self._ids[index].tolist(), supervised=self._supervised[index].tolist()
        )

    def lengths(self) -> list[int]:
        """Tokens of every row."""
        return [len(ids) for ids in self._ids]

    def arrays(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """The ids and the mask of a row."""
        return self._ids[index], self._supervised[index]

    def take(self, numbers: Sequence[int]) -> RowStore:
        """A store of these rows, in this order, over the same arrays."""
        taken = RowStore()
        for number in numbers:
            taken._rows.append(self._rows[number])
            taken._ids.append(self._ids[number])
            taken._supervised.append(self._supervised[number])
        return taken


def batches(
    rows: Sequence[Row],
    *,
    batch_size: int,
    max_length: int,
    packing: bool,
    seed: int,
    epoch: int,
    rank: int = 0,
    world_size: int = 1,
) -> list[list[list[int]]]:
    """The batches of one rank in one epoch: batch -> sequence -> row numbers. Every call with these values is the same.

    Which rows share a sequence follows from the seed alone, so that a sequence comes back whole in every epoch, and
    what is known of it can be kept; the order of the sequences follows from the epoch too.

    All rows of all ranks together are the whole data, each once. Sequence t of the epoch is the same for every batch
    size and number of ranks: two ranks of two sequences take in a step what one rank of four does. The last step may be
    short, and a rank may get an empty batch in it, so that all ranks take the same number of steps.
    """
    groups = _lay_out(_lengths(rows), max_length, packing, random.Random(f"headstart {seed}"))
    random.Random(f"headstart {seed} {epoch}").shuffle(groups)
    sequences = [sequence for group in groups for sequence in group]
    per_step = batch_size * world_size
    own = []
    for start in range(0, len(sequences), per_step):
        step = sequences[start : start + per_step]
        own.append(step[rank * len(step) // world_size : (rank + 1) * len(step) // world_size])
    return own


def _lengths(rows: Sequence[Row]) -> list[int]:
    return rows.lengths() if isinstance(rows, RowStore) else [len(row.input_ids) for row in rows]


def _lay_out(lengths: list[int], max_length: int, packing: bool, random_order: random.Random) -> list[list[list[int]]]:
    """Groups of sequences of row numbers: what stays together in every epoch."""
    assert max(lengths, default=0) <= max_length, "rows are cut to max_length when they are rendered"
    order = list(range(len(lengths)))
    random_order.shuffle(order)
    groups: list[list[list[int]]] = []  # what stays together: one packed sequence, or a run of rows of like length
    for start in range(0, len(order), WINDOW):
        window = sorted(order[start : start + WINDOW], key=lambda row: -lengths[row])
        if packing:
            groups += [[sequence] for sequence in _pack(window, lengths, max_length)]
        else:
            groups += [[[row] for row in window[first : first + RUN]] for first in range(0, len(window), RUN)]
    return groups


def _pack(window: list[int], lengths: list[int], max_length: int) -> list[list[int]]:
    """Best fit, longest first: each row goes where it leaves the least room."""
    sequences: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (tokens left, sequence), sorted
    for row in window:
        slot = bisect_left(room, (lengths[row], 0))
        if slot == len(room):
            sequences.append([row])
            insort(room, (max_length - lengths[row], len(sequences) - 1))
        else:
            left, sequence = room.pop(slot)
            sequences[sequence].append(row)
            insort(room, (left - lengths[row], sequence))
    return sequences


def collate(rows: Sequence[Row], batch: Sequence[Sequence[int]]) -> TokenBatch:
    """The tensors of one batch. An empty batch is one token of padding: nothing is scored in it."""
    length = max((sum(len(rows[row].input_ids) for row in sequence) for sequence in batch), default=1)
    shape = (max(len(batch), 1), length)
    tokens = TokenBatch(
        input_ids=torch.zeros(shape, dtype=torch.long),
        supervised=torch.zeros(shape, dtype=torch.bool),
        position_ids=torch.zeros(shape, dtype=torch.long),
        document_ids=torch.full(shape, -1, dtype=torch.long),
    )
    for line, sequence in enumerate(batch):
        start = 0
        for document, number in enumerate(sequence):
            row = rows[number]
            place = (line, slice(start, start + len(row.input_ids)))
            tokens.input_ids[place] = torch.tensor(row.input_ids)
            tokens.supervised[place] = torch.tensor(row.supervised)
            tokens.position_ids[place] = torch.arange(len(row.input_ids))
            tokens.document_ids[place] = document
            start += len(row.input_ids)
    return tokens
