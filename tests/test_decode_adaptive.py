"""Adaptive draft lengths: the policies against hand-made texts, and the drafter that follows them in the engine."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Sequence
from math import inf

import eagle_cases
import pytest
import stubs
import torch
from stubs import TREES
from test_decode_model import decode, draft_model, plain, target
from test_decode_sampling import DRAWS, SETTINGS, SMOKE_DRAWS, assert_distribution, small_target

from headstart.decode.cost import CostCurve, RankedAnswer, accepted_at
from headstart.decode.draft_length import (
    AdaptiveLength,
    ConstantLength,
    HeuristicLength,
    LengthPolicy,
    StepCosts,
    replay_lengths,
)
from headstart.decode.drafters import adaptive
from headstart.decode.drafters.adaptive import AdaptiveDrafter
from headstart.decode.drafters.base import NoDraft
from headstart.decode.drafters.eagle import EagleDrafter
from headstart.decode.drafters.model import ModelDrafter
from headstart.decode.drafters.ngram import NgramDrafter
from headstart.decode.drafters.plans import DynamicTree, SampledChain, StaticTree
from headstart.decode.forecast import measure_depths
from headstart.decode.sampling import SamplingSettings
from headstart.errors import HeadstartError

LONGEST = 12


def chain_costs(draft: float, more: float, longest: int = LONGEST) -> StepCosts:
    """draft: of a draft; more: of one token more to verify; both in plain steps."""
    seconds = tuple(1 + depth * (draft + more) for depth in range(longest + 1))
    return StepCosts(seconds=seconds, budgets=tuple(range(1, longest + 2)))


# -- policies, replayed ------------------------------------------------------------------------------------------------


def text(alphas: Sequence[float], rng: random.Random) -> list[int]:
    """Drafts accepted from every token on, each with the chance of its place."""
    return [next((k for k in range(LONGEST) if rng.random() >= alpha), LONGEST) for alpha in alphas]


def switching(tokens: int, rng: random.Random) -> list[float]:
    alphas: list[float] = []
    for alpha in itertools.cycle([0.92, 0.08]):
        alphas += [alpha] * rng.randint(40, 160)
        if len(alphas) >= tokens:
            return alphas[:tokens]
    raise AssertionError


KINDS: dict[str, Callable[[int, random.Random], list[float]]] = {
    "high": lambda tokens, rng: [0.85] * tokens,
    "low": lambda tokens, rng: [0.35] * tokens,
    "switching": switching,
    "random": lambda tokens, rng: [0.03] * tokens,
}


def compare(kind: str, costs: StepCosts, texts: int = 40, tokens: int = 256) -> tuple[float, float]:
    """How fast the adaptive length is, over the best constant one in hindsight and over plain decoding; every text
    begins with a policy that knows nothing."""
    rng = random.Random(kind)
    written = [text(KINDS[kind](tokens, rng), rng) for _ in range(texts)]

    def seconds(policy: Callable[[], LengthPolicy]) -> float:
        return sum(replay_lengths(policy(), one, costs) for one in written)

    constant = [seconds(lambda k=k: ConstantLength(k)) for k in range(LONGEST + 1)]
    ours = seconds(lambda: AdaptiveLength(costs))
    return min(constant) / ours, constant[0] / ours


@pytest.mark.parametrize("kind", KINDS)
def test_never_three_percent_below_the_best_constant_length(kind):
    over_best, over_plain = compare(kind, chain_costs(0.15, 0.04))
    assert over_best > 0.97
    if kind == "random":
        assert over_plain > 0.97
    if kind == "switching":
        assert over_best > 1.05, "no constant length suits both halves"


@pytest.mark.slow
@pytest.mark.parametrize("more", [0.02, 0.06])
@pytest.mark.parametrize("draft", [0.05, 0.15, 0.3])
@pytest.mark.parametrize("kind", KINDS)
def test_nor_at_any_other_cost(kind, draft, more):
    over_best, _ = compare(kind, chain_costs(draft, more), texts=100)
    assert over_best > 0.97


def test_replay_moves_on_by_what_was_accepted_plus_one():
    class Noting(ConstantLength):
        seen: list[tuple[int, int, int]] = []

        def observe(self, *, chosen: int, drafted: int, accepted: int) -> None:
            self.seen.append((chosen, drafted, accepted))

    costs = chain_costs(0.25, 0.25)
    # steps at 0, 3, 4; the last has one token left to emit, and would write two
    assert replay_lengths(Noting(2), [5, 9, 9, 0, 2], costs) == 3 * 2.0
    assert Noting.seen == [(2, 2, 2), (2, 2, 0)]
    assert replay_lengths(ConstantLength(0), [5, 9, 9, 0, 2], costs) == 5 * 1.0


def test_acceptance_along_an_answer_comes_from_its_ranks():
    answer = RankedAnswer(torch.tensor([[0, 0], [5, 5], [1, 0], [0, -1]]))
    assert accepted_at(answer, [(0,), (1,), (0, 0)]) == [2, 0, 1, 1]


def test_rates_come_from_tested_depths_alone():
    rng, alphas = random.Random(0), [0.9, 0.5, 0.8]
    policy = AdaptiveLength(chain_costs(0.1, 0.1, 3), memories=(4000.0,))
    for _ in range(3000):
        accepted = next((depth for depth in range(3) if rng.random() >= alphas[depth]), 3)
        policy.observe(chosen=3, drafted=3, accepted=accepted)
        policy.observe(chosen=0, drafted=0, accepted=0)
    assert policy.rates() == pytest.approx(alphas, abs=0.04)


def test_drafts_that_are_not_made_are_not_paid_for():
    """n-grams without a match: at 60% of all steps nothing is drafted, else two of three drafts are right."""
    rng, costs = random.Random(0), chain_costs(0.0, 0.5, 1)
    policy, chosen = AdaptiveLength(costs), []
    for step in range(600):
        depth = policy.choose()
        drafted = min(depth, rng.random() < 0.4)
        policy.observe(chosen=depth, drafted=drafted, accepted=min(drafted, rng.random() < 2 / 3))
        chosen.append(depth) if step > 300 else None
    assert sum(chosen) / len(chosen) > 0.9, "0.27 tokens for 0.2 steps"


def test_it_comes_back_from_plain_decoding_and_exploring_is_bounded():
    costs, rng = chain_costs(0.2, 0.05), random.Random(0)
    policy = AdaptiveLength(costs)
    hopeless = replay_lengths(policy, [0] * 2000, costs)
    assert 2000 * 1.002 < hopeless < 2000 * 1.012
    assert policy.rates()[0] < 0.2
    good = text([0.9] * 400, rng)
    best = min(replay_lengths(ConstantLength(k), good, costs) for k in range(LONGEST + 1))
    assert replay_lengths(policy, good, costs) < best * 1.2, "within some fifty tokens"
    assert replay_lengths(policy, good, costs) < best * 1.06


def test_depths_that_are_not_on_offer_are_not_chosen():
    costs = StepCosts(seconds=(1.0, inf, inf, 1.3), budgets=(1, 0, 0, 12))
    policy = AdaptiveLength(costs)
    chosen = set()
    for accepted in [3, 2] * 20 + [0] * 60 + [3] * 20:
        depth = policy.choose()
        chosen.add(depth)
        policy.observe(chosen=depth, drafted=depth, accepted=min(depth, accepted))
    assert chosen == {0, 3}


def test_the_heuristic_is_transformers_own():
    policy, lengths = HeuristicLength(longest=9, start=3), []
    for accepted in [3, 5, 0, 6, 8, 9, 9, *[0] * 10]:
        lengths.append(policy.choose())
        policy.observe(chosen=lengths[-1], drafted=lengths[-1], accepted=min(accepted, lengths[-1]))
    assert lengths == [3, 5, 7, 6, 8, 9, 9, 9, 8, 7, 6, 5, 4, 3, 2, 1, 1]


def test_doubt_stops_a_draft_where_one_more_does_not_pay():
    """At plain speed, a draft and its verification cost a quarter of a token's time."""
    policy = AdaptiveLength(chain_costs(0.2, 0.05))
    for _ in range(200):
        policy.observe(chosen=policy.choose(), drafted=policy.choose(), accepted=0)
    policy.choose()
    assert policy.stop_below() == pytest.approx(0.25)
    for _ in range(100):
        policy.observe(chosen=LONGEST, drafted=LONGEST, accepted=LONGEST)
    policy.choose()
    assert 0.6 < policy.stop_below() < 0.25 * 13 / 4  # at thrice that speed it must be thrice as sure


