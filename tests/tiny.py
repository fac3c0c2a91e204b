"""Tiny random models of every family that matters, and a byte tokenizer: the fixtures that all tests share.

    tiny.model("llama", dtype=torch.float64)      # the bare Hugging Face model, seeded, in evaluation mode
    tiny.tokenizer(pad_is_end=True)               # ids 0-255 are bytes, 256-260 the special tokens
    tiny.target("llama", dtype=torch.float64)     # both, wrapped as headstart.target.Target
    tiny.save(folder, "llama")                    # both, as a folder that load_target reads

Weights are drawn with a standard deviation of about 0.3 instead of the usual 0.02, so that greedy texts wander through
the vocabulary instead of repeating one token, and the two best logits are far apart compared with rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedModel, PreTrainedTokenizerFast

if TYPE_CHECKING:
    from headstart.target import Target

BEGIN, END, TURN_END, PAD, MASK = 256, 257, 258, 259, 260
SPECIAL_TOKENS = ["<|begin|>", "<|end|>", "<|turn_end|>", "<|pad|>", "<|mask|>"]
VOCAB_SIZE = 261

# ChatML in shape, with few bytes a header: a header is made of ordinary byte tokens, a turn ends with token 258.
CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}<|turn_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)

# Families whose trees are decoded exactly, and families that must be refused.
TREE_FAMILIES = (
    "llama tied padded swa hyb headdim gpt2 opt neox gptj phi gemma gemma2 olmoe cohere granite minicpm qwen2"
).split()
REFUSED_FAMILIES = ("mpt", "bloom", "falcon-alibi", "mamba")

_DECODER = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 264,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
}
_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}
_LLAMA = {**_DECODER, **_ROPE}
_GPT2 = {"n_embd": 64, "n_layer": 4, "n_head": 4, "vocab_size": 264, "initializer_range": 0.3}
_NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
_ALTERNATING = ["sliding_attention", "full_attention"] * 2

_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", _LLAMA),
    "tied": ("Llama", {**_LLAMA, "vocab_size": 257, "tie_word_embeddings": True}),
    # 27 rows more than the tokenizer has ids, as Qwen pads its vocabulary
    "padded": ("Qwen3", {**_LLAMA, "vocab_size": 288}),
    "swa": ("Mistral", {**_LLAMA, "sliding_window": 16}),
    "hyb": (
        "Gemma3Text",
        {
            **_DECODER,
            "sliding_window": 16,
            "layer_types": _ALTERNATING,
            "query_pre_attn_scalar": 16,
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 500000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
    ),
    "headdim": ("Qwen3", {**_LLAMA, "hidden_size": 48, "head_dim": 32}),
    "gpt2": ("GPT2", {**_GPT2, **_NO_DROPOUT, "n_positions": 64}),
    "opt": (
        "OPT",
        {
            "hidden_size": 64,
            "word_embed_proj_dim": 64,
            "ffn_dim": 96,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "vocab_size": 264,
            "max_position_embeddings": 128,
            "init_std": 0.3,
            "dropout": 0.0,
        },
    ),
    "neox": ("GPTNeoX", {**_LLAMA, "rotary_pct": 0.25, "use_parallel_residual": True}),
    "gptj": ("GPTJ", {**_GPT2, **_NO_DROPOUT, "n_positions": 128, "rotary_dim": 8, "tie_word_embeddings": False}),
    "phi": ("Phi", {**_LLAMA, **_NO_DROPOUT, "partial_rotary_factor": 0.5}),
    "gemma": ("Gemma", {**_LLAMA, "tie_word_embeddings": True}),
    "gemma2": (
        "Gemma2",
        {
            **_LLAMA,
            "sliding_window": 16,
            "layer_types": _ALTERNATING,
            "query_pre_attn_scalar": 16,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "olmoe": ("Olmoe", {**_LLAMA, "num_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32}),
    "cohere": ("Cohere", {**_LLAMA, "logit_scale": 0.5, "tie_word_embeddings": True}),
    "granite": (
        "Granite",
        {
            **_LLAMA,
            "embedding_multiplier": 3.0,
            "logits_scaling": 2.0,
            "residual_multiplier": 0.7,
            "attention_multiplier": 0.25,
        },
    ),
    "minicpm": (
        "MiniCPM3",
        {
            **_LLAMA,
            "num_key_value_heads": 4,  # latent attention has a key head for every query head
            "q_lora_rank": 24,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 8,
            "v_head_dim": 16,
        },
    ),
    "qwen2": ("Qwen2", {**_LLAMA, "use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2}),
    # refused: position is in the attention bias, or in a recurrent state
    "mpt": ("Mpt", {"d_model": 64, "n_layers": 2, "n_heads": 4, "vocab_size": 264, "max_seq_len": 128}),
    "bloom": ("Bloom", {"hidden_size": 64, "n_layer": 2, "n_head": 4, "vocab_size": 264, "initializer_range": 0.3}),
    "falcon-alibi": (
        "Falcon",
        {
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "vocab_size": 264,
            "alibi": True,
            "new_decoder_architecture": False,
            "multi_query": False,
            "initializer_range": 0.3,
        },
    ),
    "mamba": ("Mamba", {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 264, "state_size": 8}),
}


def config(family: str, **changes: Any) -> transformers.PreTrainedConfig:
    """The configuration of one family; `changes` override its values. Special ids are those of the byte tokenizer."""
    class_name, values = _FAMILIES[family]
    values = {"bos_token_id": BEGIN, "eos_token_id": END, "pad_token_id": PAD, **values, **changes}
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        # `tied` has 257 rows: its tokenizer's end has no row, so this model can't name one
        if isinstance(values[name], int) and values[name] >= values["vocab_size"]:
            values[name] = None
    return getattr(transformers, class_name + "Config")(**values)


def model(
    family: str = "llama", *, dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any
) -> PreTrainedModel:
    """A random model of one family in evaluation mode, the same for the same seed; drawn in fp32, then cast."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        built = transformers.AutoModelForCausalLM.from_config(config(family, **changes), dtype=torch.float32)
        _vary(built)
    if family == "olmoe":
        built.set_experts_implementation("eager")  # the grouped kernels refuse float64
    return built.to(dtype).eval()


