"""What storing features in fewer bits costs a head: its forecast along held-out answers, with exact states and with
those that come back from the cache."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from headstart.data.feature_codec import FINAL, decode, encode
from headstart.data.rendering import Row
from headstart.decode.cost import RankedAnswer, mean_tokens, replay
from headstart.decode.forecast import rank_answer, record_rows
from headstart.errors import DataError
from headstart.heads.base import Head
from headstart.target import Features, Target


@dataclass(frozen=True)
class StorageLoss:
    """Forecasts of one head: `exact` and `stored` are the τ of a chain of all its depths, top_1 the shares of labels
    that are its first choice, by depth, in the same order."""

    storage: str
    exact: float
    stored: float
    top_1_exact: list[float]
    top_1_stored: list[float]

    def __str__(self) -> str:
        change = (self.stored - self.exact) / self.exact
        shares = [" ".join(f"{share:.3f}" for share in top_1) for top_1 in (self.top_1_exact, self.top_1_stored)]
        return (
            f"{self.storage} features: τ of a chain {self.stored:.3f}, with exact ones {self.exact:.3f} "
            f"({change:+.1%}); top-1 by depth {shares[1]}, with exact ones {shares[0]}"
        )


@torch.no_grad()
def storage_loss(head: Head, target: Target, rows: Iterable[Row], storage: str) -> StorageLoss:
    """Replays the last answer of each row; the head drafts in the target's dtype, from the whole draft vocabulary."""
    drafting = copy.deepcopy(head).to(target.device, target.dtype).eval()
    texts = record_rows(target, rows, head.wants)
    if not texts:
        raise DataError("no held-out row has an answer to replay; name other sources under data.held_out")
    exact = [rank_answer(drafting, target, text) for text in texts]
    stored = [
        rank_answer(drafting, target, replace(text, features=through(text.features, storage, target))) for text in texts
    ]
    return StorageLoss(storage, _chain(exact, head), _chain(stored, head), _top_1(exact), _top_1(stored))


def through(features: Features, storage: str, target: Target) -> Features:
    """Features as they come back from a cache of this storage."""

    def there_and_back(state: Tensor) -> Tensor:
        return decode(encode(state[0], FINAL, storage), FINAL, storage, target.dtype, state.device)[None]

    return Features(there_and_back(features.final), {k: there_and_back(tap) for k, tap in features.taps.items()})


def _chain(answers: Sequence[RankedAnswer], head: Head) -> float:
    chain = [(0,) * depth for depth in range(1, head.num_depths + 1)]
    return mean_tokens([replay(answer, chain) for answer in answers])


def _top_1(answers: Sequence[RankedAnswer]) -> list[float]:
    """By depth: what lies behind an answer's end is left out."""
    shares = []
    for depth in range(answers[0].ranks.shape[1]):
        ranks = torch.cat([answer.ranks[: max(0, len(answer.ranks) - depth), depth] for answer in answers])
        shares.append(float((ranks == 0).double().mean()))
    return shares
