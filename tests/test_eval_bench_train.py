"""The training benchmark counts what is executed: its formula against torch's own counter of products."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import tiny
import torch
import train_cases as cases
from torch.utils.flop_counter import FlopCounterMode

from headstart.data.packing import RowStore, collate
from headstart.eval import bench_train
from headstart.eval.bench_train import StepShape, _unrolled, matmul_peak, step_flops
from headstart.heads.base import Alignment
from headstart.heads.configs import Eagle3Config
from headstart.heads.store import build_head
from headstart.heads.unrolled_attention import unrolled_rows
from headstart.train.preparation import draft_vocab_of


@pytest.mark.parametrize("norms", [{}, {"fc_norm": True, "norm_before_residual": True}, {"norm_before_fc": True}])
@pytest.mark.parametrize("output", ["shared", "own"])
def test_the_formula_counts_the_products_that_torch_counts(norms, output):
    target, rows = tiny.target(), cases.random_rows(6)
    config = Eagle3Config(unrolled_steps=3, draft_vocab_size=64, output=output, **norms)
    recipe = cases.recipe("head={type: eagle3, draft_vocab_size: 64}")
    head = build_head(config, target, draft_vocab_of(recipe, target, rows)).train()
    head.set_share(1.0)
    batch = collate(rows, [[0, 1], [2], [3, 4]])
    features = target.forward(batch.input_ids, batch.position_ids, target.masks(*batch.attention()), layers=head.wants)
    with FlopCounterMode(display=False) as counter:
        head(features, batch, target.embedding, target.output).loss_sum.backward()
    counts = counter.get_flop_counts()["Global"]
    products = sum(count for op, count in counts.items() if str(op) in ("aten.mm", "aten.addmm", "aten.bmm"))
    parts = step_flops(StepShape.of(head), batch.input_ids.numel(), *_unrolled(head, batch))
    assert parts["keys"] and _unrolled(head, batch)[0] < batch.input_ids.numel()
    expected = sum(count for part, count in parts.items() if part != "attention")
    assert products == pytest.approx(expected, rel=0.02), (counts, parts)


@pytest.mark.parametrize("everything", [False, True])
def test_attention_counts_the_pairs_that_see_each_other(everything):
    target, rows = tiny.target(), cases.random_rows(6)
    if everything:
        rows = RowStore([replace(row, supervised=[True] * len(row.input_ids)) for row in rows])
    head = build_head(Eagle3Config(unrolled_steps=2), target)
    batch = collate(rows, [[0, 1], [2]])
    positions = unrolled_rows(batch, Alignment.of_drafts(batch, 2).positions)
    pairs = int(batch.attention()[0].flatten(0, 1)[positions].sum())
    assert _unrolled(head, batch)[:2] == (len(positions), pairs)
    shape = StepShape.of(head)
    forward = 2 * 2 * pairs * shape.query_width * 2  # scores and sums, a product and an addition each, in two steps
    assert step_flops(shape, 99, len(positions), pairs, 7)["attention"] == forward + forward * 5 // 2


def test_the_peak_is_a_rate_of_real_products():
    assert 1e6 < matmul_peak(torch.float32, sizes=(64,), repeats=2) < 1e14


def test_figures_are_written(tmp_path, capsys):
    out = tmp_path / "speed.json"
    assert bench_train.main(["--smoke", "--steps", "2", "--dtypes", "float32", "--output", str(out)]) == 0
    report = json.loads(out.read_text())
    result, whole = report["results"]
    assert (result["supervised"], whole["supervised"]) == ("answers", "everything")
    assert result["supervised_share"] < 0.95 < whole["supervised_share"] <= 1
    assert report["unrolled_steps"] == 3 and report["sequence_length"] == 128 and report["environment"]["threads"] == 1
    assert 0 < result["share_of_peak"] < 1.5 and 0 < result["supervised_share"] < 1
    assert result["tokens_per_cpu_second"] > 0 and set(result["flops_by_part"]) == {
        "fusion", "keys", "layer", "attention", "output", "teacher"
    }  # fmt: skip
    assert "of the matmul peak" in capsys.readouterr().out
    assert bench_train.main(["--recipe", "quickstart.yaml", "--smoke"]) == 2
