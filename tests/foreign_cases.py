"""Random checkpoints of every foreign layout, written as each format's own tools lay them out, without our writers.

Names, shapes and dtypes are typed out here on purpose: a reader and a writer of ours that agree on a wrong name would
otherwise never be found out.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tiny
import torch
from safetensors.torch import save_file
from torch import Tensor

from headstart.target import Target

DIM, INNER, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 64, 96, 4, 2, 16, 264
QUERY, KEY = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
DRAFT_IDS = [0, 3, 5, 6, 40, 41, 100, 200, 257, 263]
LAYERS = [2, 4, 5]
"""HF indices, the published default for a target of eight layers."""


def target(**changes: Any) -> Target:
    """A target with room for the published three layers."""
    return tiny.target("llama", num_hidden_layers=8, **changes)


@dataclass
class Draw:
    """Random tensors of one dtype; no two alike."""

    dtype: torch.dtype = torch.bfloat16
    seed: int = 0

    def __post_init__(self):
        self.generator = torch.Generator().manual_seed(self.seed)

    def __call__(self, *shape: int, scale: float = 0.2) -> Tensor:
        return (scale * torch.randn(shape, generator=self.generator)).to(self.dtype)

    def norm(self, width: int = DIM) -> Tensor:
        return (1 + 0.1 * torch.randn(width, generator=self.generator)).to(self.dtype)


def write(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor], weights: str) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    if weights.endswith(".safetensors"):
        save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, folder / weights)
    else:
        torch.save(tensors, folder / weights)
    return folder


def layer(draw: Draw, prefix: str, width: int) -> dict[str, Tensor]:
    return {
        f"{prefix}.self_attn.q_proj.weight": draw(QUERY, width),
        f"{prefix}.self_attn.k_proj.weight": draw(KEY, width),
        f"{prefix}.self_attn.v_proj.weight": draw(KEY, width),
        f"{prefix}.self_attn.o_proj.weight": draw(DIM, QUERY),
        f"{prefix}.mlp.gate_proj.weight": draw(INNER, DIM),
        f"{prefix}.mlp.up_proj.weight": draw(INNER, DIM),
        f"{prefix}.mlp.down_proj.weight": draw(DIM, INNER),
        f"{prefix}.post_attention_layernorm.weight": draw.norm(),
    }


def maps(ids: list[int] | None) -> dict[str, Tensor]:
    if ids is None:
        return {}
    members = torch.zeros(VOCAB, dtype=torch.bool)
    members[ids] = True
    return {"d2t": torch.tensor([token - index for index, token in enumerate(ids)]), "t2d": members}


def llama_config(**changes: Any) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": DIM,
        "intermediate_size": INNER,
        "hidden_act": "silu",
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "num_hidden_layers": 1,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 2048,
        "vocab_size": VOCAB,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 256,
        "eos_token_id": 257,
        "pad_token_id": 259,
        **changes,
    }


def medusa(
    folder: Path, *, heads: int = 3, layers: int = 1, own: bool = True, weights: str = "medusa_lm_head.pt"
) -> Path:
    """The original's: `{head}.{block}.linear.*`, `{head}.{blocks}.weight`; config.json says 2 heads, as published."""
    config = {"medusa_num_heads": 2, "medusa_num_layers": layers, "base_model_name_or_path": "lmsys/vicuna-7b-v1.3"}
    return write(folder, config | ({} if own else {"version": "2"}), medusa_tensors(heads, layers, own), weights)


def medusa_tensors(heads: int, layers: int, own: bool, prefix: str = "") -> dict[str, Tensor]:
    draw, tensors = Draw(), {}
    for head in range(heads):
        for block in range(layers):
            tensors[f"{prefix}{head}.{block}.linear.weight"] = draw(DIM, DIM)
            tensors[f"{prefix}{head}.{block}.linear.bias"] = draw(DIM)
        if own:
            tensors[f"{prefix}{head}.{layers}.weight"] = draw(VOCAB, DIM)
    return tensors


def medusa_merged(folder: Path, base: Target) -> Path:
    """Medusa-2: one model with its heads inside."""
    tensors = {**base.model.state_dict(), **medusa_tensors(3, 1, True, prefix="medusa_head.")}
    config = base.model.config.to_dict() | {"medusa_num_heads": 3, "medusa_num_layers": 1}
    return write(folder, config, tensors, "pytorch_model.bin")


def vllm_medusa(folder: Path, base: Target, *, shared: bool = False, ids: list[int] | None = None) -> Path:
    draw, tensors = Draw(), {}
    draft = VOCAB if ids is None else len(ids)
    for head in range(3):
        tensors[f"blocks.{head}.layers.0.weight"] = draw(DIM, DIM)
        tensors[f"blocks.{head}.layers.0.bias"] = draw(DIM)
        if not shared:
            tensors[f"lm_heads.{head}.weight"] = draw(draft, DIM)
    if shared:
        rows = base.output.weight_rows(None if ids is None else torch.tensor(ids))
        tensors["lm_head.weight"] = rows.to(torch.bfloat16)
    if ids is not None:
        tensors["token_map"] = torch.tensor(ids)
    config = {
        "model_type": "medusa",
        "architectures": ["MedusaModel"],
        "hidden_size": DIM,
        "vocab_size": VOCAB,
        "truncated_vocab_size": draft,
        "num_heads": 3,
        "num_hidden_layers": 1,
        "medusa_fc_bias": True,
        "original_lm_head": shared,
        "max_paths": 64,
        "topk": 10,
    }
    return write(folder, config, tensors, "model.safetensors")


