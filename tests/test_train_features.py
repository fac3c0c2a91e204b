"""Features online, offline and hybrid: the same training to the bit, and no layer of the target but where needed."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny
import torch
import train_cases as cases

from headstart.data.feature_cache import FeatureWriter
from headstart.data.feature_key import cache_key
from headstart.data.features import compute, jobs
from headstart.data.packing import RowStore, collate
from headstart.data.progress import Progress
from headstart.errors import DataError, TargetError, TrainingError
from headstart.heads.vocab import DraftVocab
from headstart.light_target import load_light_target
from headstart.recipe import Recipe
from headstart.target import Target, load_target
from headstart.train.ceiling import outside
from headstart.train.features import OnlineFeatures
from headstart.train.preparation import foreign_answers, known_states, recipe_batches

SETTINGS = ("train.save_every=5", "train.eval_every=4", "train.max_steps=20")
ROWS, HELD_OUT = cases.random_rows(26), cases.random_rows(5, seed=1, name="held")


def recipe(folder: Path, features: str, *settings: str) -> Recipe:
    return cases.recipe(*SETTINGS, f"data.features={features}", f"data.feature_cache={folder / 'cache'}", *settings)


def write_cache(made: Recipe, storage: str | None = None, rows: RowStore = ROWS) -> None:
    target = tiny.target()
    with FeatureWriter(Path(str(made.data.feature_cache)), cache_key(target, made, (), storage)) as cache:
        compute(cache, target, jobs(cache, [rows, HELD_OUT], made), Progress("computing"))


def train(folder: Path, made: Recipe, **options) -> None:
    cases.training(folder, made, rows=ROWS, held_out=HELD_OUT, **options).finish()


def same_training(one: Path, other: Path) -> None:
    assert cases.losses(one) == cases.losses(other)
    for name, value in cases.weights(one / "head").items():
        assert torch.equal(value, cases.weights(other / "head")[name])


@pytest.mark.parametrize("packing", ["false", "true"])
def test_offline_and_hybrid_training_equal_online_training_to_the_bit(tmp_path, packing):
    setting = f"data.packing={packing}"
    train(tmp_path / "online", recipe(tmp_path, "online", setting))
    write_cache(recipe(tmp_path, "offline", setting))
    train(tmp_path / "offline", recipe(tmp_path, "offline", setting))
    train(tmp_path / "hybrid", recipe(tmp_path, "hybrid", setting))
    train(tmp_path / "filling", recipe(tmp_path / "other", "hybrid", setting))
    for name in ("offline", "hybrid", "filling"):
        same_training(tmp_path / "online", tmp_path / name)


def count_forwards(target: Target) -> list[int]:
    calls, forward = [], target.forward
    target.forward = lambda *words, **named: calls.append(1) or forward(*words, **named)
    return calls


def test_hybrid_fills_the_cache_and_never_calls_the_target_again(tmp_path):
    target = tiny.target()
    calls = count_forwards(target)
    made = recipe(tmp_path, "hybrid")
    train(tmp_path / "first", made, target=target)  # nearly three epochs of 26 rows
    assert len(calls) == len(ROWS) + len(HELD_OUT)
    train(tmp_path / "second", made, target=target)
    assert len(calls) == len(ROWS) + len(HELD_OUT)
    same_training(tmp_path / "first", tmp_path / "second")
    train(tmp_path / "offline", recipe(tmp_path, "offline"), target=target)
    assert len(calls) == len(ROWS) + len(HELD_OUT)


@pytest.mark.parametrize("features, storage", [("offline", None), ("offline", "int8"), ("hybrid", "int8")])
def test_a_resumed_run_equals_a_straight_one(tmp_path, features, storage):
    runs = {name: recipe(tmp_path / name, features) for name in ("straight", "resumed")}
    for made in runs.values():
        write_cache(made, storage, ROWS if features == "offline" else ROWS.take(range(9)))
    straight = cases.training(tmp_path / "straight" / "run", runs["straight"], rows=ROWS, held_out=HELD_OUT)
    straight.finish()
    training = cases.training(tmp_path / "resumed" / "run", runs["resumed"], rows=ROWS, held_out=HELD_OUT)
    cases.stop_after_save(training, 5)
    with pytest.raises(cases.Stopped):
        training.finish()
    if isinstance(training.features.cache, FeatureWriter):  # as when a process is killed: what was open is lost
        training.features.cache.close(publish=False)
    train(tmp_path / "resumed" / "run", runs["resumed"], resume=True)
    one, other = (tmp_path / name / "run" for name in ("straight", "resumed"))
    assert cases.losses(one) == cases.losses(other)
    for name, value in cases.weights(one / "head").items():
        assert torch.equal(value, cases.weights(other / "head")[name])


def test_a_run_is_not_continued_on_features_of_another_dtype(tmp_path):
    made = recipe(tmp_path, "offline")
    write_cache(made)
    train(tmp_path / "run", made)
    (tmp_path / "cache").rename(tmp_path / "exact")
    write_cache(made, "int8")
    with pytest.raises(TrainingError, match="has feature dtype float32, this run int8"):
        train(tmp_path / "run", made, resume=True)


def test_a_row_that_an_offline_cache_lacks_is_named_before_the_first_step(tmp_path):
    made = recipe(tmp_path, "offline")
    with pytest.raises(DataError, match="There is no feature cache in .*cache; write it with `headstart data features"):
        train(tmp_path / "run", made)
    write_cache(made, rows=ROWS.take(range(20)))
    with pytest.raises(TrainingError, match="6 of 31 rows are not in the feature cache .*the first: row-20"):
        train(tmp_path / "other", made)


def test_feature_memory_without_effect_is_said(tmp_path, capsys):
    write_cache(recipe(tmp_path, "offline"))
    train(tmp_path / "run", recipe(tmp_path, "offline", "train.feature_memory=1"))
    assert "train.feature_memory has no effect with data.features: offline" in capsys.readouterr().err


# --- the target without its layers


@pytest.mark.parametrize("family", "llama tied headdim hyb gpt2 gemma2 opt cohere".split())
def test_a_light_target_is_the_target(tmp_path, family):
    folder = tiny.save(tmp_path / family, family)
    whole, light = (load(str(folder), dtype="float32") for load in (load_target, load_light_target))
    in_layers = sum(parameter.numel() for parameter in whole.layers.parameters())
    held = [sum(parameter.numel() for parameter in target.model.parameters()) for target in (whole, light)]
    assert held[1] == held[0] - in_layers and not any(parameter.is_meta for parameter in light.model.parameters())
    assert light.fingerprint() == whole.fingerprint()
    facts = "vocab_size hidden_size num_layers max_positions end_token_ids layer_windows dtype".split()
    assert all(getattr(light, fact) == getattr(whole, fact) for fact in facts)
    ids = torch.arange(20).view(2, 10)
    positions, masks = torch.arange(10).expand(2, 10), None
    theirs, ours = (target.forward(ids, positions, masks, layers=(0, 2, 4)) for target in (whole, light))
    for expected, found in [(theirs.final, ours.final), *((theirs.taps[k], ours.taps[k]) for k in (0, 2, 4))]:
        assert torch.equal(expected, found)
    assert torch.equal(whole.output.logits(theirs.final), light.output.logits(theirs.final))
    assert torch.equal(whole.output.logits(theirs.taps[2], norm=True), light.output.logits(theirs.taps[2], norm=True))
    assert torch.equal(whole.embedding(ids), light.embedding(ids))
    for name, weight in light.layers[-1].state_dict().items():
        assert torch.equal(weight, whole.layers[-1].state_dict()[name])


def test_offline_training_holds_no_layer(tmp_path):
    folder = tiny.save(tmp_path / "model", "llama")
    light = load_light_target(str(folder), dtype="float32")
    made = recipe(tmp_path, "offline")
    write_cache(made)
    training = cases.training(tmp_path / "run", made, rows=ROWS, held_out=HELD_OUT, target=light)
    held = {name for name, _ in training.wrapped.module.named_parameters() if not name.startswith("head.")}
    assert held == {f"target_model.{name}.weight" for name in ("model.embed_tokens", "model.norm", "lm_head")}
    training.finish()
    train(tmp_path / "online", recipe(tmp_path, "online"))
    same_training(tmp_path / "online", tmp_path / "run")


def test_offline_what_is_said_before_training_is_read_from_the_cache(tmp_path):
    made, whole = recipe(tmp_path, "offline"), tiny.target()
    write_cache(made)
    vocab = DraftVocab(list(range(0, whole.vocab_size, 2)), whole.vocab_size)
    batches = list(recipe_batches(HELD_OUT, made))
    ceiling, warning = outside(whole, vocab, batches), foreign_answers(whole, ROWS, recipe(tmp_path, "online"))
    calls = count_forwards(whole)
    found = outside(whole, vocab, batches, final=known_states(made, whole))
    assert ceiling is not None and found is not None
    assert (found.argmaxes, found.tokens) == (ceiling.argmaxes, ceiling.tokens)
    assert found.probability == pytest.approx(ceiling.probability, rel=1e-5)
    assert foreign_answers(whole, ROWS, made) == warning and not calls


def test_a_checkpoint_in_several_files_opens_those_that_are_asked_for(tmp_path):
    folder = tmp_path / "model"
    model = tiny.model("llama")
    model.save_pretrained(folder, max_shard_size="100KB")
    tiny.tokenizer().save_pretrained(folder)
    assert len(list(folder.glob("model-*.safetensors"))) > 3
    light = load_light_target(str(folder), dtype="float32")
    assert torch.equal(light.embedding(torch.arange(9)), tiny.target().embedding(torch.arange(9)))
    assert light.fingerprint()["weights"] == tiny.target().fingerprint()["weights"]


def test_a_target_that_cannot_be_read_in_parts_is_refused(tmp_path):
    folder = tiny.save(tmp_path / "moe", "olmoe")
    with pytest.raises(TargetError, match="cannot be read in parts.*experts.*set data.features: hybrid"):
        load_light_target(str(folder), dtype="float32").fingerprint()
    (folder / "model.safetensors").rename(folder / "elsewhere")
    with pytest.raises(TargetError, match="it has no model.safetensors"):
        load_light_target(str(folder), dtype="float32")


def test_batched_and_single_sequences_have_the_same_states_online():
    target = tiny.target(dtype=torch.float64)
    features = OnlineFeatures(target, (2,))
    together, alone = (features(collate(ROWS, batch)) for batch in ([[0], [1]], [[1]]))
    length = alone.final.shape[1]
    assert torch.equal(together.final[1, :length], alone.final[0])
    assert torch.equal(together.taps[2][1, :length], alone.taps[2][0])
