"""Training learns: a text whose next token is always one more, by every head, and the forecast says so."""

from __future__ import annotations

import random
from typing import Any

import pytest
import tiny
import torch
import train_cases as cases

from headstart.data.packing import RowStore
from headstart.data.rendering import Row
from headstart.decode.decode_copy import shared_copy
from headstart.decode.forecast import rank_rows
from headstart.heads.configs import MedusaConfig
from headstart.heads.store import build_head, load_head
from headstart.train import forecasting
from headstart.train.forecasting import Forecaster
from headstart.train.metrics import read_metrics
from headstart.train.preparation import foreign_answers

NUM_TOKENS = 32


def counting_rows(count: int, seed: int) -> RowStore:
    """t, t + 1, t + 2, ... modulo 32 from a random start; the first three tokens are the question."""
    draw = random.Random(seed)
    starts = [draw.randrange(NUM_TOKENS) for _ in range(count)]
    rows = [[(start + place) % NUM_TOKENS for place in range(24)] for start in starts]
    return RowStore([Row(f"count-{n}", ids, [False] * 3 + [True] * 21) for n, ids in enumerate(rows)])


@pytest.mark.parametrize("output", ["shared", "own"])
def test_counting_is_learnt_by_every_head(tmp_path, monkeypatch, output):
    monkeypatch.setattr(forecasting, "CPU_SIZES", (1, 5))
    recipe = cases.recipe(
        *("head.num_heads=4", "head.num_layers=2", "head.dropout=0", "head.loss=hard-ce", f"head.output={output}"),
        *("train.lr=3e-2", "train.max_steps=110", "train.batch_size=8", "train.accumulation=1", "train.clip=null"),
        *("train.warmup=0.05", "logging.every=50", "data.packing=true", "data.max_length=48"),
    )
    training = cases.training(
        tmp_path / "run", recipe, rows=counting_rows(64, 0), held_out=counting_rows(8, 1), forecast=True
    )
    training.finish()
    (line,) = read_metrics(tmp_path / "run/metrics.jsonl", "held_out")
    assert min(line["top_1"]) > 0.98
    assert line["forecast_chain_acceptance_length"] > 4.8
    assert line["forecast_speedup"] >= 1.0 and line["forecast_nodes"] in (1, 5)

    head = load_head(tmp_path / "run/head", training.target)
    row = counting_rows(1, 2)[0]
    answer = rank_rows(head, training.target, [row])[0]
    assert answer.ranks.shape == (21, 4) and (answer.ranks[:-4] == 0).float().mean() > 0.95


def test_a_forecast_leaves_target_and_head_as_they_are():
    target = tiny.target(dtype=torch.bfloat16)
    before = target.model.config._attn_implementation
    head = build_head(MedusaConfig(num_heads=2), target).train()
    forecast = Forecaster(target, cases.random_rows(3))(head)
    assert forecast.chain >= 1 and forecast.speedup >= 1
    assert target.model.config._attn_implementation == before and not target.swapped
    assert head.training and head.blocks[0].weight.dtype == torch.float32
    twin = shared_copy(target)
    assert twin.model is not target.model
    assert twin.model.get_input_embeddings().weight is target.model.get_input_embeddings().weight


def test_an_answer_may_begin_with_the_first_token_or_end_with_the_end():
    target = tiny.target()
    head = build_head(MedusaConfig(num_heads=2), target).eval()
    text = rank_rows(head, target, [Row("text", [5, 6, 7, 8], [True] * 4)])[0]
    assert text.ranks.shape == (3, 2)


def test_answers_that_the_target_would_not_have_written_are_warned_of():
    target = tiny.target()
    questions = torch.randint(0, 256, (6, 5), generator=torch.Generator().manual_seed(1))
    generate: Any = target.model.generate
    texts = generate(questions, max_new_tokens=12, do_sample=False, attention_mask=questions >= 0).tolist()
    own = RowStore([Row(f"own-{n}", ids, [place >= 5 for place in range(len(ids))]) for n, ids in enumerate(texts)])
    recipe = cases.recipe()
    assert foreign_answers(target, own, recipe) is None
    warning = foreign_answers(target, cases.random_rows(6), recipe)
    assert warning is not None and "headstart data distill" in warning
