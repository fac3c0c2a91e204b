"""EAGLE heads through the real loop: curriculum, resume and kill, several processes, what is learnt, what is said."""

from __future__ import annotations

import random
from typing import Any, cast

import pytest
import tiny
import torch
import train_cases as cases
from parallel import in_two_processes
from test_train_learns import NUM_TOKENS, counting_rows
from test_train_resume import kill_again_and_again, run_stopped_at, same_bits

from headstart.data.packing import collate
from headstart.data.rendering import Row
from headstart.decode.cost import replay
from headstart.decode.drafters.base import Request
from headstart.decode.drafters.heads import head_drafter
from headstart.decode.drafters.plans import chain_paths
from headstart.decode.engine import Engine
from headstart.decode.forecast import Recorded, rank_answer
from headstart.decode.tree import Path as TreePath
from headstart.heads.configs import Eagle3Config, MedusaConfig
from headstart.heads.store import build_head, load_head
from headstart.heads.vocab import DraftVocab
from headstart.target import Target
from headstart.train import forecasting, loop
from headstart.train.ceiling import outside
from headstart.train.curriculum import describe_curriculum, stages
from headstart.train.metrics import read_metrics
from headstart.train.modes import start_processes
from headstart.train.preparation import draft_vocab_of, recipe_batches
from headstart.train.random_state import seed_everything

CURRICULUM = "unrolled_steps: [{until: 0.5, steps: 1}, {until: 1.0, steps: 3}]"
EAGLE3 = f"head={{type: eagle3, fc_norm: true, norm_before_residual: true, {CURRICULUM}}}"
EAGLE = f"head={{type: eagle, noise: 0.2, {CURRICULUM}}}"


# --- the curriculum


def test_a_curriculum_unrolls_as_many_steps_as_its_stage_says(tmp_path):
    training = cases.training(tmp_path / "run", cases.recipe(EAGLE3, "train.eval_every=4"))
    training.finish()
    lines = read_metrics(tmp_path / "run/metrics.jsonl", "train")
    unrolled = [sum(loss is not None for loss in line["head_loss"]) for line in lines]
    assert unrolled == [1] * 6 + [3] * 6
    for line in read_metrics(tmp_path / "run/metrics.jsonl", "held_out"):
        assert None not in line["top_1"] and len(line["top_1"]) == 3, "held-out rows are always asked at every depth"
    assert isinstance(training.head.config, Eagle3Config)
    assert describe_curriculum(training.head.config, 12) == (
        "start: last-layer; unrolled steps: 1 in steps 1 to 6, then 3 in steps 7 to 12"
    )


def test_a_stage_that_is_too_short_for_a_step_is_not_announced():
    config = Eagle3Config.model_validate({"unrolled_steps": [{"until": 0.05, "steps": 1}, {"until": 1.0, "steps": 2}]})
    assert describe_curriculum(config, 1).endswith("unrolled steps: 1 in steps 1 to 1")
    assert [stage.until for stage in stages(config)] == [0.05, 1.0]
    assert describe_curriculum(Eagle3Config(unrolled_steps=4), 9).endswith("4 in steps 1 to 9")
    assert [stage.until for stage in stages(MedusaConfig(num_heads=4))] == [1.0]


def test_a_budget_of_cpu_seconds_times_every_stage(tmp_path, monkeypatch):
    asked = {}

    def steps_within(seconds, new_trial, *, wrapped, phases, **rest):
        for share in (0.0, 0.5):
            new_trial(share)()
            asked[share] = wrapped.head.steps
        assert phases == [0.5, 1.0]
        return 4

    monkeypatch.setattr(loop, "steps_within", steps_within)
    cases.training(tmp_path / "run", cases.recipe(EAGLE3, "train.max_steps=null", "train.cpu_seconds=9"))
    assert asked == {0.0: 1, 0.5: 3}


# --- resumed and killed


@pytest.mark.parametrize("stop", [5, 10])
@pytest.mark.parametrize("head", [EAGLE3, EAGLE], ids=["eagle3", "eagle"])
def test_resumed_in_either_stage_equals_straight_with_muon(tmp_path, head, stop):
    recipe = cases.recipe(head, "train.optimizer=muon", "train.weight_decay=0.1", "train.save_every=5")
    cases.training(tmp_path / "straight", recipe).finish()
    run_stopped_at(tmp_path / "resumed", recipe, stop)
    torch.manual_seed(999)
    training = cases.training(tmp_path / "resumed", recipe, resume=True)
    assert training.progress.step == stop
    training.finish()
    same_bits(tmp_path / "straight", tmp_path / "resumed")


KILLED = (EAGLE, "train.optimizer=muon", "train.save_every=1", "train.eval_every=7", "train.max_steps=30")


