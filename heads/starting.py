"""What a head starts from: the dimensions of its target, or the weights of a head that was trained before.

The configuration that a head carries, and that is saved with it, names every dimension and every rotary parameter as
it is used; null in a recipe means the target's, or those of the head to go on from.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, TypeVar

import pydantic
import torch
import transformers

from headstart.errors import HeadError
from headstart.heads.base import Head
from headstart.heads.configs import Eagle3Config, EagleConfig, UnrolledConfig
from headstart.heads.last_layer import Scales, embedding_scale
from headstart.target import Target

Config = TypeVar("Config", bound=UnrolledConfig)

OPEN = (
    "num_attention_heads num_kv_heads head_dim intermediate_size rms_norm_eps max_positions rope layers "
    "embedding_scale feature_scale"
).split()
"""What may be null in a recipe."""
FIXED = "num_layers attention_bias fc_bias fc_norm norm_before_fc norm_before_residual norm_output".split()
"""What decides, beside them, what the weights mean."""


def as_used(config: Config, target: Target) -> Config:
    """The configuration with everything that it leaves to the target written out."""
    found = target.config
    heads = config.num_attention_heads or int(found.num_attention_heads)
    values: dict[str, Any] = {
        "num_attention_heads": heads,
        "num_kv_heads": int(getattr(found, "num_key_value_heads", None) or heads),
        "head_dim": int(getattr(found, "head_dim", None) or target.hidden_size // heads),
        "intermediate_size": int(getattr(found, "intermediate_size", None) or 4 * target.hidden_size),
        "rms_norm_eps": float(getattr(found, "rms_norm_eps", None) or 1e-6),
        "max_positions": target.max_positions,
        "rope": _rope_of(found),
    }
    if isinstance(config, Eagle3Config):
        values["layers"] = _default_layers(target.num_layers)
    if isinstance(config, EagleConfig) and config.embedding_scale is None:
        values["embedding_scale"] = _power_of_two(1 / embedding_scale(target))
    if isinstance(config, EagleConfig) and config.feature_scale is None:
        values["feature_scale"] = _power_of_two(1 / Scales.measure(target).of(None))
    open_values = {name: value for name, value in values.items() if getattr(config, name) is None}
    if isinstance(config, Eagle3Config) and config.layers is not None and config.layers[-1] > target.num_layers:
        raise HeadError(
            f"head.layers asks for HF[{config.layers[-1]}], {target.name} has HF[0] to HF[{target.num_layers}]; "
            "leave it null for the usual three"
        )
    # validated again: the target's own numbers have to fit together with those that were given
    try:
        return type(config).model_validate({**config.model_dump(), **open_values})
    except pydantic.ValidationError as error:
        reason = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise HeadError(f"this head does not fit {target.name}: {reason}; set the dimensions under `head:`") from None


def _rope_of(config: transformers.PreTrainedConfig) -> dict[str, Any]:
    """The target's rotary parameters; those of its full-attention layers where kinds of layers differ.

    `partial_rotary_factor` is left out: a draft layer always turns whole heads. Targets without rotary embedding get
    the usual base.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)
    kept = {name: value for name, value in rope.items() if name != "partial_rotary_factor" and value is not None}
    return {"rope_type": "default", "rope_theta": 10000.0, **kept}


def _default_layers(num_layers: int) -> list[int]:
    """The published 2, N // 2 and N - 3 where these are three different layers, else three spread over the target."""
    published = [2, num_layers // 2, num_layers - 3]
    if published[0] < published[1] < published[2]:
        return published
    return sorted({num_layers // 4, num_layers // 2, num_layers - 1})


def settings_of_start(config: Config, source: Head) -> Config:
    """The configuration with everything that it leaves open as the head `source` has it.

    Raises HeadError where the two would make something else of the same weights.
    """
    if not isinstance(source.config, type(config)):
        raise HeadError(
            f"head.init: {config.init} holds a head of type {source.config.type}, the recipe asks for {config.type}; "
            "name a head of the same type"
        )
    names = [name for name in OPEN if name in type(config).model_fields]
    taken = {name: getattr(source.config, name) for name in names if getattr(config, name) is None}
    filled = config.model_copy(update=taken)
    for name in [*names, *(name for name in FIXED if name in type(config).model_fields)]:
        ours, theirs = getattr(filled, name), getattr(source.config, name)
        if ours != theirs and name != "max_positions":
            raise HeadError(
                f"head.init: the head in {config.init} has {name} {theirs}, the recipe says {ours}; set head.{name} "
                f"to {theirs}, or start from another head"
            )
    # the name alone: no path of this machine goes out with a head
    return filled.model_copy(update={"init": Path(config.init).name})


def warm_start(head: Head, source: Head) -> None:
    """Copies every weight of `source`; of own output rows those of the tokens that both may draft, so that the others
    keep their start."""
    ours, theirs = head.state_dict(), source.state_dict()
    with torch.no_grad():
        for name, weight in theirs.items():
            if name == "output_weight" and name in ours:
                shared = [token for token in _ids(source).tolist() if int(head.draft_index(torch.tensor(token))) >= 0]
                ids = torch.tensor(shared, dtype=torch.long)
                ours[name][head.draft_index(ids)] = weight[source.draft_index(ids)].to(ours[name].dtype)
            elif name != "vocab.ids":
                if name not in ours:
                    raise HeadError(f"head.init: {name} has no place in the new head; set head.output to `own`")
                ours[name].copy_(weight)


def _ids(head: Head) -> torch.Tensor:
    return torch.arange(head.vocab_size) if head.draft_ids is None else head.draft_ids


def _power_of_two(scale: float) -> float:
    """The nearest one: a weight that it is multiplied into, as an export does, loses nothing in any dtype."""
    return 2.0 ** round(math.log2(scale))