def _vary(built: PreTrainedModel) -> None:
    """Norm weights start at one and biases at zero, where a forgotten one would go unnoticed: move them a little."""
    with torch.no_grad():
        for name, parameter in built.named_parameters():
            if parameter.dim() == 1 and ("norm" in name or "ln" in name or name.endswith("bias")):
                parameter.add_(0.1 * torch.randn_like(parameter))
    if built.config.model_type in {"mpt", "mamba"}:  # these two ignore initializer_range
        _widen(built)


def _widen(built: PreTrainedModel) -> None:
    with torch.no_grad():
        for parameter in built.parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=0.3)


def tokenizer(
    *, pad_is_end: bool = False, adds_begin: bool = False, template: str | None = CHAT_TEMPLATE, max_length: int = 128
) -> PreTrainedTokenizerFast:
    """The byte tokenizer: ids 0-255 are the bytes, 256-260 the special tokens; 261 ids.

    pad_is_end: padding is the end token, 257, as in many published tokenizers.
    adds_begin: encoding puts 256 in front by itself. template: None for a tokenizer without a chat template.
    """
    # GPT-2's table of printable stand-ins for the 256 bytes, in byte order
    letters = _byte_letters()
    backend = Tokenizer(models.BPE(vocab={letter: byte for byte, letter in enumerate(letters)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(SPECIAL_TOKENS)
    if adds_begin:
        begin = SPECIAL_TOKENS[0]
        backend.post_processor = processors.TemplateProcessing(
            single=f"{begin} $A", pair=f"{begin} $A {begin} $B", special_tokens=[(begin, BEGIN)]
        )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<|begin|>",
        eos_token="<|end|>",
        pad_token="<|end|>" if pad_is_end else "<|pad|>",
        mask_token="<|mask|>",
        additional_special_tokens=["<|turn_end|>"],
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = template
    return fast


def _byte_letters() -> list[str]:
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    stand_ins = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(stand_ins)) for byte in range(256)]


def target(family: str = "llama", *, dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any) -> Target:
    """A tiny model and the byte tokenizer, wrapped; `changes` are configuration values."""
    from headstart.target import Target

    return Target(model(family, dtype=dtype, seed=seed, **changes), tokenizer(), name=f"tiny-{family}")


def save(
    folder: str | Path,
    family: str = "llama",
    *,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    make_tokenizer: Callable[[], PreTrainedTokenizerFast] = tokenizer,
    **changes: Any,
) -> Path:
    """Writes a tiny model and its tokenizer as a folder that `load_target` reads; returns the folder."""
    folder = Path(folder)
    model(family, dtype=dtype, seed=seed, **changes).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder
