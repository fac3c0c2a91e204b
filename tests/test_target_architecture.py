"""Published configurations: compared with a target, and shrunk to a tiny random target that keeps what matters."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny
import torch

from headstart.architecture import compare_architecture, random_target, read_architecture
from headstart.borrowed import check_borrowed
from headstart.errors import TargetError
from headstart.target import load_target

SHIPPED = sorted((Path(__file__).parents[1] / "recipes" / "architectures").glob("*.json"))

# Shaped like published files, with the older names that many of them still use.
LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "tie_word_embeddings": False,
    "eos_token_id": [128001, 128008, 128009],
}
QWEN3 = {
    "model_type": "qwen3",
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rope_theta": 1000000,
    "tie_word_embeddings": True,
    "eos_token_id": 151645,
}
GEMMA3 = {
    "model_type": "gemma3_text",
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "num_hidden_layers": 26,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "vocab_size": 262144,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "query_pre_attn_scalar": 256,
    "rope_theta": 1000000,
    "rope_local_base_freq": 10000,
}
MOE = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "vocab_size": 151936,
    "rope_theta": 1000000,
    "tie_word_embeddings": False,
}
PHI3 = {
    "model_type": "phi3",
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "vocab_size": 32064,
    "max_position_embeddings": 131072,
    "original_max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "rope_scaling": {"type": "longrope", "short_factor": [1.1] * 48, "long_factor": [2.0] * 48},
    "sliding_window": 262144,
    "pad_token_id": 32000,
    "tie_word_embeddings": False,
}


def shrunk(folder, values):
    path = folder / "published.json"
    path.write_text(json.dumps(values))
    return random_target(path, shrink=True, seed=0, tokenizer=tiny.tokenizer())


def runs(target):
    with torch.no_grad():
        check_borrowed(target)
        positions = torch.arange(40)[None]
        distance = positions[:, :, None] - positions[:, None, :]
        features = target.forward(positions, positions, target.masks(distance >= 0, distance), layers=[1])
    return bool(torch.isfinite(features.final).all())


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_shipped_architecture_shrinks_and_runs(path):
    target, replaced = random_target(path, shrink=True, seed=0, tokenizer=tiny.tokenizer(), dtype="float32")
    published = read_architecture(path)
    assert target.num_layers <= 4 and target.hidden_size <= 128
    ratio = published.num_attention_heads // published.num_key_value_heads
    assert target.config.num_attention_heads == ratio * target.config.num_key_value_heads
    assert target.config.tie_word_embeddings == published.tie_word_embeddings
    assert target.config.rope_parameters == published.rope_parameters
    assert target.end_token_ids == (tiny.END,)
    assert runs(target) and len(replaced) >= 4


def test_grouped_heads_and_the_rope_scaling_block_stay(tmp_path):
    target, replaced = shrunk(tmp_path, LLAMA)
    config = target.config
    assert config.num_attention_heads == 4 * config.num_key_value_heads
    assert config.rope_parameters["rope_type"] == "llama3" and config.rope_parameters["rope_theta"] == 500000.0
    assert config.rope_parameters["original_max_position_embeddings"] == 8192
    assert not config.tie_word_embeddings and target.vocab_size == 384  # 261 ids in multiples of 128, as 128256 is
    assert "layers 32 by 4" in replaced and "vocabulary rows 128256 by 384" in replaced
    assert runs(target)


def test_a_head_dim_of_its_own_stays_apart_from_hidden_over_heads(tmp_path):
    target, _ = shrunk(tmp_path, QWEN3)
    config = target.config
    attention_width = config.num_attention_heads * config.head_dim
    assert attention_width / target.hidden_size == pytest.approx(32 * 128 / 2560, rel=0.05)
    assert config.tie_word_embeddings and any("q_norm" in name for name, _ in target.layers[0].named_modules())
    assert runs(target)


def test_windows_and_kinds_of_layers_stay(tmp_path):
    target, replaced = shrunk(tmp_path, GEMMA3)
    assert target.layer_windows == (32, 32, 32, None)  # five of six slide in the published model
    assert "the window 512 by 32" in replaced
    assert runs(target)


def test_experts_stay_few(tmp_path):
    target, replaced = shrunk(tmp_path, MOE)
    assert target.config.num_experts == 4 and "experts 128 by 4" in replaced
    assert runs(target)


def test_factors_per_frequency_fit_the_new_width(tmp_path):
    target, _ = shrunk(tmp_path, PHI3)
    assert len(target.config.rope_parameters["short_factor"]) == 8  # 48 of a head of 96, for a head of 16
    assert runs(target)


def test_a_family_with_names_of_its_own(tmp_path):
    """GPT-2 says n_embd, n_layer and n_head; the shrunk one is no different."""
    values = {
        "model_type": "gpt2",
        "n_embd": 768,
        "n_layer": 12,
        "n_head": 12,
        "n_positions": 1024,
        "vocab_size": 50257,
    }
    target, replaced = shrunk(tmp_path, values)
    assert (target.num_layers, target.hidden_size, target.vocab_size) == (4, 64, 261)
    assert "hidden size 768 by 64" in replaced and target.max_positions == 1024
    assert runs(target)


def test_what_cannot_be_shrunk_is_one_sentence(tmp_path):
    with pytest.raises(TargetError, match="no random model can be made"):
        shrunk(tmp_path, {"model_type": "mamba", "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 264})


def test_the_same_seed_gives_the_same_weights(tmp_path):
    path = tmp_path / "published.json"
    path.write_text(json.dumps(LLAMA))
    prints = [
        random_target(path, shrink=True, seed=seed, tokenizer=tiny.tokenizer())[0].fingerprint() for seed in (0, 0, 1)
    ]
    assert prints[0] == prints[1] != prints[2]


def test_without_shrinking_the_published_sizes_are_built(tmp_path):
    path = tmp_path / "small.json"
    path.write_text(json.dumps({**LLAMA, "num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 64}))
    target, replaced = random_target(path, shrink=False, seed=0, tokenizer=tiny.tokenizer(), dtype="bfloat16")
    assert target.vocab_size == 128256 and target.dtype == torch.bfloat16
    assert len(replaced) == 1


def test_a_target_that_is_not_what_was_published_is_refused(tmp_path):
    folder = tiny.save(tmp_path / "model")
    published = tmp_path / "published.json"
    published.write_text((folder / "config.json").read_text())
    compare_architecture(published, load_target(str(folder), dtype="float32", architecture=published))
    published.write_text(json.dumps({**json.loads(published.read_text()), "hidden_size": 128}))
    with pytest.raises(TargetError, match="hidden_size 128, .* has 64"):
        load_target(str(folder), dtype="float32", architecture=published)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"model_type": "nowhere"}', None])
def test_a_file_that_is_no_configuration_is_one_sentence(tmp_path, text):
    path = tmp_path / "published.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(TargetError, match="published.json"):
        read_architecture(path)
