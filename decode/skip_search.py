"""Which blocks to leave out: a search on text that the target wrote, without training.

    costs = measure_skip_costs(target)
    found = search_skips(target, rows, costs, tries=200, seed=0, progress=progress.add)
    save_skips(found.skips, "runs/skips", target, length=found.length, search=found.record())

A set of blocks is worth the speed that it promises: the agreement of its drafts with the target, measured at every
position of the text at once and under the very conditions of drafting, put into the closed form with measured costs.
The search goes in three stages: every block left out alone; one after the other left out, those first that save most
for what they cost in agreement; changes of one block or two to the best set so far, at random. (Draft & Verify, arXiv
2309.08168, finds such sets by Bayesian optimisation.)
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from headstart.bypass import Bypass
from headstart.data.rendering import Row, label_runs
from headstart.decode.attention import IMPLEMENTATION, prefill_mask
from headstart.decode.cache import KVCache
from headstart.decode.closed_form import best_length, walltime_factor
from headstart.decode.cost import measure_costs
from headstart.decode.drafters.layer_skip import SkippingDrafter
from headstart.decode.forecast import drafting_seconds
from headstart.decode.skips import Skips
from headstart.errors import HeadstartError
from headstart.target import Target

LONGEST = 8
"""Drafts of a chain at most."""
PATIENCE = 8
"""Blocks left out in a row without any gain, after which the second stage ends."""

KINDS = ("attention", "mlp")
Block = tuple[str, int]
"""Its kind and its layer."""


@dataclass(frozen=True, kw_only=True)
class SkipCosts:
    """What drafting and verifying take, in plain steps."""

    draft: float
    """One draft of the whole target, nothing left out."""
    attention: float
    """What leaving out the attention of one layer saves of it."""
    mlp: float
    """What leaving out the MLP of one layer saves."""
    verify: tuple[float, ...]
    """Verifying 0, 1, 2, .. drafts; the first is 1."""

    def of_draft(self, skips: Skips) -> float:
        return max(self.draft - self.attention * len(skips.attention) - self.mlp * len(skips.mlp), 0.0)

    def of_step(self, skips: Skips, length: int) -> float:
        return self.verify[length] + length * self.of_draft(skips)


@dataclass(frozen=True, kw_only=True)
class SkipSearch:
    """What a search has found."""

    skips: Skips
    length: int
    """Drafts of a chain with the highest forecast; 0 where plain decoding is faster."""
    agreement: float
    """Share of first drafts that the target would have written, on rows that the blocks were not chosen on."""
    speedup: float
    """Over plain decoding, forecast from that agreement, all drafts of a chain taken as equally likely right."""
    positions: int
    """That the agreement was measured at."""
    tries: int
    """Sets of blocks that were looked at."""

    def record(self) -> dict[str, Any]:
        """All but the blocks, for `save_skips`."""
        return {name: value for name, value in asdict(self).items() if name != "skips"}


def measure_skip_costs(target: Target, *, length: int = 4, steps: int = 16) -> SkipCosts:
    """Times drafting with nothing, all attention and all MLPs left out, and steps of every width, on this device."""
    curve = measure_costs(target, widths=range(1, LONGEST + 2), repeats=steps)
    everywhere = tuple(range(target.num_layers))
    whole, attention, mlp = (
        drafting_seconds(SkippingDrafter(target, skips, length), target, length + 1, steps) / (length * curve.at(1))
        for skips in (Skips(), Skips(attention=everywhere), Skips(mlp=everywhere))
    )
    return SkipCosts(
        draft=whole,
        attention=max(whole - attention, 0.0) / target.num_layers,
        mlp=max(whole - mlp, 0.0) / target.num_layers,
        verify=tuple(curve.ratio(drafts + 1) for drafts in range(LONGEST + 1)),
    )


@torch.no_grad()
def search_skips(
    target: Target,
    rows: Iterable[Row],
    costs: SkipCosts,
    *,
    tries: int = 200,
    seed: int = 0,
    progress: Callable[[], None] | None = None,
) -> SkipSearch:
    """The best of at most `tries` sets of blocks, the same for the same seed; each takes a forward over half the rows.

    rows: with labels, best the target's own answers. Blocks are chosen on every other row and judged on the others. The
    keys and values of all are in memory all the while, with room for as many again. progress: called after every try.
    """
    target.model.set_attn_implementation(IMPLEMENTATION)
    texts = [text for row in rows if (text := _Text.read(target, row)) is not None]
    if not texts:
        raise HeadstartError("blocks to leave out are found on labelled text, and the rows have no label; give others")
    if tries < 1:
        raise HeadstartError(f"a search of {tries} tries finds nothing; give 1 or more")
    search = _Search(target, texts[::2], costs, tries, progress)
    search.one_by_one()
    search.in_order()
    search.at_random(random.Random(seed))
    best = max(search.agreements, key=search.worth)
    judged_on = texts[1::2] or texts
    agreement = agreement_on(judged_on, target, best)
    length, speedup = forecast(best, agreement, costs)
    return SkipSearch(
        skips=best,
        length=length,
        agreement=agreement,
        speedup=speedup,
        positions=sum(len(text.at) for text in judged_on),
        tries=len(search.agreements),
    )


def forecast(skips: Skips, agreement: float, costs: SkipCosts) -> tuple[int, float]:
    """(drafts of the best chain, its speed over plain decoding), every draft being right with the same chance."""
    rates = [agreement] * (len(costs.verify) - 1)
    length = best_length(rates, lambda drafts: costs.of_step(skips, drafts))
    return length, walltime_factor(rates[:length], costs.of_step(skips, length))


class _Search:
    """The sets of blocks looked at so far, with their agreement; its stages go on until the tries are spent."""

    def __init__(
        self,
        target: Target,
        texts: Sequence[_Text],
        costs: SkipCosts,
        tries: int,
        progress: Callable[[], None] | None,
    ):
        self._target, self._texts, self._costs, self._tries, self._progress = target, texts, costs, tries, progress
        self._blocks: list[Block] = [(kind, layer) for kind in KINDS for layer in range(target.num_layers)]
        self.agreements: dict[Skips, float] = {}

    @property
    def spent(self) -> bool:
        return len(self.agreements) >= self._tries

    def worth(self, skips: Skips) -> float:
        """The forecast speed of the best chain of one draft at least: so that there is a way up from bad sets too."""
        if skips not in self.agreements:
            self.agreements[skips] = agreement_on(self._texts, self._target, skips)
            if self._progress is not None:
                self._progress()
        rates = [self.agreements[skips]] * (len(self._costs.verify) - 1)
        lengths = range(1, len(rates) + 1)
        return max(walltime_factor(rates[:drafts], self._costs.of_step(skips, drafts)) for drafts in lengths)

    def one_by_one(self) -> None:
        for block in self._blocks:
            if not self.spent:
                self.worth(_as_skips({block}))

    def in_order(self) -> None:
        """Leaves out block after block, first the one that saves most for what it costs in agreement."""
        saved = {"attention": self._costs.attention, "mlp": self._costs.mlp}

        def price(block: Block) -> float:
            return (1 - self.agreements.get(_as_skips({block}), 0.0)) / max(saved[block[0]], 1e-9)

        left_out, best, without_gain = set[Block](), 0.0, 0
        for block in sorted(self._blocks, key=price):
            if self.spent or without_gain == PATIENCE:
                return
            left_out.add(block)
            worth = self.worth(_as_skips(left_out))
            without_gain = 0 if worth > best else without_gain + 1
            best = max(best, worth)

    def at_random(self, dice: random.Random) -> None:
        """Changes the best set by a block or two, as long as there is anything new to look at around it."""
        known = 0
        while not self.spent and known < 10 * len(self._blocks):
            best = max(self.agreements, key=self.worth)
            left_out = {("attention", layer) for layer in best.attention} | {("mlp", layer) for layer in best.mlp}
            changed = left_out ^ set(dice.sample(self._blocks, dice.choice([1, 2])))
            known = known + 1 if _as_skips(changed) in self.agreements else 0
            self.worth(_as_skips(changed))


def _as_skips(blocks: set[Block]) -> Skips:
    return Skips(*(tuple(sorted(layer for found, layer in blocks if found == kind)) for kind in KINDS))


@dataclass(frozen=True)
class _Text:
    """One row as the target has read it, and what it would have written."""

    tokens: Int[Tensor, "1 seq"]
    cache: KVCache
    """Holds the whole text, with room for the keys and values of the drafting target behind it."""
    at: Int[Tensor, "positions"]
    """The tokens before each label: the roots that are drafted from."""
    written: Int[Tensor, "positions"]
    """The target's likeliest token behind each of them."""

    @classmethod
    def read(cls, target: Target, row: Row) -> _Text | None:
        """None where the row has no label behind its first token."""
        bases = [place for first, end in label_runs(row) for place in range(max(first, 1) - 1, end - 1)]
        if not bases:
            return None
        length, device = bases[-1] + 1, torch.device(target.device)
        tokens, at = torch.tensor([row.input_ids[:length]], device=device), torch.tensor(bases, device=device)
        cache = KVCache(target.num_layers, slots=1, capacity=2 * length)
        cache.join(1)
        cache.begin(0, 1)
        allowed, distance, positions = prefill_mask(0, length, 1, device)
        masks = target.masks(allowed, distance)
        features = target.forward(tokens, positions, masks, cache=cache.as_transformers)
        cache.extend(0, length)
        return cls(tokens, cache, at, target.output.logits(features.final[0, at]).argmax(-1))

    def drafted(self, target: Target, skips: Skips) -> Int[Tensor, "positions"]:
        """The first draft behind each root: every token is read once more, with its own keys made by the drafting
        target and those of all tokens before it by the whole one, as they are while decoding."""
        length = self.tokens.shape[1]
        _, distance, positions = prefill_mask(0, length, 1, self.tokens.device)
        masks = target.masks(torch.cat([distance > 0, distance == 0], dim=-1), torch.cat([distance, distance], dim=-1))
        self.cache.begin(0, 1)
        with Bypass(skips.calls(target)):
            features = target.forward(self.tokens, positions, masks, cache=self.cache.as_transformers)
        return target.output.logits(features.final[0, self.at]).argmax(-1)


def agreement_on(texts: Sequence[_Text], target: Target, skips: Skips) -> float:
    """The share of roots behind which the first draft is the target's own token."""
    right = sum(int((text.drafted(target, skips) == text.written).sum()) for text in texts)
    return right / sum(len(text.at) for text in texts)
