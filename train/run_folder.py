"""The folder of a run: what was asked for, on what, and where everything goes.

runs/NAME/recipe.yaml         the effective recipe, every default written out
runs/NAME/environment.json    versions, git commit, device, command, the id of the run in its trackers
runs/NAME/metrics.jsonl       one line for each log and evaluation
runs/NAME/checkpoints/        step-00000200/, ..., best/
runs/NAME/head/               what is shipped
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import subprocess
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import headstart
from headstart.atomic import clear_leftovers, write_text
from headstart.errors import TrainingError
from headstart.recipe import Recipe, load_recipe

# What may change between a run and its continuation: none of these touches a weight, or it says how many sequences the
# processes take in a step, which other processes may share out otherwise.
FREE_KEYS = ("name", "logging.", "eval.", "export.", "data.distill.", "train.keep", "train.save_every")
FREE_KEYS += ("target.placement", "train.world_size", "train.accumulation", "train.timeout")
PACKAGES = ("torch", "transformers", "accelerate", "datasets", "safetensors", "tokenizers", "numpy")


@dataclass(frozen=True)
class RunFolder:
    """One run on disk. run_id: what trackers know it by, the same after a resume. resumed: it existed before."""

    path: Path
    run_id: str
    resumed: bool

    @property
    def recipe(self) -> Path:
        return self.path / "recipe.yaml"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def head(self) -> Path:
        return self.path / "head"


def open_run(path: Path, recipe: Recipe, *, resume: bool, command: Sequence[str]) -> tuple[RunFolder, Recipe]:
    """Makes the folder, or takes up an existing one, and returns the recipe to train: on resume the number of steps
    that the first launch worked out is kept. Called by the main process only.

    Raises TrainingError if the folder exists without `resume`, or was started with another recipe.
    """
    exists = refuse_existing(path, resume)
    if exists:
        recipe = _continued(recipe, load_recipe(path / "recipe.yaml"), path)
    path.mkdir(parents=True, exist_ok=True)
    clear_leftovers(path)
    (path / "checkpoints").mkdir(exist_ok=True)
    clear_leftovers(path / "checkpoints")
    run = RunFolder(path, _write_environment(path / "environment.json", command), exists)
    write_text(run.recipe, recipe.to_yaml())
    return run, recipe


def refuse_existing(path: Path, resume: bool) -> bool:
    """Whether there is a run; TrainingError if there is and it is not to be resumed."""
    exists = (path / "recipe.yaml").exists()
    if exists and not resume:
        raise TrainingError(f"{path} holds a run already; go on with it by --resume, or choose another --name")
    return exists


def refuse_other_recipe(path: Path, recipe: Recipe) -> None:
    """TrainingError, naming what changed, if a run is there that was started with another recipe."""
    if (path / "recipe.yaml").exists():
        _continued(recipe, load_recipe(path / "recipe.yaml"), path)


def with_steps(run: RunFolder, recipe: Recipe, max_steps: int, *, write: bool) -> Recipe:
    """The recipe with the number of steps that `train.cpu_seconds` was turned into, kept in the run folder."""
    recipe = recipe.model_copy(update={"train": recipe.train.model_copy(update={"max_steps": max_steps})})
    if write:
        write_text(run.recipe, recipe.to_yaml())
    return recipe


def training_hash(recipe: Recipe) -> str:
    """A hash of all that the weights depend on."""
    return hashlib.sha256(json.dumps(_binding(recipe), sort_keys=True).encode()).hexdigest()[:16]


def _continued(given: Recipe, stored: Recipe, path: Path) -> Recipe:
    if given.train.max_steps is None and given.train.cpu_seconds is not None:
        steps = {"max_steps": stored.train.max_steps}
        given = given.model_copy(update={"train": given.train.model_copy(update=steps)})
    old, new = _binding(stored), _binding(given)
    changed = [f"{key} was {old.get(key)}, is {new.get(key)}" for key in {**old, **new} if old.get(key) != new.get(key)]
    if changed:
        raise TrainingError(
            f"{path} was started with another recipe ({'; '.join(changed)}); "
            "resume with the same one, or choose another --name"
        )
    return given


def _binding(recipe: Recipe) -> dict[str, Any]:
    """Dotted keys and values, without those that may change."""
    return {key: value for key, value in flat(recipe.model_dump()).items() if not key.startswith(FREE_KEYS)}


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings as dotted keys and values."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        found.update(flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value})
    return found


def _write_environment(path: Path, command: Sequence[str]) -> str:
    """Records this launch; launches after the first are listed under `resumed`. Returns the id of the run."""
    launch = environment(command)
    if path.exists():
        try:
            record = json.loads(path.read_text())
            record["resumed"].append(launch)
        except (ValueError, KeyError, TypeError) as error:
            raise TrainingError(f"{path} is damaged ({error!r}); remove it to go on with the run") from None
    else:
        record = {"run_id": uuid.uuid4().hex[:12], **launch, "resumed": []}
    write_text(path, json.dumps(record, indent=1))
    return record["run_id"]


def environment(command: Sequence[str]) -> dict[str, Any]:
    """What a result depends on besides the recipe: versions, commit, machine, command, date (UTC)."""
    cuda = torch.cuda.is_available()
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": list(command),
        "headstart": headstart.__version__,
        "commit": _git_commit(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "device": torch.cuda.get_device_name() if cuda else _processor(),
        "num_devices": torch.cuda.device_count() if cuda else 1,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "world_size": int(os.environ.get("WORLD_SIZE", 1)),
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git_commit() -> str | None:
    """The commit of the working tree that this code runs from, `+` if files differ from it; None for a wheel."""
    root = Path(headstart.__file__).resolve().parents[1]
    if not (root / ".git").exists():
        return None
    try:
        commit = _git(root, "rev-parse", "HEAD")
        return commit + ("+" if _git(root, "status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):  # no git here, or not ours to read
        return None


def _git(root: Path, *arguments: str) -> str:
    return subprocess.run(
        ["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True
    ).stdout.strip()


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
