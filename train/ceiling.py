"""The ceiling that a draft vocabulary puts on acceptance: what the target would say that the head cannot draft."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from headstart.data.agreement import forward_states
from headstart.data.packing import TokenBatch
from headstart.heads.vocab import DraftVocab
from headstart.target import Target

CHUNK = 256
"""Positions whose logits over the whole vocabulary are in memory together."""


@dataclass(frozen=True)
class Outside:
    """Of the target's predictions of `tokens` supervised tokens, what lies outside a draft vocabulary.

    probability: mean share of the probability, which no draft can win when sampling at temperature 1. argmaxes: share
    of the first choices, which no draft can hit in greedy decoding.
    """

    probability: float
    argmaxes: float
    tokens: int

    def __str__(self) -> str:
        return (
            f"outside of it lie {self.probability:.1%} of the target's probability and {self.argmaxes:.1%} of its "
            f"first choices, over {self.tokens} held-out tokens: no head with this vocabulary is accepted more often"
        )


@torch.no_grad()
def outside(
    target: Target,
    vocab: DraftVocab,
    batches: Iterable[TokenBatch],
    max_tokens: int = 2048,
    final: Callable[[TokenBatch], Tensor] | None = None,
) -> Outside | None:
    """Looks at the predictions of supervised tokens until `max_tokens` were seen; None where there are none.

    final: gives the final states of a batch, [batch, seq, dim]; None: one forward of the target each. Logits are made
    in chunks.
    """
    final = final or forward_states(target)
    ids = vocab.ids.to(target.device)
    inside = torch.zeros((), dtype=torch.float64, device=target.device)
    drafted = tokens = 0
    for batch in batches:
        batch = batch.to(target.device)
        scored = batch.labels_at(1)[1]
        if not scored.any():
            continue
        for hidden in final(batch)[scored].split(CHUNK):
            logits = target.output.logits(hidden).float()
            inside += (logits[:, ids].logsumexp(-1) - logits.logsumexp(-1)).double().exp().sum()
            drafted += int(torch.isin(logits.argmax(-1), ids).sum())
        tokens += int(scored.sum())
        if tokens >= max_tokens:
            break
    return Outside(1 - float(inside) / tokens, 1 - drafted / tokens, tokens) if tokens else None
