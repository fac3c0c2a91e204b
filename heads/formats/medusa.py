"""Medusa's original layouts. Counts come from the names: published configurations give wrong ones.

own      `{head}.{block}.linear.{weight,bias}` and `{head}.{blocks}.weight`, an output matrix per head
shared   version 2: the blocks alone, the target's output rows are used
merged   Medusa-2: the target that was trained along, and its heads as `medusa_head.{head}...`
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from headstart.errors import HeadError
from headstart.heads.formats.exported import Exported, Source
from headstart.heads.formats.files import MERGED
from headstart.heads.formats.foreign import Checkpoint, Foreign, Shape, check_layout
from headstart.heads.medusa import MedusaHead

_NAME = re.compile(r"(\d+)\.(\d+)\.(linear\.weight|linear\.bias|weight)")


def read(checkpoint: Checkpoint) -> Foreign:
    merged = any(name.startswith(MERGED) for name in checkpoint.tensors)
    tensors = {name.removeprefix(MERGED): tensor for name, tensor in checkpoint.tensors.items()}
    borrowed = {}
    if merged:
        for name, what in (("model.embed_tokens.weight", "embedding"), ("lm_head.weight", "output")):
            if name in tensors:
                borrowed[what] = tensors.pop(name)
    heads, layers, own = count(tensors)
    hidden = tensors["0.0.linear.weight"].shape[-1]
    vocab = len(tensors[f"0.{layers}.weight"]) if own else None
    check_layout(Checkpoint(checkpoint.folder, checkpoint.config, tensors), layout(heads, layers, hidden, vocab))
    _check_counts(checkpoint, heads, layers)
    name = checkpoint.config.get("base_model_name_or_path")
    return Foreign(
        format="medusa-merged" if merged else "medusa" if own else "medusa-shared",
        type="medusa",
        state=stack(tensors, heads, layers, own),
        settings={"num_heads": heads, "num_layers": layers, "output": "own" if own else "shared"},
        hidden_size=hidden,
        vocab_size=vocab,
        borrowed=borrowed,
        target_name=name if isinstance(name, str) else None,
    )


def count(names: Iterable[str]) -> tuple[int, int, bool]:
    """Heads, blocks of each head, and whether heads have output matrices of their own."""
    places = [match.groups() for match in map(_NAME.fullmatch, names) if match]
    heads = 1 + max(int(head) for head, _, _ in places)
    blocks = [int(block) for _, block, kind in places if kind != "weight"]
    return heads, 1 + max(blocks, default=0), any(kind == "weight" for _, _, kind in places)


def layout(heads: int, layers: int, hidden: int, vocab: int | None) -> dict[str, Shape]:
    """Shapes of all tensors by name; vocab: rows of the own output matrices, None without them."""
    shapes: dict[str, Shape] = {}
    for head in range(heads):
        for layer in range(layers):
            shapes[f"{head}.{layer}.linear.weight"] = (hidden, hidden)
            shapes[f"{head}.{layer}.linear.bias"] = (hidden,)
        if vocab is not None:
            shapes[f"{head}.{layers}.weight"] = (vocab, hidden)
    return shapes


def stack(tensors: Mapping[str, Tensor], heads: int, layers: int, own: bool) -> dict[str, Tensor]:
    """Our tensors, which hold all heads: a copy, so blocks that were one module in the original may now differ."""
    state = {}
    for layer in range(layers):
        for kind in ("weight", "bias"):
            parts = [tensors[f"{head}.{layer}.linear.{kind}"] for head in range(heads)]
            state[f"blocks.{layer}.{kind}"] = torch.stack(parts)
    if own:
        state["output_weight"] = torch.stack([tensors[f"{head}.{layers}.weight"] for head in range(heads)])
    return state


def unstack(state: Mapping[str, Tensor], prefix: str = "") -> dict[str, Tensor]:
    """The original's names of our tensors."""
    tensors = {}
    layers = sum(name.startswith("blocks.") and name.endswith(".weight") for name in state)
    for head in range(len(state["blocks.0.bias"])):
        for layer in range(layers):
            for kind in ("weight", "bias"):
                tensors[f"{prefix}{head}.{layer}.linear.{kind}"] = state[f"blocks.{layer}.{kind}"][head]
        if "output_weight" in state:
            tensors[f"{prefix}{head}.{layers}.weight"] = state["output_weight"][head]
    return tensors


def _check_counts(checkpoint: Checkpoint, heads: int, layers: int) -> None:
    """Published files say fewer heads than they hold; more than they hold is a broken file."""
    for key, found in (("medusa_num_heads", heads), ("medusa_num_layers", layers)):
        said = checkpoint.config.get(key)
        if isinstance(said, int) and said > found:
            raise HeadError(
                f"{checkpoint.folder}: config.json says {key} {said}, the weights hold {found}; copy the checkpoint "
                f"again, or set {key} to {found}"
            )


def full_state(source: Source) -> dict[str, Tensor]:
    """The head's tensors with whole output matrices: a low-rank correction is added to the target's rows."""
    state = source.state()
    if "output_down" in state:
        down, up = source.head.state_dict()["output_down"], source.head.state_dict()["output_up"]
        correction = torch.einsum("hvr,hrd->hvd", up, down).to("cpu", source.dtype)
        state["output_weight"] = source.borrowed_rows() + correction
        del state["output_down"], state["output_up"]
    state.pop("vocab.ids", None)
    return state


def export(source: Source) -> Exported:
    """Own output matrices where the head has them, else version 2, which the target's rows serve."""
    head = source.head
    assert isinstance(head, MedusaHead)
    state = full_state(source)
    own = "output_weight" in state
    _refuse_reduced(head, own)
    config = {
        "model_type": "medusa",
        "medusa_num_heads": head.config.num_heads,
        "medusa_num_layers": head.config.num_layers,
        "hidden_size": head.hidden_size,
        "vocab_size": head.vocab_size,
        "original_lm_head": not own,
        "medusa_fc_bias": True,  # for vLLM to 0.32.0, which reads these names too
        "base_model_name_or_path": source.target_name,
        "torch_dtype": str(source.dtype).removeprefix("torch."),
        **({} if own else {"version": "2"}),
    }
    return Exported(config, unstack(state), "medusa_lm_head.safetensors")


def export_merged(source: Source) -> Exported:
    """Medusa-2: the target's own tensors, and the heads beside them."""
    head, model = source.head, source.target.model
    assert isinstance(head, MedusaHead)
    state = full_state(source)
    if "output_weight" not in state:
        state["output_weight"] = source.borrowed_rows().expand(head.config.num_heads, -1, -1)
    _refuse_reduced(head, own=True)
    tied = set(model.all_tied_weights_keys) if source.target.config.tie_word_embeddings else set()
    tensors = {name: tensor for name, tensor in model.state_dict().items() if name not in tied}
    counts = {"medusa_num_heads": head.config.num_heads, "medusa_num_layers": head.config.num_layers}
    return Exported(model.config.to_dict() | counts, tensors | unstack(state, MERGED))


def _refuse_reduced(head: MedusaHead, own: bool) -> None:
    if own and head.vocab is not None:
        raise HeadError(
            f"the heads' output matrices have {head.draft_vocab_size} rows of {head.vocab_size}, and the original "
            "layout has no draft vocabulary; export with --format vllm-medusa, or train with draft_vocab_size null"
        )
