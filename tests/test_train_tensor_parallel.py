"""A target split over two CPU processes by transformers' plan trains the head that one process trains."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny
import torch
import train_cases as cases
from parallel import in_two_processes
from torch.distributed.tensor import DTensor

from headstart.errors import TrainingError
from headstart.train.metrics import read_metrics
from headstart.train.modes import start_processes
from headstart.train.preparation import describe, place_target
from headstart.train.tensor_parallel import split_target

SETTINGS = ("train.max_steps=4", "train.eval_every=2", "train.save_every=2", "train.lr=1e-3", "head.dropout=0.2")
SPLIT = (*SETTINGS, "target.placement=tensor_parallel")


def split(folder: Path, rank: int) -> str:
    made = cases.recipe(*SPLIT)
    processes, target = start_processes(made), tiny.target()
    place_target(target, made, processes)
    held = sum(one.to_local().numel() for one in target.model.parameters() if isinstance(one, DTensor))
    whole = sum(one.numel() for one in target.model.parameters() if isinstance(one, DTensor))
    training = cases.training(folder / "split", made, target=target, processes=processes, forecast=True)
    processes.print(describe(training))
    training.finish()
    with pytest.raises(TrainingError, match="target.tensor_parallel_size: 3 does not divide the 2 processes"):
        split_target(tiny.target(), processes, 3)
    with pytest.raises(TrainingError, match=r"tiny-gpt2 \(gpt2\) cannot be split over 2 .*no plan for it"):
        split_target(tiny.target("gpt2"), processes, 2)
    with pytest.raises(TrainingError, match="cannot be split over 2 processes: it has 1 key heads"):
        split_target(tiny.target(num_key_value_heads=1), processes, 2)
    return json.dumps([held, whole, training.progress.tokens])


@pytest.mark.slow
def test_a_split_target_trains_the_same_head(tmp_path):
    found = [json.loads(one) for one in in_two_processes(tmp_path / "logs", lambda rank: split(tmp_path, rank))]
    one = cases.training(tmp_path / "one", cases.recipe(*SETTINGS)).finish()
    assert [tokens for _, _, tokens in found] == [one.tokens] * 2, "both read the same rows, which count once"
    assert [2 * held for held, _, _ in found] == [whole for _, whole, _ in found] and found[0][1]
    log = (tmp_path / "logs/log-0").read_text()
    assert "world size 2, mode DDP" in log and "split over groups of 2 processes" in log
    assert "acceptance decoded on 5 held-out prompts" in log
    for kind in ("train", "held_out"):
        lines, twins = (read_metrics(tmp_path / name / "metrics.jsonl", kind) for name in ("split", "one"))
        assert [line["step"] for line in lines] == [line["step"] for line in twins]
        for line, twin in zip(lines, twins, strict=True):
            assert line["loss"] == pytest.approx(twin["loss"], abs=1e-4)
    for name, value in cases.weights(tmp_path / "one/head").items():
        torch.testing.assert_close(cases.weights(tmp_path / "split/head")[name], value, rtol=1e-3, atol=1e-4)
