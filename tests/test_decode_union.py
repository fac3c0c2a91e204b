"""Several drafters under one tree: nothing lost, nothing twice, and the budget goes to who is right."""

from __future__ import annotations

import pytest
import stubs
import tiny
import torch
from stubs import TREES
from test_decode_model import NEW, plain, prompts, target

from headstart.decode.drafters.base import Request
from headstart.decode.drafters.model import ModelDrafter
from headstart.decode.drafters.ngram import NgramDrafter
from headstart.decode.drafters.union import UnionDrafter
from headstart.decode.engine import Engine
from headstart.decode.sampling import SamplingSettings
from headstart.errors import HeadstartError


def stub(kind: str, tree: str):
    return stubs.stub(kind, dict(enumerate(plain())), TREES[tree], target().vocab_size)


def decode(drafter, batch_size: int = 3, budget: int = 64, **settings):
    requests = [
        Request(prompt_ids=prompt, max_new_tokens=NEW, request_id=number, settings=SamplingSettings(**settings))
        for number, prompt in enumerate(prompts())
    ]
    done = Engine(target(), drafter, batch_size=batch_size, budget=budget).generate(requests)
    return sorted(done, key=lambda one: one.request.request_id)


def accepted(done) -> int:
    return sum(step.accepted for one in done for step in one.steps)


@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize("budget", [1, 2, 5, 64])
def test_the_text_is_the_targets_own(batch_size, budget):
    for parts in (["random", "anti-oracle"], ["mixed", "oracle"], ["random"]):
        drafter = UnionDrafter([stub(part, tree) for part, tree in zip(parts, ["full3x3", "chain4"], strict=False)])
        done = decode(drafter, batch_size, budget)
        assert [one.token_ids for one in done] == plain()
        assert max(step.nodes for one in done for step in one.steps) <= budget


def test_nothing_that_one_of_them_drafts_is_lost():
    """With room for all nodes, every step accepts what the better of the two would; one that is never right costs
    nothing but its nodes."""
    right = accepted(decode(stub("mixed", "full3x3")))
    union = decode(UnionDrafter([stub("anti-oracle", "chain4"), stub("mixed", "full3x3")]))
    assert accepted(union) == right > 0
    both = decode(UnionDrafter([stub("mixed", "full3x3"), stub("oracle", "chain1")]))
    assert accepted(both) >= right


def test_shared_prefixes_stand_once():
    alone = decode(stub("oracle", "chain4"), 1)
    twice = decode(UnionDrafter([stub("oracle", "chain4"), stub("oracle", "chain4")]), 1)
    assert [step.nodes for one in twice for step in one.steps] == [step.nodes for one in alone for step in one.steps]


def test_a_small_budget_goes_to_who_was_right():
    """Four places for two chains of four: at first they share them, in the end the one that is right has all."""
    done = decode(UnionDrafter([stub("anti-oracle", "chain4"), stub("oracle", "chain4")]), 1, budget=5)
    depths = [step.accepted for one in done for step in one.steps if not step.cut]
    assert depths[0] < 4 and all(depth == 4 for depth in depths[len(depths) // 2 :])


def test_what_a_step_tells_is_counted_at_the_right_places():
    drafter = UnionDrafter([NgramDrafter(), NgramDrafter()])
    # chains: 5 6 7 and 5 8; written: 5 6 9
    drafter._learn([[(5,), (5, 6), (5, 6, 7)], [(5,), (5, 8)]], [5, 6, 9])
    assert drafter._seen == [[[1, 1], [1, 1], [0, 1]], [[1, 1], [0, 1]]]
    # written: 5, one token; only what is no longer, or had left it, is known
    drafter._learn([[(5,), (5, 6), (4, 6)], [(), (5, 8)]], [5])
    assert drafter._seen == [[[2, 2], [1, 1], [0, 2]], [[1, 1], [0, 1]]]


def test_texts_are_those_of_the_seed_and_drawn_drafts_are_refused():
    alone = [one.token_ids for one in decode(stub("random", "chain1"), 1, temperature=0.9, seed=3)]
    union = UnionDrafter([NgramDrafter(), stub("random", "full3x3")])
    assert [one.token_ids for one in decode(union, 4, temperature=0.9, seed=3)] == alone
    model = ModelDrafter(tiny.target("llama", dtype=torch.float64, seed=5), target(), 3)
    decode(UnionDrafter([model, NgramDrafter()]))  # greedy rows draw nothing
    with pytest.raises(HeadstartError, match="draws its drafts"):
        decode(UnionDrafter([NgramDrafter(), model]), temperature=0.9)
    with pytest.raises(HeadstartError, match="no drafters"):
        UnionDrafter([])
