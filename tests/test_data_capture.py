"""States that come up while the target answers are those of a forward of the rendered row, or are not kept."""

from __future__ import annotations

import json

import pytest
import tiny
import torch

from headstart import cli
from headstart.data.capture import padded
from headstart.data.distill import Answer
from headstart.data.feature_cache import FeatureCache
from headstart.data.feature_key import cache_key
from headstart.data.features import hashes, sequence_features
from headstart.data.packing import RowStore, collate
from headstart.data.prepare import prepare
from headstart.data.rendering import Row
from headstart.heads.configs import DraftConfig, Eagle3Config, EagleConfig, MedusaConfig
from headstart.heads.store import build_head
from headstart.recipe import load_recipe
from headstart.target import Features, load_target

RECIPE = """\
name: tiny
target: {name: model, dtype: float64}
head: {type: eagle3, layers: [1, 2, 3], draft_vocab_size: null}
data:
  train: [{source: SOURCE}]
  held_out: {fraction: 0.1}
  max_length: 40
  distill: {max_new_tokens: 3, temperature: 0.0, batch_size: 3}
"""


HEADS = [
    MedusaConfig(num_heads=3),
    EagleConfig(unrolled_steps=3),
    Eagle3Config(unrolled_steps=3, layers=[1, 2, 3]),
    DraftConfig(num_layers=2),
]


def test_a_distilled_row_has_the_states_of_its_own_forward_up_to_its_last_label(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    tiny.save(tmp_path / "model", "llama", dtype=torch.float64)
    questions = [{"messages": [{"role": "user", "content": "ab" * (n % 4) + chr(97 + n)}]} for n in range(26)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in questions))
    (tmp_path / "ask.yaml").write_text(RECIPE.replace("SOURCE", "prompts.jsonl"))
    (tmp_path / "learn.yaml").write_text(RECIPE.replace("SOURCE", "answers.jsonl"))
    words = ["--output", "answers.jsonl", "--features", "cache", "--device", "cpu"]
    assert cli.main(["data", "distill", "--recipe", "ask.yaml", *words]) == 0
    said = capsys.readouterr().out

    target = load_target("model", dtype="float64")
    recipe = load_recipe("learn.yaml")
    data = prepare(recipe, target.tokenizer, vocab_size=target.vocab_size)
    rows = RowStore([*data.train, *data.held_out])
    cache = FeatureCache(tmp_path / "cache", cache_key(target, recipe, (1, 2, 3), None))
    kept = [number for number, row in enumerate(hashes(rows)) if row in cache]
    assert len(kept) >= 2 and f"features in cache: {len(cache)} rows kept while answering" in said
    for number in kept:
        row, states = rows[number], cache.read(hashes(rows)[number])
        last = max(place for place, label in enumerate(row.supervised) if label)
        plain = sequence_features(target, collate(rows, [[number]]), (1, 2, 3))
        for name, expected in {"final": plain.final, **{f"layer.{k}": plain.taps[k] for k in (1, 2, 3)}}.items():
            torch.testing.assert_close(states[name][:last], expected[0, :last], rtol=1e-6, atol=1e-6)
            assert len(states[name]) == len(row.input_ids) and not states[name][last:].any()

    assert cli.main(["data", "features", "--recipe", "learn.yaml", "--output", "cache", "--device", "cpu"]) == 0
    assert all(row in FeatureCache(tmp_path / "cache", cache.wanted) for row in hashes(rows))


@pytest.mark.parametrize("settings", HEADS)
def test_no_loss_reads_what_stands_behind_the_last_label(settings):
    target = tiny.target(dtype=torch.float64)
    head = build_head(settings, target).double().eval()
    row = Row("row", list(range(60, 76)), [4 <= place < 13 for place in range(16)])
    batch = collate([row], [[0]])
    features = sequence_features(target, batch, head.wants)
    inside = torch.arange(16)[:, None] < 12  # the last label is token 12
    cut = Features(features.final * inside, {k: tap * inside for k, tap in features.taps.items()})
    whole, shortened = (head(states, batch, target.embedding, target.output) for states in (features, cut))
    assert torch.equal(whole.loss_sum, shortened.loss_sum) and torch.equal(whole.hits, shortened.hits)


@pytest.mark.parametrize("change, kept", [(None, True), (2, False), (6, True)])
def test_a_row_that_reads_differently_is_not_kept(change, kept):
    """The last label is token 5, so what stands at 6 is the template's own."""
    row = Row("row", [1, 2, 3, 4, 5, 6, 7], [False, False, False, True, True, True, False])
    read = list(row.input_ids[:6]) + [9]
    if change is not None:
        read[change] = 99
    states = {"final": torch.arange(12.0).view(6, 2) + 1}
    found = padded(row, Answer("row/1", "text", False, 3, token_ids=read, states=states))
    assert bool(found) == kept
    if kept:
        assert torch.equal(found["final"][:5], states["final"][:5]) and not found["final"][5:].any()
    short = Answer("row/1", "text", False, 3, token_ids=read, states={"final": states["final"][:4]})
    assert not padded(row, short)