@pytest.mark.parametrize("kills", [2, pytest.param(10, marks=pytest.mark.slow)])
def test_killed_in_a_curriculum_with_muon_equals_straight(tmp_path, kills):
    recipe = cases.recipe(*KILLED, "train.keep=30")
    cases.training(tmp_path / "straight", recipe).finish()
    kill_again_and_again(tmp_path / "killed", recipe, kills, random.Random(kills))
    same_bits(tmp_path / "straight", tmp_path / "killed")


# --- several processes


@pytest.mark.parametrize("head", [EAGLE3, EAGLE.replace("0.2", "0.0")], ids=["eagle3", "eagle"])
def test_one_process_equals_two(tmp_path, head):
    settings = (head, "train.eval_every=6", "train.max_steps=8", "train.batch_size=1", "train.lr=1e-3")
    one = cases.recipe(*settings, "train.accumulation=4")
    two = cases.recipe(*settings, "train.accumulation=2", "train.world_size=2")

    def work(rank: int) -> str:
        training = cases.training(tmp_path / "two", two, processes=start_processes(two, smoke=True))
        assert type(training.wrapped.module).__name__ == "DistributedDataParallel"
        return str(training.finish().tokens)

    tokens = in_two_processes(tmp_path / "logs", work)
    assert tokens == [str(cases.training(tmp_path / "one", one).finish().tokens)] * 2
    for name, value in cases.weights(tmp_path / "one/head").items():
        torch.testing.assert_close(cases.weights(tmp_path / "two/head")[name], value, rtol=1e-4, atol=1e-5)
    for kind in ("train", "held_out"):
        lines, twins = (read_metrics(tmp_path / name / "metrics.jsonl", kind) for name in ("one", "two"))
        for line, twin in zip(lines, twins, strict=True):
            assert line["loss"] == pytest.approx(twin["loss"], rel=1e-4)


# --- what is learnt


def counting_target() -> Target:
    """A target that counts: its layers add nothing to the embedding, and the output row of t + 1 is that of t."""
    target = tiny.target("llama", dtype=torch.float64)
    model: Any = target.model
    layers: Any = target.layers
    embedding, rows = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    with torch.no_grad():
        for layer in layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        rows.zero_()
        embedding.div_(embedding.norm(dim=-1, keepdim=True).clamp(min=1e-6))  # the row of padding is zero
        for token in range(NUM_TOKENS):
            rows[(token + 1) % NUM_TOKENS] = 20 * embedding[token]
    return target


@pytest.mark.parametrize(
    "head",
    [
        "head={type: eagle3, loss: hard-ce, unrolled_steps: [{until: 0.3, steps: 1}, {until: 1.0, steps: 3}]}",
        "head={type: eagle, loss: hard-ce, token_loss: 1.0, feature_loss: 0.1, noise: 0.0, unrolled_steps: 3}",
    ],
    ids=["eagle3", "eagle"],
)
def test_counting_is_learnt_and_the_forecast_is_what_is_decoded(tmp_path, monkeypatch, head):
    monkeypatch.setattr(forecasting, "CPU_SIZES", (1, 4))
    target = counting_target()
    recipe = cases.recipe(
        *(head, "train.lr=1e-2", "train.max_steps=60", "train.batch_size=8", "train.accumulation=1"),
        *("train.warmup=0.05", "logging.every=30", "data.packing=true", "data.max_length=48", "train.clip=1.0"),
    )
    training = cases.training(
        tmp_path / "run",
        recipe,
        target=target,
        rows=counting_rows(64, 0),
        held_out=counting_rows(8, 1),
        forecast=True,
    )
    training.finish()
    (line,) = read_metrics(tmp_path / "run/metrics.jsonl", "held_out")
    assert min(line["top_1"]) > 0.98
    assert line["forecast_chain_acceptance_length"] > 3.5 and line["forecast_nodes"] in (1, 4)

    learnt = load_head(tmp_path / "run/head", target)
    weak = cases.training(tmp_path / "weak", cases.recipe(head), target=target, rows=counting_rows(4, 5)).head
    for drafting, floor in ((learnt, 3.5), (weak.double().eval(), 0.0)):
        for paths in (chain_paths(3), [(0,), (1,), (0, 0), (1, 0), (0, 0, 1)]):
            forecast, decoded = forecast_and_decoded(target, drafting, paths)
            assert forecast == decoded
            if len(paths) == 3:
                assert sum(step + 1 for step in decoded) >= floor * len(decoded)


