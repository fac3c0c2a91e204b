"""The settings of each head, one class per head, checked where they are declared. Nothing here imports torch.

    >>> MedusaConfig(num_heads=4, draft_vocab_size=8192, loss={"soft-ce": 0.9, "tv": 0.1})

A head's keys stand under `head:` in a recipe; `type` chooses the class (`HEADS`).
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

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


class HeadConfig(Config):
    """What all heads share: the draft vocabulary and the loss."""

    type: str
    """Which head this is."""

    draft_vocab_size: int | None = Field(default=None, ge=1)
    """How many of the target's tokens the head may draft: those met most often in training. Fewer are faster to train
    and to draft with, and put a ceiling on acceptance that is reported. null: all of them."""

    loss: Loss | Annotated[dict[Loss, Weight], Field(min_length=1)] = "soft-ce"
    """What is minimised: `soft-ce` learns from the target's whole distribution, `hard-ce` from the text alone. A
    mapping such as `{soft-ce: 0.9, tv: 0.1}` adds losses with these weights."""

    loss_decay: Number = Field(default=0.8, gt=0, le=1)
    """Depth d (Medusa's head d, EAGLE's unrolled step d) weighs `loss_decay ** d`: a later one counts only where those
    before it were right. 1: all alike."""

    teacher_top_k: int | None = Field(default=None, ge=1)
    """Keep only so many of the target's likeliest tokens, renormalised, as the soft label. Faster where the vocabulary
    is large; `hard-ce` has no use for it. null: the whole distribution."""

    @property
    def loss_weights(self) -> dict[Loss, float]:
        """The mixture as weights by name; a single loss weighs 1."""
        return dict(self.loss) if isinstance(self.loss, dict) else {self.loss: 1.0}

    @model_validator(mode="after")
    def _check_loss(self) -> HeadConfig:
        if "reverse-kl" in self.loss_weights and self.teacher_top_k is not None:
            raise ValueError("loss `reverse-kl` needs the target's whole distribution; set `teacher_top_k` to null")
        return self


class MedusaConfig(HeadConfig):
    """Medusa heads: head i reads the target's final state at position j and predicts token j + 2 + i.

    https://arxiv.org/abs/2401.10774
    """

    type: Literal["medusa"] = "medusa"  # pyright: ignore[reportIncompatibleVariableOverride]
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

    dropout: Number = Field(default=0.0, ge=0, lt=1)
    """Share of a head's input that is dropped while training. Worth trying when conversations are few."""

    @model_validator(mode="after")
    def _check_together(self) -> MedusaConfig:
        if self.output == "low-rank" and self.rank is None:
            raise ValueError("`output: low-rank` needs `rank`, for example `rank: 64`")
        if self.output != "low-rank" and self.rank is not None:
            raise ValueError(f"`rank` goes with `output: low-rank` only, not with `output: {self.output}`")
        return self


class Stage(Config):
    """One stage of a curriculum of unrolled steps."""

    until: Number = Field(gt=0, le=1)
    """The share of the training at which this stage ends: 0.3 is after 30% of all optimiser steps."""

    steps: int = Field(ge=1, le=16)
    """Unrolled steps in this stage."""


RopeTypes = Literal["default", "linear", "dynamic", "yarn", "longrope", "llama3"]

Rope = dict[str, Any]
"""Rotary parameters in transformers' own words: `rope_type`, `rope_theta` and what that type needs besides."""


