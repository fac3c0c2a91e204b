"""DDP, ZeRO-2, ZeRO-3 and FSDP2 with two CPU processes: the losses of one process, half of the target on each where it
is sharded, and checkpoints that go on in any mode."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import train_cases as cases
from parallel import in_two_processes
from safetensors.torch import load_file

from headstart import bundled
from headstart.heads.store import load_head
from headstart.recipe import Recipe
from headstart.target import Target, load_target
from headstart.train.metrics import read_metrics
from headstart.train.modes import MODES, mode, start_processes
from headstart.train.preparation import describe
from headstart.train.wrapping import full_size

MEDUSA = ("head.output=own", "head.num_layers=2", "head.loss=soft-ce")
EAGLE3 = ("head={type: eagle3, unrolled_steps: 2}",)
HEADS = {"medusa": MEDUSA, "eagle3": EAGLE3}
SETTINGS = (
    "train.max_steps=6",
    "train.eval_every=3",
    "train.save_every=2",
    "train.batch_size=1",
    "train.lr=1e-3",
    "eval.max_new_tokens=5",
)
ALL = ("DDP", "ZeRO-2", "ZeRO-3", "FSDP2")


def recipe(head: str, real: str, *more: str) -> Recipe:
    """Two rows a step in two processes take what four micro-batches of one process do. 27 rows: an epoch ends with a
    step in which one rank has an empty batch."""
    placement = next(name for name, modes in MODES.items() if real in modes)
    dropout = () if head == "eagle3" else ("head.dropout=0",)
    accumulation = 4 if real == "one process" else 2
    shared = (f"target.placement={placement}", f"train.accumulation={accumulation}")
    return cases.recipe(*HEADS[head], *dropout, *SETTINGS, *shared, *more)


def run(folder: Path, made: Recipe, *, stop: int | None = None, resume: bool = False) -> Any:
    """Trains to the end, or until the checkpoint `stop` has been written."""
    sharded = made.target.placement == "shard"  # elsewhere a forecast measures costs, which takes longer than all else
    rows, processes = cases.random_rows(27), start_processes(made)
    training = cases.training(folder, made, resume=resume, processes=processes, rows=rows, forecast=sharded)
    if stop is None:
        training.finish()
        return training
    cases.stop_after_save(training, stop)
    with pytest.raises(cases.Stopped):
        training.finish()
    return training


def shards(training: Any) -> dict[str, tuple[int, int]]:
    """Numbers that this process holds, and that there are, of the target and of the head."""
    counts = {}
    if hasattr(training.wrapped.module, "reshard"):
        training.wrapped.module.reshard()
    for name, module in (("target", training.target.model), ("head", training.head)):
        held = whole = 0
        for parameter in module.parameters():
            local = getattr(parameter, "ds_tensor", parameter)
            held += (local.to_local() if hasattr(local, "to_local") else local).numel()
            whole += full_size(parameter)
        counts[name] = (held, whole)
    return counts


def in_mode(folder: Path, real: str, rank: int) -> str:
    """Both heads, straight and resumed; what a process holds."""
    counts = {}
    for head in HEADS:
        straight = run(folder / f"{head}-straight", recipe(head, real))
        counts[head] = shards(straight)
        assert mode(straight.accelerator) == real and straight.accelerator.num_processes == 2
        straight.accelerator.print(describe(straight))
        run(folder / f"{head}-resumed", recipe(head, real), stop=2)
        if rank == 0:
            shutil.copytree(folder / f"{head}-resumed", folder / f"{head}-switched")
        torch.manual_seed(999 + rank)
        run(folder / f"{head}-resumed", recipe(head, real), resume=True)
    in_bfloat16(folder / "bfloat16", real)
    return json.dumps(counts)


def in_bfloat16(folder: Path, real: str) -> None:
    """Two steps with a target, and a forward of the head, in bfloat16."""
    made = recipe("medusa", real, "train.dtype=bfloat16", "train.max_steps=2", "train.save_every=null")
    cases.training(folder, made, target=tiny.target(dtype=torch.bfloat16), processes=start_processes(made)).finish()


@pytest.fixture(scope="module")
def one_process(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("one")
    for head in HEADS:
        run(folder / head, recipe(head, "one process"))
    in_bfloat16(folder / "bfloat16", "one process")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("real", ALL)
def test_a_mode_trains_resumes_and_switches(tmp_path, one_process, real):
    found = in_two_processes(tmp_path / "logs", lambda rank: in_mode(tmp_path, real, rank), real)
    log = (tmp_path / "logs/log-0").read_text()
    assert f"world size 2, mode {real}, device cpu" in log and "trainable of" in log
    check_shards(real, [json.loads(counts) for counts in found])
    for head in HEADS:
        check_equal(tmp_path / f"{head}-straight", one_process / head, real)
        straight, resumed = tmp_path / f"{head}-straight", tmp_path / f"{head}-resumed"
        assert cases.losses(straight) == cases.losses(resumed), f"{head} resumed in {real}"
        for name, value in cases.weights(straight / "head").items():
            assert torch.equal(value, cases.weights(resumed / "head")[name]), (head, name)
        run(tmp_path / f"{head}-switched", recipe(head, "one process"), stop=4, resume=True)

    check_bfloat16(tmp_path / "bfloat16", one_process / "bfloat16")

    other = ALL[(ALL.index(real) + 2) % len(ALL)]

    def go_on(rank: int) -> None:
        for head in HEADS:
            run(tmp_path / f"{head}-switched", recipe(head, other), resume=True)

    in_two_processes(tmp_path / "logs-switched", go_on, other)
    for head in HEADS:
        check_equal(tmp_path / f"{head}-switched", one_process / head, f"{real}, one process, {other}")


def check_equal(run: Path, one: Path, what: str) -> None:
    """The losses of one process, the same files, and weights as near."""
    for kind in ("train", "held_out"):
        lines, expected = (read_metrics(folder / "metrics.jsonl", kind) for folder in (run, one))
        assert [line["step"] for line in lines] == [line["step"] for line in expected], what
        for line, twin in zip(lines, expected, strict=True):
            assert line["loss"] == pytest.approx(twin["loss"], abs=1e-4), (what, kind, line["step"])
    last, twin = cases.newest(run), cases.newest(one)
    assert (
        json.loads((last / "state.json").read_text())["tokens"]
        == json.loads((twin / "state.json").read_text())["tokens"]
    )
    for file in ("head.safetensors", "optimizer.safetensors"):
        values, expected = load_file(last / file), load_file(twin / file)
        assert values.keys() == expected.keys(), (what, file)
        for name, value in expected.items():
            torch.testing.assert_close(values[name], value, rtol=1e-3, atol=1e-4, msg=f"{what}: {name}")
    assert all(torch.isfinite(value).all() for value in load_head(run / "head").state_dict().values())


def check_bfloat16(run: Path, one: Path) -> None:
    """Weights and moments stay in float32; losses are those of one process but for rounding."""
    last = cases.newest(run)
    for file in ("head.safetensors", "optimizer.safetensors"):
        assert {value.dtype for value in load_file(last / file).values()} == {torch.float32}, file
    for (_, loss), (_, twin) in zip(cases.losses(run), cases.losses(one), strict=True):
        assert loss == pytest.approx(twin, rel=0.01)


def check_shards(real: str, of_ranks: list[dict[str, Any]]) -> None:
    """Sharded, each process holds half of the target, and of the head a part: FSDP2 deals out whole rows."""
    sharded = real in MODES["shard"]
    for head in HEADS:
        held = [rank[head]["target"][0] for rank in of_ranks]
        whole = of_ranks[0][head]["target"][1]
        assert held == [whole // 2 if sharded else whole] * 2, (real, head)
        parts = [rank[head]["head"][0] for rank in of_ranks]
        whole = of_ranks[0][head]["head"][1]
        assert (sum(parts) == whole and min(parts)) if sharded else parts == [whole] * 2, (real, head)


def cut_smollm2(layers: int) -> Target:
    """SmolLM2-135M-Instruct without its later layers."""
    whole = load_target(bundled.NAME, dtype="float32")
    del whole.layers[layers:]  # pyright: ignore[reportIndexIssue]
    whole.model.config.num_hidden_layers = layers
    return Target(whole.model, whole.tokenizer, name=whole.name)


@pytest.mark.slow
def test_heads_of_smollm2_train_alike_with_half_of_it_on_each_process(tmp_path):
    target, few = cut_smollm2(3), ("train.max_steps=2", "train.save_every=null", "train.eval_every=null")

    def run_both(folder: Path, real: str) -> str:
        counts = {}
        for head in HEADS:
            made = recipe(head, real, *few, "head.output=shared")
            processes, own = start_processes(made), Target(copy.deepcopy(target.model), target.tokenizer, name="cut")
            training = cases.training(folder / head, made, target=own, processes=processes, rows=cases.random_rows(9))
            training.finish()
            counts[head] = shards(training)
        return json.dumps(counts)

    run_both(tmp_path / "one", "one process")
    found = in_two_processes(tmp_path / "logs", lambda rank: run_both(tmp_path / "two", "ZeRO-3"), "ZeRO-3")
    check_shards("ZeRO-3", [json.loads(counts) for counts in found])
    for head in HEADS:
        for line, twin in zip(
            cases.losses(tmp_path / "two" / head), cases.losses(tmp_path / "one" / head), strict=True
        ):
            assert line == pytest.approx(twin, abs=1e-4)
