"""Heads that draw trees: whole answers keep the target's distribution, seeds give the same text in any batch, and
greedy rows write the target's own text.

The target, its enumeration and the G-test are those of test_decode_sampling.py, the EAGLE heads those of
test_decode_rejection.py. What verification does with such trees is tested in test_decode_frequencies.py.
"""

from __future__ import annotations

import functools

import numpy as np
import pytest
import stubs
import torch
from test_decode_rejection import head_of, the_drafts_numbers_again
from test_decode_sampling import (
    DRAWS,
    FAULT_LEVEL,
    PROMPT,
    SETTINGS,
    SMOKE_DRAWS,
    assert_distribution,
    g_test,
    joint,
    sample,
    seeded_requests,
    seeds_from,
    small_model,
    small_target,
)

from headstart.decode.drafters.base import NoDraft, Request
from headstart.decode.drafters.eagle import EagleDrafter
from headstart.decode.drafters.heads import head_drafter
from headstart.decode.drafters.plans import SampledChain, SampledTree, StaticTree
from headstart.decode.engine import Engine
from headstart.decode.processors import Text
from headstart.decode.sampling import SamplingSettings
from headstart.errors import HeadstartError
from headstart.heads.configs import MedusaConfig
from headstart.heads.store import build_head

TREE = [(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0)]
FULL = stubs.full_tree(2, 2)
DRAWN = {
    "eagle": ("own", SampledTree(paths=TREE)),
    "narrow": ("narrow", SampledTree(paths=TREE)),
    "stopping": ("own", SampledTree(paths=FULL, stop_below=0.3)),
    "full": ("own", SampledTree(paths=FULL)),
    "medusa": ("medusa", SampledTree(paths=FULL)),
}


@functools.lru_cache
def medusa_head():
    with torch.random.fork_rng():
        torch.manual_seed(1)
        head = build_head(MedusaConfig(num_heads=2, output="shared"), small_target()).double()
        for parameter in head.parameters():
            parameter.data += 0.05 * torch.randn_like(parameter)
    return head


def drafter_of(name: str):
    head, plan = DRAWN[name]
    return head_drafter(medusa_head() if head == "medusa" else head_of(head), small_target(), plan)


seed_of = seeds_from(201, DRAWN)
TESTS = len(DRAWN) * len(SETTINGS)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "setting"), zip(DRAWN, SETTINGS, strict=True))
def test_three_tokens_have_the_targets_joint_distribution(name, setting):
    assert_distribution(drafter_of(name), setting, DRAWS, seed_of(name, setting), tests=TESTS)


@pytest.mark.parametrize(
    ("name", "setting"), [("eagle", "top-p"), ("narrow", "warm"), ("stopping", "cool"), ("medusa", "top-k")]
)
def test_a_smaller_sample_has_the_targets_joint_distribution(name, setting):
    assert_distribution(drafter_of(name), setting, SMOKE_DRAWS, seed_of(name, setting), tests=TESTS)


def test_siblings_are_worth_more_than_a_chain():
    accepted = {}
    for name, plan in [("chain", SampledChain(length=2)), ("tree", SampledTree(paths=FULL))]:
        found = sample(head_drafter(head_of("own"), small_target(), plan), "warm", 2_000, 7)
        accepted[name] = found.accepted / found.steps
    assert accepted["tree"] > accepted["chain"] + 0.05


# -- planted faults ----------------------------------------------------------------------------------------------------


def every_step_begins_again(monkeypatch):
    """Sequoia: drafts and trials of every step are made with the numbers of the first."""
    propose = EagleDrafter.propose

    def faulty(self, rows, budget):
        rows.streams = [request.settings.draft_stream() for request in rows.requests]
        return propose(self, rows, budget)

    monkeypatch.setattr(EagleDrafter, "propose", faulty)


FAULTS = {"re-used": (the_drafts_numbers_again, "full"), "stale": (every_step_begins_again, "full")}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_rejected(fault, monkeypatch):
    plant, name = FAULTS[fault]
    plant(monkeypatch)
    assert g_test(sample(drafter_of(name), "warm", SMOKE_DRAWS, 1).counts, joint("warm")) < FAULT_LEVEL


# -- greedy rows -------------------------------------------------------------------------------------------------------

PROMPTS = [list(PROMPT), [3, 1], [7] * 5, [2, 9, 4]]


def greedy(drafter, prompts=PROMPTS, batch_size=3, **settings) -> list[list[int]]:
    asked = [
        Request(prompt_ids=ids, max_new_tokens=12, request_id=place, settings=SamplingSettings(**settings))
        for place, ids in enumerate(prompts)
    ]
    found = Engine(small_target(), drafter, batch_size=batch_size, budget=8).generate(asked)
    return [one.token_ids for one in sorted(found, key=lambda generation: generation.request.request_id)]


