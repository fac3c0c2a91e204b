"""`headstart data features`: the target's states of a recipe's rows go into a cache, which training then reads.

    headstart data features --recipe smollm2-eagle3.yaml
    headstart data features --recipe smollm2-eagle3.yaml --dtype int8 --head runs/smollm2-eagle3
    torchrun --nproc-per-node 8 -m headstart.cli data features --recipe qwen3-8b-eagle3.yaml

Several processes need nothing of each other but RANK and WORLD_SIZE, which every launcher sets: each has its own part
of the rows and its own files. Killed and started again with the same words, it goes on where it stopped.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from headstart.data.agreement import agreement
from headstart.data.feature_cache import FeatureWriter
from headstart.data.feature_codec import bytes_per_token
from headstart.data.feature_key import cache_key
from headstart.data.features import Job, compute, feature_folder, jobs, share_of
from headstart.data.packing import collate, spread
from headstart.data.prepare import Prepared, prepare
from headstart.data.progress import Progress
from headstart.data.sources import with_limit
from headstart.decode.selfcheck import check_target
from headstart.errors import DataError
from headstart.eval.trained import find_head
from headstart.heads.configs import Eagle3Config
from headstart.heads.starting import as_used
from headstart.heads.store import load_head
from headstart.recipe import Recipe
from headstart.recipe_target import load_recipe_target
from headstart.target import Target
from headstart.train.feature_loss import storage_loss

LABELS_LOOKED_AT = 1024
"""How many labels are compared with the target's own choice."""
ANSWERS_REPLAYED = 24
"""Held-out rows on which the cost of fewer bits is measured."""
SPARE = 0.02
"""Share of the estimate that must be free besides: headers, manifests, the file system's own."""


def run(
    recipe: Recipe,
    output: str | Path | None = None,
    *,
    storage: str | None = None,
    limit: int | None = None,
    layers: Sequence[int] | None = None,
    head: str | None = None,
    device: str | None = None,
) -> Path:
    """Computes what the cache lacks and returns its folder. Says how large it will be before anything is written.

    storage: None goes on with what there is, or keeps states as the target computes them. layers: None: those that the
    recipe's head reads. limit: the first so many rows of each source. head: a trained one, on which the cost of the
    storage is measured.
    """
    if recipe.data.streaming:
        raise DataError("a stream's rows are not known beforehand; --set data.streaming=false, or data.features=hybrid")
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    say = print if not rank else (lambda *words, **options: None)
    target, _ = load_recipe_target(recipe, device=device or _own_device())
    check_target(target)
    trained = None if head is None else load_head(find_head(Path(head))[1], target)
    recipe = with_limit(recipe, limit)
    data = prepare(recipe, target.tokenizer, vocab_size=target.vocab_size, max_positions=target.max_positions)
    say(data.summary())
    folder = Path(output) if output is not None else feature_folder(recipe)
    wanted = wanted_layers(recipe, target) if layers is None else list(layers)
    with FeatureWriter(folder, cache_key(target, recipe, wanted, storage), writer=rank) as cache:
        todo = jobs(cache, (data.train, data.held_out), recipe)
        say(estimate(cache, todo, folder, target.hidden_size))
        if todo:
            say(_written_by_others(target, data, recipe), end="")
            say(f"processes: {world_size}")
            _compute(cache, target, share_of(todo, rank, world_size), rank)
        elif not rank:
            _verify(cache)
        storage = cache.storage
    if trained is not None:
        say(storage_loss(trained, target, spread(data.held_out, ANSWERS_REPLAYED), storage))
    say(f"train with it: --set data.features=offline --set data.feature_cache={folder}")
    return folder


def wanted_layers(recipe: Recipe, target: Target) -> list[int]:
    """The HF[k] that the head of a recipe reads beside the final state."""
    config = recipe.head
    return list(as_used(config, target).layers or ()) if isinstance(config, Eagle3Config) else []


def estimate(cache: FeatureWriter, todo: Sequence[Job], folder: Path, hidden_size: int) -> str:
    """What is to be computed and what it takes; raises DataError where the disk has no room for it."""
    tokens, rows = sum(job.num_tokens for job in todo), sum(len(job.missing) for job in todo)
    each = bytes_per_token(len(cache.layers), hidden_size, cache.storage)
    need, free = tokens * each, shutil.disk_usage(folder).free
    states = f"the final state{''.join(f', HF[{k}]' for k in cache.layers)}, {hidden_size} numbers each"
    text = (
        f"features: {len(cache)} rows are in {folder}, {rows} rows of {tokens:,} tokens are to be computed: {states} "
        f"in {cache.storage}, {each:,} bytes a token, {_size(need)} in all; {_size(free)} are free there"
    )
    if need * (1 + SPARE) > free:
        raise DataError(
            f"{text}. That does not fit; make room, name a folder on another disk (--output), store them as int8 "
            "(--dtype int8), or take fewer rows (--limit)."
        )
    return text


def _compute(cache: FeatureWriter, target: Target, todo: Sequence[Job], rank: int) -> None:
    rows = sum(len(job.missing) for job in todo)
    begun = time.monotonic()
    with Progress("computing features", total=rows, extra="tokens") as progress:
        compute(cache, target, todo, progress)
    seconds = time.monotonic() - begun
    print(
        f"process {rank}: {progress.done} rows, {progress.extra_done:,} tokens in {seconds:.0f} s, "
        f"{progress.extra_done / max(seconds, 1e-9):.0f} tokens/s"
    )


def _verify(cache: FeatureWriter) -> None:
    """Nothing is missing: all that there is is read and compared with its checksums."""
    with Progress("checking shards", total=len(cache)) as progress:
        cache.verify(progress.add)
    print(f"all {len(cache)} rows are there, as they were written")


def _written_by_others(target: Target, data: Prepared, recipe: Recipe) -> str:
    """A warning where the target would not have written the answers; offline training does not ask it."""
    alone = (collate(data.train, [[row]]) for row in range(len(data.train)))
    warning = agreement(target, alone, max_tokens=LABELS_LOOKED_AT).warning()
    return f"warning: {warning}\n" if warning else ""


def _own_device() -> str | None:
    """The GPU of this process among those of its machine; None where there is no choice."""
    local = os.environ.get("LOCAL_RANK")
    return f"cuda:{local}" if local is not None and torch.cuda.is_available() else None


def _size(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"