class UnrolledConfig(HeadConfig):
    """What EAGLE-1 and EAGLE-3 share: draft layers that read their own output, step after step.

    Dimensions that are null are the target's; the saved head names all of them as they were used.
    """

    num_layers: int = Field(default=1, ge=1, le=8)
    """Decoder layers of the head. One is the published choice, and each more makes every drafted token dearer."""

    unrolled_steps: Annotated[int, Field(ge=1, le=16)] | Annotated[list[Stage], Field(min_length=1)] = 3
    """How many tokens ahead the head is trained to read its own output (training-time test). A list is a curriculum,
    such as `[{until: 0.3, steps: 1}, {until: 1.0, steps: 3}]`: one step is several times cheaper, and a good start."""

    output: Literal["shared", "own"] = "shared"
    """What turns a state into logits: the target's own output rows (nothing to train or to ship, and the draft
    vocabulary can be widened while decoding), or own rows that start as a copy of them."""

    init: str = Field(default="last-layer", min_length=1)
    """Where the weights start: `last-layer` copies the target's last layer where its shapes allow, `random` does not,
    and a path names the folder of a trained head to go on from."""

    num_attention_heads: int | None = Field(default=None, ge=1)
    """Query heads of a draft layer. null: as the target's."""

    num_kv_heads: int | None = Field(default=None, ge=1)
    """Key and value heads, a divisor of `num_attention_heads`. null: as the target's."""

    head_dim: int | None = Field(default=None, ge=2, multiple_of=2)
    """Width of one attention head. null: as the target's."""

    intermediate_size: int | None = Field(default=None, ge=1)
    """Inner width of the gated MLP. null: as the target's."""

    dropout: Number = Field(default=0.0, ge=0, lt=1)
    """Share that is dropped of what a draft layer adds to its state, and of EAGLE-3's features before they are fused,
    while training. With few conversations, heads learn them by heart: their training accuracy is far above the
    held-out one. 0: none."""

    attention_bias: bool = False
    """Whether queries, keys and values have biases, as published heads of Qwen2 do."""

    rms_norm_eps: Number | None = Field(default=None, gt=0)
    """What the norms add to the mean square. null: as the target's."""

    max_positions: int | None = Field(default=None, ge=1)
    """Positions that the head declares to serving engines; drafting itself has no limit. null: as the target's."""

    rope: Rope | None = None
    """Rotary parameters, for example `{rope_type: default, rope_theta: 500000.0}`. null: those of the target, scaling
    included."""

    @property
    def most_unrolled_steps(self) -> int:
        """Unrolled steps of the longest stage: the depths that are trained."""
        steps = self.unrolled_steps
        return steps if isinstance(steps, int) else max(stage.steps for stage in steps)

    def steps_at(self, share: float) -> int:
        """Unrolled steps when the share `share` (0 to 1) of the training is done."""
        if isinstance(self.unrolled_steps, int):
            return self.unrolled_steps
        return next(
            (stage.steps for stage in self.unrolled_steps if share < stage.until), self.unrolled_steps[-1].steps
        )

    @field_validator("unrolled_steps")
    @classmethod
    def _check_stages(cls, value: int | list[Stage]) -> int | list[Stage]:
        if isinstance(value, list):
            ends = [stage.until for stage in value]
            if any(later <= earlier for earlier, later in zip(ends, ends[1:], strict=False)) or ends[-1] != 1.0:
                raise ValueError(f"`until` of the stages must ascend and end at 1.0, found {ends}")
        return value

    @field_validator("rope")
    @classmethod
    def _check_rope(cls, value: Rope | None) -> Rope | None:
        if value is None:
            return None
        rope = {"rope_type": "default", **{name: number_from_text(entry) for name, entry in value.items()}}
        known = get_args(RopeTypes)
        if rope["rope_type"] not in known:
            raise ValueError(f"`rope_type` is {rope['rope_type']!r}, expected one of {', '.join(known)}")
        theta = rope.get("rope_theta")
        if isinstance(theta, bool) or not isinstance(theta, int | float) or not theta > 0:
            raise ValueError(f"`rope_theta` is {theta!r}, expected a number above 0, such as 10000.0")
        return rope

    @model_validator(mode="after")
    def _check_heads(self) -> UnrolledConfig:
        heads, kv_heads = self.num_attention_heads, self.num_kv_heads
        if heads is not None and kv_heads is not None and heads % kv_heads:
            raise ValueError(f"`num_attention_heads` ({heads}) must be a multiple of `num_kv_heads` ({kv_heads})")
        return self