def forecast_and_decoded(target: Target, head, paths: list[TreePath]) -> tuple[list[int], list[int]]:
    """Drafts accepted in each whole step: by replay of the target's text, and by the engine's records."""
    forecast, decoded = [], []
    for row in counting_rows(4, 3):
        request = Request(prompt_ids=row.input_ids[:3], max_new_tokens=20, ignore_end=True)
        (answer,) = Engine(target, head_drafter(head, target, paths), budget=len(paths) + 1).generate([request])
        assert answer.token_ids == [(row.input_ids[2] + 1 + place) % NUM_TOKENS for place in range(20)]
        decoded += [step.accepted for step in answer.steps if not step.cut]
        ids = [*request.prompt_ids, *answer.token_ids]
        tokens = torch.tensor([ids])
        batch = collate([Row("text", ids, [False] * len(ids))], [[0]])
        masks = target.masks(*batch.attention())
        features = target.forward(tokens, batch.position_ids, masks, layers=head.wants)
        ranked = rank_answer(head, target, Recorded(ids, 3, features), depth=3)
        forecast += [accepted for _, accepted in replay(ranked, paths)]
    return forecast, decoded


@pytest.mark.parametrize("head", [EAGLE3, EAGLE], ids=["eagle3", "eagle"])
def test_random_text_cannot_be_foreseen(tmp_path, head):
    """B24's kind, the cheap alarm for a leak: on random tokens accuracy stays near chance, however long it trains."""
    recipe = cases.recipe(head, "train.max_steps=40", "train.lr=3e-3")
    cases.training(tmp_path / "run", recipe, held_out=cases.random_rows(40, seed=9)).finish()
    (line,) = read_metrics(tmp_path / "run/metrics.jsonl", "held_out")
    assert line["labels"] > 300 and max(line["top_1"]) < 0.04


# --- draft vocabularies


def test_the_ceiling_is_what_the_target_says_outside_of_the_draft_vocabulary():
    target, recipe = tiny.target(), cases.recipe()
    rows, model = cases.random_rows(5), cast(Any, target.model)
    vocab = DraftVocab(list(range(0, 264, 2)), 264)
    found = outside(target, vocab, recipe_batches(rows, recipe))
    assert found is not None
    mass, missed, count = 0.0, 0, 0
    for row in rows:
        ids = torch.tensor([row.input_ids])
        probabilities = model(input_ids=ids).logits[0].softmax(-1)
        for place, supervised in enumerate(row.supervised[1:]):
            if supervised:
                mass += float(probabilities[place, 1::2].sum())
                missed += int(probabilities[place].argmax()) % 2
                count += 1
    assert found.tokens == count
    assert found.probability == pytest.approx(mass / count, abs=1e-5)
    assert found.argmaxes == pytest.approx(missed / count)
    assert f"over {count} held-out tokens" in str(found)
    assert outside(target, vocab, []) is None


def test_a_draft_vocabulary_larger_than_the_data_is_filled_up():
    """20 distinct supervised tokens, 64 asked for: 64 ids, special ones included, the same every time."""
    target = tiny.target()
    rows = counting_rows(3, 0)
    recipe = cases.recipe("head={type: eagle3, draft_vocab_size: 64}")
    vocab = draft_vocab_of(recipe, target, rows)
    assert vocab is not None and len(vocab) == len(set(vocab.ids.tolist())) == 64
    assert set(target.tokenizer.all_special_ids) <= set(vocab.ids.tolist())
    again = draft_vocab_of(recipe, target, rows)
    assert again is not None and torch.equal(vocab.ids, again.ids)
    assert draft_vocab_of(cases.recipe("head={type: eagle3, draft_vocab_size: 264}"), target, rows) is None


def test_own_output_rows_of_a_tied_target_are_trained_saved_and_resumed(tmp_path):
    """A head that copied the tie flag would lose its rows, or get the embedding, when it is saved."""
    target, rows = tiny.target("tied"), counting_rows(26, 0)
    model: Any = target.model
    before = model.get_input_embeddings().weight.clone()
    recipe = cases.recipe(
        "head={type: eagle3, output: own, draft_vocab_size: 64, unrolled_steps: 2}",
        *("train.max_steps=4", "train.save_every=2"),
    )
    vocab = draft_vocab_of(recipe, target, rows)
    assert vocab is not None

    def training(folder, **options):
        seed_everything(0)
        head = build_head(recipe.head, target, vocab)
        return cases.training(folder, recipe, target=target, rows=rows, head=head, **options)

    straight = training(tmp_path / "straight")
    straight.finish()
    stopped = training(tmp_path / "resumed")
    cases.stop_after_save(stopped, 2)
    with pytest.raises(cases.Stopped):
        stopped.finish()
    training(tmp_path / "resumed", resume=True).finish()
    same_bits(tmp_path / "straight", tmp_path / "resumed")
    stored = cases.weights(tmp_path / "straight/head")
    assert stored["output_weight"].shape == (64, 64)
    assert not torch.equal(stored["output_weight"], before[vocab.ids]), "trained, not the embedding"
    live = straight.head.state_dict()
    assert all(torch.equal(value, live[name]) for name, value in stored.items())
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert torch.equal(model.get_input_embeddings().weight, before)
