"""What a check finds: a cause, what it costs, the figure that shows it, and what to type."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from statistics import mean, stdev
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headstart.eval.diagnosis.evidence import Evidence

CAUSES = {
    "other-target": "the target is another model than the head was trained for",
    "chat-template": "the chat template differs from that of training",
    "system-prompt": "the system prompt differs from that of training",
    "foreign-data": "the training answers are not the target's own",
    "loss-mask": "the loss mask is wrong or thin",
    "little-data": "there was too little to learn from",
    "feature-layers": "the head reads other layers than it was trained on",
    "final-norm": "a norm stands on the wrong side of what the head reads",
    "rope": "the rotary positions differ from those of training",
    "position-offset": "features and tokens are paired one position off",
    "draft-vocabulary": "the draft vocabulary is a ceiling",
    "head-tensors": "tensors of the head are random, missing or stale",
    "export-tensors": "tensors of the export are random, missing or stale",
    "tie-flag": "the export's tie flag makes an engine take the wrong output rows",
    "dtype": "the numbers are of another precision than in training",
    "context-length": "prompts are longer than what the head was trained on",
    "forecast-apart": "decoding accepts something else than the head drafts along the same texts",
    "tree-size": "the tree is too large for this device",
    "temperature": "the temperature is above 0",
}
"""Every cause that the doctor can name."""
LEAST, LEAST_SHARE = 0.05, 0.1
"""What a cause must cost to be named: so many tokens a step, and such a share of the drafts that would be accepted."""
SURE = 2.5
"""Standard errors, over the answers, that a gain must be away from none: the best of a dozen trials is taken."""


@dataclass(frozen=True)
class Finding:
    """One cause. lost: tokens a step of acceptance length, or of speed worth as much. measured: the remedy was tried on
    these texts; else `lost` is estimated from a sign."""

    cause: str
    lost: float
    figure: str
    remedy: str
    measured: bool = True

    def __post_init__(self) -> None:
        assert self.cause in CAUSES, self.cause

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "lost": round(self.lost, 4), "says": CAUSES[self.cause]}


class NotLookedAt(Exception):  # noqa: N818  (no fault: nothing to look at)
    """Why a check says nothing, in words that go on from "not looked at: "."""


Check = Callable[["Evidence"], Iterator[Finding]]
"""Looks at the evidence. Raises NotLookedAt where there is nothing to look at."""


@dataclass(frozen=True)
class Along:
    """What a head is accepted along some texts. tau: tokens a step. each: drafts accepted a step, text by text."""

    tau: float
    each: list[float]


def gained(cause: str, before: Along, after: Along, what: str, remedy: str) -> Iterator[Finding]:
    """The finding that a change brings acceptance back, if it is large enough and no accident of these texts. what: the
    change, in words that go on from "with"."""
    lost = after.tau - before.tau
    if counts(lost, after.tau - 1) and surely(before, after):
        yield Finding(cause, lost, f"acceptance length {before.tau:.2f} as it is, {after.tau:.2f} with {what}", remedy)


def surely(before: Along, after: Along) -> bool:
    """Whether the same texts gain: the mean of their differences against its standard error."""
    gains = [more - less for less, more in zip(before.each, after.each, strict=False)]
    if len(gains) < 2:
        return True
    return mean(gains) >= SURE * stdev(gains) / len(gains) ** 0.5


def counts(lost: float, accepted: float) -> bool:
    """Whether a loss is large enough to be named. accepted: drafts a step that would be accepted without it."""
    return lost >= max(LEAST, LEAST_SHARE * accepted)
