"""What every writer of a foreign layout needs from a head and its target, and the targets no layout can describe."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from headstart.borrowed import input_module, weight_of
from headstart.errors import HeadError
from headstart.heads.base import Head
from headstart.heads.configs import UnrolledConfig
from headstart.heads.formats.rope import CACHE_ONLY, both_spellings
from headstart.heads.formats.sizes import Sizes
from headstart.heads.unrolled import UnrolledHead
from headstart.target import Target


@dataclass(frozen=True)
class Exported:
    """A head ready to be written: config.json and tensors by the layout's names."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    weights: str = "model.safetensors"
    """Name of the weights' file."""
    token_map: list[int] | None = None
    """Target ids for a file of its own: SGLang's `--speculative-token-map`."""


@dataclass(frozen=True)
class Source:
    """A head, its target, and what the command line may change about an export."""

    head: Head
    target: Target
    dtype: torch.dtype
    """Of every floating tensor that is written."""
    target_name: str | None
    """The target's hub id; None where it has none."""
    num_tokens: int = 3
    """How many tokens an engine is told to draft."""

    def state(self) -> dict[str, Tensor]:
        """The head's tensors in the dtype of the export; integers stay what they are."""
        return {
            name: tensor.detach().to(self.dtype if tensor.is_floating_point() else tensor.dtype)
            for name, tensor in self.head.state_dict().items()
        }

    def ids(self) -> Int[Tensor, "draft"]:
        """Target ids of the draft vocabulary, all of them where the head has none of its own."""
        ids = self.head.draft_ids
        return torch.arange(self.head.vocab_size) if ids is None else ids.to("cpu")

    def borrowed_rows(self) -> Float[Tensor, "draft dim"]:
        """The target's output rows of the draft vocabulary, with its logit scale, for a layout that carries them.

        They are read after the head's own last norm (EAGLE-3) or by states that stand for normed ones (Medusa, EAGLE):
        the target's final norm is not applied to them a second time, and does not belong into the rows.
        """
        output = self.target.output
        if output.soft_cap is not None or output.select(torch.arange(1)).bias is not None:
            what = "a soft-cap" if output.soft_cap is not None else "a bias"
            raise HeadError(
                f"the logits of {self.target.name} have {what}, for which no exported layout has a place, and this "
                "head borrows its output rows; train it with head.output=own"
            )
        return (output.weight_rows(self.head.draft_ids) * output.scale).to("cpu", self.dtype)

    def embedding(self) -> Float[Tensor, "vocab dim"]:
        """The target's embedding, bit for bit where the dtype is the target's."""
        return weight_of(input_module(self.target.model)).detach().to("cpu", self.dtype)

    def llama_config(self) -> dict[str, Any]:
        """The keys that describe the draft's layers, in the words of a Llama configuration."""
        head, target = self.head, self.target
        assert isinstance(head, UnrolledHead)
        sizes = Sizes.of(head)
        return {
            "model_type": "llama",
            "hidden_size": sizes.hidden,
            "intermediate_size": sizes.inner,
            "hidden_act": "silu",
            "num_attention_heads": sizes.heads,
            "num_key_value_heads": sizes.kv_heads,
            "head_dim": sizes.head_dim,
            "num_hidden_layers": sizes.layers,
            "rms_norm_eps": head.config.rms_norm_eps,
            "max_position_embeddings": _positions(head.config, target),
            **both_spellings(head.config.rope or {}),
            "vocab_size": sizes.vocab,
            "tie_word_embeddings": False,
            "attention_bias": head.config.attention_bias,
            "torch_dtype": str(self.dtype).removeprefix("torch."),
            **{name: special_id(target, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")},
        }


def _positions(config: UnrolledConfig, target: Target) -> int:
    """The target's, unless the rotary frequencies depend on how many there are."""
    assert config.rope is not None and config.max_positions is not None
    return target.max_positions if config.rope["rope_type"] in CACHE_ONLY else config.max_positions


def special_id(target: Target, name: str) -> Any:
    """The target's own id or ids; None for one that its vocabulary has no row for."""
    value = getattr(target.config, name, None)
    return None if isinstance(value, int) and not 0 <= value < target.vocab_size else value


def refuse_scaled_embedding(target: Target) -> None:
    """Engines give a draft the bare rows of the target's embedding."""
    ids = torch.arange(min(8, target.vocab_size), device=target.device)
    bare = weight_of(input_module(target.model)).detach()[ids]
    if not torch.equal(target.embedding.embed(ids), bare):
        raise HeadError(
            f"{target.name} scales its embedding, which serving engines do not do for a draft head; decode with "
            "headstart, or export a head of another target"
        )


def is_finite(tensor: Tensor) -> bool:
    """No NaN and no infinity among its numbers."""
    return not tensor.is_floating_point() or bool(torch.isfinite(tensor).all())


def check_state(state: Mapping[str, Tensor], what: str, remedy: str = "export the last good checkpoint") -> None:
    """No tensor of size zero or with a NaN is written, or read."""
    for name, tensor in state.items():
        if tensor.numel() == 0 or not is_finite(tensor):
            fault = "is empty" if tensor.numel() == 0 else "holds values that are not finite"
            raise HeadError(f"{what}: {name} {fault}; {remedy}")
