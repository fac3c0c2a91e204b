"""Acceptance as measured is acceptance as computed: exactly enumerated on a target of twelve tokens.

Chains: 1 - TV(p, q) at each depth; trees of fixed choices: the sum of p over the children; sampled trees: every ordered
draw of siblings, refused one after the other, written down by the definitions. Tokens per step = 1 + the sum over nodes
of the probability that their path is accepted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from test_decode_rejection import head_of
from test_decode_sampled_trees import medusa_head
from test_decode_sampling import PROMPT, VOCAB, conditionals, no_garbage_collection, small_target

from headstart.decode import engine as engine_module
from headstart.decode.drafters.base import Request
from headstart.decode.drafters.heads import head_drafter
from headstart.decode.drafters.plans import Plan, SampledChain, SampledTree, StaticTree
from headstart.decode.engine import Engine
from headstart.decode.sampling import SamplingSettings
from headstart.decode.tree import Path, TokenTree
from headstart.decode.verify import Verified, verify

ROWS = 6_000
WIDE = [(0,), (1,), (2,), (0, 0), (0, 1), (1, 0)]
HEADS = {"eagle": lambda: head_of("own"), "medusa": medusa_head}


@dataclass
class FirstStep:
    """The first step of ROWS answers that differ in their seeds alone."""

    tree: TokenTree
    verdicts: list[Verified]

    def share(self, *nodes: int) -> float:
        """Steps that accepted all of these nodes."""
        return float(np.mean([set(nodes) <= set(one.path) for one in self.verdicts]))

    @property
    def tokens_per_step(self) -> float:
        return float(np.mean([len(one.tokens) for one in self.verdicts]))

    def q_after(self, *drafts: int) -> np.ndarray:
        """What the head drafts from behind these drafts, as it told when it last drew them."""
        drawn, parents = self.tree.drawn, self.tree.topology.parents[0].tolist()
        assert drawn is not None
        if not drafts:
            return drawn.probs[0, drawn.place(0)].numpy()
        for node in (node for node, above in enumerate(parents) if above == 0 and node in parents):
            rows = (self.tree.tokens[:, node] == drafts[0]).nonzero()
            if len(rows):
                return drawn.probs[int(rows[0]), drawn.place(node)].numpy()
        return np.full(VOCAB, 1 / VOCAB)  # never drawn in ROWS steps: what stands below it counts for nothing


def first_step(head: str, plan: Plan | Sequence[Path], monkeypatch, setting: str = "warm") -> FirstStep:
    taken = []

    def noting(tree, *rest, **named):
        verdicts = verify(tree, *rest, **named)
        taken.append(FirstStep(tree, verdicts))
        return verdicts

    monkeypatch.setattr(engine_module, "verify", noting)
    engine = Engine(small_target(), head_drafter(HEADS[head](), small_target(), plan), batch_size=ROWS)
    asked = [
        Request(prompt_ids=PROMPT, max_new_tokens=1, settings=SamplingSettings(temperature=1.0, seed=seed))
        for seed in range(ROWS)
    ]
    with no_garbage_collection():
        list(engine.generate(asked))
    return taken[0]


def near(measured: float, computed: float, spread: float = 0.5) -> bool:
    """Within four standard errors of a mean over ROWS steps."""
    return abs(measured - computed) < 4 * spread / ROWS**0.5


def p_after(*drafts: int) -> np.ndarray:
    return conditionals("warm")[drafts]


def kept(p: np.ndarray, q: np.ndarray, count: int) -> np.ndarray:
    """[i, x]: the probability that of `count` siblings drawn from q without replacement the i-th stays and is x."""
    found = np.zeros((count, VOCAB))

    def try_next(turn: int, left: np.ndarray, urn: np.ndarray, weight: float) -> None:
        if turn == count or weight == 0:
            return
        for token in np.flatnonzero(urn):
            stays = min(1.0, left[token] / urn[token])
            found[turn, token] += weight * urn[token] * stays
            rest, others = np.maximum(left - urn, 0), np.where(np.arange(VOCAB) == token, 0, urn)
            if stays < 1 and others.sum() > 0:
                try_next(turn + 1, rest / rest.sum(), others / others.sum(), weight * urn[token] * (1 - stays))

    try_next(0, p, q, 1.0)
    return found


def children(paths: Sequence[Path], above: Path) -> int:
    return sum(path[:-1] == above for path in paths)


@pytest.mark.parametrize("head", HEADS)
def test_a_drawn_chain_is_accepted_with_one_minus_the_total_variation(head, monkeypatch):
    step = first_step(head, SampledChain(length=2), monkeypatch)
    p, q = p_after(), step.q_after()
    first = 1 - np.abs(p - q).sum() / 2
    both = sum(min(p[x], q[x]) * (1 - np.abs(p_after(x) - step.q_after(x)).sum() / 2) for x in range(VOCAB) if q[x] > 0)
    assert 0.1 < first < 0.95
    assert near(step.share(1), first) and near(step.share(1, 2), both)
    assert near(step.tokens_per_step, 1 + first + both, spread=1)


@pytest.mark.parametrize("head", HEADS)
def test_fixed_choices_are_accepted_with_the_targets_probability_of_the_children(head, monkeypatch):
    step = first_step(head, StaticTree(paths=WIDE), monkeypatch)
    tokens, parents = step.tree.tokens[0].tolist(), step.tree.topology.parents[0].tolist()
    assert (step.tree.tokens[:, 1:] == step.tree.tokens[:1, 1:]).all()
    chances = {0: 1.0}
    for node in range(1, 1 + len(WIDE)):
        above = [] if parents[node] == 0 else [tokens[parents[node]]]
        chances[node] = chances[parents[node]] * float(p_after(*above)[tokens[node]])
        assert near(step.share(node), chances[node])
    assert near(sum(step.share(node) for node in (1, 2, 3)), float(p_after()[tokens[1:4]].sum()))
    assert near(step.tokens_per_step, sum(chances.values()), spread=1)


@pytest.mark.parametrize("head", HEADS)
def test_a_sampled_trees_tokens_per_step_are_one_and_all_paths_acceptance(head, monkeypatch):
    step = first_step(head, SampledTree(paths=WIDE), monkeypatch)
    at_root, total = kept(p_after(), step.q_after(), 3), 1.0
    assert at_root.sum() > 1 - np.abs(p_after() - step.q_after()).sum() / 2 + 0.02  # siblings add to the first
    for rank in range(3):
        assert near(step.share(1 + rank), at_root[rank].sum())
        below = children(WIDE, (rank,))
        for token in np.flatnonzero(at_root[rank]):
            deeper = kept(p_after(int(token)), step.q_after(int(token)), below).sum() if below else 0.0
            total += at_root[rank, token] * (1 + deeper)
    assert near(step.tokens_per_step, total, spread=1)


def test_the_enumeration_of_siblings_knows_the_easy_cases():
    p, q = np.array([0.7, 0.3] + [0.0] * 10), np.array([0.4, 0.6] + [0.0] * 10)
    assert kept(p, q, 1).sum() == pytest.approx(0.7)  # 1 - TV
    assert kept(p, q, 2).sum(0)[:2] == pytest.approx([0.7, 0.3])  # both tokens tried: one of them always stays
    assert kept(p, p, 3)[0].sum() == pytest.approx(1)
