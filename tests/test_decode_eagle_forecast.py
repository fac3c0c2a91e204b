"""What is forecast along an answer is what is decoded, step by step: chains, static and dynamic trees, any drafter."""

from __future__ import annotations

import pytest
from eagle_cases import KINDS, decode, features_of, learnt, plain, requests, target_of, text_batch, texts
from stubs import chain, full_tree

from headstart.decode.cost import grow_tree, replay, replay_grown
from headstart.decode.drafters.base import NoDraft
from headstart.decode.drafters.eagle import EagleDrafter
from headstart.decode.drafters.ngram import NgramDrafter
from headstart.decode.drafters.plans import DynamicTree, SampledChain, StaticTree
from headstart.decode.forecast import Recorded, grow_rows, rank_answer, replay_drafts
from headstart.decode.tree import sort_paths

SPARSE = [(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (2, 3), (0, 0, 0, 1)]


def recorded(head, target, generation) -> Recorded:
    ids = [*generation.request.prompt_ids, *generation.token_ids]
    return Recorded(ids, len(generation.request.prompt_ids), features_of(head, target, text_batch(ids)))


def measured(generation) -> list[int]:
    return [step.accepted for step in generation.steps if not step.cut]


def accepted(run: list[tuple[int, int]]) -> list[int]:
    return [drafts for _, drafts in run]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize("paths", [chain(3), full_tree(3, 3), SPARSE], ids=["chain", "full", "sparse"])
def test_ranks_along_the_text_are_those_of_a_static_tree(kind, small, paths):
    target, head, total = target_of(), learnt(kind, small=small), 0
    for ignore_end in (True, False):
        out = decode(target, EagleDrafter(head, target, paths), requests(ignore_end=ignore_end), batch_size=2)
        for generation in out:
            ranks = rank_answer(head, target, recorded(head, target, generation), depth=5)
            assert accepted(replay(ranks, sort_paths(paths, 5, 40))) == measured(generation)
            total += sum(measured(generation))
    assert total > 10


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("small", [False, True])
def test_trees_grown_at_every_base_are_those_that_are_decoded(kind, small):
    target, head = target_of(), learnt(kind, small=small)
    answers = decode(target, NoDraft(), requests())
    records = [recorded(head, target, one) for one in answers]
    for width, shapes in [(2, [(1, 3), (4, 6)]), (4, [(2, 9), (4, 12)])]:
        grown = grow_rows(head, target, records, depth=4, width=width)
        for depth, nodes in shapes:
            plan = DynamicTree(depth=depth, width=width, num_nodes=nodes)
            out = decode(target, EagleDrafter(head, target, plan), requests(), batch_size=2)
            assert texts(out) == plain()
            for answer, generation in zip(grown, out, strict=True):
                assert accepted(replay_grown(answer, depth, nodes)) == measured(generation), (depth, nodes)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "plan",
    [SPARSE, DynamicTree(depth=4, width=3, num_nodes=9, stop_below=0.1), SampledChain(length=4)]
    + [StaticTree(paths=full_tree(2, 4), stop_below=0.2)],
    ids=["static", "dynamic", "chain", "stopping"],
)
def test_a_drafter_proposes_along_a_recorded_text_what_it_does_while_decoding(kind, plan):
    target, head = target_of(), learnt(kind, small=True)
    out = decode(target, EagleDrafter(head, target, plan), requests(), batch_size=3)
    runs = replay_drafts(EagleDrafter(head, target, plan), [recorded(head, target, one) for one in out], budget=64)
    assert [accepted(run) for run in runs] == [measured(generation) for generation in out]
    assert sum(map(sum, map(accepted, runs))) > 3


def test_any_drafter_can_be_replayed():
    target = target_of("gpt2")  # its texts loop, so lookup finds something
    head = learnt("eagle3")
    out = decode(target, NgramDrafter(), requests(24), batch_size=2)
    runs = replay_drafts(NgramDrafter(), [recorded_plain(target, one) for one in out], budget=64, batch_size=2)
    assert [accepted(run) for run in runs] == [measured(generation) for generation in out]
    assert sum(map(sum, map(accepted, runs))) > 3 and head.num_depths == 3


def recorded_plain(target, generation) -> Recorded:
    ids = [*generation.request.prompt_ids, *generation.token_ids]
    batch = text_batch(ids)
    features = target.forward(batch.input_ids, batch.position_ids, target.masks(*batch.attention()))
    return Recorded(ids, len(generation.request.prompt_ids), features)


def test_a_tree_grown_from_the_ranks_is_decoded_as_forecast():
    target, head = target_of(), learnt("eagle3")
    ranks = [rank_answer(head, target, recorded(head, target, one)) for one in decode(target, NoDraft(), requests())]
    paths = grow_tree(ranks, 12)
    out = decode(target, EagleDrafter(head, target, paths), requests())
    assert texts(out) == plain()
    assert [accepted(replay(one, paths)) for one in ranks] == [measured(generation) for generation in out]
