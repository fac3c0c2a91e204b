"""EAGLE-3 with `midlayer.*`: the original's files, and SGLang's and SpecForge's, which have the same names.

One config.json serves SGLang and vLLM, because each finds the layer ids where it looks for them: at the top HF indices
(vLLM: HF[k] = what layer k reads), inside `eagle_config` the layer before (SGLang: the OUTPUT of layer id).

Published defaults where config.json is silent: layers [2, N//2, N-3], rotary base 10000.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from headstart.errors import HeadError
from headstart.heads.eagle3 import Eagle3Head
from headstart.heads.formats.exported import Exported, Source, refuse_scaled_embedding
from headstart.heads.formats.foreign import (
    Checkpoint,
    Foreign,
    Shape,
    check_layout,
    offsets_of,
    target_ids,
)
from headstart.heads.formats.sizes import Sizes, numbers

FIRST = "midlayer."
OLD_NORMS = ("aux_norm_low.weight", "aux_norm_mid.weight", "aux_norm_high.weight")
"""An earlier spelling of `fc_norm.{0,1,2}.weight`, which SGLang still reads."""
OPTIONAL = ("embed_tokens.weight", "lm_head.weight", "d2t", "t2d")
FIRST_NORMS = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
IDS = "eagle_aux_hidden_state_layer_ids"


def read(checkpoint: Checkpoint) -> Foreign:
    tensors = {_new_name(name): tensor for name, tensor in checkpoint.tensors.items()}
    renamed = Checkpoint(checkpoint.folder, checkpoint.config, tensors)
    layers = read_layer_ids(checkpoint.config, checkpoint.folder)
    # SGLang has no norm_before_residual: without the key it is false in every engine
    residual = bool(checkpoint.config.get("norm_before_residual", False))
    return read_head("eagle3", renamed, checkpoint.config, layers, first=FIRST, norm_before_residual=residual)


def _new_name(name: str) -> str:
    return f"fc_norm.{OLD_NORMS.index(name)}.weight" if name in OLD_NORMS else name


def read_head(
    format_name: str,
    checkpoint: Checkpoint,
    layer_config: Mapping[str, Any],
    layers: list[int] | None,
    *,
    first: str = "layers.0.",
    norm_before_residual: bool,
) -> Foreign:
    """first: how the names of the first layer begin. layer_config: where the sizes of the draft's layers stand."""
    sizes = Sizes.read(layer_config, checkpoint.folder)
    tensors, config = dict(checkpoint.tensors), checkpoint.config
    flags = _flags(checkpoint)
    if config.get("target_hidden_size") not in (None, sizes.hidden):
        raise HeadError(
            f"{checkpoint.folder}: target_hidden_size is {config['target_hidden_size']}, the head's hidden_size "
            f"{sizes.hidden}; our heads are as wide as their target, use one that is"
        )
    taps = _num_taps(checkpoint, sizes, layers)
    _merge_later_norms(checkpoint.folder, tensors, sizes.layers)
    draft = len(tensors["d2t"]) if "d2t" in tensors else config.get("draft_vocab_size") or sizes.vocab
    expected = layout(sizes, taps, draft, first, **flags)
    check_layout(Checkpoint(checkpoint.folder, config, tensors), expected, OPTIONAL)
    ids = target_ids(checkpoint, sizes.vocab)
    if ids is None and draft != sizes.vocab:
        raise HeadError(
            f"{checkpoint.folder}: draft_vocab_size is {draft} of {sizes.vocab} ids, but d2t is missing; "
            "give the whole checkpoint"
        )
    borrowed = {"embedding": tensors.pop("embed_tokens.weight")} if "embed_tokens.weight" in tensors else {}
    tensors.pop("d2t", None)
    tensors.pop("t2d", None)
    output = tensors.pop("lm_head.weight", None)
    own = {"output_weight": output, "vocab.ids": ids}
    tensors = {name.replace(first, "layers.0.", 1): tensor for name, tensor in tensors.items()}
    return Foreign(
        format=format_name,
        type="eagle3",
        state=tensors | {name: tensor for name, tensor in own.items() if tensor is not None},
        settings={
            **sizes.settings,
            **numbers(layer_config, checkpoint.folder),
            **flags,
            "layers": layers,
            "norm_output": bool(config.get("norm_output", False)),
            "norm_before_residual": norm_before_residual,
            "output": "shared" if output is None else "own",
            "draft_vocab_size": None if ids is None else len(ids),
        },
        hidden_size=sizes.hidden,
        vocab_size=sizes.vocab,
        borrowed=borrowed,
    )


def layout(sizes: Sizes, taps: int, draft: int, first: str, *, fc_norm: bool, norm_before_fc: bool) -> dict[str, Shape]:
    """Shapes of all tensors by name, later layers with `input_layernorm` alone."""
    hidden, width = sizes.hidden, taps * sizes.hidden
    shapes: dict[str, Shape] = {"fc.weight": (hidden, width), "norm.weight": (hidden,)}
    shapes |= {f"fc_norm.{tap}.weight": (hidden,) for tap in range(taps)} if fc_norm else {}
    shapes |= {"input_norm.weight": (width,)} if norm_before_fc else {}
    shapes |= sizes.layer(first, width=2 * hidden, norms=FIRST_NORMS)
    for layer in range(1, sizes.layers):
        norms = ("input_layernorm", "post_attention_layernorm")
        shapes |= sizes.layer(f"layers.{layer}.", width=hidden, norms=norms)
    shapes |= {"lm_head.weight": (draft, hidden), "embed_tokens.weight": (sizes.vocab, hidden)}
    return shapes | ({"d2t": (draft,), "t2d": (sizes.vocab,)})