def test_tables_that_are_none_are_refused():
    with pytest.raises(HeadstartError, match="one budget for every depth"):
        StepCosts(seconds=(1.0, 2.0), budgets=(1,))
    with pytest.raises(HeadstartError, match="above 0"):
        StepCosts(seconds=(1.0, 0.0), budgets=(1, 2))


def test_costs_are_those_of_drafting_and_verifying():
    curve = CostCurve(seconds={1: 1.0, 2: 1.5, 4: 2.0}, context_length=9, rows=1, device="cpu", dtype="float32")
    assert StepCosts.measured(curve, lambda depth: depth / 4, range(1, 5)).seconds == (1.0, 1.75, 2.5, 2.75)
    assert StepCosts.measured(curve, lambda depth: 0.5, [1, 0, 4]).seconds == (1.0, inf, 2.5)
    costs = measure_depths(NgramDrafter(), target(), [1, 2, 4], steps=4)
    assert costs.budgets == (1, 2, 4) and all(seconds > 0 for seconds in costs.seconds)


# -- the drafter, in the engine ----------------------------------------------------------------------------------------


class Wandering(ConstantLength):
    """Any depth, from a number of its own on and from what was accepted, as a policy that learns would."""

    def __init__(self, costs: StepCosts, number: int):
        super().__init__(costs.longest)
        self.rng, self.least = random.Random(number), 0.0

    def choose(self) -> int:
        self.least = self.rng.choice([0.0, 0.1, 0.5])
        return self.rng.choice([0, 0, self.rng.randint(0, self.length)])

    def stop_below(self) -> float:
        return self.least

    def observe(self, *, chosen: int, drafted: int, accepted: int) -> None:
        assert 0 <= accepted <= drafted <= chosen <= self.length
        self.rng = random.Random(self.rng.random() + 7 * chosen + 3 * accepted)


