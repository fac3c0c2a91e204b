"""Small complete trainings for the tests: a tiny target, rows of random tokens, a recipe, and the loop itself."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import tiny
import torch
from accelerate import Accelerator
from safetensors.torch import load_file

from headstart.data.packing import RowStore
from headstart.data.rendering import Row
from headstart.heads.store import build_head
from headstart.recipe import Recipe, override
from headstart.target import Target
from headstart.train.checkpoint import latest_checkpoint
from headstart.train.loop import Training
from headstart.train.metrics import read_metrics
from headstart.train.preparation import on_main
from headstart.train.random_state import seed_everything
from headstart.train.run_folder import open_run


def recipe(*settings: str) -> Recipe:
    """Three heads, dropout, shuffled padded rows, accumulation of two: 7 steps an epoch, of which the last is short."""
    plain = Recipe.model_validate(
        {
            "name": "demo",
            "target": {"name": "tiny-llama", "dtype": "float32"},
            "head": {"type": "medusa", "num_heads": 3, "dropout": 0.3},
            "data": {"train": [{"source": "none.jsonl"}], "max_length": 32, "packing": False},
            "train": {
                "max_steps": 12,
                "batch_size": 2,
                "accumulation": 2,
                "dtype": "float32",
                "eval_every": None,
                "save_every": None,
                "lr": 1e-2,
            },
            "logging": {"every": 1},
        }
    )
    return override(plain, settings)


def random_rows(count: int, *, seed: int = 0, shortest: int = 8, longest: int = 24, name: str = "row") -> RowStore:
    """Rows of random bytes whose first quarter is a question, unsupervised."""
    draw = random.Random(seed)
    rows = []
    for number in range(count):
        length = draw.randint(shortest, longest)
        ids = [draw.randrange(256) for _ in range(length)]
        rows.append(Row(f"{name}-{number}", ids, [place >= length // 4 for place in range(length)]))
    return RowStore(rows)


def training(
    folder: Path,
    made: Recipe,
    *,
    resume: bool = False,
    target: Target | None = None,
    rows: RowStore | None = None,
    held_out: RowStore | None = None,
    head: Any = None,
    processes: Accelerator | None = None,
    forecast: bool = False,
) -> Training:
    """A training on the CPU, in this process, ready for `finish`; `folder` is the run's own. forecast: with the replay
    and the measured costs, which take longer than all the rest."""
    accelerator = processes or Accelerator(cpu=True, mixed_precision="no")
    run, made = on_main(accelerator, lambda: open_run(folder, made, resume=resume, command=["test"]))
    target = target or tiny.target()
    seed_everything(made.seed)
    head = head or build_head(made.head, target)
    with torch.no_grad():  # zero blocks have no use for dropout in their first step
        for parameter in head.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))
    rows = random_rows(26) if rows is None else rows
    held_out = random_rows(5, seed=1, name="held") if held_out is None else held_out
    made_training = Training(made, run, accelerator, target, head, rows, held_out)
    if not forecast:
        made_training.forecaster = None
    return made_training


class Stopped(Exception):
    """What a test raises to end a run early."""


def stop_after_save(training: Training, step: int) -> None:
    save = training._save

    def save_and_stop() -> None:
        save()
        if training.progress.step == step:
            raise Stopped

    training._save = save_and_stop


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of a saved head."""
    return load_file(folder / "head.safetensors")


def newest(run: Path) -> Path:
    """The latest whole checkpoint of a run, which must have one."""
    folder = latest_checkpoint(run / "checkpoints")
    assert folder is not None
    return folder


def losses(folder: Path) -> list[tuple[int, float]]:
    """(step, loss) of every training line of a run."""
    return [(line["step"], line["loss"]) for line in read_metrics(folder / "metrics.jsonl", "train")]
