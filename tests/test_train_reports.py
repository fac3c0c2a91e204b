"""What users of other trainers met with several processes, tried here in every mode: B42, B43, B46, B47, B53 and B54.

(B42, all of a rank's state survives a resume, and a kill while saving: test_train_faults and test_train_modes too; B04,
several processes answering prompts: test_data_distill.)
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import train_cases as cases
from head_cases import head_for, vocab_of
from parallel import in_two_processes
from safetensors import safe_open
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from headstart.borrowed import read_weight
from headstart.data.packing import RowStore
from headstart.data.rendering import Row
from headstart.heads.store import load_head, read_description
from headstart.recipe import Recipe
from headstart.train import loop
from headstart.train.metrics import read_metrics
from headstart.train.modes import MODES, start_processes

MODES_TRIED = ["DDP", *(pytest.param(mode, marks=pytest.mark.slow) for mode in ("ZeRO-2", "ZeRO-3", "FSDP2"))]
LINEAR = ("train.lr=1e-3", "train.schedule=linear", "train.warmup=0.1", "train.max_steps=20")
WATCHED = ("train.eval_every=4", "train.save_every=4", "train.batch_size=1", "train.accumulation=1", "train.keep=9")


def recipe(mode: str, *settings: str) -> Recipe:
    placement = next(name for name, modes in MODES.items() if mode in modes)
    return cases.recipe("head.dropout=0", "train.timeout=120", f"target.placement={placement}", *settings)


def labelled(name: str, length: int, labels: int) -> Row:
    return Row(
        name, [(7 * place) % 256 for place in range(length)], [place >= length - labels for place in range(length)]
    )


UNEVEN = RowStore([labelled("short", 12, 10), labelled("long", 101, 100)])


def resumed_run(folder: Path, mode: str) -> None:
    """Stopped at step 8, resumed to 16 of 20; held-out losses are 1.0 at step 8 and 1.2 at all others."""
    made, rows = recipe(mode, *LINEAR, *WATCHED), cases.random_rows(20, longest=10)
    scored(1.0)
    for stop, resume in ((8, False), (16, True)):
        training = cases.training(folder, made, rows=rows, resume=resume, processes=start_processes(made))
        same_target(training)
        cases.stop_after_save(training, stop)
        with pytest.raises(cases.Stopped):
            training.finish()
        same_target(training)


def scored(best: float) -> None:
    evaluate = loop.evaluate

    def as_told(wrapped, rows, recipe, *, step):
        totals = evaluate(wrapped, rows, recipe, step=step)
        assert totals is not None
        totals.loss_sum = totals.scored[0] * (best if step == 8 else best + 0.2)
        return totals

    loop.evaluate = as_told  # in a forked process of its own


def same_target(training: Any) -> None:
    """B47: the frozen weights are those of the source to the bit, on a resume too, none missing and none empty."""
    if hasattr(training.wrapped.module, "reshard"):
        training.wrapped.module.reshard()
    expected = dict(tiny.target().model.named_parameters())
    for name, parameter in training.target.model.named_parameters():
        assert torch.equal(read_weight(parameter), expected.pop(name)), name
    assert not expected


def uneven_run(folder: Path, mode: str, accumulation: int) -> None:
    """B54: 10 labels on one rank and 100 on the other, or in two micro-batches of one process."""
    settings = ("train.batch_size=1", f"train.accumulation={accumulation}", "train.max_steps=3", "data.max_length=128")
    made = recipe(mode, *settings)
    cases.training(folder, made, rows=UNEVEN, held_out=UNEVEN, processes=start_processes(made)).finish()


class LargestMatrix(TorchDispatchMode):
    """Bytes of the largest tensor of two or more dimensions that any operation makes in this process; a mode's flat
    buffers, in which gradients travel, are none of the loss's."""

    largest = 0

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        result = function(*arguments, **(keywords or {}))
        for made in tree_leaves(result):
            if isinstance(made, torch.Tensor) and made.dim() > 1:
                local: Any = made.to_local() if isinstance(made, DTensor) else made
                self.largest = max(self.largest, local.numel() * local.element_size())
        return result


def largest_in_a_step(folder: Path, mode: str) -> int:
    """B53: bytes of the largest tensor of a step with a vocabulary of 32768, a tenth of 512 positions labelled."""
    target = tiny.target("llama", hidden_size=16, head_dim=4, vocab_size=32768, max_position_embeddings=512)
    rows = RowStore([labelled(f"row {number}", 512, 51) for number in range(2)])
    made = recipe(mode, "train.batch_size=1", "train.accumulation=1", "train.max_steps=1", "data.max_length=512")
    head = head_for(target, vocab_of(range(256), 32768), num_heads=4).float().train()
    training = cases.training(
        folder, made, target=target, head=head, rows=rows, held_out=rows, processes=start_processes(made)
    )
    with LargestMatrix() as watch:
        training.step(training.progress, training.schedule)
    assert watch.largest > 100_000, "nothing was watched"
    return watch.largest


@pytest.mark.parametrize("mode", MODES_TRIED)
def test_field_reports_hold_with_two_processes(tmp_path, mode):
    def work(rank: int) -> str:
        largest = largest_in_a_step(tmp_path / "large", mode)
        uneven_run(tmp_path / "uneven", mode, 1)
        resumed_run(tmp_path / "run", mode)
        return str(largest)

    largest = in_two_processes(tmp_path / "logs", work, mode)
    assert all(int(size) < 7e6 for size in largest), largest
    uneven_run(tmp_path / "one", "one process", 2)
    check_uneven(tmp_path / "uneven", tmp_path / "one")
    check_resumed(tmp_path / "run")


def check_uneven(two: Path, one: Path) -> None:
    for kind in ("train", "held_out"):
        lines, expected = (read_metrics(folder / "metrics.jsonl", kind) for folder in (two, one))
        assert [line["loss"] for line in lines] == pytest.approx([line["loss"] for line in expected], rel=1e-5)
    for name, value in cases.weights(one / "head").items():
        torch.testing.assert_close(cases.weights(two / "head")[name], value, rtol=1e-4, atol=1e-5)


def check_resumed(run: Path) -> None:
    """B43: the rate goes on, and 1.2 is no better than 1.0. B46, B47: every folder is a whole head, alone."""
    rates: list[float] = [line["rate"] for line in read_metrics(run / "metrics.jsonl", "train")]
    rising, falling = [1e-3 * (step + 1) / 2 for step in range(2)], [1e-3 * (20 - step) / 18 for step in range(2, 16)]
    assert rates == pytest.approx(rising + falling)
    best = read_description(run / "checkpoints/best")["training"]
    assert (best["step"], best["best_step"], best["best_value"]) == (8, 8, pytest.approx(1.0))
    state = json.loads((cases.newest(run) / "state.json").read_text())
    assert (state["best_step"], state["best_value"]) == (8, pytest.approx(1.0))
    target = tiny.target()
    for name in ("step-00000004", "step-00000008", "step-00000012", "step-00000016", "best"):
        folder = run / "checkpoints" / name
        head: Any = load_head(folder, target)
        assert head.draft_logits(torch.randn(5, 64), target.output).isfinite().all()
        assert read_description(folder)["target"]["name"] == "tiny-llama"
        with safe_open(folder / "head.safetensors", framework="pt") as file:
            shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
        assert shapes == {name: list(value.shape) for name, value in head.state_dict().items()}
        assert all(0 not in shape for shape in shapes.values())