COSTS = chain_costs(0.1, 0.02, 5)
POLICIES = ("adaptive", "heuristic", "wandering", "none")


def new_policy(name: str) -> Callable[[StepCosts], LengthPolicy]:
    numbers = itertools.count()
    return {
        "adaptive": AdaptiveLength,
        "heuristic": lambda costs: HeuristicLength(costs.longest),
        "wandering": lambda costs: Wandering(costs, next(numbers)),
        "none": lambda costs: ConstantLength(0),
    }[name]


@functools.lru_cache
def levels(tree: str) -> StepCosts:
    """One depth for every level of a static tree."""
    paths = TREES[tree]
    budgets = [1 + sum(len(path) <= depth for path in paths) for depth in range(1 + max(map(len, paths)))]
    return StepCosts(seconds=tuple(1 + 0.1 * nodes for nodes in budgets), budgets=tuple(budgets))


@pytest.mark.parametrize(
    ("policy", "batch_size"),
    [("adaptive", 3), ("wandering", 3), ("wandering", 8), ("heuristic", 8), ("none", 3)],
)
def test_the_text_is_the_targets_own(policy, batch_size):
    answers = dict(enumerate(plain()))
    kinds = {number: ["oracle", "anti-oracle", "mixed", "random"][number % 4] for number in answers}
    drafters = [
        (stubs.stub(kinds, answers, TREES["sparse25"], target().vocab_size), levels("sparse25")),
        (NgramDrafter(), COSTS),
        (ModelDrafter(stubs.half_right(), target(), 5), COSTS),
    ]
    for drafter, costs in drafters:
        done = decode(AdaptiveDrafter(drafter, costs, new_policy(policy)), batch_size)
        assert [one.token_ids for one in done] == plain()
        if policy == "none":
            assert all(step.nodes == 1 for one in done for step in one.steps)
    done = decode(AdaptiveDrafter(drafters[0][0], levels("sparse25")), batch_size, budget=7)
    assert [one.token_ids for one in done] == plain() and max(step.nodes for one in done for step in one.steps) <= 7


def test_it_drafts_deep_for_who_is_right_and_not_at_all_for_who_is_wrong():
    answers = dict(enumerate(plain()))
    for kind, least, most in [("oracle", 3.0, 4.0), ("anti-oracle", 0.0, 0.35)]:
        drafter = stubs.stub(kind, answers, TREES["chain4"], target().vocab_size)
        done = decode(AdaptiveDrafter(drafter, chain_costs(0.2, 0.05, 4)), 1)
        depths = [step.depth for one in done for step in one.steps if not step.cut]
        assert least <= sum(depths) / len(depths) <= most, kind


