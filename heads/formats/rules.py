"""Rules that several layouts share. A rule yields a Fault for each thing that an engine would get wrong."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from headstart.borrowed import input_module, weight_of
from headstart.errors import HeadError
from headstart.heads.base import Head
from headstart.heads.formats.exported import is_finite
from headstart.heads.formats.files import WEIGHT_FILES
from headstart.heads.formats.foreign import Checkpoint, equal_rounded
from headstart.heads.formats.rope import CACHE_ONLY, read_rope
from headstart.target import Target

SIZES = (
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "vocab_size",
)
"""Keys of a configuration that are whole numbers, where they are there."""


@dataclass(frozen=True)
class Fault:
    """One thing that an engine would get wrong."""

    rule: str
    expected: str
    got: str
    consequence: str
    """What happens while serving."""
    remedy: str
    """What to type."""

    def named(self, rule: str) -> Fault:
        return replace(self, rule=rule)

    def __str__(self) -> str:
        return f"{self.rule}: expected {self.expected}, got {self.got}; {self.consequence}. {self.remedy}"


def fault(expected: object, got: object, consequence: str, remedy: str) -> Fault:
    """A fault whose rule is filled in by the check."""
    return Fault("", str(expected), str(got), consequence, remedy)


@dataclass(frozen=True)
class Subject:
    """The folder under check, and what it is compared with."""

    checkpoint: Checkpoint
    layout: str
    target: Target | None
    head: Head | None

    @property
    def config(self) -> dict[str, Any]:
        return self.checkpoint.config

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        return self.checkpoint.tensors

    @cached_property
    def layer_config(self) -> dict[str, Any]:
        """Where the sizes of the draft's layers stand."""
        return self.config.get("transformer_layer_config") or self.config

    @property
    def is_speculators(self) -> bool:
        """Whether vLLM reads the config.json as speculators' own."""
        return "speculators_config" in self.config or "transformer_layer_config" in self.config

    @property
    def first_layer(self) -> str:
        return "midlayer." if self.layout == "eagle3" else "layers.0."

    def set(self, **values: Any) -> str:
        """What to type for keys of config.json."""
        words = " and ".join(f"{key} to {value}" for key, value in values.items())
        return f"Set {words} in {self.checkpoint.folder / 'config.json'}"

    @property
    def again(self) -> str:
        return "Export it again with `headstart export --head RUN --format ... --output DIR`"


def weights_file(subject: Subject) -> Iterator[Fault]:
    names = [name for name in WEIGHT_FILES if (subject.checkpoint.folder / name).is_file()]
    if names != [WEIGHT_FILES[0]]:
        yield fault(
            WEIGHT_FILES[0],
            " and ".join(names),
            "a server may read another file than the one that was checked, and a pickle can run code",
            "Keep the weights in one model.safetensors",
        )


ARCHITECTURES = {
    "eagle": ("LlamaForCausalLM", "LlamaForCausalLMEagle"),
    "eagle3": ("LlamaForCausalLMEagle3",),
    "vllm-medusa": ("MedusaModel",),
}


def architecture(subject: Subject) -> Iterator[Fault]:
    known = ARCHITECTURES.get(subject.layout, ("Eagle3Speculator",))
    if subject.layout == "speculators" and not subject.is_speculators:
        known = ARCHITECTURES["eagle3"]
    found = subject.config.get("architectures")
    if found not in [[name] for name in known]:
        yield fault(
            f"architectures {' or '.join(known)}",
            found,
            "servers choose the draft's class by it and find none, or another",
            subject.set(architectures=[known[0]]),
        )


def stored_dtype(subject: Subject) -> Iterator[Fault]:
    said = subject.config.get("torch_dtype") or subject.config.get("dtype")
    found = sorted({str(t.dtype).removeprefix("torch.") for t in subject.tensors.values() if t.is_floating_point()})
    if found != [said]:
        yield fault(
            f"torch_dtype {said} for every floating tensor",
            ", ".join(found),
            "the draft is cast while loading and drafts other tokens than it was measured with",
            subject.set(torch_dtype=found[0]) if len(found) == 1 else subject.again,
        )


def finite_values(subject: Subject) -> Iterator[Fault]:
    """A NaN in one weight makes every draft the same token, and nothing says so."""
    for name, tensor in subject.tensors.items():
        if not is_finite(tensor):
            yield fault(f"finite numbers in {name}", "others", "no draft is ever accepted", subject.again)


def whole_numbers(subject: Subject) -> Iterator[Fault]:
    for name in SIZES:
        value = subject.layer_config.get(name)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
            yield fault(f"a whole number as {name}", repr(value), "loading stops", subject.again)