class EagleConfig(UnrolledConfig):
    """EAGLE-1, whose weights EAGLE-2 and HASS use too: predicts the target's next final state and reads it again.

    https://arxiv.org/abs/2401.15077; more than one unrolled step is HASS, https://arxiv.org/abs/2408.15766.
    """

    type: Literal["eagle"] = "eagle"  # pyright: ignore[reportIncompatibleVariableOverride]
    """Which head this is."""

    unrolled_steps: Annotated[int, Field(ge=1, le=16)] | Annotated[list[Stage], Field(min_length=1)] = 1
    """How many tokens ahead the head is trained to read its own output: 1 is the published EAGLE-1, 3 the published
    HASS. A list is a curriculum, such as `[{until: 0.3, steps: 1}, {until: 1.0, steps: 3}]`."""

    fc_bias: bool = False
    """Whether the layer that joins embedding and feature has a bias, as the published Vicuna heads do."""

    feature_loss: Number = Field(default=1.0, ge=0)
    """Weight of the smooth-L1 distance between predicted and true features."""

    token_loss: Number = Field(default=0.1, gt=0)
    """Weight of `loss`, the loss on tokens."""

    noise: Number = Field(default=0.2, ge=0)
    """Uniform noise on the features while training, of amplitude `noise / 2 * 512 / length`, length being that of the
    document, on features scaled by `feature_scale`."""

    embedding_scale: Number | None = Field(default=None, gt=0)
    """What embeddings are multiplied with before they meet the features. null: the power of two that brings the
    target's nearest to a root mean square of 1. Published heads have 1; an export multiplies it into `fc`."""

    feature_scale: Number | None = Field(default=None, gt=0)
    """The same for features."""


def _ascending(value: list[int] | None) -> list[int] | None:
    """Layer numbers, each greater than the one before."""
    if value is not None and any(later <= earlier for earlier, later in zip(value, value[1:], strict=False)):
        raise ValueError(f"`layers` must ascend, found {value}")
    return value


class Eagle3Config(UnrolledConfig):
    """EAGLE-3: features of several layers, training-time test, and no loss on features.

    https://arxiv.org/abs/2503.01840; the norms are those of EAGLE-3.1 and of vLLM's speculators.
    """

    type: Literal["eagle3"] = "eagle3"  # pyright: ignore[reportIncompatibleVariableOverride]
    """Which head this is."""

    layers: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)] | None = None
    """Whose states are read: k is what layer k of the target reads, counted from 0 (Hugging Face's hidden_states[k]).
    null: 2, the middle one and the last but two."""

    fc_norm: bool = False
    """Normalises each layer's features on its own before they are fused: their scales differ by far."""

    norm_before_fc: bool = False
    """Normalises all fused features together, as heads of gpt-oss do."""

    norm_before_residual: bool = False
    """The residual stream of the first layer starts from the normalised state instead of the state itself."""

    norm_output: bool = False
    """The next step reads the state after the output norm instead of before it."""

    @field_validator("layers")
    @classmethod
    def _check_layers(cls, value: list[int] | None) -> list[int] | None:
        return _ascending(value)


class DraftConfig(HeadConfig):
    """A student: a language model of its own, made of a few of the target's layers, that reads tokens alone.

    https://arxiv.org/abs/2211.17192 drafts with such models, https://arxiv.org/abs/2310.08461 distils them. It predicts
    the next token from the true text, so `loss_decay` has nothing to weigh.
    """

    type: Literal["draft"] = "draft"  # pyright: ignore[reportIncompatibleVariableOverride]
    """Which head this is."""

    num_layers: int = Field(default=2, ge=1)
    """How many of the target's layers the student keeps. Every drafted token costs all of them and the output rows;
    more of them are right more often."""

    layers: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)] | None = None
    """Which of them, counted from 0. null: `num_layers` at even distances, the first and the last among them."""

    embedding: Literal["shared", "own"] = "shared"
    """What tokens are read by: the target's embedding, frozen and not shipped, or a copy that is trained."""

    output: Literal["shared", "own"] = "shared"
    """What turns a state into logits: the target's output rows, frozen and not shipped, or a copy of those of the draft
    vocabulary that is trained. The final norm is the student's own in any case, and starts as the target's."""

    architecture: dict[str, Any] | None = None
    """The student's configuration in transformers' words. Worked out from the target's and saved with the student; null
    in a recipe."""

    @field_validator("layers")
    @classmethod
    def _check_layers(cls, value: list[int] | None) -> list[int] | None:
        return _ascending(value)

    @model_validator(mode="after")
    def _check_count(self) -> DraftConfig:
        if self.layers is not None and len(self.layers) != self.num_layers:
            raise ValueError(
                f"`layers` names {len(self.layers)} layers and `num_layers` is {self.num_layers}; make them agree"
            )
        return self


HEADS: dict[str, type[MedusaConfig] | type[EagleConfig] | type[Eagle3Config] | type[DraftConfig]] = {
    "medusa": MedusaConfig,
    "eagle": EagleConfig,
    "eagle3": Eagle3Config,
    "draft": DraftConfig,
}
"""The heads that can be trained, by the name under `head.type`."""
