"""Fills a feature cache: the rows of a recipe through the target, each once, on one process or many.

Rows go through the target in the sequences that training makes of them, each sequence alone and without padding. So a
row's states don't depend on the batch size, on the number of processes or on where a killed run stopped, and are those
that online training with the same recipe computes, to the bit on a CPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from headstart.data.feature_cache import FeatureCache, FeatureWriter
from headstart.data.feature_codec import FINAL, state_name
from headstart.data.feature_key import row_hash
from headstart.data.packing import RowStore, TokenBatch, batches, collate
from headstart.data.progress import Progress
from headstart.data.rendering import Row
from headstart.recipe import Recipe
from headstart.target import Features, Target


@dataclass(frozen=True)
class Job:
    """A sequence that has rows which are not in the cache yet."""

    number: int
    """Of the sequence among all of the recipe."""
    rows: RowStore
    sequence: list[int]
    missing: list[int]
    """Those of its row numbers."""

    @property
    def num_tokens(self) -> int:
        """Tokens of the missing rows."""
        return sum(len(self.rows.arrays(number)[0]) for number in self.missing)


def feature_folder(recipe: Recipe) -> Path:
    """Where the recipe's features are: `data.feature_cache`, or `features/NAME`."""
    return Path(recipe.data.feature_cache or Path("features") / recipe.name)


def hashes(rows: Sequence[Row]) -> list[bytes]:
    """How the cache knows each of the rows."""
    if isinstance(rows, RowStore):
        return [row_hash(*rows.arrays(number)) for number in range(len(rows))]
    return [row_hash(np.array(row.input_ids), np.array(row.supervised)) for row in rows]


def jobs(cache: FeatureCache, parts: Iterable[RowStore], recipe: Recipe) -> list[Job]:
    """What is to be computed; parts are training and held-out rows.

    A row that occurs twice is computed in the first sequence that has it.
    """
    found: list[Job] = []
    met: set[bytes] = set()
    count = 0
    for rows in parts:
        known = hashes(rows)
        layout = batches(
            rows,
            batch_size=1,
            max_length=recipe.data.max_length,
            packing=recipe.data.packing,
            seed=recipe.seed,
            epoch=0,
        )
        for sequence in (sequence for batch in layout for sequence in batch):
            missing = []
            for number in sequence:
                if known[number] not in met and known[number] not in cache:
                    missing.append(number)
                met.add(known[number])
            if missing:
                found.append(Job(count, rows, sequence, missing))
            count += 1
    return found


def share_of(todo: Iterable[Job], rank: int, world_size: int) -> list[Job]:
    """The jobs of one process: which they are does not depend on what others have written meanwhile."""
    return [job for job in todo if job.number % world_size == rank]


def compute(cache: FeatureWriter, target: Target, todo: Sequence[Job], progress: Progress) -> None:
    """Runs the jobs and publishes what they give. progress counts rows, and tokens beside."""
    for job in todo:
        batch = collate(job.rows, [job.sequence]).to(target.device)
        features = sequence_features(target, batch, cache.layers)
        for number, place in zip(job.sequence, batch.documents(0), strict=True):
            if number in job.missing:
                ids, supervised = job.rows.arrays(number)
                cache.add(row_hash(ids, supervised), ids, supervised, row_states(features, place, cache.layers))
                progress.add(1, len(ids))
    cache.flush()


@torch.no_grad()
def sequence_features(target: Target, sequence: TokenBatch, layers: Sequence[int]) -> Features:
    """The target's states of one sequence without padding: a batch of one."""
    return target.forward(sequence.input_ids, sequence.position_ids, target.masks(*sequence.attention()), layers=layers)


def row_states(features: Features, place: slice, layers: Sequence[int]) -> dict[str, Float[Tensor, "tokens dim"]]:
    """One row's states under the names of the cache; `features` are of the one sequence that it stands in."""
    taps = {state_name(k): features.taps[k][0, place] for k in layers}
    return {FINAL: features.final[0, place], **taps}
