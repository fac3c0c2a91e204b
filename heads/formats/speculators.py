"""EAGLE-3 as vLLM's `speculators` writes it: `layers.0.*`, the draft's sizes inside `transformer_layer_config`."""

from __future__ import annotations

from dataclasses import replace

import transformers

from headstart.errors import HeadError
from headstart.heads.eagle3 import Eagle3Head
from headstart.heads.formats.eagle3 import IDS, check_layer_ids, common_config, read_head, read_layer_ids, tensors_of
from headstart.heads.formats.exported import Exported, Source
from headstart.heads.formats.foreign import Checkpoint, Foreign

VERSION = "0.9.0"
"""Of speculators, whose layout this is."""


def read(checkpoint: Checkpoint) -> Foreign:
    """Also for `layers.0.*` files with a plain config.json, which vLLM and SGLang read like `midlayer.*`."""
    config, folder = checkpoint.config, checkpoint.folder
    if "speculators_config" not in config and "transformer_layer_config" not in config:
        residual = bool(config.get("norm_before_residual", False))
        layers = read_layer_ids(config, folder)
        return read_head("speculators", checkpoint, config, layers, norm_before_residual=residual)
    if config.get("speculators_model_type") != "eagle3":
        raise HeadError(
            f"{folder / 'config.json'}: speculators_model_type is {config.get('speculators_model_type')!r}, only "
            "'eagle3' is read; give an EAGLE-3 checkpoint"
        )
    if not isinstance(config.get("norm_before_residual"), bool):
        raise HeadError(
            f"{folder / 'config.json'} does not say norm_before_residual, which vLLM then takes for true and "
            "speculators for false; add the one that the head was trained with"
        )
    layer_config = checkpoint.value("transformer_layer_config", dict)
    foreign = read_head(
        "speculators",
        checkpoint,
        layer_config,
        check_layer_ids(config.get(IDS), folder),
        norm_before_residual=config["norm_before_residual"],
    )
    verifier = (config.get("speculators_config") or {}).get("verifier") or {}
    return replace(foreign, target_name=verifier.get("name_or_path"))


def export(source: Source) -> Exported:
    """With the target's embedding; the draft's sizes inside, flags and layer ids (HF indices) outside."""
    head = source.head
    assert isinstance(head, Eagle3Head)
    if source.target_name is None:
        raise HeadError(
            "the speculators layout names the target by its hub id, where its readers fetch embedding and norm; add "
            "--target-name OWNER/MODEL"
        )
    layer_config = source.llama_config()
    verifier = {"name_or_path": source.target_name, "architectures": source.target.model.config.architectures or []}
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": source.num_tokens,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    config = {
        "speculators_model_type": "eagle3",
        "speculators_version": VERSION,
        "architectures": ["Eagle3Speculator"],
        **common_config(head),
        "target_hidden_size": None,
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        "torch_dtype": layer_config["torch_dtype"],
        "transformers_version": transformers.__version__,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": verifier,
        },
        "transformer_layer_config": {"architectures": ["LlamaForCausalLM"], **layer_config},
    }
    return Exported(config, tensors_of(source) | {"embed_tokens.weight": source.embedding()})
