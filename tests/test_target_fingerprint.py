"""Fingerprints: stable for one target in every precision, different for any other, and refused by name."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import gguf
import pytest
import tiny
import torch

from headstart.errors import TargetError
from headstart.target import Target, check_fingerprint, load_target


def wrap(model, tokenizer=None, name="other"):
    return Target(model, tokenizer or tiny.tokenizer(), name=name)


@pytest.mark.parametrize("family", tiny.TREE_FAMILIES)
def test_one_checkpoint_has_one_fingerprint_in_every_precision(family):
    """A checkpoint in bf16, loaded in other precisions; through JSON, as it is stored."""
    stored = json.loads(json.dumps(tiny.target(family, dtype=torch.bfloat16).fingerprint()))
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        model: Any = tiny.model(family, dtype=torch.bfloat16)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            check_fingerprint(stored, wrap(model.to(dtype)))


def test_other_weights_are_refused_and_named():
    stored = tiny.target("llama").fingerprint()
    assert all(stored["weights"].values())
    for what, name in (
        ("embedding", "model.embed_tokens.weight"),
        ("output", "lm_head.weight"),
        ("middle", "model.layers.2.mlp.down_proj.weight"),
    ):
        model = tiny.model("llama")
        model.get_parameter(name).data[0, 0] += 0.5
        with pytest.raises(
            TargetError, match=rf"tiny-llama, and other differs from it: weights {what};.*--allow-other"
        ):
            check_fingerprint(stored, wrap(model))


def test_another_target_may_be_allowed_with_one_warning():
    stored = tiny.target("llama").fingerprint()
    other = tiny.target("llama", seed=1)
    with pytest.warns(UserWarning, match="weights embedding, weights middle, weights output") as caught:
        check_fingerprint(stored, other, allow_other_target=True)
    assert len(caught) == 1


@pytest.mark.parametrize("change", [{"vocab_size": 272}, {"num_hidden_layers": 2}, {"hidden_size": 32}])
def test_another_shape_is_refused_always(change):
    stored = tiny.target("llama").fingerprint()
    with pytest.raises(TargetError, match=r"another shape: shape \w+ \d+ became \d+"):
        check_fingerprint(stored, tiny.target("llama", **change), allow_other_target=True)


def test_a_configuration_value_is_compared_where_weights_are_the_same():
    stored = tiny.target("swa").fingerprint()
    with pytest.raises(TargetError, match="config sliding_window 16 became 8"):
        check_fingerprint(stored, tiny.target("swa", sliding_window=8))


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"adds_begin": True}, "ids of"),
        ({"template": None}, "tokenizer template"),
        ({"template": tiny.CHAT_TEMPLATE + " "}, "tokenizer template"),
    ],
)
def test_another_tokenizer_is_refused_and_named(options, named):
    stored = tiny.target("llama").fingerprint()
    with pytest.raises(TargetError, match=named):
        check_fingerprint(stored, wrap(tiny.model("llama"), tiny.tokenizer(**options)))


def test_a_quantised_matrix_equals_anything():
    stored = tiny.target("llama").fingerprint()
    stored["weights"]["middle"] = None
    check_fingerprint(stored, tiny.target("llama"))


def test_a_fingerprint_names_no_folders(tmp_path):
    target = load_target(str(tiny.save(tmp_path / "my-model")), dtype="float32")
    assert target.fingerprint()["name"] == "my-model"
    assert str(tmp_path) not in json.dumps(target.fingerprint())


def test_field_report_b28_a_tokenizer_rebuilt_from_gguf_is_compared(tmp_path):
    """Trained on the folder, run from GGUF files: the same weights, a rebuilt tokenizer; each difference is named."""
    stored = tiny.target("llama").fingerprint()
    same = load_target(str(write_gguf(tmp_path / "same.gguf")), dtype="float32")
    assert same.fingerprint()["weights"] == stored["weights"]
    # transformers adds <|endoftext|> when it rebuilds a GPT-2 tokenizer: the text of a special token becomes one
    with pytest.raises(TargetError, match="ids of '<|im_end|></s><|endoftext|>'"):
        check_fingerprint(stored, same)

    rebuilt = same.fingerprint()
    other_end = load_target(str(write_gguf(tmp_path / "end.gguf", end=tiny.TURN_END)), dtype="float32")
    with pytest.raises(TargetError, match="tokenizer end 257 became 258"):
        check_fingerprint(rebuilt, other_end)
    no_template = load_target(str(write_gguf(tmp_path / "plain.gguf", template=None)), dtype="float32")
    with pytest.raises(TargetError, match="tokenizer template"):
        check_fingerprint(rebuilt, no_template)
    with pytest.warns(UserWarning, match="tokenizer template"):
        check_fingerprint(rebuilt, no_template, allow_other_target=True)


def write_gguf(path: Path, *, end: int = tiny.END, template: str | None = tiny.CHAT_TEMPLATE) -> Path:
    """The tiny llama with the byte tokenizer as a GGUF file, in the layout of llama.cpp."""
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(64)
    writer.add_block_count(4)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(500000.0)
    writer.add_vocab_size(264)
    writer.add_tokenizer_model("gpt2")
    letters = [text for text, _ in sorted(tiny.tokenizer().get_vocab().items(), key=lambda item: item[1])][:256]
    # a list of merges may not be empty: two NUL bytes, which no text here has, become the first spare row
    tokens = [*letters, *tiny.SPECIAL_TOKENS, letters[0] * 2, "<|spare1|>", "<|spare2|>"]
    writer.add_token_list(tokens)
    writer.add_token_merges([f"{letters[0]} {letters[0]}"])
    writer.add_token_types([1] * 256 + [3] * 5 + [1, 3, 3])
    writer.add_bos_token_id(tiny.BEGIN)
    writer.add_eos_token_id(end)
    writer.add_pad_token_id(tiny.PAD)
    if template:
        writer.add_chat_template(template)
    for name, tensor in tiny.model("llama").state_dict().items():
        writer.add_tensor(_gguf_name(name), _gguf_values(name, tensor).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _gguf_name(name: str) -> str:
    outside = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    inside = {
        "input_layernorm": "attn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "post_attention_layernorm": "ffn_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    stem = name.removesuffix(".weight")
    if stem in outside:
        return f"{outside[stem]}.weight"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{inside[part]}.weight"


def _gguf_values(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """llama.cpp interleaves the two halves of a rotary head that Hugging Face keeps apart."""
    if "q_proj" not in name and "k_proj" not in name:
        return tensor
    return tensor.view(-1, 2, 8, 64).transpose(1, 2).reshape(tensor.shape).contiguous()
