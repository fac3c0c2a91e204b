"""Medusa heads in the decoder: exact whatever they say, and accepted exactly as the forecast says."""

from __future__ import annotations

import pytest
import torch
from head_cases import collate, features, forward, head_for, row, tiny, vocab_of
from stubs import chain, full_tree

from headstart.decode.cost import grow_tree, replay
from headstart.decode.drafters.base import NoDraft, Request
from headstart.decode.drafters.medusa import MedusaDrafter
from headstart.decode.engine import Engine
from headstart.decode.forecast import Recorded, rank_answer
from headstart.decode.tree import sort_paths
from headstart.errors import HeadstartError
from headstart.heads.configs import MedusaConfig
from headstart.heads.store import build_head

SPARSE = [(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (2, 3), (0, 0, 0, 1)]
TREES = {"chain": chain(4), "one": [(0,)], "full": full_tree(3, 3), "sparse": SPARSE, "empty": []}
PROMPT_LENGTHS = (3, 1, 14, 7, 2)


def requests(new: int = 18, ignore_end: bool = False) -> list[Request]:
    prompts = {length: row(length, [], seed=length).input_ids for length in PROMPT_LENGTHS}
    return [
        Request(prompt_ids=ids, max_new_tokens=new, request_id=length, ignore_end=ignore_end)
        for length, ids in prompts.items()
    ]


def decode(target, drafter, asked, **settings):
    engine = Engine(target, drafter, **settings)
    return sorted(engine.generate(asked), key=lambda generation: PROMPT_LENGTHS.index(generation.request.request_id))


def texts(generations) -> list[list[int]]:
    return [generation.token_ids for generation in generations]


@pytest.fixture(scope="module")
def target():
    return tiny.target("llama", dtype=torch.float64)


@pytest.fixture(scope="module")
def plain(target):
    return texts(decode(target, NoDraft(), requests()))


@pytest.fixture(scope="module")
def learnt(target, plain):
    """Heads that half know the target's answers by heart. Their 40 ids occur once: what is repeated takes widening."""
    rows = []
    for request, answer in zip(requests(), plain, strict=True):
        each = row(len(request.prompt_ids) + len(answer), range(len(request.prompt_ids), 99))
        each.input_ids[:] = [*request.prompt_ids, *answer]
        rows.append(each)
    batch = collate(rows, [[number] for number in range(len(rows))])
    tokens = (torch.bincount(batch.input_ids[batch.supervised]) == 1).nonzero().flatten()[:40]
    head = build_head(MedusaConfig(num_heads=4, loss="hard-ce", loss_decay=1.0), target).double()
    states = features(target, batch)
    optimizer = torch.optim.Adam(head.parameters(), lr=1e-2)
    for _ in range(8):
        optimizer.zero_grad()
        forward(head, target, batch, states).loss_sum.backward()
        optimizer.step()
    small = build_head(MedusaConfig(num_heads=4, draft_vocab_size=40), target, vocab_of(tokens.tolist())).double()
    small.blocks.load_state_dict(head.blocks.state_dict())
    return small.eval()


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("batch_size", [1, 3])
def test_the_text_is_the_targets_own_for_every_tree(target, plain, learnt, tree, batch_size):
    """B58: random and trained heads, in batches whose rows leave and make room."""
    for head in (learnt, head_for(target, num_heads=4, shake=0.3, output="own")):
        drafter = MedusaDrafter(head, target, TREES[tree])
        assert texts(decode(target, drafter, requests(), batch_size=batch_size)) == plain


def forecast(target, head, generation, paths, widen):
    ids = [*generation.request.prompt_ids, *generation.token_ids]
    text = collate([row(len(ids), [])], [[0]])
    text.input_ids[0] = torch.tensor(ids)
    recorded = Recorded(ids, len(generation.request.prompt_ids), features(target, text))
    answer = rank_answer(head, target, recorded, widen=widen)
    return answer, [accepted for _, accepted in replay(answer, sort_paths(paths, 4, head.draft_vocab_size))]


@pytest.mark.parametrize("widen", [True, False])
@pytest.mark.parametrize("tree", ["chain", "full", "sparse", "empty"])
def test_what_is_forecast_is_what_is_decoded_step_by_step(target, learnt, tree, widen):
    for ignore_end in (True, False):
        drafter = MedusaDrafter(learnt, target, TREES[tree], widen=widen)
        total = 0
        for generation in decode(target, drafter, requests(ignore_end=ignore_end), batch_size=2):
            measured = [step.accepted for step in generation.steps if not step.cut]
            assert forecast(target, learnt, generation, TREES[tree], widen)[1] == measured
            total += sum(measured)
        assert total > 10 or tree == "empty"


def test_the_widened_vocabulary_is_used_and_helps(target, learnt):
    """No static id occurs twice; tokens of the text beyond them are accepted only where the vocabulary is widened."""
    counts = {}
    for widen in (True, False):
        drafter = MedusaDrafter(learnt, target, full_tree(3, 2), widen=widen)
        steps = [step for generation in decode(target, drafter, requests()) for step in generation.steps]
        counts[widen] = sum(step.accepted for step in steps)
    assert counts[True] > counts[False] > 0


def test_a_tree_grown_from_the_ranks_is_one_that_can_be_decoded(target, plain, learnt):
    answers = []
    for generation in decode(target, NoDraft(), requests()):
        answers.append(forecast(target, learnt, generation, [], True)[0])
    paths = grow_tree(answers, 12)
    assert 3 < len(paths) <= 11
    generations = decode(target, MedusaDrafter(learnt, target, paths), requests())
    assert texts(generations) == plain
    measured = [step.accepted for each in generations for step in each.steps if not step.cut]
    assert measured == [accepted for answer in answers for _, accepted in replay(answer, paths)]


def test_no_rank_is_one_that_a_tree_may_not_ask_for(target, plain):
    """A widened vocabulary of 4 offers more than 4 choices, and a text is found among the last of them too."""
    head = head_for(target, vocab_of(range(4)), num_heads=2, shake=0.3)
    answers = [forecast(target, head, one, [], True)[0] for one in decode(target, NoDraft(), requests())]
    ranks = torch.cat([answer.ranks for answer in answers])
    assert ranks.max() == 3
    MedusaDrafter(head, target, grow_tree(answers, 64))


def test_rows_draft_the_same_in_any_batch(target, learnt):
    """Acceptance, not only the text: another row's words in the union of extra ids must not reach this row's tree."""
    alone, together = (
        decode(target, MedusaDrafter(learnt, target, SPARSE), requests(), batch_size=size) for size in (1, 5)
    )
    for one, other in zip(alone, together, strict=True):
        assert [step.accepted for step in one.steps] == [step.accepted for step in other.steps]


def test_extra_rows_are_those_of_the_target(target, learnt):
    drafter = MedusaDrafter(learnt, target, SPARSE)
    engine = Engine(target, drafter, batch_size=5)
    running = engine.generate(requests())
    next(running)
    rows = drafter._rows
    assert rows.selected is not None and rows._order is not None
    order = torch.cat([torch.arange(40), 40 + rows._order])
    ids = rows.target_ids(torch.arange(len(rows.selected.weight)))
    assert len(ids) > 40 and len(set(ids.tolist())) == len(ids)
    assert torch.equal(rows.selected.weight[order], target.output.weight_rows(ids))
    assert ids[40:].tolist() == sorted(ids[40:].tolist())


def test_a_bias_of_the_output_head_is_widened_too():
    target = tiny.target("phi", dtype=torch.float64)
    head = head_for(target, vocab_of(range(100)), num_heads=2)
    plain = texts(decode(target, NoDraft(), requests()))
    drafter = MedusaDrafter(head, target, full_tree(2, 2))
    generations = decode(target, drafter, requests(), batch_size=2)
    assert texts(generations) == plain
    for generation in generations:
        measured = [step.accepted for step in generation.steps if not step.cut]
        assert forecast(target, head, generation, full_tree(2, 2), True)[1] == measured


def test_a_small_budget_takes_the_beginning_of_the_tree(target, plain, learnt):
    for budget in (1, 2, 4):
        generations = decode(target, MedusaDrafter(learnt, target, SPARSE), requests(), budget=budget)
        assert texts(generations) == plain
        assert max(step.nodes for each in generations for step in each.steps) == budget


def test_a_tree_that_the_heads_cannot_fill_names_the_node(target):
    """B59."""
    head = head_for(target, vocab_of(range(8)), num_heads=3)
    for paths, message in [
        ([(0,), (0, 0), (0, 0, 0), (0, 0, 0, 0)], r"\[0, 0, 0, 0\].*depths 1 to 3"),
        ([(0,), (8,)], r"\[8\].*0 to 7"),
        ([(0,), (1, 0)], r"\[1, 0\] has no parent \[1\]"),
        ([(0,), (0,)], r"\[0\] stands twice"),
    ]:
        with pytest.raises(HeadstartError, match=message):
            MedusaDrafter(head, target, paths)
    unsorted = MedusaDrafter(head, target, [(0, 1), (1,), (0,), (0, 0)])
    assert unsorted.paths == [(0,), (1,), (0, 0), (0, 1)]


def test_the_head_in_training_is_not_touched(target):
    head = head_for(target, num_heads=2).float().train()
    drafter = MedusaDrafter(head, target)
    assert head.training and head.blocks[0].weight.dtype == torch.float32 and head.blocks[0].weight.requires_grad
    assert drafter.head.blocks[0].weight.dtype == torch.float64
    assert drafter.num_parameters() == sum(parameter.numel() for parameter in head.parameters())
    assert drafter.num_bytes() >= 8 * drafter.num_parameters()
