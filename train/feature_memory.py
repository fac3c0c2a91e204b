"""Keeps the frozen target's states in memory, so that later epochs need no forward of it.

They are kept by document, because every epoch packs its documents into other sequences. What a document's states are
must not depend on where they come from, or a resumed run would differ from a straight one: each goes through the target
alone and without padding, whether it is remembered or not.
"""

from __future__ import annotations

import torch

from headstart.data.packing import TokenBatch
from headstart.target import Features, Target


class FeatureMemory:
    """States of documents by their tokens, up to `max_bytes`; once full it keeps what it has.

    wants: the HF[k] that the head reads beside the final state.
    """

    def __init__(self, target: Target, wants: tuple[int, ...], max_bytes: int):
        self.target, self.wants, self.max_bytes = target, wants, max_bytes
        self.num_bytes = 0
        self._kept: dict[bytes, Features] = {}

    def bytes_per_token(self) -> int:
        element = torch.finfo(self.target.dtype).bits // 8
        return (1 + len(self.wants)) * self.target.hidden_size * element

    @torch.no_grad()
    def __call__(self, batch: TokenBatch) -> Features:
        """The features of a batch; zeros at padding. The caller turns autocast off."""
        shape = (*batch.input_ids.shape, self.target.hidden_size)
        zeros = torch.zeros(shape, dtype=self.target.dtype, device=batch.input_ids.device)
        features = Features(zeros, {k: zeros.clone() for k in self.wants})
        for row, documents in enumerate(batch.document_ids.tolist()):
            start = 0
            while start < len(documents) and documents[start] >= 0:  # padding stands behind the documents
                end = start + documents[start:].count(documents[start])
                part = self._document(batch.input_ids[row : row + 1, start:end])
                features.final[row, start:end] = part.final[0]
                for k in self.wants:
                    features.taps[k][row, start:end] = part.taps[k][0]
                start = end
        return features

    def _document(self, input_ids: torch.Tensor) -> Features:
        key = input_ids.cpu().numpy().tobytes()
        if key in self._kept:
            return self._kept[key]
        position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        alone = TokenBatch(input_ids, torch.ones_like(input_ids, dtype=torch.bool), position_ids, position_ids * 0)
        features = self.target.forward(
            input_ids, position_ids, self.target.masks(*alone.attention()), layers=self.wants
        )
        size = input_ids.shape[1] * self.bytes_per_token()
        if self.num_bytes + size <= self.max_bytes:
            self._kept[key] = features
            self.num_bytes += size
        return features
