"""Medusa as vLLM up to 0.32.0 read it; 0.33.0 has no Medusa.

`blocks.{head}.layers.{block}.{weight,bias}`, and `lm_heads.{head}.weight`, an output matrix per head;
with `original_lm_head` one matrix serves all heads. `token_map` holds target ids, not offsets.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from headstart.errors import HeadError
from headstart.heads.formats.exported import Exported, Source
from headstart.heads.formats.foreign import Checkpoint, Foreign, Shape, check_layout
from headstart.heads.formats.medusa import full_state, stack, unstack
from headstart.heads.medusa import MedusaHead

PREFIX = "medusa_heads."
SHARED = ("lm_head.weight", "lm_heads.0.weight")
"""The names that one output matrix of all heads may have."""


def read(checkpoint: Checkpoint) -> Foreign:
    tensors = {name.removeprefix(PREFIX): tensor for name, tensor in checkpoint.tensors.items()}
    heads, layers = checkpoint.value("num_heads"), checkpoint.value("num_hidden_layers")
    hidden, vocab = checkpoint.value("hidden_size"), checkpoint.value("vocab_size")
    held = len({name.split(".")[1] for name in tensors if name.startswith("blocks.")})
    if held != heads:
        raise HeadError(
            f"{checkpoint.folder}: config.json says num_heads {heads}, the weights hold {held}; copy the checkpoint's "
            "own config.json again"
        )
    shared = bool(checkpoint.config.get("original_lm_head", False))
    draft = checkpoint.config.get("truncated_vocab_size") or vocab
    bias = "blocks.0.layers.0.bias" in tensors
    names = [next((name for name in SHARED if name in tensors), SHARED[0])] if shared else _own(heads)
    expected = layout(heads, layers, hidden, bias=bias) | dict.fromkeys(names, (draft, hidden))
    expected |= {"token_map": (draft,)} if "token_map" in tensors or draft != vocab else {}
    check_layout(Checkpoint(checkpoint.folder, checkpoint.config, tensors), expected)
    output = torch.stack([tensors.pop(name) for name in names])
    ids = tensors.pop("token_map", None)
    if ids is not None:  # our draft vocabularies ascend; rows follow their ids
        order = ids.argsort()
        ids, output = ids[order].long(), output[:, order]
    named = _original(tensors) if bias else {**_zero_biases(tensors, heads, layers, hidden), **_original(tensors)}
    state = stack(named, heads, layers, own=False) | ({} if ids is None else {"vocab.ids": ids})
    settings = {
        "num_heads": heads,
        "num_layers": layers,
        "output": "shared" if shared else "own",
        "draft_vocab_size": None if ids is None else draft,
    }
    if shared:
        return Foreign("vllm-medusa", "medusa", state, settings, hidden, vocab, borrowed={"output": output[0]})
    return Foreign("vllm-medusa", "medusa", state | {"output_weight": output}, settings, hidden, vocab)


def layout(heads: int, layers: int, hidden: int, *, bias: bool) -> dict[str, Shape]:
    """Shapes of the blocks by name; the output matrices depend on `original_lm_head`."""
    shapes: dict[str, Shape] = {}
    for head in range(heads):
        for layer in range(layers):
            shapes[f"blocks.{head}.layers.{layer}.weight"] = (hidden, hidden)
            shapes |= {f"blocks.{head}.layers.{layer}.bias": (hidden,)} if bias else {}
    return shapes


def export(source: Source) -> Exported:
    """Blocks always with a bias, as ours have one; shared output rows once, as `lm_head.weight`."""
    head, ids = source.head, source.ids()
    assert isinstance(head, MedusaHead)
    state, config = full_state(source), head.config
    tensors = {}
    for name, tensor in unstack(state).items():
        number, layer, *rest = name.split(".")
        own = int(layer) == config.num_layers
        tensors[f"lm_heads.{number}.weight" if own else f"blocks.{number}.layers.{layer}.{rest[-1]}"] = tensor
    shared = "output_weight" not in state
    if shared:
        tensors["lm_head.weight"] = source.borrowed_rows()
    if len(ids) < head.vocab_size:
        tensors["token_map"] = ids
    # no other key may hold "num" with "heads" or "layers": vLLM renames every such key to these two
    values = {
        "model_type": "medusa",
        "architectures": ["MedusaModel"],
        "hidden_size": head.hidden_size,
        "vocab_size": head.vocab_size,
        "truncated_vocab_size": len(ids),
        "num_heads": config.num_heads,
        "num_hidden_layers": config.num_layers,
        "medusa_fc_bias": True,
        "original_lm_head": shared,
        "max_paths": 64,
        "topk": 10,
        "torch_dtype": str(source.dtype).removeprefix("torch."),
        "base_model_name_or_path": source.target_name,
    }
    return Exported(values, tensors)


def _own(heads: int) -> list[str]:
    return [f"lm_heads.{head}.weight" for head in range(heads)]


def _original(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Names of the blocks as in the original layout: `{head}.{block}.linear.*`."""
    name_of = re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)")
    matches = ((match, tensors[name]) for name in tensors if (match := name_of.fullmatch(name)))
    return {f"{match[1]}.{match[2]}.linear.{match[3]}": tensor for match, tensor in matches}


def _zero_biases(tensors: Mapping[str, Tensor], heads: int, layers: int, hidden: int) -> dict[str, Tensor]:
    """Blocks without a bias are ours with a bias of zero."""
    zeros = torch.zeros(hidden, dtype=tensors["blocks.0.layers.0.weight"].dtype)
    return {f"{head}.{layer}.linear.bias": zeros for head in range(heads) for layer in range(layers)}
