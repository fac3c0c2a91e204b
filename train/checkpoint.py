"""Checkpoints: everything a run needs to go on to the bit, in a folder that either exists whole or not at all.

    checkpoints/step-00000200/
        config.json, head.safetensors         the head as `load_head` reads it, with its target's fingerprint
        optimizer.safetensors                 one tensor per state and parameter, `exp_avg/<parameter>`
        random-00000.safetensors              the generators of each rank
        state.json                            progress, schedule, recipe hash, size and SHA-256 of every other file
    checkpoints/best/                         the head of the best evaluation so far

A folder is written as `.step-00000200.partial` by the main process, flushed to the disk, then renamed: a kill or a full
disk at any moment leaves the checkpoint before it untouched. One in which a bit has changed since, or whose files are
missing or short, is never gone on from. Nothing is pickled.

All of it is the same in every mode, whatever is sharded there, and for every number of processes: a run may be resumed
with others. The target is never in it; it is read from its own source again.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from safetensors.torch import load_file
from torch import nn

from headstart.atomic import whole_folder
from headstart.errors import TrainingError, disk_fault
from headstart.heads.base import Head
from headstart.heads.store import load_head, save_head
from headstart.target import Target
from headstart.tensor_files import describe_file, fault_of, save_tensors
from headstart.train.modes import on_main
from headstart.train.random_state import random_state, set_random_state
from headstart.train.wrapping import Wrapped

FORMAT = 3
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
    Raises TrainingError, on every rank, if a weight is not finite or the disk refuses a file: nothing is written then.
    """
    head, optimizer, accelerator = wrapped.whole_head(), wrapped.optimizer_tensors(), wrapped.accelerator
    refuse_broken_weights(head, progress.step)
    adapters = wrapped.adapter_state()
    generators = gather_object([random_state()] if wrapped.leads else [])
    state = {"format": FORMAT, "world_size": wrapped.world_size, "mode": wrapped.mode, "about": about}
    state |= {"plan": plan, **asdict(progress)}
    folder = checkpoints / f"step-{progress.step:08d}"

    def write() -> None:
        with whole_folder(folder) as partial:
            save_head(head, partial, fingerprint=target.fingerprint(), training_record=record)
            save_tensors(optimizer, partial / "optimizer.safetensors")
            if adapters:
                save_tensors(adapters, partial / ADAPTERS)
            for rank, generator in enumerate(generators):
                save_tensors(generator, partial / _random_name(rank))
            state["files"] = {file.name: describe_file(file) for file in sorted(partial.iterdir())}
            (partial / "state.json").write_text(json.dumps(sealed(state), indent=1))
        for old in [one for one in _step_folders(checkpoints) if one.name <= folder.name][:-keep]:
            shutil.rmtree(old)

    on_main(accelerator, lambda: _explained(write, folder))
    return folder


def _explained(write: Callable[[], None], folder: Path) -> None:
    """Where the disk refuses a checkpoint, says what there is to go on from."""
    try:
        write()
    except OSError as error:
        if disk_fault(error) is None:
            raise
        earlier = [one.name for one in _step_folders(folder.parent) if one.name < folder.name]
        raise TrainingError(
            f"no checkpoint could be written ({folder}: {str(error.strerror).lower()}); make room there, and the same "
            f"command with --resume goes on from {earlier[-1] if earlier else 'the first step'}"
        ) from None


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
    another, or this process doesn't see the folder.
    """
    if not folder.is_dir():
        raise TrainingError(
            f"the run goes on from {folder}, which is not on the machine of this process; keep runs on storage that "
            "all machines share (--output)"
        )
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


def latest_checkpoint(checkpoints: Path, *, set_aside: bool = False) -> Path | None:
    """The newest checkpoint that is as it was written; None where there is none at all.

    One that is not is passed over with a warning; set_aside: and renamed, so that it never counts as a newer one again.
    Raises TrainingError where all of them are damaged.
    """
    damaged: list[str] = []
    for folder in reversed(_step_folders(checkpoints)):
        fault = _fault(folder)
        if fault is None:
            if set_aside:
                _set_aside([checkpoints / name for name in damaged])
            return folder
        damaged.append(folder.name)
        print(f"warning: {folder} is damaged ({fault}): passed over", file=sys.stderr)
    if damaged:
        raise TrainingError(
            f"no checkpoint in {checkpoints} is as it was written ({', '.join(reversed(damaged))}); restore one from a "
            "copy, or remove them to start from the first step"
        )
    return None


def sealed(state: Mapping[str, Any]) -> dict[str, Any]:
    """With the SHA-256 of all the rest."""
    return {**state, "sha256": _digest(state)}


def save_best(checkpoints: Path, head: Head, target: Target, record: dict[str, Any]) -> Path:
    """Replaces `checkpoints/best` by this head; called by the main process, after the evaluation that chose it."""
    refuse_broken_weights(head, record["step"])
    folder = checkpoints / "best"
    with whole_folder(folder) as partial:
        save_head(head, partial, fingerprint=target.fingerprint(), training_record=record)
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
    """What is not as it was written; None also for one of another version, which `load_checkpoint` refuses."""
    try:
        state = json.loads((folder / "state.json").read_text())
        if "sha256" not in state and state["format"] < FORMAT:
            return None
        if state["sha256"] != _digest(state):
            return "state.json is not what was written"
        if state["format"] != FORMAT:
            return None
        return next((fault for name, said in state["files"].items() if (fault := fault_of(folder / name, said))), None)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"state.json: {error}"


def _set_aside(folders: Sequence[Path]) -> None:
    for folder in folders:
        kept = folder.with_name(f"{folder.name}.damaged")
        shutil.rmtree(kept, ignore_errors=True)
        folder.rename(kept)


def _digest(state: Mapping[str, Any]) -> str:
    rest = {key: value for key, value in state.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def _random_name(rank: int) -> str:
    return f"random-{rank:05d}.safetensors"
