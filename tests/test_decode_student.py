"""Students while drafting: the target's text whatever they say, drafts from the very distribution that was trained,
and accepted as often as is forecast."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from head_cases import collate, forward, head_for, row, tiny, vocab_of
from stubs import chain
from test_decode_model import NEW, WARMISH, decode, plain, prompts, target
from test_decode_sampling import SMOKE_DRAWS, VOCAB, assert_distribution, small_target

from headstart.data.rendering import Row
from headstart.decode.cache import KVCache
from headstart.decode.cost import CostCurve, DraftCosts, RankedAnswer, replay, tune
from headstart.decode.drafters.base import NoDraft, Request, Rows
from headstart.decode.drafters.heads import head_drafter
from headstart.decode.drafters.plans import DynamicTree, SampledChain, StaticTree
from headstart.decode.drafters.student import StudentDrafter, student_drafter
from headstart.decode.engine import Engine
from headstart.decode.forecast import rank_answer, rank_rows, record_rows
from headstart.decode.sampling import SamplingSettings
from headstart.errors import HeadError, HeadstartError
from headstart.heads.configs import DraftConfig
from headstart.heads.draft import DraftHead
from headstart.heads.store import build_head, save_head
from headstart.train.forecasting import Forecaster

VOCABS = ("all", "few", "own")


@functools.lru_cache
def learnt(kind: str) -> DraftHead:
    """A student of three layers that half knows the target's answers by heart; with a vocabulary that needs widening,
    or with own rows of it."""
    vocab = None if kind == "all" else vocab_of(range(0, 264, 2))
    settings = {"num_layers": 3, "loss": "soft-ce", "draft_vocab_size": None if vocab is None else len(vocab)}
    config = DraftConfig(**settings, output="own" if kind == "own" else "shared")
    head = build_head(config, target(), vocab).double()
    rows = [
        Row("row", [*prompt, *answer], [place >= len(prompt) for place in range(len(prompt) + len(answer))])
        for prompt, answer in zip(prompts(), plain(), strict=True)
    ]
    batch = collate(rows, [[number] for number in range(len(rows))])
    optimizer = torch.optim.Adam(head.parameters(), lr=5e-3)
    for _ in range(10):
        optimizer.zero_grad()
        forward(head, target(), batch).loss_sum.backward()
        optimizer.step()
    return head.eval()


@pytest.mark.parametrize("kind", VOCABS)
@pytest.mark.parametrize(("length", "batch_size"), [(1, 3), (4, 1), (4, 3), (4, 8)])
def test_the_text_is_the_targets_own(kind, length, batch_size):
    done = decode(StudentDrafter(learnt(kind), target(), length), batch_size, prefill_chunk=5)
    assert [one.token_ids for one in done] == plain()
    accepted = [step.accepted for one in done for step in one.steps if not step.cut]
    assert 0.1 < np.mean(accepted) < length and max(accepted) == length, "drafts are right and wrong"


@pytest.mark.parametrize("family", ["tied", "hyb", "gpt2", "gptj", "minicpm"])
def test_students_of_other_families_keep_the_text(family):
    model = tiny.target(family, dtype=torch.float64)
    head = head_for(model, kind="draft", shake=0.02, num_layers=3)
    asked = [row(length, [], seed=length, vocab=250).input_ids for length in (3, 9, 17)]
    requests = [Request(prompt_ids=prompt, max_new_tokens=NEW, request_id=n) for n, prompt in enumerate(asked)]

    def texts(drafter) -> dict[int, list[int]]:
        done = Engine(model, drafter, batch_size=2).generate(requests)
        return {one.request.request_id: one.token_ids for one in done}

    assert texts(StudentDrafter(head, model, 3)) == texts(NoDraft())


# -- the distribution --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", VOCABS)
def test_a_draft_is_drawn_from_the_distribution_that_is_trained(kind):
    """In fp32, to 1e-5: what the drafter says it drew from, against the training forward along the drafted text."""
    model = tiny.target("gemma2")
    vocab = None if kind == "all" else vocab_of(range(0, 264, 2))
    head = head_for(model, vocab, kind="draft", shake=0.02, output="own" if kind == "own" else "shared").eval()
    drafter = StudentDrafter(head, model, 4, widen=False)
    asked = [row(length, [], seed=length, vocab=250).input_ids for length in (5, 23)]
    settings = SamplingSettings(temperature=1.0, seed=3)
    requests = [Request(prompt_ids=prompt, max_new_tokens=8, settings=settings) for prompt in asked]
    streams = [request.settings.draft_stream() for request in requests]
    rows = Rows(requests=requests, ids=asked, streams=streams, cache=KVCache(0, slots=2, capacity=64))
    drafter.start(rows, 0)
    with torch.no_grad():
        tree = drafter.propose(rows, 8)
    assert tree.drawn is not None and tree.num_nodes == 5
    ids = torch.arange(264) if head.draft_ids is None else head.draft_ids
    assert torch.equal(tree.drawn.ids, ids)
    for number, prompt in enumerate(asked):
        text = [*prompt, *tree.tokens[number, 1:].tolist()]
        with torch.no_grad():
            states = head.states(collate([Row("row", text, [False] * len(text))], [[0]]), model.embedding)[0]
            own = head.logits(states, None if kind == "own" else model.output.select(head.draft_ids))
        expected = own[len(prompt) - 1 : -1].double().softmax(-1)
        torch.testing.assert_close(tree.drawn.probs[number], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["all", "few"])
def test_sampled_rows_have_the_targets_joint_distribution(kind):
    """Also where the drafts' vocabulary is a part of the target's."""
    vocab = None if kind == "all" else vocab_of(range(0, VOCAB, 2), VOCAB)
    head = head_for(small_target(), vocab, kind="draft", num_layers=1, shake=0.1)
    drafter = StudentDrafter(head, small_target(), 3)
    assert_distribution(drafter, "warm", SMOKE_DRAWS, (711 + len(kind)) * 1_000_000, tests=2)


@pytest.mark.parametrize("kind", VOCABS)
def test_a_row_drafts_the_same_in_any_batch(kind):
    records = []
    for size in (1, 3, 8):
        done = decode(StudentDrafter(learnt(kind), target(), 3), size, WARMISH)
        records.append([(one.token_ids, [(step.depth, step.accepted) for step in one.steps]) for one in done])
    assert records[0] == records[1] == records[2]


def test_first_choices_keep_the_text_of_plain_sampling():
    drafter = head_drafter(learnt("few"), target(), chain(3))
    plainly = [one.token_ids for one in decode(NoDraft(), 3, WARMISH)]
    assert [one.token_ids for one in decode(drafter, 3, WARMISH)] == plainly


# -- the forecast ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("widen", [True, False])
@pytest.mark.parametrize("kind", VOCABS)
def test_what_is_forecast_is_what_is_decoded_step_by_step(kind, widen):
    head, total = learnt(kind), 0
    for one in decode(StudentDrafter(head, target(), 3, widen=widen), 3):
        prompt = list(one.request.prompt_ids)
        text = Row("row", prompt + one.token_ids, [False] * len(prompt) + [True] * len(one.token_ids))
        (recorded,) = record_rows(target(), [text], ()) or [None]
        assert recorded is not None
        ranks = rank_answer(head, target(), recorded, depth=5, widen=widen)
        measured = [step.accepted for step in one.steps if not step.cut]
        assert [accepted for _, accepted in replay(ranks, chain(3))] == measured
        total += sum(measured)
    assert total > 20


def test_lengths_are_compared_by_what_they_yield_and_cost():
    """Ranks 0 0 1 at every base: chains of two accept two, a third draft is paid for and refused."""
    answer = RankedAnswer(torch.tensor([[0, 0, 1]] * 30))
    costs = CostCurve(seconds={n: 1.0 for n in range(1, 6)}, context_length=1, rows=1, device="cpu", dtype="")
    drafting = DraftCosts(first=0.1, static_level={1: 0.1}, dynamic_level={})
    forecasts = tune([answer], costs, drafting, range(1, 6), chains=True)
    assert [one.paths for one in forecasts.values()] == [chain(length) for length in range(4)]
    assert [one.acceptance_length for one in forecasts.values()] == [1.0, 2.0, 3.0, 3.0]
    assert [one.speedup for one in forecasts.values()] == pytest.approx([1.0, 2 / 1.1, 3 / 1.2, 3 / 1.3])


def test_training_can_forecast_a_student():
    model = tiny.target("llama", max_position_embeddings=512)
    rows = [row(24, range(8, 24), seed=seed) for seed in range(6)]
    forecast = Forecaster(model, rows)(head_for(model, kind="draft", num_layers=3, shake=0.01))
    assert forecast.acceptance_length >= 1 and forecast.speedup > 0 and 1 <= forecast.nodes <= 10
    ranked = rank_rows(head_for(model, kind="draft"), model, rows)
    assert ranked[0].ranks.shape == (16, 1), "one token ahead, as it was trained"


# -- ways in -----------------------------------------------------------------------------------------------------------


def test_a_run_of_a_student_is_a_drafter_and_that_of_a_head_is_not(tmp_path):
    for name, head in [("student", learnt("few")), ("medusa", head_for(target()))]:
        save_head(head, tmp_path / name / "head", fingerprint=target().fingerprint())
    for folder in (tmp_path / "student", tmp_path / "student" / "head"):
        drafter = student_drafter(folder, target(), 3)
        assert [one.token_ids for one in decode(drafter)] == plain()
    with pytest.raises(HeadError, match=r"holds a head of type medusa, no student; draft with head:"):
        student_drafter(tmp_path / "medusa", target())
    with pytest.raises(HeadError, match="holds no trained head"):
        student_drafter(tmp_path / "nowhere", target())
    with pytest.raises(HeadstartError, match="weights"):
        student_drafter(tmp_path / "student", tiny.target("llama", dtype=torch.float64, seed=9))


def test_a_student_follows_chains_alone():
    head = learnt("all")
    drawn = head_drafter(head, target(), SampledChain(length=2))
    static = head_drafter(head, target(), StaticTree(paths=chain(2)))
    assert isinstance(drawn, StudentDrafter) and (drawn.length, drawn.drawn) == (2, True)
    assert isinstance(static, StudentDrafter) and (static.length, static.drawn) == (2, False)
    assert head_drafter(head, target(), SampledChain(length=2, stop_below=0.5)).stop_below == 0.5
    assert isinstance(usual := head_drafter(head, target()), StudentDrafter) and usual.length == 4
    branching = StaticTree(paths=[(0,), (1,)])
    for plan in (DynamicTree(depth=2, width=2, num_nodes=4), branching):
        with pytest.raises(HeadstartError, match="students draft chains"):
            head_drafter(head, target(), plan)


@pytest.mark.parametrize("kind", VOCABS)
def test_what_it_holds_is_counted_without_the_targets_own(kind):
    head = learnt(kind)
    drafter = StudentDrafter(head, target(), 2)
    assert drafter.num_parameters() == sum(parameter.numel() for parameter in head.parameters())
    assert drafter.num_bytes() >= 8 * drafter.num_parameters()
    assert drafter.num_bytes() < 8 * (drafter.num_parameters() + 264 * 64 + 200)
