"""Loading: what a folder gives, and one sentence for whatever is wrong with it."""

from __future__ import annotations

import json
from typing import Any

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file

from headstart import loading
from headstart.errors import TargetError
from headstart.recipe import load_recipe
from headstart.recipe_target import settle_dtypes
from headstart.target import load_target, load_tokenizer


def load(folder, **options):
    return load_target(str(folder), **{"dtype": "float32", "device": "cpu", **options})


@pytest.mark.parametrize("family", ["llama", "tied", "hyb", "gpt2", "opt", "granite"])
def test_a_saved_target_loads_as_it_was(tmp_path, family):
    loaded, built = load(tiny.save(tmp_path, family), device="cpu"), tiny.target(family)
    for name, value in built.model.state_dict().items():
        assert torch.equal(loaded.model.state_dict()[name], value)
    assert loaded.vocab_size == built.vocab_size and loaded.end_token_ids == built.end_token_ids
    assert load_tokenizer(str(tmp_path))("a b").input_ids == [97, 32, 98]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", torch.float64])
def test_the_precision_asked_for(tmp_path, dtype):
    target = load(tiny.save(tmp_path), dtype=dtype)
    assert target.dtype == (dtype if isinstance(dtype, torch.dtype) else getattr(torch, dtype))


def test_field_report_b29_sizes_are_read_from_the_weights(tmp_path):
    """(a) 264 rows, 261 ids: the head is 264 wide. (b) 257 rows, 258 ids or more: the rows say 257."""
    spare = load(tiny.save(tmp_path / "a", "llama"))
    assert spare.vocab_size == spare.embedding.vocab_size == 264 and len(spare.tokenizer) == 261
    assert spare.output.logits(torch.randn(1, 64)).shape == (1, 264)
    short = load(tiny.save(tmp_path / "b", "tied"))
    assert short.vocab_size == 257 < len(short.tokenizer)
    assert all(token < 257 for token in short.end_token_ids)


def broken(folder, kind):
    """A saved target with one thing wrong."""
    tiny.save(folder)
    weights, config_file = folder / "model.safetensors", folder / "config.json"
    values = json.loads(config_file.read_text())
    if kind == "no weights":
        weights.unlink()
    elif kind == "cut weights":
        weights.write_bytes(weights.read_bytes()[:50_000])
    elif kind == "missing tensor":
        tensors = load_file(weights)
        del tensors["model.layers.1.mlp.up_proj.weight"], tensors["lm_head.weight"]
        save_file(tensors, weights, metadata={"format": "pt"})
    elif kind == "other shapes":
        config_file.write_text(json.dumps({**values, "num_attention_heads": 8}))
    elif kind == "unknown model_type":
        config_file.write_text(json.dumps({**values, "model_type": "nowhere"}))
    elif kind == "no config":
        config_file.unlink()
    elif kind == "bad json":
        config_file.write_text("{")
    elif kind == "no tokenizer":
        (folder / "tokenizer.json").unlink()
        (folder / "tokenizer_config.json").unlink()
    elif kind == "own code":
        auto_map = {"AutoConfig": "configuration.Own", "AutoModelForCausalLM": "modeling.Own"}
        config_file.write_text(json.dumps({**values, "model_type": "own", "auto_map": auto_map}))
        (folder / "configuration.py").write_text("raise SystemExit('remote code ran')")
    return folder


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("no weights", "holds no weights"),
        ("cut weights", "cut short"),
        ("missing tensor", r"lacks the weights lm_head.weight and 1 more"),
        ("other shapes", "do not have the shapes"),
        ("unknown model_type", "does not know its model_type"),
        ("no config", "no config.json"),
        ("bad json", "not valid JSON"),
        ("no tokenizer", "no tokenizer files"),
        ("own code", "trust_remote_code: true"),
    ],
)
def test_a_folder_with_something_wrong_is_one_sentence(tmp_path, kind, reason):
    folder = broken(tmp_path / "model", kind)
    with pytest.raises(TargetError, match=reason) as caught:
        load(folder)
    assert "\n" not in str(caught.value) and str(folder) in str(caught.value)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("/nowhere/at/all", "there is no folder"),
        ("./nowhere", "there is no folder"),
        ("nobody/nothing-of-this-name", "HF_HUB_OFFLINE is set"),
        ("bundled:gpt-7", "there is no bundled target"),
        ("model.gguf", "there is no folder"),
    ],
)
def test_a_name_that_leads_nowhere_is_one_sentence(name, reason):
    with pytest.raises(TargetError, match=reason) as caught:
        load(name)
    assert "\n" not in str(caught.value)


def test_models_of_another_kind_are_refused(tmp_path):
    from transformers import BertConfig, BertModel, T5Config, T5Model

    sizes: Any = {"vocab_size": 264, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16}
    BertModel(BertConfig(**sizes, num_hidden_layers=1)).save_pretrained(tmp_path / "bert")
    T5Model(T5Config(vocab_size=264, d_model=16, num_layers=1, num_heads=2, d_ff=16)).save_pretrained(tmp_path / "t5")
    for name, reason in (("bert", "lacks the weights"), ("t5", "encoder-decoder")):
        tiny.tokenizer().save_pretrained(tmp_path / name)
        with pytest.raises(TargetError, match=reason):
            load(tmp_path / name)


def test_an_unknown_precision_is_refused(tmp_path):
    with pytest.raises(TargetError, match="'float8'.*bfloat16"):
        load(tmp_path, dtype="float8")


@pytest.mark.parametrize("device", ["cude", "cuda:99", "cpu:x"])
def test_a_device_that_is_not_here_is_one_sentence(tmp_path, device):
    with pytest.raises(TargetError, match=f"device '?{device}'? (is unknown; expected cpu|was asked for, and PyTorch)"):
        load(tmp_path, device=device)


def test_auto_is_bfloat16_only_where_the_processor_computes_in_it(monkeypatch):
    place = torch.device("cpu")
    for has_instructions, expected in [(True, torch.bfloat16), (False, torch.float32)]:
        monkeypatch.setattr(loading, "_computes_bfloat16", lambda device, has=has_instructions: has)
        assert loading.parse_dtype("auto", place) == expected
        assert loading.parse_dtype("float64", place) == torch.float64
        settled = settle_dtypes(load_recipe("quickstart.yaml", ["train.dtype=float32"]), place)
        assert settled.target.dtype == str(expected).removeprefix("torch.") and settled.train.dtype == "float32"
