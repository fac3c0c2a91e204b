"""From logits to a token, once, for every drafter: settings, the one logits-to-probabilities function, the draw.

A row's randomness is one stream of uniforms indexed by the position of the token in the answer, fixed by the seed. The
k-th new token is always drawn by inverting the distribution at the k-th uniform, so a seed gives the same text in any
batch, with any drafter whose trees are deterministic, and without one. A drafter that draws its tokens needs further
numbers, for the drafts and for the trials that accept or reject them: they come, one after the other, from a second
stream of the row, which nothing else reads. No number is ever used twice.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Literal, cast

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.random.bit_generator import ISeedSequence
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
)
from transformers import TopPLogitsWarper as NucleusLogitsWarper

from headstart.errors import HeadstartError


@dataclass(frozen=True, kw_only=True)
class SamplingSettings:
    """How tokens are chosen; the defaults are greedy decoding. Order and meaning are those of transformers.generate."""

    temperature: float = 0.0
    """0 is greedy; otherwise the logits are divided by it."""
    top_k: int = 0
    """Only the k likeliest tokens; 0 is off."""
    top_p: float = 1.0
    """The smallest set of likeliest tokens whose probability reaches p; 1 is off."""
    min_p: float = 0.0
    """Only tokens at least this fraction as likely as the likeliest; 0 is off."""
    seed: int = 0
    """Seed of this row's own stream of random numbers."""
    repetition_penalty: float = 1.0
    """Divides the positive logits of tokens that prompt or answer hold, multiplies the negative ones; 1 is off."""
    frequency_penalty: float = 0.0
    """Taken off a token's logit for each time that the answer holds it."""
    presence_penalty: float = 0.0
    """Taken off a token's logit if the answer holds it."""
    no_repeat_ngram_size: int = 0
    """No n-gram of this size occurs twice in prompt and answer; 0 is off."""
    min_new_tokens: int = 0
    """No end token before so many tokens."""
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    """Sequences of tokens that the answer may not hold."""
    suppress_tokens: tuple[int, ...] = ()
    """Tokens that the answer may not hold."""
    force_end: bool = False
    """An answer that reaches its length limit ends with the end token."""
    processors: tuple[LogitsProcessor, ...] = ()
    """Any further ones of transformers, or of one's own: functions of text and logits that remember nothing."""
    lossy: Literal["typical"] | None = None
    """"typical": drafts that are likely enough stay (Medusa's typical acceptance, arXiv 2401.10774), whatever the
    chance that the target would have written them. It accepts more, and the text no longer has the target's
    distribution: its figures are never to stand beside exact ones. Nothing changes for greedy rows and without drafts.
    The token behind the accepted ones is drawn from the target, where the original takes its likeliest."""
    typical_epsilon: float = 0.09
    """A typical draft has a probability above this, or ..."""
    typical_delta: float = 0.3
    """... above this times exp(-entropy) of the target's distribution: the smaller of both counts."""

    def __post_init__(self) -> None:
        for name, value, good, expected in [
            ("temperature", self.temperature, 0 <= self.temperature < math.inf, "a number from 0 on"),
            ("top_k", self.top_k, self.top_k >= 0, "a whole number from 0 on"),
            ("top_p", self.top_p, 0 < self.top_p <= 1, "a number above 0, at most 1"),
            ("min_p", self.min_p, 0 <= self.min_p <= 1, "a number from 0 to 1"),
            ("seed", self.seed, 0 <= self.seed < 2**63, "a whole number from 0 to 2^63 - 1"),
            ("repetition_penalty", self.repetition_penalty, 0 < self.repetition_penalty < math.inf, "a number above 0"),
            ("frequency_penalty", self.frequency_penalty, math.isfinite(self.frequency_penalty), "a number"),
            ("presence_penalty", self.presence_penalty, math.isfinite(self.presence_penalty), "a number"),
            ("no_repeat_ngram_size", self.no_repeat_ngram_size, self.no_repeat_ngram_size >= 0, "a number from 0 on"),
            ("min_new_tokens", self.min_new_tokens, self.min_new_tokens >= 0, "a whole number from 0 on"),
            ("lossy", self.lossy, self.lossy in (None, "typical"), 'None or "typical"'),
            ("typical_epsilon", self.typical_epsilon, 0 <= self.typical_epsilon <= 1, "a number from 0 to 1"),
            ("typical_delta", self.typical_delta, 0 <= self.typical_delta < math.inf, "a number from 0 on"),
            ("bad_words_ids", self.bad_words_ids, all(map(len, self.bad_words_ids)), "no empty sequence of tokens"),
        ]:
            if not good:
                raise HeadstartError(f"sampling setting {name}={value} is out of range; give {expected}")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def exact(self) -> bool:
        """Whether the text has the target's own distribution, whatever was drafted."""
        return self.lossy is None or self.greedy

    def warpers(self) -> LogitsProcessorList:
        """transformers' own warpers, in its order."""
        warpers = LogitsProcessorList([TemperatureLogitsWarper(float(self.temperature))])
        if self.top_k:
            warpers.append(TopKLogitsWarper(self.top_k))
        if self.top_p < 1:
            warpers.append(NucleusLogitsWarper(self.top_p))
        if self.min_p > 0:
            warpers.append(MinPLogitsWarper(self.min_p))
        return warpers

    def uniforms(self, count: int) -> Float[Tensor, "count"]:
        """The row's stream: float64 numbers in [0, 1), the k-th for the k-th new token."""
        generator = torch.Generator().manual_seed(self.seed)
        return torch.rand(count, generator=generator, dtype=torch.float64)

    def draft_stream(self) -> np.random.Generator:
        """The row's second stream, for drafts and their trials: a generator of another kind, so that no seed's second
        stream is any seed's first. (torch's keeps 32 bits of a seed: an offset would not tell streams apart.)"""
        bits = np.random.Philox(_NO_SEED)  # pyright: ignore[reportArgumentType]  (stubs leave ISeedSequence out)
        state = bits.state
        state["state"]["key"][0] = self.seed
        bits.state = state
        return np.random.Generator(bits)


