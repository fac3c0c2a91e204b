"""Keeps the frozen target's states in memory, so that later epochs need no forward of it.

What a sequence's states are must not depend on where they come from, or a resumed run would differ from a straight one:
every sequence goes through the target alone and without padding, whether it is remembered or not. Packed sequences come
back whole in every epoch (`data.packing.batches`); going document by document would be half as fast on a CPU.
"""

from __future__ import annotations

import torch

from headstart.data.packing import TokenBatch
from headstart.target import Features, Target


class FeatureMemory:
    """States of sequences by their content, up to `max_bytes`; once full it keeps what it has.

    wants: the HF[k] that the head reads beside the final state.
    """

    def __init__(self, target: Target, wants: tuple[int, ...], max_bytes: int):
        self.target, self.wants, self.max_bytes = target, wants, max_bytes
        self.num_bytes = 0
        self._kept: dict[tuple[bytes, bytes], Features] = {}

    def bytes_per_token(self) -> int:
        element = torch.finfo(self.target.dtype).bits // 8
        return (1 + len(self.wants)) * self.target.hidden_size * element

    @torch.no_grad()
    def __call__(self, batch: TokenBatch) -> Features:
        """The features of a batch; zeros at padding. The caller turns autocast off."""
        parts = [self._sequence(batch, row) for row in range(len(batch.input_ids))]
        length = batch.input_ids.shape[1]
        final = _stack([part.final for part in parts], length)
        return Features(final, {k: _stack([part.taps[k] for part in parts], length) for k in self.wants})

    def _sequence(self, batch: TokenBatch, row: int) -> Features:
        length = max(1, int((batch.document_ids[row] >= 0).sum()))  # padding stands behind the documents
        alone = TokenBatch(
            batch.input_ids[row : row + 1, :length],
            batch.supervised[row : row + 1, :length],
            batch.position_ids[row : row + 1, :length],
            batch.document_ids[row : row + 1, :length],
        )
        key = (alone.input_ids.cpu().numpy().tobytes(), alone.document_ids.cpu().numpy().tobytes())
        if key in self._kept:
            return self._kept[key]
        masks = self.target.masks(*alone.attention())
        features = self.target.forward(alone.input_ids, alone.position_ids, masks, layers=self.wants)
        size = length * self.bytes_per_token()
        if self.num_bytes + size <= self.max_bytes:
            self._kept[key] = features
            self.num_bytes += size
        return features


def _stack(states: list[torch.Tensor], length: int) -> torch.Tensor:
    out = states[0].new_zeros(len(states), length, states[0].shape[-1])
    for row, state in enumerate(states):
        out[row, : state.shape[1]] = state[0]
    return out
