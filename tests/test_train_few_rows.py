"""Fewer rows than processes: each is learnt from once a pass, wherever states and rows come from, and no rank waits."""

from __future__ import annotations

from pathlib import Path

import pytest
import test_data_streaming as streams
import tiny
import torch
import train_cases as cases
from parallel import in_two_processes

from headstart.data.feature_cache import FeatureWriter
from headstart.data.feature_key import cache_key
from headstart.data.features import compute, jobs, share_of
from headstart.data.progress import Progress
from headstart.recipe import Recipe
from headstart.train.modes import start_processes

COUNTS = (1, 3)
"""Of rows, for two processes: one has none at all; one has fewer than the other."""
TRIED = (("padded", 3), ("packed", 1), ("offline", 1), ("offline", 3), ("hybrid", 1))
WAYS = {
    "padded": (),
    "packed": ("data.packing=true",),
    "offline": ("data.packing=true", "data.features=offline"),
    "hybrid": ("data.features=hybrid",),
}
SETTINGS = ("head.dropout=0", "train.accumulation=1", "train.max_steps=3", "train.eval_every=2", "train.timeout=60")


def recipe(folder: Path, way: str, processes: int) -> Recipe:
    """Two rows a step: of one process, or one of each of two."""
    cache = f"data.feature_cache={folder / f'cache-{way}-{processes}'}"
    return cases.recipe(*SETTINGS, *WAYS[way], cache, f"train.batch_size={2 // processes}")


def train(folder: Path, way: str, count: int, processes: int) -> None:
    made = recipe(folder, way, processes)
    training = cases.training(
        folder / f"{way}-{count}-{processes}",
        made,
        rows=cases.random_rows(count),
        held_out=cases.random_rows(1, seed=1, name="held"),
        processes=start_processes(made),
    )
    assert training.accelerator.num_processes == processes
    training.finish()


def write_cache(made: Recipe) -> None:
    """By four writers, of which some have nothing to do."""
    target = tiny.target()
    parts = [cases.random_rows(max(COUNTS)), cases.random_rows(1, seed=1, name="held")]
    key, folder = cache_key(target, made, (), None), Path(str(made.data.feature_cache))
    for writer in range(4):
        with FeatureWriter(folder, key, writer=writer) as cache:
            compute(cache, target, share_of(jobs(cache, parts, made), writer, 4), Progress("computing"))


def test_two_processes_with_fewer_rows_than_they_are_equal_one(tmp_path):
    for processes in (1, 2):
        write_cache(recipe(tmp_path, "offline", processes))

    def work(rank: int) -> None:
        for way, count in TRIED:
            train(tmp_path, way, count, 2)

    in_two_processes(tmp_path / "logs", work)
    for way, count in TRIED:
        train(tmp_path, way, count, 1)
        one, two = (tmp_path / f"{way}-{count}-{processes}" for processes in (1, 2))
        for line, twin in zip(cases.losses(one), cases.losses(two), strict=True):
            assert twin == pytest.approx(line, rel=1e-5), (way, count)
        for name, value in cases.weights(one / "head").items():
            torch.testing.assert_close(cases.weights(two / "head")[name], value, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("count", COUNTS)
def test_a_stream_with_fewer_rows_than_ranks_gives_each_once_a_pass(tmp_path, count):
    """Row n is n+1 tokens long, up to five: so many tokens are read in every pass."""
    made = streams.recipe(
        [streams.write(tmp_path / "a.jsonl", 0, count)], "train.max_steps=4", "train.batch_size=1", "train.timeout=60"
    )

    def work(rank: int) -> str:
        data = streams.prepared(made)
        processes = start_processes(made)
        training = cases.training(tmp_path / "run", made, rows=data.train, held_out=data.held_out, processes=processes)
        training.finish()
        return f"{training.progress.tokens} tokens, pass {training.progress.epoch}"

    # accumulation is 2: one row in a step; or two rows of one rank and one of the other in a step
    assert in_two_processes(tmp_path / "logs", work) == [f"{4 * sum(range(1, count + 1))} tokens, pass 3"] * 2