class _NoSeed(ISeedSequence):
    """Philox follows from its key alone. Given only that, numpy seeds it from the operating system first and writes the
    key over it then, which takes longer than the rest of a row's way into a batch."""

    def generate_state(self, n_words: int, dtype: Any = np.uint32) -> np.ndarray:
        return np.zeros(n_words, dtype)


_NO_SEED = _NoSeed()


def probabilities(logits: Float[Tensor, "rows vocab"], settings: SamplingSettings) -> Float[Tensor, "rows vocab"]:
    """The distribution that tokens are drawn from, in float64: for the target and for any drafter alike.

    Greedy settings give the point mass on the argmax. Temperatures too small to divide by in the logits' precision act
    like greedy as well, because the largest logit is subtracted first.
    """
    logits = logits.double()
    if settings.greedy:
        return torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).double()
    logits = logits - logits.amax(-1, keepdim=True)
    ids = torch.empty(logits.shape[0], 0, dtype=torch.long, device=logits.device)
    return settings.warpers()(cast(torch.LongTensor, ids), cast(torch.FloatTensor, logits)).softmax(-1)


def draw(probs: Float[Tensor, "rows vocab"], uniform: Float[Tensor, "rows"]) -> Int[Tensor, "rows"]:
    """The token whose slice of the cumulative distribution holds `uniform` in [0, 1).

    A token of probability zero has an empty slice, so it is never drawn, not even at 0.0.
    """
    cumulative = probs.cumsum(-1)
    total = cumulative[:, -1:].contiguous()
    picked = torch.searchsorted(cumulative, uniform[:, None] * total, right=True)
    # Rounding can lift uniform * total to the total itself: then it is the last token that adds any mass to it.
    return torch.minimum(picked, torch.searchsorted(cumulative, total)).squeeze(1)


def draw_in_turn(
    probs: Float[Tensor, "rows vocab"], uniforms: Float[Tensor, "rows count"]
) -> Int[Tensor, "rows count"]:
    """Tokens drawn one after the other without replacement: each from what those before it leave of `probs`.

    All different, as long as anything is left; where nothing is, any token.
    """
    drawn = []
    for uniform in uniforms.unbind(1):
        drawn.append(draw(probs, uniform))
        probs = without(probs, drawn[-1])
    return torch.stack(drawn, dim=1)


def without(probs: Float[Tensor, "rows vocab"], tokens: Int[Tensor, "rows"]) -> Float[Tensor, "rows vocab"]:
    """What is left when one token of each row is taken out: no distribution yet, its sum is below 1."""
    return probs.scatter(1, tokens[:, None], 0)


def choose(
    logits: Float[Tensor, "rows vocab"], settings: list[SamplingSettings], uniform: Float[Tensor, "rows"]
) -> Int[Tensor, "rows"]:
    """One token per row: the argmax where the row is greedy, else drawn at the row's uniform."""
    if any(setting.greedy for setting in settings):
        tokens = logits.argmax(-1)
    else:
        tokens = torch.zeros(len(settings), dtype=torch.long, device=logits.device)
    for rows in group_by_distribution(settings):
        index = torch.tensor(rows, device=logits.device)
        tokens[index] = draw(probabilities(logits[index], settings[rows[0]]), uniform[index])
    return tokens


_distribution_key = attrgetter("temperature", "top_k", "top_p", "min_p")
"""Rows with equal keys share their logits processing. No method: it is asked for every row in every level of a step."""


def group_by_distribution(settings: Sequence[SamplingSettings]) -> list[list[int]]:
    """Rows that share their logits processing, together; greedy rows are in no group."""
    groups: dict[tuple, list[int]] = {}
    for row, key in enumerate(map(_distribution_key, settings)):
        groups.setdefault(key, []).append(row)
    return [rows for key, rows in groups.items() if key[0] != 0]
