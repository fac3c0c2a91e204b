"""Is the drafted text the target's own? What can be asked of floating point, measured, with nothing waved through.

float64: the texts are equal. float32: where a text first differs, the two tokens must tie: in an uncached forward both
lie within four times the measured difference between logits of one row and of n rows. bfloat16, float16: one token and
n tokens go through kernels that round differently, and ties are common, so texts part often. Then every emitted token
must lie within twice the measured logit error of the best one in float32 with the same weights, and no more texts may
part from plain decoding than those of a control arm do, beyond chance: plain decoding at the same width of a forward.

A cache that keeps one wrong row fails each of these; the tests plant one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from headstart.decode.attention import prefill_mask
from headstart.decode.cache import KVCache
from headstart.decode.decode_copy import untouched
from headstart.decode.drafters.base import Drafter, Request
from headstart.decode.engine import Engine
from headstart.eval.intervals import more_often
from headstart.target import Target

TIE = 4
"""In float32, tokens tie within so many times the difference between one row and n rows."""
ERRORS = 2
"""In half precision, a token is as good as the best within so many times the logit error."""
ERROR_QUANTILE, TOP = 0.999, 10
"""The logit error is this quantile over the tokens with the 10 highest logits at every position."""
LEVEL = 0.01
"""Of the one-sided exact test against the control arm."""
WIDTH_TEXTS, WIDTH_TOKENS = 2, 32
"""Texts, beside those that part, and tokens of each on which one row is compared with n rows."""

Text = Sequence[int]


@dataclass(frozen=True)
class Divergence:
    """Where a drafted text first differs from the plain one."""

    prompt: int
    position: int
    gap: float | None
    """By how much the worse of the two tokens lies below the best logit; None where one text just ends."""
    allowed: bool


@dataclass(frozen=True)
class FullPrecision:
    """The outcome in float32 or float64."""

    dtype: str
    compared: int
    identical: int
    row_difference: float
    """Largest difference between logits of one row and of n rows; what rounding alone does."""
    limit: float
    divergences: list[Divergence]

    @property
    def passed(self) -> bool:
        return all(divergence.allowed for divergence in self.divergences)


@dataclass(frozen=True)
class HalfPrecision:
    """The outcome in bfloat16 or float16."""

    dtype: str
    compared: int
    identical: int
    control_identical: int
    """Texts that plain decoding at the drafted width leaves as they are."""
    p_value: float
    """That the drafted texts part from the plain ones no more often than the control's: McNemar, exact, one-sided."""
    tokens: int
    logit_error: float
    """The 99.9th percentile."""
    limit: float
    largest_gap: float
    outside: list[Divergence]
    """Emitted tokens that lie further below the best than the limit."""

    @property
    def tokens_passed(self) -> bool:
        return not self.outside

    @property
    def share_passed(self) -> bool:
        return self.p_value >= LEVEL

    @property
    def share_could_fail(self) -> bool:
        """Whether there are texts enough: if all of them parted, the test would notice."""
        return 0.5**self.control_identical < LEVEL

    @property
    def passed(self) -> bool:
        return self.tokens_passed and self.share_passed


def as_dict(outcome: FullPrecision | HalfPrecision) -> dict[str, Any]:
    """For the report: all fields, and what passed."""
    names = [name for name, value in vars(type(outcome)).items() if isinstance(value, property)]
    return {**asdict(outcome), **{name: getattr(outcome, name) for name in names}}


def decode(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Text],
    max_new_tokens: int,
    budget: int,
    progress: Callable[[], None] = lambda: None,
) -> list[Text]:
    """Greedy answers, one at a time. With `NoDraft(width)` these are the texts of the control arm."""
    engine = Engine(target, drafter, budget=budget)
    requests = (Request(prompt_ids=prompt, max_new_tokens=max_new_tokens) for prompt in prompts)
    texts = []
    for generation in engine.generate(requests):
        texts.append(generation.token_ids)
        progress()
    return texts


@torch.no_grad()
def check_full_precision(
    target: Target, prompts: Sequence[Text], plain: Sequence[Text], drafted: Sequence[Text], width: int
) -> FullPrecision:
    """Compares greedy texts of a float32 or float64 target. width: nodes of the drafted trees."""
    reference = untouched(target)
    places = [first_difference(*pair) for pair in zip(plain, drafted, strict=True)]
    # rounding grows with the context, so it is measured where texts part as well
    texts = [index for index, place in enumerate(places) if index < WIDTH_TEXTS or place is not None]
    difference = max((row_difference(target, prompts[index], plain[index], width) for index in texts), default=0.0)
    exact = target.dtype == torch.float64
    limit = 0.0 if exact else TIE * difference
    divergences = []
    for index, (prompt, first, second) in enumerate(zip(prompts, plain, drafted, strict=True)):
        position = places[index]
        if position is None:
            continue
        gap = None
        if position < min(len(first), len(second)):
            logits = answer_logits(reference, prompt, first[: position + 1])[-1]
            gap = float(logits.max() - logits[[first[position], second[position]]].min())
        divergences.append(Divergence(index, position, gap, gap is not None and gap < limit))
    return FullPrecision(
        dtype=_name(target.dtype),
        compared=len(prompts),
        identical=len(prompts) - len(divergences),
        row_difference=difference,
        limit=limit,
        divergences=divergences,
    )