def head_width(subject: Subject) -> Iterator[Fault]:
    """Not every model's attention heads are hidden_size / num_attention_heads wide."""
    config = subject.layer_config
    query = subject.tensors.get(f"{subject.first_layer}self_attn.q_proj.weight")
    heads, said = config.get("num_attention_heads"), config.get("head_dim")
    if query is None or not isinstance(heads, int) or not isinstance(said, int | None):
        return
    rows = query.shape[0]
    if said and rows != said * heads and rows % heads and not rows % said:
        yield fault(
            f"num_attention_heads {rows // said} (q_proj has {rows} rows for heads of {said})",
            heads,
            "loading stops, or the heads are cut in the wrong places",
            subject.set(num_attention_heads=rows // said),
        )
    elif said is None or said * heads != rows:
        yield fault(
            f"head_dim {query.shape[0] // heads} (q_proj has {query.shape[0]} rows for {heads} heads)",
            said,
            "a server assumes hidden_size / num_attention_heads and loads shapes that do not fit",
            subject.set(head_dim=query.shape[0] // heads),
        )


def rope_spellings(subject: Subject) -> Iterator[Fault]:
    config = subject.layer_config
    missing = [key for key in ("rope_parameters", "rope_theta", "rope_scaling") if key not in config]
    if missing:
        yield fault(
            "rope_parameters, rope_theta and rope_scaling",
            f"no {' and no '.join(missing)}",
            "a server that reads the missing spelling falls back to a base of 10000: positions are rotated wrongly",
            subject.again,
        )
    try:
        read_rope(config, subject.checkpoint.folder)
    except HeadError as error:
        yield fault("one rope in both spellings", error, "old and new servers rotate differently", subject.again)


def positions(subject: Subject) -> Iterator[Fault]:
    found = subject.layer_config.get("max_position_embeddings")
    kind = (subject.layer_config.get("rope_parameters") or {}).get("rope_type", "default")
    if subject.target is None or kind not in CACHE_ONLY or found == subject.target.max_positions:
        return
    yield fault(
        f"max_position_embeddings {subject.target.max_positions}, the target's",
        found,
        "older servers size the rotary table by it and stop drafting well, or at all, behind it",
        subject.set(max_position_embeddings=subject.target.max_positions),
    )


def tie_flag(subject: Subject) -> Iterator[Fault]:
    for config in {id(subject.config): subject.config, id(subject.layer_config): subject.layer_config}.values():
        if config.get("tie_word_embeddings") is not False:
            yield fault(
                "tie_word_embeddings false",
                config.get("tie_word_embeddings"),
                "SGLang takes the embedding for the output head: no draft is accepted",
                subject.set(tie_word_embeddings="false"),
            )


def special_ids(subject: Subject) -> Iterator[Fault]:
    missing = [key for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key not in subject.layer_config]
    if missing:
        yield fault(
            "bos_token_id, eos_token_id and pad_token_id",
            f"no {' and no '.join(missing)}",
            "the class of the configuration fills in ids of its own",
            subject.set(**{key: "the target's" for key in missing}),
        )


def embedding(subject: Subject) -> Iterator[Fault]:
    """One engine ignores the draft's copy, another uses it."""
    found = subject.tensors.get("embed_tokens.weight")
    if found is None or subject.target is None:
        return
    if not equal_rounded(found, weight_of(input_module(subject.target.model)).detach()):
        yield fault(
            "embed_tokens.weight absent or equal to the target's",
            f"another one, {list(found.shape)}",
            "vLLM drafts with this embedding and SGLang with the target's",
            "Remove embed_tokens.weight, or export with the target that the head was trained for",
        )


def fc_bias(subject: Subject) -> Iterator[Fault]:
    bias = subject.tensors.get("fc.bias")
    for_sglang = subject.config.get("architectures") == ["LlamaForCausalLMEagle"]
    if for_sglang and bias is None:
        yield fault(
            "fc.bias, zeros where the head has none",
            "no fc.bias",
            "SGLang's layer has one and leaves it as it was initialised",
            "Export it again with --format sglang",
        )
    if not for_sglang and bias is not None and bool(bias.any()):
        yield fault(
            "no fc.bias, or zeros",
            "fc.bias with other values",
            "vLLM drops it without a word and computes another head",
            "Serve it with SGLang (--format sglang), or train with head.fc_bias=false",
        )


def first_layer_norm(subject: Subject) -> Iterator[Fault]:
    if "layers.0.input_layernorm.weight" in subject.tensors:
        yield fault(
            "no layers.0.input_layernorm.weight",
            "one",
            "EAGLE's first layer has no norm there, and engines drop it",
            "Use a checkpoint of EAGLE itself",
        )
