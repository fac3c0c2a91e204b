"""How vLLM 0.32.0, the last that had Medusa, loads its heads and computes with them; apart from our writers.

It reads its own layout and the original's names, and drops what it does not know. See twins.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import linear, silu

from headstart.heads.formats.engine_layers import Slots, fill


class MedusaTwin:
    """Medusa in vLLM 0.32.0, which reads its own layout and the original's names."""

    def __init__(self, config: Mapping[str, Any], tensors: Mapping[str, Tensor]):
        self.config = config = self._renamed(config)
        heads, blocks, hidden = config["num_heads"], config["num_hidden_layers"], config["hidden_size"]
        draft = config.get("truncated_vocab_size") or config["vocab_size"]
        shared = config.get("original_lm_head", False)
        slots: Slots = {f"lm_heads.{head}.weight": [(draft, hidden)] for head in range(1 if shared else heads)}
        for head in range(heads):
            for block in range(blocks):
                slots[f"blocks.{head}.layers.{block}.weight"] = [(hidden, hidden)]
                if config.get("medusa_fc_bias", False):
                    slots[f"blocks.{head}.layers.{block}.bias"] = [(hidden,)]
        if draft < config["vocab_size"]:
            slots["token_map"] = [(draft,)]
        self.loaded = fill(slots, tensors, {name: self._place(name, blocks) for name in tensors})
        self.parameters = self.loaded.parameters

    @staticmethod
    def _renamed(config: Mapping[str, Any]) -> dict[str, Any]:
        """Any key with both words is taken for one of the two counts; the last one wins."""
        renamed = {}
        for key, value in config.items():
            if "num" in key and "heads" in key:
                key = "num_heads"
            elif "num" in key and "layers" in key:
                key = "num_hidden_layers"
            renamed[key] = value
        return renamed

    @staticmethod
    def _place(name: str, blocks: int) -> tuple[str, int]:
        name = name.removeprefix("medusa_heads.")
        if name == "lm_head.weight":
            return "lm_heads.0.weight", 0
        original = re.fullmatch(r"(\d+)\.(\d+)\.(?:linear\.)?(weight|bias)", name)
        if original is None:
            return name, 0
        head, block, kind = original.groups()
        return (f"lm_heads.{head}.weight" if int(block) == blocks else f"blocks.{head}.layers.{block}.{kind}"), 0

    def logits(self, final: Float[Tensor, "*batch dim"]) -> Float[Tensor, "*batch heads draft"]:
        """Of every head, from the target's state after its final norm."""
        found = []
        for head in range(self.config["num_heads"]):
            states = final
            for block in range(self.config["num_hidden_layers"]):
                name = f"blocks.{head}.layers.{block}"
                weight, bias = self.parameters[f"{name}.weight"], self.parameters.get(f"{name}.bias")
                states = states + silu(linear(states, weight, bias))
            row = "lm_heads.0.weight" if self.config.get("original_lm_head", False) else f"lm_heads.{head}.weight"
            found.append(linear(states, self.parameters[row]))
        return torch.stack(found, -2)
