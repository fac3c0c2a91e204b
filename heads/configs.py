"""The settings of each head, one class per head, checked where they are declared. Nothing here imports torch.

    >>> MedusaConfig(num_heads=4, draft_vocab_size=8192, loss={"soft-ce": 0.9, "tv": 0.1})

A head's keys stand under `head:` in a recipe; `type` chooses the class (`HEADS`).
"""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

Loss = Literal["hard-ce", "soft-ce", "kl", "reverse-kl", "tv", "lk"]
"""Losses by name: cross-entropy with the text or with the target's distribution, divergences, total variation, and the
negative logarithm of the acceptance."""

_NUMBER_TEXT = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")


def number_from_text(value: object) -> object:
    """The number that `value` spells, else `value` itself: YAML 1.1 and quotes make text of `2e-5`."""
    if isinstance(value, str) and _NUMBER_TEXT.fullmatch(value):
        return float(value)
    return value


Number = Annotated[float, Field(allow_inf_nan=False), BeforeValidator(number_from_text)]
"""A finite float that may come spelt as text (`'2e-5'`); never `1_000`, `yes` or `true`."""

Weight = Annotated[Number, Field(gt=0)]
"""A number above 0."""


class Config(BaseModel):
    """What every section of a recipe shares: no unknown key, no silent conversion, no change after it was checked."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True)


class MedusaConfig(Config):
    """Medusa heads: head i reads the target's final state at position j and predicts token j + 2 + i.

    https://arxiv.org/abs/2401.10774
    """

    type: Literal["medusa"] = "medusa"
    """Which head this is."""

    num_heads: int = Field(default=4, ge=1, le=16)
    """How many tokens are drafted beyond the one that the target itself gives. Each head more costs training time and
    is accepted less often than the one before it; 3 to 5 is usual."""

    num_layers: int = Field(default=1, ge=1, le=8)
    """Residual blocks in each head. One is the published choice; every block has its own weights."""

    output: Literal["shared", "own", "low-rank"] = "shared"
    """What turns a head's state into logits: the target's own output rows (nothing to train or to ship), an own full
    matrix per head that starts as a copy of them, or a low-rank correction of them."""

    rank: int | None = Field(default=None, ge=1)
    """Rank of the correction; with `output: low-rank` only, and needed there."""

    draft_vocab_size: int | None = Field(default=None, ge=1)
    """How many of the target's tokens the heads may draft: those met most often in training. Fewer are faster to train
    and to draft with, and put a ceiling on acceptance that is reported. null: all of them."""

    loss: Loss | Annotated[dict[Loss, Weight], Field(min_length=1)] = "soft-ce"
    """What is minimised: `soft-ce` learns from the target's whole distribution, `hard-ce` from the text alone. A
    mapping such as `{soft-ce: 0.9, tv: 0.1}` adds losses with these weights."""

    loss_decay: Number = Field(default=0.8, gt=0, le=1)
    """Head i weighs `loss_decay ** i`: a later head counts only where those before it were right. 1: all alike."""

    teacher_top_k: int | None = Field(default=None, ge=1)
    """Keep only so many of the target's likeliest tokens, renormalised, as the soft label. Faster where the vocabulary
    is large; `hard-ce` has no use for it. null: the whole distribution."""

    dropout: Number = Field(default=0.0, ge=0, lt=1)
    """Share of a head's input that is dropped while training. Worth trying when conversations are few."""

    @property
    def loss_weights(self) -> dict[Loss, float]:
        """The mixture as weights by name; a single loss weighs 1."""
        return dict(self.loss) if isinstance(self.loss, dict) else {self.loss: 1.0}

    @model_validator(mode="after")
    def _check_together(self) -> MedusaConfig:
        if self.output == "low-rank" and self.rank is None:
            raise ValueError("`output: low-rank` needs `rank`, for example `rank: 64`")
        if self.output != "low-rank" and self.rank is not None:
            raise ValueError(f"`rank` goes with `output: low-rank` only, not with `output: {self.output}`")
        return self


HEADS: dict[str, type[MedusaConfig]] = {"medusa": MedusaConfig}
"""The heads that can be trained, by the name under `head.type`."""

PLANNED_HEADS = ("eagle", "eagle3")
"""Known by name and refused in a sentence: not built yet."""
