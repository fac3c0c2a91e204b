"""Checkpoints: everything a run needs to go on to the bit, in a folder that either exists whole or not at all.

    checkpoints/step-00000200/
        config.json, head.safetensors         the head as `load_head` reads it, with its target's fingerprint
        optimizer.safetensors                 one tensor per state and parameter, `exp_avg/<parameter>`
        random-00000.safetensors              the generators of each rank
        state.json                            progress, schedule, recipe hash, and the size of every other file
    checkpoints/best/                         the head of the best evaluation so far

A folder is written as `.step-00000200.partial`, flushed to the disk, then renamed: a kill at any moment leaves the
checkpoint before it untouched. Nothing is pickled.

All of it is the same in every mode, whatever is sharded there, and for every number of processes: a run may be resumed
with others. The target is never in it; it is read from its own source again.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from headstart.atomic import partial_name, publish, start_folder
from headstart.errors import TrainingError
from headstart.heads.base import Head
from headstart.heads.store import load_head, save_head
from headstart.target import Target
from headstart.train.random_state import random_state, set_random_state
from headstart.train.wrapping import Wrapped

FORMAT = 2
ADAPTERS = "adapters.safetensors"
"""Of a target that learns too (`train.joint`)."""
STEP_FOLDER = re.compile(r"step-(\d{8})")


@dataclass
class Progress:
    """Where a run stands.

    step: optimiser steps done. epoch, position: the pass over the data, and how many of its micro-batches each rank
    has read; window: of a stream, in which `position` then counts. tokens: tokens read, padding apart. empty_steps:
    steps in which no label was scored, and nothing was changed. best_value: the lowest held-out loss (or what
    `best_metric` names), met at best_step.
    """

    step: int = 0
    epoch: int = 0
    position: int = 0
    window: int = 0
    tokens: int = 0
    empty_steps: int = 0
    best_step: int | None = None
    best_metric: str | None = None
    best_value: float | None = None


def save_checkpoint(
    checkpoints: Path,
    progress: Progress,
    *,
    wrapped: Wrapped,
    target: Target,
    about: dict[str, Any],
    plan: dict[str, Any],
    record: dict[str, Any],
    keep: int,
) -> Path:
    """Writes `step-...` and removes all but the `keep` newest; called by every rank at the same step.

    about: plain values that `load_checkpoint` compares (recipe hash, rows). plan: others that it gives back (schedule).
    record: kept with the head.
    Raises TrainingError, and writes nothing, if a weight is not finite.
    """
    head, optimizer, accelerator = wrapped.whole_head(), wrapped.optimizer_tensors(), wrapped.accelerator
    refuse_broken_weights(head, progress.step)
    folder = checkpoints / f"step-{progress.step:08d}"
    partial = partial_name(folder)
    if accelerator.is_main_process:
        start_folder(folder)
        save_head(head, partial, fingerprint=target.fingerprint(), training_record=record)
        save_file(optimizer, partial / "optimizer.safetensors")
        if adapters := wrapped.adapter_state():
            save_file(adapters, partial / ADAPTERS)
    accelerator.wait_for_everyone()
    if wrapped.leads:
        save_file(random_state(), partial / _random_name(wrapped.rank))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        state = {"format": FORMAT, "world_size": wrapped.world_size, "mode": wrapped.mode, "about": about}
        state |= {"plan": plan, **asdict(progress)}
        state["files"] = {file.name: file.stat().st_size for file in sorted(partial.iterdir())}
        (partial / "state.json").write_text(json.dumps(state, indent=1))
        publish(partial, folder)
        for old in _step_folders(checkpoints)[:-keep]:
            shutil.rmtree(old)
    accelerator.wait_for_everyone()
    return folder


def load_checkpoint(
    folder: Path,
    *,
    wrapped: Wrapped,
    target: Target,
    about: dict[str, Any],
) -> tuple[Progress, dict[str, Any]]:
    """Fills head, optimiser and this rank's generators from `folder`; returns the progress it was written at, and its
    plan.

    With another number of processes the epoch goes on at the micro-batch in which the first row stands that was not
    read yet, and ranks that were not there draw random numbers of their own. Raises TrainingError where `about` is
    another.
    """
    state = json.loads((folder / "state.json").read_text())
    if state["format"] != FORMAT:
        raise TrainingError(f"{folder} has format {state['format']}, this version reads {FORMAT}; start another run")
    for key, value in about.items():
        if state["about"].get(key) != value:
            raise TrainingError(
                f"{folder} has {key} {state['about'].get(key)}, this run {value}; "
                "go on with the recipe that it was started with, or choose another --name"
            )
    wrapped.load_head_state(load_head(folder, target).state_dict())
    if wrapped.joint is not None:
        wrapped.load_adapter_state(load_file(folder / ADAPTERS))
    wrapped.load_optimizer_tensors(load_file(folder / "optimizer.safetensors"))
    random = folder / _random_name(wrapped.rank)
    if random.is_file():
        set_random_state(load_file(random))
    progress = Progress(**{name: state[name] for name in Progress.__dataclass_fields__})
    progress.position = progress.position * state["world_size"] // wrapped.world_size
    return progress, state["plan"]


def latest_checkpoint(checkpoints: Path) -> Path | None:
    """The newest checkpoint that is whole; one whose files are missing or short is passed over with a warning."""
    for folder in reversed(_step_folders(checkpoints)):
        fault = _fault(folder)
        if fault is None:
            return folder
        print(f"warning: {folder} is not whole ({fault}): passed over", file=sys.stderr)
    return None


def save_best(checkpoints: Path, head: Head, target: Target, record: dict[str, Any]) -> Path:
    """Replaces `checkpoints/best` by this head; called by the main process, after the evaluation that chose it."""
    refuse_broken_weights(head, record["step"])
    folder = checkpoints / "best"
    partial = start_folder(folder)
    save_head(head, partial, fingerprint=target.fingerprint(), training_record=record)
    publish(partial, folder)
    return folder


def refuse_broken_weights(head: nn.Module, step: int) -> None:
    broken = [name for name, value in head.named_parameters() if not torch.isfinite(value).all()]
    if broken:
        raise TrainingError(
            f"step {step}: {broken[0]} of the head is no longer finite, so nothing was saved over the last good "
            "checkpoint; lower train.lr or train.clip and start again under another --name"
        )


def _step_folders(checkpoints: Path) -> list[Path]:
    if not checkpoints.is_dir():
        return []
    return sorted(folder for folder in checkpoints.iterdir() if STEP_FOLDER.fullmatch(folder.name))


def _fault(folder: Path) -> str | None:
    try:
        files = json.loads((folder / "state.json").read_text())["files"]
    except (OSError, ValueError, KeyError) as error:
        return f"state.json: {error}"
    for name, size in files.items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != size:
            return f"{name} is missing or short"
    return None


def _random_name(rank: int) -> str:
    return f"random-{rank:05d}.safetensors"