@pytest.mark.parametrize("name", DRAWN)
def test_greedy_rows_write_the_targets_text_with_the_likeliest_drafts(name):
    answers = stubs.plain_answers(small_model(), PROMPTS, 12)
    assert greedy(drafter_of(name)) == answers
    head, plan = DRAWN[name]
    asked = [Request(prompt_ids=ids, max_new_tokens=12) for ids in PROMPTS]
    head = medusa_head() if head == "medusa" else head_of(head)
    steps = []
    for one in (plan, StaticTree(paths=plan.paths, stop_below=plan.stop_below)):
        engine = Engine(small_target(), head_drafter(head, small_target(), one), budget=8)
        steps.append([(step.nodes, step.accepted) for done in engine.generate(asked) for step in done.steps])
    assert steps[0] == steps[1]


def test_a_stale_row_of_keys_shows_in_the_text(monkeypatch):
    prompts = stubs.prompts_of([4] * 12, 12, seed=3)
    answers = stubs.plain_answers(small_model(), prompts, 12)
    assert greedy(drafter_of("full"), prompts) == answers
    stubs.plant_stale_rows(monkeypatch)
    assert greedy(drafter_of("full"), prompts) != answers


def test_penalties_once_per_step_show_in_the_text(monkeypatch):
    """B68: the processors see a node's ancestors; a fault leaves the text where it stood before the step."""
    prompts = stubs.prompts_of([4] * 12, 12, seed=3)
    answers = stubs.plain_answers(small_model(), prompts, 12, repetition_penalty=1.8)
    assert answers != stubs.plain_answers(small_model(), prompts, 12)
    assert greedy(drafter_of("full"), prompts, repetition_penalty=1.8) == answers
    process = Text.process
    monkeypatch.setattr(Text, "process", lambda self, logits, after=(): process(self, logits))
    assert greedy(drafter_of("full"), prompts, repetition_penalty=1.8) != answers


# -- seeds and plans ---------------------------------------------------------------------------------------------------


def answers(name: str, requests, batch_size: int) -> list[list[int]]:
    found = Engine(small_target(), drafter_of(name), batch_size=batch_size, budget=8).generate(requests)
    return [one.token_ids for one in sorted(found, key=lambda generation: generation.request.request_id)]


@pytest.mark.parametrize("name", ["eagle", "narrow", "stopping", "medusa"])
def test_a_seed_gives_the_same_text_alone_and_in_any_batch(name):
    asked = seeded_requests(21, 7)
    together = answers(name, asked, 21)
    assert answers(name, asked, 5) == together
    assert [answers(name, [one], 1)[0] for one in asked[:7]] == together[:7]
    by_rank = [place for place, one in enumerate(asked) if one.settings.greedy]
    plain = Engine(small_target(), NoDraft(), batch_size=21).generate([asked[place] for place in by_rank])
    by_id = {one.request.request_id: one.token_ids for one in plain}
    assert by_rank and all(together[place] == by_id[place] for place in by_rank)


def test_no_number_is_taken_twice(monkeypatch):
    """Of a full tree each of the six nodes takes one to be drawn, whether or not there is anything left to draw, and
    each that was drawn one more to be tried."""
    taken: dict[int, int] = {}

    def counting(self):
        stream, seed = np.random.Generator(np.random.Philox(key=self.seed)), self.seed

        class Counting:
            def random(self, size=None):
                taken[seed] = taken.get(seed, 0) + (1 if size is None else size)
                return stream.random(size)

        return Counting()

    monkeypatch.setattr(SamplingSettings, "draft_stream", counting)
    for generation in Engine(small_target(), drafter_of("full"), batch_size=9).generate(seeded_requests(10, 6)):
        settings, numbers = generation.request.settings, sum(6 + step.nodes - 1 for step in generation.steps)
        assert taken.get(settings.seed, 0) == (0 if settings.greedy else numbers)


def test_what_cannot_be_drawn_is_no_node():
    """top_k=2 leaves two columns: of three children, the third and what hangs below it are not there."""
    paths = [*stubs.full_tree(3, 1), (2, 0), (0, 0)]
    request = Request(prompt_ids=PROMPT, max_new_tokens=9, settings=SamplingSettings(temperature=1.0, top_k=2))
    for head in (head_of("own"), medusa_head()):
        drafter = head_drafter(head, small_target(), SampledTree(paths=paths))
        (done,) = Engine(small_target(), drafter).generate([request])
        assert {step.nodes for step in done.steps} == {4}


def test_plans_that_cannot_be_drawn_are_refused_in_a_sentence():
    with pytest.raises(HeadstartError, match=r"\[0, 1\] is drawn after its sibling \[0, 0\].*add it"):
        SampledTree(paths=[(0,), (0, 1)])
    with pytest.raises(HeadstartError, match="without stop_below"):
        head_drafter(medusa_head(), small_target(), SampledTree(paths=FULL, stop_below=0.5))
    assert SampledTree(paths=FULL).num_nodes == 7
    # the shape of a tuned tree, whose ranks may have gaps
    assert SampledTree.shaped([(1,), (3,), (3, 2), (1, 0), (3, 0)]).paths == [(0,), (1,), (1, 1), (0, 0), (1, 0)]
    assert SampledTree.shaped(TREE).paths == TREE and SampledTree.shaped([]).paths == []
    chain, tree = SampledChain(length=3), SampledTree(paths=stubs.chain(3))
    assert chain.paths == list(tree.paths) and chain.num_nodes == tree.num_nodes
