"""Published configuration files: compared with a real target, or built with random weights for --smoke."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate import init_empty_weights
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from headstart.errors import TargetError
from headstart.rehearsal import rehearsing

if TYPE_CHECKING:
    from headstart.target import Target

COMPARED = (
    "model_type hidden_size num_hidden_layers num_attention_heads num_key_value_heads head_dim intermediate_size "
    "vocab_size tie_word_embeddings sliding_window"
).split()
MAX_LAYERS, MAX_HIDDEN, HEAD_DIM, WINDOW, NUM_EXPERTS = 4, 128, 16, 32, 4


def read_architecture(path: str | Path) -> PreTrainedConfig:
    """The configuration in a published config.json, as the class of its model_type."""
    path = Path(path)
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        config_class = CONFIG_MAPPING[values["model_type"]]
        return config_class.from_dict(values).get_text_config()
    except OSError as error:
        raise TargetError(f"there is no architecture file {path}; give the path of a published config.json") from error
    except Exception as error:  # configuration classes check themselves, each in its own way
        raise TargetError(
            f"{path} is no config.json that this transformers can read ({_last_line(error)}); copy the published one"
        ) from error


def _last_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[-1].strip()


def compare_architecture(path: str | Path, target: Target) -> None:
    """Refuses a target that is not what the published configuration says, naming the first difference."""
    published, real = read_architecture(path).to_dict(), target.config.to_dict()
    for key in COMPARED:
        if published.get(key) != real.get(key):
            raise TargetError(
                f"{Path(path).name} says {key} {published.get(key)}, {target.name} has {real.get(key)}; correct "
                "target.architecture or target.name"
            )


def random_target(
    architecture: str | Path,
    *,
    shrink: bool,
    seed: int,
    tokenizer: PreTrainedTokenizerBase,
    dtype: str | torch.dtype = "float32",
) -> tuple[Target, list[str]]:
    """A target with random weights in the architecture of a published config.json.

    shrink: at most 4 layers and a hidden size of 128, the vocabulary of `tokenizer`; the ratio of query to key heads,
    tied embeddings, the kind of rope and its scaling, kinds of layers, windows, norms and experts stay.
    Returns the target and one sentence for each thing that was replaced.
    """
    from headstart.loading import parse_dtype
    from headstart.target import Target

    published = read_architecture(architecture)
    replaced = [f"the weights of {Path(architecture).stem} by random numbers (seed {seed})"]
    try:
        config, sentences = _shrink(published, tokenizer) if shrink else (published, [])
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    except Exception as error:
        raise TargetError(
            f"no random model can be made of {architecture} ({_last_line(error)}); use another architecture"
        ) from error
    replaced += sentences
    model.to(parse_dtype(dtype))
    return Target(model, tokenizer, name=f"random-{Path(architecture).stem}"), replaced


def _shrink(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> tuple[PreTrainedConfig, list[str]]:
    published = config.to_dict()
    own_names = config.attribute_map  # GPT-2 calls hidden_size n_embd
    old = published | {usual: published[own] for usual, own in own_names.items() if own in published}
    new = _shrunk_attention(old) | _shrunk_layers(old) | _shrunk_experts(old)
    new["vocab_size"] = _padded_vocabulary(int(old["vocab_size"]), len(tokenizer))
    new |= {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    new["initializer_range"] = 0.2  # 0.02 would leave a small model's attention without any effect
    changes = [
        f"{word} {old[key]} by {new[key]}"
        for key, word in _WORDS.items()
        if key in new and old.get(key) is not None and old[key] != new[key]
    ]
    own = {own_names.get(name, name): value for name, value in new.items()}
    return type(config).from_dict(published | own), changes


_WORDS = {
    "num_hidden_layers": "layers",
    "hidden_size": "hidden size",
    "num_attention_heads": "query heads",
    "num_key_value_heads": "key heads",
    "vocab_size": "vocabulary rows",
    "sliding_window": "the window",
    "num_experts": "experts",
    "num_local_experts": "experts",
    "n_routed_experts": "experts",
}


def _shrunk_attention(old: dict[str, Any]) -> dict[str, Any]:
    """Widths of the residual stream and of attention; own head_dim stays apart from hidden / heads if it was."""
    heads = int(old["num_attention_heads"])
    key_heads = int(old.get("num_key_value_heads") or heads)
    group = max(1, heads // key_heads)
    new_key_heads = max(1, min(key_heads, 8 // group, 4))
    new_heads = group * new_key_heads
    head_dim = HEAD_DIM if new_heads * HEAD_DIM <= MAX_HIDDEN else max(2, MAX_HIDDEN // new_heads // 2 * 2)
    old_head_dim = int(old.get("head_dim") or old["hidden_size"] // heads)
    if old.get("qk_rope_head_dim"):  # latent attention (DeepSeek, MiniCPM3): only a part of a head is rotated
        old_head_dim = int(old["hidden_size"]) // heads
    # the published proportion of hidden size to attention width, in whole heads' widths
    ratio = int(old["hidden_size"]) / (heads * old_head_dim)
    hidden = min(MAX_HIDDEN, max(8, round(new_heads * head_dim * ratio / 8) * 8))
    new: dict[str, Any] = {
        "hidden_size": hidden,
        "num_attention_heads": new_heads,
        "num_key_value_heads": new_key_heads,
        "intermediate_size": 2 * hidden,
        "ffn_dim": 2 * hidden,
        "word_embed_proj_dim": hidden,
        "rotary_dim": head_dim // 2,
        "query_pre_attn_scalar": head_dim,
        "attention_multiplier": head_dim**-0.5,
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": head_dim,
        "qk_rope_head_dim": head_dim // 2,
        "qk_head_dim": head_dim + head_dim // 2,
        "v_head_dim": head_dim,
    }
    new = {key: value for key, value in new.items() if old.get(key) is not None}
    if "head_dim" in old:
        new["head_dim"] = new.get("qk_rope_head_dim", head_dim)
    if old.get("rope_parameters"):
        new["rope_parameters"] = _shrunk_rope(old["rope_parameters"], old_head_dim, head_dim)
    return new


def _shrunk_rope(rope: dict[str, Any], old_head_dim: int, head_dim: int) -> dict[str, Any]:
    """Lists with a number per rotary frequency (longrope factors, mrope sections) fit the new width; the rest stays."""

    def shrunk(key: str, value: Any) -> Any:
        if isinstance(value, dict):  # one block per kind of layer
            return _shrunk_rope(value, old_head_dim, head_dim)
        if key in ("short_factor", "long_factor"):
            return value[: max(1, len(value) * head_dim // old_head_dim)]
        if key == "mrope_section":
            return [max(1, part * head_dim // old_head_dim) for part in value]
        return value

    return {key: shrunk(key, value) for key, value in rope.items()}


def _shrunk_layers(old: dict[str, Any]) -> dict[str, Any]:
    """The first layers, with one of every kind among them, in everything that is listed by layer."""
    num_layers = int(old["num_hidden_layers"])
    count = min(MAX_LAYERS, num_layers)
    kinds = old.get("layer_types") or [None] * num_layers
    later = [kinds.index(kind) for kind in dict.fromkeys(kinds) if kind not in kinds[:count]]
    kept = [*range(count - len(later)), *later]
    new = kept_layers(old, kept)
    if old.get("sliding_window"):
        new["sliding_window"] = min(int(old["sliding_window"]), WINDOW)
    if old.get("max_window_layers") is not None:
        new["max_window_layers"] = math.ceil(count * min(1.0, old["max_window_layers"] / num_layers))
    if old.get("first_k_dense_replace") is not None:
        new["first_k_dense_replace"] = min(1, int(old["first_k_dense_replace"]))
    return new


def kept_layers(old: dict[str, Any], kept: Sequence[int]) -> dict[str, Any]:
    """What changes in a configuration, by its usual names, when these layers alone are kept, in this order.

    Everything that is listed by layer follows: kinds of attention, windows, which layers have experts.
    """
    num_layers = int(old["num_hidden_layers"])
    new: dict[str, Any] = {"num_hidden_layers": len(kept)}
    for key, value in old.items():
        if isinstance(value, list) and len(value) == num_layers:
            new[key] = [value[layer] for layer in kept]
    if old.get("per_layer_config"):  # Gemma 4
        own = {int(layer): settings for layer, settings in old["per_layer_config"].items()}
        new["per_layer_config"] = {place: own[layer] for place, layer in enumerate(kept) if layer in own}
    for key in ("max_window_layers", "first_k_dense_replace"):  # layers below it are of one kind, the rest of another
        if old.get(key) is not None:
            new[key] = sum(layer < int(old[key]) for layer in kept)
    if old.get("mlp_only_layers"):
        new["mlp_only_layers"] = [place for place, layer in enumerate(kept) if layer in old["mlp_only_layers"]]
    return new


def with_layers(config: PreTrainedConfig, kept: Sequence[int]) -> PreTrainedConfig:
    """The configuration of a model of these layers alone."""
    values = config.to_dict()
    own_names = config.attribute_map  # GPT-2 calls hidden_size n_embd
    new = kept_layers(values | {usual: values[own] for usual, own in own_names.items() if own in values}, kept)
    return type(config).from_dict(values | {own_names.get(name, name): value for name, value in new.items()})


def empty_model(config: PreTrainedConfig) -> PreTrainedModel:
    """A model whose parameters have shapes and no memory; its buffers (rotary frequencies) are there."""
    with nullcontext() if rehearsing() else init_empty_weights(include_buffers=False):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return model


def _shrunk_experts(old: dict[str, Any]) -> dict[str, Any]:
    limits = {
        "num_experts": NUM_EXPERTS,
        "num_local_experts": NUM_EXPERTS,
        "n_routed_experts": NUM_EXPERTS,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
        "n_group": 1,
        "topk_group": 1,
    }
    return {key: min(limit, int(old[key])) for key, limit in limits.items() if old.get(key) is not None}


def _padded_vocabulary(old_rows: int, num_ids: int) -> int:
    """Rows for `num_ids` ids, padded to the power of two, at most 128, that the published number is a multiple of."""
    multiple = math.gcd(old_rows, 128)
    return math.ceil(num_ids / multiple) * multiple
