"""Where training takes the target's states from: a forward of the target, memory, or the cache on disk.

What a sequence's states are must not depend on where they come from, or a resumed run would differ from a straight one,
and an offline run from an online one: on a CPU every sequence goes through the target alone and without padding, in all
of them. Packed sequences come back whole in every epoch (`data.packing.batches`); going document by document would be
half as fast there.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from headstart.data.feature_cache import FeatureCache, FeatureWriter
from headstart.data.feature_codec import FINAL, state_name
from headstart.data.feature_key import cache_key, row_hash
from headstart.data.features import feature_folder, hashes, row_states, sequence_features
from headstart.data.packing import TokenBatch
from headstart.data.rendering import Row
from headstart.errors import TrainingError
from headstart.recipe import Recipe
from headstart.target import Features, Target


@runtime_checkable
class FeatureSource(Protocol):
    """What gives the features of a batch to the head. The caller turns gradients and autocast off."""

    storage: str | None
    """What states are stored as, where they come from a cache."""

    def __call__(self, batch: TokenBatch, *, keep: bool) -> Features:
        """Zeros or anything at padding. keep: the batch comes again, so its states are worth remembering."""
        ...

    def share_kept(self, tokens: float) -> float:
        """Of an epoch of so many tokens, the share whose forward later epochs are spared."""
        ...

    def flush(self) -> None:
        """Puts on the disk what is to be there before a checkpoint."""
        ...

    def close(self) -> None:
        """Training is over: others may write where this one did."""
        ...


class OnlineFeatures:
    """The target's own forward; states of sequences are remembered by content up to `max_bytes`, then none are added.

    wants: the HF[k] that the head reads beside the final state. together: a batch is one forward on a CPU too, as
    processes that gather the target's layers from each other need it: each of them runs it equally often.
    """

    storage: str | None = None

    def __init__(self, target: Target, wants: tuple[int, ...], max_bytes: int = 0, *, together: bool = False):
        self.target, self.wants, self.max_bytes, self.together = target, wants, max_bytes, together
        self.num_bytes = 0
        self._kept: dict[tuple[bytes, bytes], Features] = {}

    def __call__(self, batch: TokenBatch, *, keep: bool = True) -> Features:
        at_once = self.together or batch.input_ids.device.type != "cpu"  # a GPU is faster so
        if not self.max_bytes and at_once:
            masks = self.target.masks(*batch.attention())
            return self.target.forward(batch.input_ids, batch.position_ids, masks, layers=self.wants)
        parts = [self.sequence(batch.sequence(line), keep=keep) for line in range(len(batch.input_ids))]
        length = batch.input_ids.shape[1]
        final = _stack([part.final for part in parts], length)
        return Features(final, {k: _stack([part.taps[k] for part in parts], length) for k in self.wants})

    def sequence(self, sequence: TokenBatch, *, keep: bool) -> Features:
        """The features of one sequence without padding."""
        if not self.max_bytes:
            return sequence_features(self.target, sequence, self.wants)
        key = (sequence.input_ids.cpu().numpy().tobytes(), sequence.document_ids.cpu().numpy().tobytes())
        if key in self._kept:
            return self._kept[key]
        features = sequence_features(self.target, sequence, self.wants)
        size = sequence.input_ids.shape[1] * self.bytes_per_token()
        if keep and self.num_bytes + size <= self.max_bytes:
            self._kept[key] = features
            self.num_bytes += size
        return features

    def bytes_per_token(self) -> int:
        element = torch.finfo(self.target.dtype).bits // 8
        return (1 + len(self.wants)) * self.target.hidden_size * element

    def share_kept(self, tokens: float) -> float:
        return min(1.0, self.max_bytes / max(1.0, tokens * self.bytes_per_token()))

    def flush(self) -> None: ...

    def close(self) -> None: ...


class CachedFeatures:
    """The cache on disk. A sequence with a row that is not in it goes through the target, and its rows are added.

    A row added to a cache in 8 bits is read from it at once: what training sees of it is always the same.
    """

    def __init__(self, cache: FeatureCache, target: Target, wants: tuple[int, ...]):
        self.cache, self.target, self.wants = cache, target, wants
        self.storage: str | None = cache.storage

    def __call__(self, batch: TokenBatch, *, keep: bool = True) -> Features:
        final = torch.zeros(
            *batch.input_ids.shape, self.target.hidden_size, dtype=self.target.dtype, device=batch.input_ids.device
        )
        taps = {k: final if k == self.target.num_layers else torch.zeros_like(final) for k in self.wants}
        for line in range(len(batch.input_ids)):
            ids, supervised = batch.input_ids[line].cpu().numpy(), batch.supervised[line].cpu().numpy()
            places = batch.documents(line)
            rows = [row_hash(ids[place], supervised[place]) for place in places]
            if any(row not in self.cache for row in rows):
                self._add(rows, places, batch.sequence(line))
            for row, place in zip(rows, places, strict=True):
                states = self.cache.read(row, final.device)
                final[line, place] = states[FINAL]
                for k in taps.keys() - {self.target.num_layers}:
                    taps[k][line, place] = states[state_name(k)]
        return Features(final, taps)

    def _add(self, rows: Sequence[bytes], places: Sequence[slice], sequence: TokenBatch) -> None:
        if not isinstance(self.cache, FeatureWriter):
            raise TrainingError(f"a row of this batch is not in {self.cache.folder}; set data.features: hybrid")
        self.cache.refresh()  # another process may have written them
        if all(row in self.cache for row in rows):
            return
        features = sequence_features(self.target, sequence, self.cache.layers)
        for row, place in zip(rows, places, strict=True):
            ids, supervised = sequence.input_ids[0, place].cpu().numpy(), sequence.supervised[0, place].cpu().numpy()
            self.cache.add(row, ids, supervised, row_states(features, place, self.cache.layers))

    def share_kept(self, tokens: float) -> float:
        return 1.0 if isinstance(self.cache, FeatureWriter) else 0.0

    def flush(self) -> None:
        if isinstance(self.cache, FeatureWriter):
            self.cache.flush()

    def close(self) -> None:
        if isinstance(self.cache, FeatureWriter):
            self.cache.close()


def feature_source(
    recipe: Recipe, target: Target, wants: tuple[int, ...], parts: Sequence[Sequence[Row]], *, rank: int = 0
) -> FeatureSource:
    """What the recipe asks for. parts: training and held-out rows, which an offline cache must hold; rank: of this
    process, which writes under that number. Raises TrainingError where only some ranks would run a sharded target."""
    size, sharded = int(recipe.train.feature_memory * 2**30), recipe.target.placement == "shard"
    if sharded and (size and recipe.data.features == "online" or recipe.data.features == "hybrid"):
        what = "data.features: hybrid" if recipe.data.features == "hybrid" else "train.feature_memory"
        raise TrainingError(
            f"{what} runs the target for some batches only, and a sharded target (target.placement: shard) is run by "
            "all processes together; set data.features: online and train.feature_memory: 0, or write the features "
            "first (`headstart data features`) and set data.features: offline"
        )
    if recipe.data.features == "online":
        return OnlineFeatures(target, wants, size, together=sharded)
    if size and not rank:
        print(
            f"warning: train.feature_memory has no effect with data.features: {recipe.data.features}; what was read "
            "from the cache stays in the memory of the operating system",
            file=sys.stderr,
        )
    folder, key = feature_folder(recipe), cache_key(target, recipe, wants, None)
    if recipe.data.features == "hybrid":
        return CachedFeatures(FeatureWriter(folder, key, writer=rank), target, wants)
    refuse_missing(recipe, target, parts)
    return CachedFeatures(FeatureCache(folder, key), target, wants)


def cached_finals(recipe: Recipe, target: Target) -> CachedFeatures:
    """The final states alone, from the cache of an offline recipe."""
    return CachedFeatures(FeatureCache(feature_folder(recipe), cache_key(target, recipe, (), None)), target, ())


def refuse_missing(recipe: Recipe, target: Target, parts: Sequence[Sequence[Row]]) -> None:
    """Raises TrainingError where a row is not in the cache of the recipe, whatever its layers, naming the first."""
    cache = cached_finals(recipe, target).cache
    missing = [rows[number] for rows in parts for number, row in enumerate(hashes(rows)) if row not in cache]
    if missing:
        raise TrainingError(
            f"{len(missing)} of {sum(map(len, parts))} rows are not in the feature cache {cache.folder} (the first: "
            f"{missing[0].row_id}, {missing[0].origin}); run `headstart data features` with this recipe, or set "
            "data.features: hybrid"
        )


def _stack(states: list[Tensor], length: int) -> Tensor:
    if len(states) == 1 and states[0].shape[1] == length:
        return states[0]
    out = states[0].new_zeros(len(states), length, states[0].shape[-1])
    for row, state in enumerate(states):
        out[row, : state.shape[1]] = state[0]
    return out