HEADS = {
    "static": StaticTree(paths=TREES["full3x3"]),
    "dynamic": DynamicTree(depth=4, width=3, num_nodes=12),
    "drawn": SampledChain(length=5),
}


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("plan", HEADS)
def test_what_was_committed_while_the_drafter_was_not_asked_is_told_in_the_end(plan, batch_size, monkeypatch):
    """Steps accept what they accept where it is told of every step at once; the head reads features of every token."""
    goal, asked = eagle_cases.target_of(), eagle_cases.requests()
    offered = {
        "static": levels("full3x3"),
        "dynamic": StepCosts(seconds=(1.0, inf, inf, inf, 1.5), budgets=(1, 0, 0, 0, 12)),
        "drawn": COSTS,
    }[plan]
    records = []
    for held in (1, 64):
        monkeypatch.setattr(adaptive, "MOST_HELD", held)
        head = EagleDrafter(eagle_cases.learnt("eagle3"), goal, HEADS[plan])
        done = eagle_cases.decode(
            goal, AdaptiveDrafter(head, offered, new_policy("wandering")), asked, batch_size=batch_size
        )
        assert eagle_cases.texts(done) == eagle_cases.plain()
        records.append([[(step.nodes, step.depth, step.accepted) for step in one.steps] for one in done])
    assert records[0] == records[1]
    steps = [step for one in records[0] for step in one]
    assert any(nodes == 1 for nodes, _, _ in steps) and sum(accepted for _, _, accepted in steps) > 2


def test_a_model_that_doubts_stops():
    """Rows stop where all that they have drafted is less likely than this, and not one token sooner."""
    free = decode(ModelDrafter(stubs.half_right(), target(), 5), 1)
    sure = decode(ModelDrafter(stubs.half_right(), target(), 5, stop_below=0.05), 3)
    assert [one.token_ids for one in sure] == plain() == [one.token_ids for one in free]
    drafted = {name: sum(step.depth for one in run for step in one.steps) for name, run in [("a", free), ("b", sure)]}
    depths = {step.depth for one in sure for step in one.steps}
    assert drafted["b"] < 0.9 * drafted["a"] and len(depths) >= 3
    with pytest.raises(HeadstartError, match="no probability"):
        ModelDrafter(stubs.half_right(), target(), 5, stop_below=1.5)


# -- sampling ----------------------------------------------------------------------------------------------------------


def drawing(policy: str) -> AdaptiveDrafter:
    return AdaptiveDrafter(ModelDrafter(draft_model(1, 0.3), small_target(), 5), COSTS, new_policy(policy))


@pytest.mark.parametrize("policy", ["adaptive", "wandering"])
def test_a_seed_has_one_text_in_every_batch(policy):
    """A row's own depths and random numbers, whatever the others draft."""
    warm = SamplingSettings(temperature=0.8, seed=4)
    runs = []
    for batch_size in (1, 3, 8):
        drafter = AdaptiveDrafter(ModelDrafter(stubs.half_right(), target(), 5), COSTS, new_policy(policy))
        done = decode(drafter, batch_size, warm)
        runs.append([(one.token_ids, [(step.depth, step.accepted) for step in one.steps]) for one in done])
    assert runs[0] == runs[1] == runs[2]
    assert [ids for ids, _ in runs[0]] != plain()


@pytest.mark.parametrize("policy", ["adaptive", "wandering"])
def test_a_sample_has_the_targets_joint_distribution(policy):
    first = (901 + POLICIES.index(policy)) * 1_000_000
    assert_distribution(drawing(policy), "warm", SMOKE_DRAWS, first, tests=2)


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["cool", "top-k"])
def test_three_tokens_have_the_targets_joint_distribution(setting):
    first = (911 + list(SETTINGS).index(setting)) * 1_000_000
    assert_distribution(drawing("wandering"), setting, DRAWS, first, tests=len(SETTINGS), accepted=(0.02, 2))


def test_nothing_is_asked_of_a_drafter_that_is_not_to_draft():
    class Silent(NoDraft):
        def propose(self, rows, budget):
            raise AssertionError("asked")

        def commit(self, rows, first, committed):
            assert rows.num_new(first) == 0 or committed.counts[0] > 1, "told of every step"

    done = decode(AdaptiveDrafter(Silent(), COSTS, lambda costs: ConstantLength(0)))
    assert [one.token_ids for one in done] == plain()
