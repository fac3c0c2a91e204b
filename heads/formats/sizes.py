"""The sizes of EAGLE's decoder layers: read from a configuration, turned into the shapes of a layer's tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headstart.errors import HeadError
from headstart.heads.formats.foreign import Shape, config_value
from headstart.heads.formats.rope import CACHE_ONLY, read_rope
from headstart.heads.unrolled import UnrolledHead


@dataclass(frozen=True)
class Sizes:
    """Sizes of the draft's decoder layers, and of the vocabulary of its target."""

    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    layers: int
    vocab: int

    @classmethod
    def read(cls, config: Mapping[str, Any], folder: Path) -> Sizes:
        """From the keys of a Llama configuration; a missing head_dim is hidden_size / num_attention_heads."""

        def value(key: str) -> int:
            return config_value(config, key, int, folder)

        hidden, heads = value("hidden_size"), value("num_attention_heads")
        head_dim = config.get("head_dim")
        if head_dim is None:
            if hidden % heads:
                raise HeadError(
                    f"{folder / 'config.json'}: hidden_size {hidden} is no multiple of num_attention_heads {heads}, "
                    "and head_dim is not said; add the head_dim that the head was trained with"
                )
            head_dim = hidden // heads
        if config.get("hidden_act", "silu") != "silu":
            raise HeadError(
                f"{folder / 'config.json'}: hidden_act is {config['hidden_act']!r}, our layers compute silu alone; "
                "use a head with silu"
            )
        return cls(
            hidden=hidden,
            inner=value("intermediate_size"),
            heads=heads,
            kv_heads=value("num_key_value_heads") if "num_key_value_heads" in config else heads,
            head_dim=int(head_dim),
            layers=config.get("num_hidden_layers", 1),
            vocab=value("vocab_size"),
        )

    @classmethod
    def of(cls, head: UnrolledHead) -> Sizes:
        return cls(
            hidden=head.hidden_size,
            inner=head.state_dict()["layers.0.mlp.gate_proj.weight"].shape[0],
            heads=head.num_heads,
            kv_heads=head.num_kv_heads,
            head_dim=head.head_dim,
            layers=head.num_layers,
            vocab=head.vocab_size,
        )

    @property
    def settings(self) -> dict[str, int]:
        """The same as keys of a head's configuration."""
        return {
            "num_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_kv_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.inner,
        }

    def layer(self, prefix: str, *, width: int, norms: Iterable[str], qkv_bias: bool = False) -> dict[str, Shape]:
        """Shapes of one layer's tensors by name; width: what q, k and v read."""
        query, key = self.heads * self.head_dim, self.kv_heads * self.head_dim
        shapes: dict[str, Shape] = {
            "self_attn.q_proj.weight": (query, width),
            "self_attn.k_proj.weight": (key, width),
            "self_attn.v_proj.weight": (key, width),
            "self_attn.o_proj.weight": (self.hidden, query),
            "mlp.gate_proj.weight": (self.inner, self.hidden),
            "mlp.up_proj.weight": (self.inner, self.hidden),
            "mlp.down_proj.weight": (self.hidden, self.inner),
            **{f"{norm}.weight": (self.hidden,) for norm in norms},
        }
        if qkv_bias:
            shapes |= {f"self_attn.{name}_proj.bias": (query if name == "q" else key,) for name in "qkv"}
        return {prefix + name: shape for name, shape in shapes.items()}


def numbers(config: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """What else a layer computes with, as keys of a head's configuration: the norms' epsilon, the rotary parameters.

    The positions that a checkpoint declares (2048 in many that serve longer texts) are kept only where the rotary
    frequencies depend on them; otherwise the target's are declared.
    """
    rope = read_rope(config, folder)
    positions = None
    if rope["rope_type"] not in CACHE_ONLY:
        positions = config_value(config, "max_position_embeddings", int, folder)
    epsilon = config_value(config, "rms_norm_eps", float, folder)
    return {"rms_norm_eps": epsilon, "rope": rope, "max_positions": positions}