@torch.no_grad()
def check_half_precision(
    target: Target,
    wide: Target,
    prompts: Sequence[Text],
    plain: Sequence[Text],
    drafted: Sequence[Text],
    control: Sequence[Text],
) -> HalfPrecision:
    """Judges drafted texts of a half-precision target. wide: the same weights in float32 (`decode_copy.in_float32`)."""
    reference = untouched(wide)
    errors, gaps = [], []
    for prompt, text in zip(prompts, drafted, strict=True):
        exact, rounded = answer_logits(reference, prompt, text), answer_logits(target, prompt, text)
        best = exact.topk(min(TOP, exact.shape[-1]))
        errors.append((rounded.gather(1, best.indices) - best.values).abs().flatten())
        gaps.append(best.values[:, 0] - exact.gather(1, torch.tensor(text, device=exact.device)[:, None])[:, 0])
    error = float(torch.cat(errors).quantile(ERROR_QUANTILE))
    limit = ERRORS * error
    outside = [
        Divergence(index, position, gap, False)
        for index, text_gaps in enumerate(gaps)
        for position, gap in enumerate(text_gaps.tolist())
        if gap > limit
    ]
    parted = [first_difference(*pair) is not None for pair in zip(plain, drafted, strict=True)]
    control_parted = [first_difference(*pair) is not None for pair in zip(plain, control, strict=True)]
    return HalfPrecision(
        dtype=_name(target.dtype),
        compared=len(prompts),
        identical=parted.count(False),
        control_identical=control_parted.count(False),
        p_value=more_often(parted, control_parted),
        tokens=sum(len(text) for text in drafted),
        logit_error=error,
        limit=limit,
        largest_gap=float(torch.cat(gaps).max()),
        outside=outside,
    )


def first_difference(first: Text, second: Text) -> int | None:
    """The first position at which two texts differ; the end of the shorter one if it begins the other."""
    for position, (one, other) in enumerate(zip(first, second, strict=False)):
        if one != other:
            return position
    return None if len(first) == len(second) else min(len(first), len(second))


@torch.no_grad()
def answer_logits(target: Target, prompt: Text, text: Text) -> Float[Tensor, "tokens vocab"]:
    """What the target gives for every token of `text` behind `prompt`: one uncached, plainly causal forward."""
    ids = torch.tensor([[*prompt, *text][:-1]], device=target.device)
    positions = torch.arange(ids.shape[1], device=ids.device)[None]
    final = target.forward(ids, positions, None).final[:, len(prompt) - 1 :]
    logits = target.output.logits(final)[0]
    return logits if logits.dtype == torch.float64 else logits.float()


@torch.no_grad()
def row_difference(target: Target, prompt: Text, text: Text, width: int) -> float:
    """Largest absolute difference of logits between forwards of one token and of `width`, behind the same cache."""
    ids = [*prompt, *text[:WIDTH_TOKENS]]
    one, many = (_cached_logits(target, ids, len(prompt) - 1, rows) for rows in (1, max(width, 2)))
    return float((one - many).abs().max())


def _cached_logits(target: Target, ids: Text, start: int, rows: int) -> Float[Tensor, "tokens vocab"]:
    """Logits of the tokens from `start` on, read `rows` at a time behind a cached beginning."""
    cache = KVCache(target.num_layers, slots=1, capacity=len(ids))
    cache.join(1)
    logits = []
    edges = [0, *range(start, len(ids), rows), len(ids)]
    for begin, end in zip(edges, edges[1:], strict=False):
        if begin == end:
            continue
        cache.begin(0, 1)
        allowed, distance, positions = prefill_mask(begin, end - begin, 1, torch.device(target.device))
        tokens = torch.tensor([ids[begin:end]], device=target.device)
        masks = target.masks(allowed, distance)
        features = target.forward(tokens, positions, masks, cache=cache.as_transformers)
        cache.extend(0, end - begin)
        if begin >= start:
            logits.append(target.output.logits(features.final)[0])
    return torch.cat(logits)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