def eagle(
    folder: Path,
    base: Target,
    *,
    bias: bool = True,
    qkv_bias: bool = False,
    layers: int = 1,
    weights: str = "pytorch_model.bin",
) -> Path:
    """EAGLE-1: no norm before layer 0, the target's embedding in the file, no rope_theta as in the first heads."""
    draw = Draw()
    tensors = {"embed_tokens.weight": embedding(base), "fc.weight": draw(DIM, 2 * DIM)}
    if bias:
        tensors["fc.bias"] = draw(DIM)
    for index in range(layers):
        tensors |= layer(draw, f"layers.{index}", DIM)
        if index:
            tensors[f"layers.{index}.input_layernorm.weight"] = draw.norm()
        if qkv_bias:
            for name, rows in (("q", QUERY), ("k", KEY), ("v", KEY)):
                tensors[f"layers.{index}.self_attn.{name}_proj.bias"] = draw(rows)
    config = llama_config(architectures=["LlamaForCausalLM"], bias=bias, num_hidden_layers=layers)
    return write(folder, config | ({"qkv_bias": True} if qkv_bias else {}), tensors, weights)


def eagle3_tensors(
    first: str,
    *,
    ids: list[int] | None = None,
    taps: int = 3,
    layers: int = 1,
    fc_norm: bool = False,
    norm_before_fc: bool = False,
    both_norms: bool = True,
) -> dict[str, Tensor]:
    draw = Draw()
    tensors = {
        "fc.weight": draw(DIM, taps * DIM),
        "norm.weight": draw.norm(),
        "lm_head.weight": draw(VOCAB if ids is None else len(ids), DIM),
        f"{first}.input_layernorm.weight": draw.norm(),
        f"{first}.hidden_norm.weight": draw.norm(),
        **layer(draw, first, 2 * DIM),
        **maps(ids),
    }
    for index in range(1, layers):
        tensors |= layer(draw, f"layers.{index}", DIM)
        norm = draw.norm()
        tensors[f"layers.{index}.input_layernorm.weight"] = norm
        if both_norms:
            tensors[f"layers.{index}.hidden_norm.weight"] = norm
    if fc_norm:
        tensors |= {f"fc_norm.{tap}.weight": draw.norm() for tap in range(taps)}
    if norm_before_fc:
        tensors["input_norm.weight"] = draw.norm(taps * DIM)
    return tensors


def eagle3_original(folder: Path, *, ids: list[int] | None = DRAFT_IDS) -> Path:
    """The authors' own: a pickle, no rope, no layer ids, a table of 2048 positions."""
    config = llama_config(draft_vocab_size=VOCAB if ids is None else len(ids))
    tensors = eagle3_tensors("midlayer", ids=ids)
    return write(folder, config, tensors, "pytorch_model.bin")


def sglang(folder: Path, *, ids: list[int] | None = DRAFT_IDS, layers: int = 1, **flags: bool) -> Path:
    """As SpecForge writes: layer outputs inside eagle_config alone, both spellings of rope."""
    rope = {"rope_type": "default", "rope_theta": 500000.0}
    config = llama_config(
        architectures=["LlamaForCausalLMEagle3"],
        head_dim=HEAD_DIM,
        num_hidden_layers=layers,
        draft_vocab_size=VOCAB if ids is None else len(ids),
        rope_parameters=rope,
        rope_theta=500000.0,
        rope_scaling=None,
        eagle_config={"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [1, 3, 4]},
        **flags,
    )
    tensor_flags = {name: flags.get(name, False) for name in ("fc_norm", "norm_before_fc")}
    return write(
        folder, config, eagle3_tensors("midlayer", ids=ids, layers=layers, **tensor_flags), "model.safetensors"
    )


def speculators(
    folder: Path, base: Target, *, ids: list[int] | None = DRAFT_IDS, layers: int = 1, **flags: bool
) -> Path:
    flags = {"norm_before_residual": True, "norm_before_fc": False, "fc_norm": False, "norm_output": False, **flags}
    config = {
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "architectures": ["Eagle3Speculator"],
        "draft_vocab_size": VOCAB if ids is None else len(ids),
        "target_hidden_size": None,
        **flags,
        "embed_requires_grad": False,
        "eagle_aux_hidden_state_layer_ids": LAYERS,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {"proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1, "accept_tolerance": 0.0}
            ],
            "verifier": {"name_or_path": "org/model", "architectures": ["LlamaForCausalLM"]},
        },
        "transformer_layer_config": llama_config(
            head_dim=HEAD_DIM,
            num_hidden_layers=layers,
            rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        ),
    }
    tensor_flags = {name: flags[name] for name in ("fc_norm", "norm_before_fc")}
    tensors = eagle3_tensors("layers.0", ids=ids, layers=layers, both_norms=False, **tensor_flags)
    return write(folder, config, {**tensors, "embed_tokens.weight": embedding(base)}, "model.safetensors")


def embedding(base: Target, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """The target's own, as a file of that dtype holds it."""
    return base.model.get_input_embeddings().weight.detach().to(dtype)
