"""How often the target would have written the data itself: its argmax against the labels, teacher-forced."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from headstart.data.packing import TokenBatch
from headstart.target import Target

FOREIGN_BELOW = (
    0.7  # greedy answers of the target agree to nearly 1, its own samples to 0.7-0.9, other people's to 0.3-0.6
)
CHUNK = 1024


@dataclass(frozen=True)
class Agreement:
    """`matches` of `tokens` labels are what the target puts first in their context."""

    matches: int
    tokens: int

    @property
    def share(self) -> float:
        """matches / tokens; 0 where nothing was compared."""
        return self.matches / self.tokens if self.tokens else 0.0

    def warning(self) -> str | None:
        """What to say about answers that the target didn't write; None where it may have."""
        if not self.tokens or self.share >= FOREIGN_BELOW:
            return None
        return (
            f"The target itself would have written {self.share:.0%} of the {self.tokens} supervised tokens looked at. "
            "Heads are accepted more often when they learn from its own answers: `headstart data distill` makes them."
        )


def forward_states(target: Target) -> Callable[[TokenBatch], Tensor]:
    """Gives the final states of a batch, [batch, seq, dim], by a forward of the target."""
    return lambda batch: target.forward(batch.input_ids, batch.position_ids, target.masks(*batch.attention())).final


@torch.no_grad()
def agreement(
    target: Target,
    batches: Iterable[TokenBatch],
    *,
    max_tokens: int = 4096,
    final: Callable[[TokenBatch], Tensor] | None = None,
) -> Agreement:
    """Compares until `max_tokens` labels were seen; logits are made in chunks.

    final: gives the final states of a batch, [batch, seq, dim]; None: one forward of the target each.
    """
    final = final or forward_states(target)
    matches = tokens = 0
    for batch in batches:
        batch = batch.to(target.device)
        labels, scored = batch.labels_at(1)
        if not scored.any():
            continue
        for hidden, label in zip(final(batch)[scored].split(CHUNK), labels[scored].split(CHUNK), strict=True):
            matches += int((target.output.logits(hidden).argmax(-1) == label).sum())
        tokens += int(scored.sum())
        if tokens >= max_tokens:
            break
    return Agreement(matches, tokens)
