"""What a user waits for, in both arms: the first token, each token after it, the whole answer.

Everything is a number of seconds of one request; percentiles are over answers, or over emissions where it says so. With
several rows at a time these are the times of a request within its batch, not its share of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from headstart.eval.acceptance import Number
from headstart.eval.timing import PLAIN, Answer, Timed

PERCENTILES = {"p50": 50, "p90": 90, "p95": 95, "p99": 99}

LATENCY_FORMULAS = {
    "time_to_first_token": "prefill + first step, which may emit several tokens",
    "inter_chunk_latency": "from one emission, of one token or more, to the next; over emissions",
    "time_per_output_token": "seconds after the first emission / tokens after it; of an answer",
    "request_latency": "prefill + all steps",
}
"""How the seconds of `latency` are counted."""


def latency(answers: Sequence[Answer], drafter: str) -> dict[str, dict[str, dict[str, float | None]]]:
    """name -> arm -> percentile -> seconds; None where nothing was timed."""
    return {
        name: {
            shown: percentiles(second for answer in answers for second in seconds(answer.arms[arm]))
            for shown, arm in (("plain", PLAIN), ("drafted", drafter))
        }
        for name, seconds in _SECONDS.items()
    }


def percentiles(values: Iterable[Number]) -> dict[str, float | None]:
    known = list(values)
    return {name: float(np.percentile(known, q)) if known else None for name, q in PERCENTILES.items()}


def _per_token(timed: Timed) -> list[float]:
    tokens = len(timed.token_ids) - timed.steps[0].emitted
    return [sum(timed.chunk_seconds[1:]) / tokens] if tokens else []


_SECONDS: dict[str, Callable[[Timed], list[float]]] = {
    "time_to_first_token": lambda timed: [timed.first_token_seconds],
    "inter_chunk_latency": lambda timed: timed.chunk_seconds[1:],
    "time_per_output_token": _per_token,
    "request_latency": lambda timed: [timed.prefill_seconds + sum(timed.chunk_seconds)],
}
