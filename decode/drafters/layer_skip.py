"""The target drafts for itself with a part of its layers: the first few of them, or all but some blocks.

    drafter = EarlyExitDrafter(target, exit_layer=8, length=4)
    drafter = skipping_drafter("runs/skips", target)

Both read and write the target's own cache: a draft sees the text as the target sees it, and its keys stand where
verification writes them anew. So they hold no weight and no cache of their own, and a prompt costs them nothing. Rows
that sample draw their drafts, and the rejection rule verifies them; greedy rows draft the likeliest tokens, and unless
`drawn` all rows do, which a union can verify.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from headstart.bypass import Bypass
from headstart.decode.attention import IMPLEMENTATION, tree_mask
from headstart.decode.drafters.base import NoDraft, Rows
from headstart.decode.drafters.drawing import draw_chain
from headstart.decode.selfcheck import check_parts
from headstart.decode.skips import Skips, check_skips, load_skips
from headstart.decode.tree import TokenTree, Topology, VerifyFrom
from headstart.errors import HeadstartError
from headstart.target import Features, Target


class _OwnDrafter(NoDraft):
    """Chains of `length` tokens from a part of the target, whose attention is switched to ours, for good."""

    name = "layer-skip"

    def __init__(self, target: Target, length: int, drawn: bool):
        super().__init__()
        if length < 0:
            raise HeadstartError(f"a chain of {length} drafts cannot be drafted; give 0 or more")
        self.target, self.length, self.drawn = target, length, drawn
        target.model.set_attn_implementation(IMPLEMENTATION)

    def propose(self, rows: Rows, budget: int) -> TokenTree:
        wanted = min(self.length, budget - 1)
        limits = [max(0, min(wanted, self.target.max_positions - len(ids))) for ids in rows.ids]
        if max(limits) == 0:
            return super().propose(rows, budget)
        depths = count()

        def read(tokens: Int[Tensor, "rows"]) -> Float[Tensor, "rows vocab"]:
            return self.target.output.logits(self._run(rows, tokens, next(depths)).final[:, 0])

        return draw_chain(read(rows.roots()), rows, limits, read, drawn=self.drawn)

    def _run(self, rows: Rows, tokens: Int[Tensor, "rows"], depth: int) -> Features:
        """The part of the target on one token of each row, at this depth of its tree; the rows' lengths stay."""
        cache, lengths = rows.cache, rows.cache.lengths
        cache.lengths = [length + depth for length in lengths]
        try:
            cache.begin(0, len(rows))
            node = Topology.chain(0, rows.device).expand(len(rows))
            ends = torch.tensor(cache.lengths, device=rows.device)
            allowed, distance, positions = tree_mask(node, ends, cache.key_length(1))
            return self._forward(
                tokens[:, None],
                positions.clamp(max=self.target.max_positions - 1),
                self.target.masks(allowed, distance),
                cache=cache.as_transformers,
            )
        finally:
            cache.lengths = lengths

    def _forward(self, *inputs: Any, **more: Any) -> Features:
        """What `Target.forward` does, by the part that drafts."""
        raise NotImplementedError


class EarlyExitDrafter(_OwnDrafter):
    """The first `exit_layer` layers, the final norm and the output head (LayerSkip, arXiv 2404.16710).

    Verification goes on from the states at the exit. So a step of K drafts is K + 1 passes of the first layers, one
    token each, and one pass of the others over K + 1 tokens; no layer reads a token twice. The last of the K + 1
    reads the last draft, for the token behind it, and needs no logits. Raises TargetError in one sentence where a
    model cannot be run in two parts.
    """

    def __init__(self, target: Target, exit_layer: int, length: int = 4, *, drawn: bool = True):
        if not 1 <= exit_layer < target.num_layers:
            raise HeadstartError(
                f"{target.name} has {target.num_layers} layers and cannot draft with the first {exit_layer}; give 1 to "
                f"{target.num_layers - 1}"
            )
        check_parts(target, exit_layer)
        super().__init__(target, length, drawn)
        self.exit_layer = exit_layer
        self._states: list[Float[Tensor, "rows 1 dim"]] = []
        """HF[exit_layer] of this step's nodes so far."""

    def propose(self, rows: Rows, budget: int) -> TokenTree:
        self._states = []
        tree = super().propose(rows, budget)
        if not self._states:
            return tree
        self._run(rows, tree.tokens[:, -1], tree.num_nodes - 1)
        return replace(tree, verify_from=VerifyFrom(self.exit_layer, torch.cat(self._states, dim=1)))

    def _forward(self, *inputs: Any, **more: Any) -> Features:
        features = self.target.forward(*inputs, **more, layers=[self.exit_layer], stop=self.exit_layer)
        self._states.append(features.taps[self.exit_layer])
        return features


class SkippingDrafter(_OwnDrafter):
    """The whole target but for some attention and MLP blocks (Draft & Verify, arXiv 2309.08168); verified in full."""

    def __init__(self, target: Target, skips: Skips, length: int = 4, *, drawn: bool = True):
        check_skips(skips, target, "skipped blocks")
        skips.calls(target)  # refused here, not in the middle of a text
        super().__init__(target, length, drawn)
        self.skips = skips

    def _forward(self, *inputs: Any, **more: Any) -> Features:
        with Bypass(self.skips.calls(self.target)):
            return self.target.forward(*inputs, **more)


def skipping_drafter(
    folder: str | Path,
    target: Target,
    length: int | None = None,
    *,
    drawn: bool = True,
    allow_other_target: bool = False,
) -> SkippingDrafter:
    """The drafter of a folder that `save_skips` wrote; its chains as long as was found best where `length` is None."""
    skips, best = load_skips(folder, target, allow_other_target)
    return SkippingDrafter(target, skips, best if length is None else length, drawn=drawn)
