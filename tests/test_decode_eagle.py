"""EAGLE heads in the decoder: exact whatever they draft, and drafting what they were trained to."""

from __future__ import annotations

import pytest
from eagle_cases import KINDS, decode, learnt, plain, requests, target_of, texts
from stubs import chain, full_tree

from headstart.decode.drafters.eagle import EagleDrafter
from headstart.decode.drafters.plans import DynamicTree, SampledChain, StaticTree

SPARSE = [(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (2, 3), (0, 0, 0, 1)]
PLANS = {
    "chain": chain(4),
    "one": [(0,)],
    "full": full_tree(3, 3),
    "sparse": SPARSE,
    "empty": [],
    "stopping": StaticTree(paths=SPARSE, stop_below=0.3),
    "dynamic": DynamicTree(depth=4, width=3, num_nodes=12),
    "dynamic-stopping": DynamicTree(depth=5, width=3, num_nodes=20, stop_below=0.2),
    "drawn": SampledChain(length=4),
    "drawn-stopping": SampledChain(length=6, stop_below=0.4),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("plan", PLANS)
def test_the_text_is_the_targets_own_for_every_plan(kind, plan):
    target = target_of()
    for batch_size in (1, 3):
        out = decode(target, EagleDrafter(learnt(kind), target, PLANS[plan]), requests(), batch_size=batch_size)
        assert texts(out) == plain()
        accepted = sum(step.accepted for one in out for step in one.steps)
        print(kind, plan, batch_size, accepted, sum(len(o.steps) for o in out))
