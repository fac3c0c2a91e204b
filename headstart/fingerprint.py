"""Which target a head was trained on: a fingerprint of its shape, its tokenizer and its weights.

A head on another target drafts badly and nothing else shows it: outputs stay exact, only slower. Siblings share
shapes, a GGUF file brings a rebuilt tokenizer with other special tokens, a fine-tune has other weights; so all three
are compared.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from headstart.borrowed import input_module, output_module, read_weight, weight_of
from headstart.errors import TargetError, warn

if TYPE_CHECKING:
    from headstart.target import Target

# Texts that rebuilt tokenizers split differently: leading blank, two blanks, newline, emoji, special-token text, empty.
PROBES = (
    " leading blank",
    "two  blanks",
    "line\nbreak\n\n",
    "emoji 🙂👩‍🚀",
    "<|im_end|></s><|endoftext|>",
    "",
    "naïve 12345.67",
)
SHAPE_KEYS = ("num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size")
VALUE_KEYS = (
    "rope_parameters",
    "sliding_window",
    "layer_types",
    "tie_word_embeddings",
    "hidden_act",
    "rms_norm_eps",
    "max_position_embeddings",
)
NUM_ROWS = 64


def fingerprint(target: Target) -> dict[str, Any]:
    """A JSON-ready dict: `name`, and `shape`, `config`, `tokenizer` and `weights` with the values that are compared.
    (`adapter` is a fifth part, where one was merged into the target: `headstart.adapters` adds it.)

    weights: SHA-256 of 64 evenly spaced rows of the embedding, the output head and one matrix of the middle layer,
    after rounding to bfloat16, so that a checkpoint has one fingerprint in every floating dtype. A quantised matrix
    has None, which equals anything.
    """
    config = target.config.to_dict()
    shape = {
        "model_type": target.config.model_type,
        "hidden_size": target.hidden_size,
        "num_layers": target.num_layers,
        "vocab_size": target.vocab_size,
        **{key: config[key] for key in SHAPE_KEYS if config.get(key) is not None},
    }
    # through JSON, so that a stored fingerprint compares equal to a live one (tuples become lists, keys strings)
    return json.loads(
        json.dumps(
            {
                "name": public_name(target.name),
                "shape": shape,
                "config": {key: config[key] for key in VALUE_KEYS if config.get(key) is not None},
                "tokenizer": _tokenizer_facts(target),
                "weights": {
                    "embedding": _checksum(weight_of(input_module(target.model))),
                    "output": _checksum(weight_of(output_module(target.model))),
                    "middle": _checksum(_middle_matrix(target)),
                },
            },
            default=str,
        )
    )


def check_fingerprint(
    stored: dict[str, Any],
    target: Target,
    allow_other_target: bool = False,
    *,
    made: str = "the head was trained on",
) -> None:
    """Compares a stored fingerprint with this target. made: what was made with the target of the fingerprint.

    Another shape is always refused; another configuration, tokenizer or weights is refused unless `allow_other_target`,
    and is then warned of once. The message names the first differences.
    """
    current = target.fingerprint()
    trained_on = stored.get("name", "an unnamed target")
    shape = _differences(stored, current, ("shape",))
    if shape:
        raise TargetError(f"{made} {trained_on}, and {target.name} has another shape: {shape}")
    rest = _differences(stored, current, ("config", "tokenizer", "weights", "adapter"))
    if not rest:
        return
    message = f"{made} {trained_on}, and {target.name} differs from it: {rest}"
    if "adapter" in rest and stored.get("adapter"):
        message += (
            " (a head that learnt with its target has the adapter beside it: --set target.adapter=RUN/head/adapter)"
        )
    if not allow_other_target:
        raise TargetError(f"{message}; give that target, or --allow-other-target")
    warn(f"{message}; used all the same, as asked")


def public_name(name: str) -> str:
    """A folder's own name without the folders above it: a fingerprint is shipped, and those are nobody's business."""
    return name if name.startswith("bundled:") or not Path(name).exists() else Path(name).resolve().name


def _differences(stored: dict[str, Any], current: dict[str, Any], sections: tuple[str, ...]) -> str:
    """The differing values in words, at most four of them; empty if there are none."""
    found = []
    for section in sections:
        before, after = stored.get(section, {}), current.get(section, {})
        for key in sorted({*before, *after}):
            old, new = before.get(key), after.get(key)
            if old == new or (section == "weights" and None in (old, new)):
                continue
            # checksums and lists of ids say nothing to a reader
            brief = section in ("weights", "adapter") or len(f"{old}{new}") > 120
            found.append(f"{section} {key}" if brief else f"{section} {key} {old!r} became {new!r}")
    more = f" and {len(found) - 4} more" if len(found) > 4 else ""
    return ", ".join(found[:4]) + more


def _tokenizer_facts(target: Target) -> dict[str, Any]:
    tokenizer = target.tokenizer
    template = json.dumps(tokenizer.chat_template, sort_keys=True)
    return {
        "length": len(tokenizer),
        **{f"ids of {text!r}": tokenizer(text, add_special_tokens=True)["input_ids"] for text in PROBES},
        "begin": tokenizer.bos_token_id,
        "end": tokenizer.eos_token_id,
        "model_end": list(target.end_token_ids),
        "template": None if tokenizer.chat_template is None else _hash(template.encode()),
    }


def _middle_matrix(target: Target) -> Tensor | None:
    layer = target.layers[target.num_layers // 2]
    matrices = {
        name: weight
        for name, weight in layer.named_parameters()
        if len(getattr(weight, "ds_shape", weight.shape)) == 2 and weight.is_floating_point()
    }
    return matrices[min(matrices)] if matrices else None


def _checksum(weight: Tensor | None) -> str | None:
    if weight is None or not weight.is_floating_point():
        return None
    num_rows = int(getattr(weight, "ds_shape", weight.shape)[0])
    rows = torch.linspace(0, num_rows - 1, min(NUM_ROWS, num_rows), dtype=torch.float64).long()
    values = read_weight(weight, rows.to(weight.device)).to("cpu", torch.bfloat16).float()
    # fp16 keeps all eight bits of a bf16 number down to 2^-16 and loses some below: leave those out
    values = torch.where(values.abs() < 2.0**-16, 0.0, values)
    return _hash(values.numpy().tobytes())


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:32]
