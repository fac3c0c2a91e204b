"""Texts of a target's with its states, from both sides of its final norm, and what a head is accepted along them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean

from jaxtyping import Float
from torch import Tensor, nn

from headstart.data.rendering import Row
from headstart.decode.cost import RankedAnswer, accepted_at, mean_tokens, replay
from headstart.decode.drafters.plans import chain_paths
from headstart.decode.forecast import Recorded, record_rows
from headstart.eval.diagnosis.finding import Along
from headstart.target import Target, find_layers


@dataclass(frozen=True)
class Known:
    """An answer of the target's with its features, and its states before the final norm, [1, tokens, dim]."""

    text: Recorded
    unnormed: Float[Tensor, "1 tokens dim"]


def record(target: Target, rows: Sequence[Row], layers: Sequence[int]) -> list[Known]:
    """The last answer of every row with its features, HF[k] of `layers` among them; one forward each."""
    with KeptNormInputs(target) as kept:
        texts = record_rows(target, rows, layers)
    before = kept.inputs if kept.norm is not None else [text.features.final for text in texts]
    return [Known(text, states) for text, states in zip(texts, before, strict=True)]


class KeptNormInputs(nn.Module):
    """While entered, keeps what the target's final norm reads, one tensor a forward. It stands in the norm's place,
    since the faster norms of decoding run no hooks."""

    def __init__(self, target: Target):
        super().__init__()
        self.norm = find_layers(target.decoder, target.num_layers, target.name)[1]
        self._decoder, self.inputs = (target.decoder,), list[Tensor]()

    def forward(self, hidden: Tensor) -> Tensor:
        self.inputs.append(hidden)
        assert self.norm is not None
        return self.norm(hidden)

    def __enter__(self) -> KeptNormInputs:
        self._put(self.norm, self)
        return self

    def __exit__(self, *_: object) -> None:
        self._put(self, self.norm)

    def _put(self, old: nn.Module | None, new: nn.Module | None) -> None:
        for owner in self._decoder[0].modules():
            for name, child in owner.named_children():
                if old is not None and child is old and owner is not self:
                    setattr(owner, name, new)
                    return


def accepted_along(answers: Sequence[RankedAnswer], depth: int) -> Along:
    """Of a chain of first choices: τ by replay; by text, the mean over all bases, which differs less by accident."""
    paths = chain_paths(depth)
    each = [float(mean(accepted_at(answer, paths) or [0])) for answer in answers]
    return Along(mean_tokens([replay(answer, paths) for answer in answers]), each)


def answered_row(prompt: Sequence[int], answer: Sequence[int]) -> Row:
    """A prompt and its answer, which is what is learnt from."""
    return Row("answer", [*prompt, *answer], [False] * len(prompt) + [True] * len(answer))