def _flags(checkpoint: Checkpoint) -> dict[str, bool]:
    """What the names say; a flag of config.json that says otherwise is refused."""
    names = checkpoint.tensors
    found = {"fc_norm": "fc_norm.0.weight" in names, "norm_before_fc": "input_norm.weight" in names}
    for flag, present in found.items():
        if bool(checkpoint.config.get(flag, present)) != present:
            tensor = {"fc_norm": "fc_norm.0.weight", "norm_before_fc": "input_norm.weight"}[flag]
            raise HeadError(
                f"{checkpoint.folder}: config.json says {flag}: {json_word(not present)}, but {tensor} is "
                f"{'there' if present else 'missing'}; mend the one that is wrong"
            )
    return found


def json_word(value: bool) -> str:
    return "true" if value else "false"


def _num_taps(checkpoint: Checkpoint, sizes: Sizes, layers: list[int] | None) -> int:
    """How many hidden states `fc` reads, by its width."""
    weight = checkpoint.tensors.get("fc.weight")
    if weight is None or weight.dim() != 2 or weight.shape[1] % sizes.hidden:
        shape = "missing" if weight is None else f"of shape {list(weight.shape)}"
        raise HeadError(
            f"{checkpoint.folder}: fc.weight is {shape}, expected [{sizes.hidden}, taps * {sizes.hidden}]; "
            "give a whole checkpoint with its own config.json"
        )
    taps = weight.shape[1] // sizes.hidden
    if taps != (3 if layers is None else len(layers)):
        said = "names no layers (the default is three)" if layers is None else f"names the layers {layers}"
        raise HeadError(
            f"{checkpoint.folder}: fc.weight reads {taps} hidden states, but config.json {said}; add --layers with "
            f"{taps} indices of hidden_states"
        )
    return taps


def _merge_later_norms(folder: Path, tensors: dict[str, Tensor], num_layers: int) -> None:
    """Layers k > 0: vLLM reads `input_layernorm`, SGLang `hidden_norm`; both names must say one thing."""
    for layer in range(1, num_layers):
        ours, theirs = f"layers.{layer}.input_layernorm.weight", f"layers.{layer}.hidden_norm.weight"
        norm = tensors.pop(theirs, None)
        if norm is not None and ours in tensors and not norm.equal(tensors[ours]):
            raise HeadError(
                f"{folder}: {ours} and {theirs} differ, so vLLM and SGLang compute different heads of it; keep the "
                "one that was trained under both names"
            )
        if norm is not None:
            tensors[ours] = norm


def read_layer_ids(config: Mapping[str, Any], folder: Path) -> list[int] | None:
    """HF indices of the hidden states that `fc` reads; None where config.json is silent."""
    top = config.get(IDS)
    nested = (config.get("eagle_config") or {}).get(IDS)
    lifted = None if nested is None else [layer + 1 for layer in nested]
    if top is not None and lifted is not None and top != lifted:
        raise HeadError(
            f"{folder / 'config.json'}: {IDS} is {top} at the top, where it means hidden_states, and {nested} inside "
            f"eagle_config, where it means layer outputs, that is hidden_states {lifted}; say which the head was "
            "trained with: --layers"
        )
    return check_layer_ids(top if top is not None else lifted, folder)


def check_layer_ids(layers: Any, folder: Path) -> list[int] | None:
    if layers is None:
        return None
    whole = isinstance(layers, list) and all(isinstance(layer, int) and layer >= 1 for layer in layers)
    if not whole or not layers or sorted(set(layers)) != layers:
        raise HeadError(
            f"{folder / 'config.json'}: {IDS} is {layers}, expected ascending, distinct indices of hidden_states from "
            "1 up (engines sort them, and the columns of fc would be mixed up); say them with --layers"
        )
    return list(layers)


def export(source: Source) -> Exported:
    """One folder for SGLang, vLLM, TensorRT-LLM and the original: every reader finds the same facts where it looks."""
    head = source.head
    assert isinstance(head, Eagle3Head)
    if head.config.norm_before_residual:
        raise HeadError(
            "this head was trained with norm_before_residual, which SGLang and the original do not compute; export "
            "with --format speculators"
        )
    tensors = tensors_of(source)
    for layer in range(1, head.num_layers):
        # vLLM norms the input of later layers with the one, SGLang with the other
        tensors[f"layers.{layer}.hidden_norm.weight"] = tensors[f"layers.{layer}.input_layernorm.weight"]
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        **source.llama_config(),
        **common_config(head),
        "num_aux_hidden_states": len(head.wants),
        "eagle_config": {"use_aux_hidden_state": True, IDS: [layer - 1 for layer in head.wants]},
    }
    return Exported(config, {name.replace("layers.0.", FIRST): tensor for name, tensor in tensors.items()})


def tensors_of(source: Source) -> dict[str, Tensor]:
    """The head's tensors with output rows (its own, or the target's) and the maps of its draft vocabulary."""
    refuse_scaled_embedding(source.target)
    assert isinstance(source.head, Eagle3Head)
    if source.head.config.attention_bias:
        raise HeadError(
            "this head has biases of queries, keys and values (head.attention_bias), which no engine's EAGLE-3 loads; "
            "train it without"
        )
    state = source.state()
    state.pop("vocab.ids", None)
    output = state.pop("output_weight", None)
    state["lm_head.weight"] = source.borrowed_rows() if output is None else output
    return state | offsets_of(source.ids(), source.head.vocab_size)


def common_config(head: Eagle3Head) -> dict[str, Any]:
    """The keys that SGLang's and speculators' configurations share."""
    flags = ("fc_norm", "norm_before_fc", "norm_output", "norm_before_residual")
    return {
        "draft_vocab_size": head.draft_vocab_size,
        **{flag: getattr(head.config, flag) for flag in flags},
        IDS: list(head.wants),
    }
