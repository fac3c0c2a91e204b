"""EAGLE-1, whose weights EAGLE-2 and HASS share: `fc.*` and `layers.{k}.*`, layer 0 without a norm on its input.

`fc` has a bias unless config.json says `bias: false`, q, k and v have none unless it says `qkv_bias: true`; here the
names decide. The file usually carries a copy of the target's embedding, which the original overwrites while loading.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headstart.errors import HeadError
from headstart.heads.eagle import EagleHead
from headstart.heads.formats.exported import Exported, Source, refuse_scaled_embedding
from headstart.heads.formats.foreign import Checkpoint, Foreign, Shape, check_layout
from headstart.heads.formats.sizes import Sizes, numbers


def read(checkpoint: Checkpoint) -> Foreign:
    sizes = Sizes.read(checkpoint.config, checkpoint.folder)
    tensors = dict(checkpoint.tensors)
    fc_bias, qkv_bias = "fc.bias" in tensors, "layers.0.self_attn.q_proj.bias" in tensors
    if "layers.0.input_layernorm.weight" in tensors:
        raise HeadError(
            f"{checkpoint.folder} holds layers.0.input_layernorm.weight: the first layer of EAGLE has no norm on its "
            "input, and every engine drops this one; use a checkpoint of EAGLE itself"
        )
    check_layout(
        checkpoint,
        layout(sizes, fc_bias=fc_bias, qkv_bias=qkv_bias),
        {"embed_tokens.weight", "lm_head.weight"},
    )
    borrowed = {"embedding": tensors.pop("embed_tokens.weight")} if "embed_tokens.weight" in tensors else {}
    output = tensors.pop("lm_head.weight", None)
    return Foreign(
        format="eagle",
        type="eagle",
        state=tensors | ({} if output is None else {"output_weight": output}),
        settings={
            **sizes.settings,
            **numbers(checkpoint.config, checkpoint.folder),
            "fc_bias": fc_bias,
            "attention_bias": qkv_bias,
            "embedding_scale": 1.0,
            "feature_scale": 1.0,
            "output": "shared" if output is None else "own",
        },
        hidden_size=sizes.hidden,
        vocab_size=sizes.vocab,
        borrowed=borrowed,
    )


def layout(sizes: Sizes, *, fc_bias: bool, qkv_bias: bool) -> dict[str, Shape]:
    """Shapes of all tensors by name."""
    hidden = sizes.hidden
    shapes: dict[str, Shape] = {"fc.weight": (hidden, 2 * hidden)}
    shapes |= {"fc.bias": (hidden,)} if fc_bias else {}
    for layer in range(sizes.layers):
        norms = ("post_attention_layernorm",) if layer == 0 else ("input_layernorm", "post_attention_layernorm")
        shapes |= sizes.layer(f"layers.{layer}.", width=hidden, norms=norms, qkv_bias=qkv_bias)
    return shapes | {"embed_tokens.weight": (sizes.vocab, hidden), "lm_head.weight": (sizes.vocab, hidden)}


def export(source: Source, *, sglang: bool = False) -> Exported:
    """With the target's embedding, as the original; output rows only where they are the head's own.

    sglang: under its architecture, with a bias of `fc` that is zero where the head has none (its layer has one and
    would start it at random), and without the embedding, which it takes from the target. Our scales of embedding and
    feature are multiplied into the columns of `fc` that read them. A draft vocabulary is a file beside the weights for
    SGLang, `--speculative-token-map`; elsewhere the target's whole vocabulary is drafted.
    """
    head = source.head
    assert isinstance(head, EagleHead)
    refuse_scaled_embedding(source.target)
    state = source.state()
    state["fc.weight"] = with_scales(head).to("cpu", source.dtype)
    output, ids = state.pop("output_weight", None), state.pop("vocab.ids", None)
    if ids is not None and output is not None:
        raise HeadError(
            f"EAGLE's layout has no draft vocabulary, this head has own output rows of {len(ids)} of "
            f"{head.vocab_size} ids; train it with head.output=shared, or with draft_vocab_size null"
        )
    if output is None:
        rows = source.borrowed_rows()
        if source.target.output.scale != 1.0:
            state["lm_head.weight"] = rows
    else:
        state["lm_head.weight"] = output
    if not sglang:
        state["embed_tokens.weight"] = source.embedding()
    elif "fc.bias" not in state:
        state["fc.bias"] = torch.zeros(head.hidden_size, dtype=source.dtype)
    config = {
        "architectures": ["LlamaForCausalLMEagle" if sglang else "LlamaForCausalLM"],
        **source.llama_config(),
        "bias": "fc.bias" in state,
        "qkv_bias": "layers.0.self_attn.q_proj.bias" in state,
    }
    return Exported(config, state, token_map=ids.tolist() if sglang and ids is not None else None)


def export_sglang(source: Source) -> Exported:
    return export(source, sglang=True)


def with_scales(head: EagleHead) -> Tensor:
    """`fc.weight` for an embedding and a feature that nobody scales; bit for bit the same where the scales are 1."""
    embedding, feature = head.fc.weight.detach().split(head.hidden_size, dim=1)
    return torch.cat([embedding * head.embedding_scale, feature * head.feature_scale], dim=1)
