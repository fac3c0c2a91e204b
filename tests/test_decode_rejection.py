"""Drawn chains keep the target's distribution: the rejection rule alone, then whole answers of an EAGLE head's drafts.

The target, its enumeration and the G-test are those of test_decode_sampling.py. Planted faults must be rejected.
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import pytest
import torch
from scipy import stats
from test_decode_sampling import (
    DRAWS,
    FAULT_DRAWS,
    FAULT_LEVEL,
    SETTINGS,
    SMOKE_DRAWS,
    VOCAB,
    assert_distribution,
    g_test,
    joint,
    sample,
    seeded_requests,
    seeds_from,
    small_target,
)

from headstart.decode.drafters.base import NoDraft
from headstart.decode.drafters.drawing import draw_children
from headstart.decode.drafters.eagle import EagleDrafter
from headstart.decode.drafters.plans import SampledChain
from headstart.decode.engine import Engine
from headstart.decode.sampling import SamplingSettings, probabilities
from headstart.decode.tree import DrawnFrom, TokenTree, Topology
from headstart.decode.verify import verify
from headstart.heads.configs import Eagle3Config
from headstart.heads.store import build_head
from headstart.heads.vocab import DraftVocab

WARM = SamplingSettings(temperature=1.0)

# -- the rule alone ----------------------------------------------------------------------------------------------------


def one_step(p: list[list[float]], q: list[list[float]], draws: int, *, drawn: bool = True):
    """`draws` rows verify a chain: p[d] and q[d] are target and drafter at depth d; the drafts are drawn from q, or are
    its argmax and told to be deterministic. Returns the verdicts."""
    generator = torch.Generator().manual_seed(3)
    target, draft = torch.tensor(p, dtype=torch.float64), torch.tensor(q, dtype=torch.float64)
    length = len(q)
    picked = torch.multinomial(draft, draws, replacement=True, generator=generator).T
    tokens = picked if drawn else draft.argmax(-1).expand(draws, -1)
    tree = TokenTree(
        torch.nn.functional.pad(tokens, (1, 0)),
        Topology.chain(length).expand(draws),
        DrawnFrom(draft.expand(draws, -1, -1), torch.arange(draft.shape[1]), [True] * draws) if drawn else None,
    )
    numbers = torch.rand(2, draws, length + 1, generator=generator, dtype=torch.float64)
    trials = [numbers[1, :, :length]] if drawn else []
    return verify(tree, target.log().expand(draws, -1, -1), [WARM] * draws, numbers[0], *trials)


def test_a_drawn_draft_is_kept_with_the_overlap_and_leaves_the_frequencies_alone():
    """B65: p = (0.7, 0.3), q = (0.4, 0.6). Token 1 comes 30% of the time; drafts stay with 1 - TV(p, q) = 0.7."""
    for drawn, kept in [(True, 0.7), (False, 0.3)]:
        verdicts = one_step([[0.7, 0.3], [0.5, 0.5]], [[0.4, 0.6]], 20_000, drawn=drawn)
        assert np.mean([one.tokens[0] for one in verdicts]) == pytest.approx(0.300, abs=0.012)
        assert np.mean([one.accepted for one in verdicts]) == pytest.approx(kept, abs=0.012)


def test_every_token_of_a_chain_has_its_own_distribution():
    p = [[0.5, 0.3, 0.2, 0.0], [0.1, 0.2, 0.3, 0.4], [0.25, 0.25, 0.0, 0.5]]
    q = [[0.1, 0.2, 0.3, 0.4], [0.1, 0.2, 0.3, 0.4]]
    verdicts = one_step(p, q, 8_000)
    counts = np.zeros((3, 4))
    for one in verdicts:
        for depth, token in enumerate(one.tokens):
            counts[depth, token] += 1
    for depth in range(3):
        assert g_test(counts[depth], np.array(p[depth])) > 1e-3
    assert all(one.accepted >= 2 for one in verdicts if one.accepted and len(one.tokens) == 3)  # q = p at depth 2
    overlap = sum(min(a, b) for a, b in zip(p[0], q[0], strict=True))
    assert np.mean([one.accepted for one in verdicts]) == pytest.approx(2 * overlap, abs=0.03)


def test_a_draft_without_probability_is_never_kept_and_an_equal_one_always():
    """B67: not even at a trial of 0.0."""
    for p, kept in [([1.0, 0.0], 0), ([0.5, 0.5], 1)]:
        tree = TokenTree(
            torch.tensor([[0, 1]]),
            Topology.chain(1),
            DrawnFrom(torch.tensor([[[0.5, 0.5]]], dtype=torch.float64), torch.arange(2), [True]),
        )
        logits = torch.tensor([p, p], dtype=torch.float64).log()[None]
        for trial in (0.0, 1 - 2**-53):
            numbers = torch.tensor([[0.0, 0.0]], dtype=torch.float64)
            trials = torch.tensor([[trial]], dtype=torch.float64)
            (verdict,) = verify(tree, logits, [WARM], numbers, trials)
            assert verdict.accepted == kept and verdict.tokens[0] == kept


def test_what_a_rejected_draft_leaves_over_may_lie_outside_the_draft_vocabulary():
    tree = TokenTree(
        torch.tensor([[0, 3]] * 4000),
        Topology.chain(1).expand(4000),
        DrawnFrom(torch.ones(4000, 1, 1, dtype=torch.float64), torch.tensor([3]), [True] * 4000),
    )
    p = torch.tensor([0.2, 0.1, 0.3, 0.4], dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    numbers = torch.rand(2, 4000, 2, generator=generator, dtype=torch.float64)
    verdicts = verify(tree, p.log().expand(4000, 2, 4), [WARM] * 4000, numbers[0], numbers[1])
    assert g_test(np.bincount([one.tokens[0] for one in verdicts], minlength=4), p.numpy()) > 1e-3
    assert np.mean([one.accepted for one in verdicts]) == pytest.approx(0.4, abs=0.03)


def test_greedy_and_drawn_rows_share_a_batch():
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(3, 4, 5, generator=generator, dtype=torch.float64)
    settings = [SamplingSettings(), WARM, SamplingSettings(temperature=0.5, top_k=2)]
    probs = torch.stack([probabilities(torch.randn(3, 5, generator=generator), WARM) for _ in range(3)])
    tokens = torch.cat([torch.zeros(3, 1, dtype=torch.long), logits[:, :3].argmax(-1)], dim=1)
    numbers = torch.rand(2, 3, 4, generator=generator, dtype=torch.float64)
    tree = TokenTree(tokens, Topology.chain(3).expand(3), DrawnFrom(probs, torch.arange(5), [False, True, True]))
    both = verify(tree, logits, settings, numbers[0], numbers[1, :, :3])
    for row in range(3):
        alone = TokenTree(
            tokens[row : row + 1],
            Topology.chain(3),
            DrawnFrom(probs[row : row + 1], torch.arange(5), [tree.drawn.sampled[row]]),
        )
        part = slice(row, row + 1)
        (one,) = verify(alone, logits[part], settings[part], numbers[0, part], numbers[1, part, :3])
        assert one == both[row]
    assert both[0].accepted == 3 and both[0].tokens[:3] == tokens[0, 1:].tolist()


# -- whole answers -----------------------------------------------------------------------------------------------------

DRAWN = {
    "own": {"length": 3},
    "narrow": {"length": 3},
    "stopping": {"length": 4, "stop_below": 0.25},
}


@functools.lru_cache
def head_of(name: str):
    """A head that drafts rather well, because it is the target's own layer; `narrow` drafts half of the tokens."""
    narrow = name == "narrow"
    config = Eagle3Config(layers=[0, 1], output="shared", draft_vocab_size=6 if narrow else None)
    vocab = DraftVocab(torch.tensor([0, 2, 3, 5, 6, 9]), VOCAB) if narrow else None
    with torch.random.fork_rng():
        torch.manual_seed(1)
        head = build_head(config, small_target(), vocab).double()
        for parameter in head.parameters():
            parameter.data += 0.05 * torch.randn_like(parameter)
    return head


def drafter_of(name: str, **changes) -> EagleDrafter:
    return EagleDrafter(head_of(name), small_target(), SampledChain(**DRAWN[name] | changes))


seed_of = seeds_from(101, DRAWN)
TESTS = len(DRAWN) * len(SETTINGS)


@pytest.mark.slow
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", DRAWN)
def test_three_tokens_have_the_targets_joint_distribution(name, setting):
    assert_distribution(drafter_of(name), setting, DRAWS, seed_of(name, setting), tests=TESTS)


@pytest.mark.parametrize(
    ("name", "setting"), [("own", "warm"), ("own", "top-p"), ("narrow", "cool"), ("stopping", "top-k")]
)
def test_a_smaller_sample_has_the_targets_joint_distribution(name, setting):
    assert_distribution(drafter_of(name), setting, SMOKE_DRAWS, seed_of(name, setting), tests=TESTS)


# -- planted faults ----------------------------------------------------------------------------------------------------


def bonus_from_p(monkeypatch):
    """After a rejection the token is drawn from the whole of p, not from what the draft leaves over."""

    monkeypatch.setattr("headstart.decode.verify.residual", lambda p, q: p)


def q_before_processing(monkeypatch):
    """The draft is drawn under the row's settings, but q is what the head said before them."""

    def faulty(logits, rows, going, count):
        columns, _ = draw_children(logits, rows, going, count)
        return columns, probabilities(logits[:, 0], WARM)[:, None]

    monkeypatch.setattr("headstart.decode.drafters.eagle.draw_children", faulty)


def q_of_an_argmax(monkeypatch):
    """B65: the draft is the argmax, the trial divides by its probability."""

    def faulty(logits, rows, going, count):
        return logits.argmax(-1, keepdim=True), draw_children(logits, rows, going, count)[1]

    monkeypatch.setattr("headstart.decode.drafters.eagle.draw_children", faulty)


def the_drafts_numbers_again(monkeypatch):
    """The trial of a draft is the number that drew it."""
    numbers: dict[int, list[float]] = {}
    propose = EagleDrafter.propose

    class Noting:
        def __init__(self, stream, taken):
            self.stream, self.taken = stream, taken

        def random(self):
            self.taken.append(self.stream.random())
            return self.taken[-1]

    def noting(self, rows, budget):
        streams = rows.streams
        numbers.clear()
        rows.streams = [Noting(one, numbers.setdefault(row, [])) for row, one in enumerate(streams)]
        try:
            return propose(self, rows, budget)
        finally:
            rows.streams = streams

    def again(self, tree):
        longest = max(map(len, numbers.values()))
        return [torch.tensor([(numbers[row] + [0.0] * longest)[:longest] for row in range(len(numbers))])]

    monkeypatch.setattr(EagleDrafter, "propose", noting)
    monkeypatch.setattr(Engine, "_next_trials", again)


def the_same_trial_at_every_depth(monkeypatch):
    """One number decides over all drafts of a step."""
    trials = Engine._next_trials

    def faulty(self, tree):
        return [one[:, :1].expand_as(one) for one in trials(self, tree)]

    monkeypatch.setattr(Engine, "_next_trials", faulty)


def drops_unlikely_drafts(monkeypatch):
    """A draft that is drawn and then left out because it is unlikely: what is verified no longer follows q."""
    propose = EagleDrafter.propose

    def faulty(self, rows, budget):
        tree = propose(self, rows, budget)
        own = tree.drawn.probs[:, 0].gather(1, tree.tokens[:, 1:2])[:, 0]
        return dataclasses.replace(tree, topology=tree.topology.within(torch.where(own < 0.3, 0, 9)))

    monkeypatch.setattr(EagleDrafter, "propose", faulty)


FAULTS = {
    "bonus": (bonus_from_p, "own", "warm"),
    "unprocessed": (q_before_processing, "own", "top-k"),
    "argmax": (q_of_an_argmax, "own", "warm"),
    "re-used": (the_drafts_numbers_again, "own", "warm"),
    "same-trial": (the_same_trial_at_every_depth, "own", "warm"),
    "dropped": (drops_unlikely_drafts, "own", "warm"),
}


def p_value(fault: str, draws: int, monkeypatch) -> float:
    plant, name, setting = FAULTS[fault]
    plant(monkeypatch)
    return g_test(sample(drafter_of(name), setting, draws, seed_of(name, setting)).counts, joint(setting))


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_rejected(fault, monkeypatch):
    assert p_value(fault, FAULT_DRAWS, monkeypatch) < FAULT_LEVEL


@pytest.mark.parametrize("fault", ["bonus", "unprocessed", "re-used"])
def test_planted_faults_are_rejected_by_a_smaller_sample_too(fault, monkeypatch):
    assert p_value(fault, 2 * SMOKE_DRAWS, monkeypatch) < FAULT_LEVEL


# -- seeds -------------------------------------------------------------------------------------------------------------


def answers(name: str, requests, batch_size: int) -> list[list[int]]:
    found = Engine(small_target(), drafter_of(name), batch_size=batch_size, budget=8).generate(requests)
    return [one.token_ids for one in sorted(found, key=lambda generation: generation.request.request_id)]


@pytest.mark.parametrize("name", DRAWN)
def test_a_seed_gives_the_same_text_alone_and_in_any_batch(name):
    asked = seeded_requests(42, 9)
    together = answers(name, asked, 42)
    assert answers(name, asked, 5) == together
    assert [answers(name, [one], 1)[0] for one in asked[:14]] == together[:14]
    assert answers(name, asked[::-1][:20], 7) == together[-20:]
    greedy = [place for place, one in enumerate(asked) if one.settings.greedy]
    plain = Engine(small_target(), NoDraft(), batch_size=42).generate([asked[place] for place in greedy])
    by_id = {one.request.request_id: one.token_ids for one in plain}
    assert greedy and all(together[place] == by_id[place] for place in greedy)


def test_the_second_stream_is_uniform_and_shares_nothing_with_the_first():
    numbers = np.stack([SamplingSettings(seed=seed).draft_stream().random(3) for seed in range(5_000)])
    first = torch.stack([SamplingSettings(seed=seed).uniforms(3) for seed in range(5_000)]).numpy()
    assert numbers.min() >= 0 and numbers.max() < 1
    pairs = {
        "first stream": (numbers[:, 0], first[:, 0]),
        "next number": (numbers[:, 0], numbers[:, 1]),
        "next seed": (numbers[:-1, 0], numbers[1:, 0]),
    }
    for name, (one, other) in pairs.items():
        assert stats.chi2_contingency(np.histogram2d(one, other, bins=8)[0]).pvalue > 1e-3, name
    assert not set(numbers.flatten()) & set(first.flatten())
    for seed in (0, 7, 2**63 - 1):
        by_key = np.random.Generator(np.random.Philox(key=seed))
        assert np.array_equal(SamplingSettings(seed=seed).draft_stream().random(9), by_key.random(9))
    assert SamplingSettings(seed=2**32 + 1).draft_stream().random() != numbers[1, 0]  # all bits of a seed count


def test_no_number_is_taken_twice(monkeypatch):
    """Every number of a row's second stream is a draft's or a trial's, in order, and a greedy row takes none."""
    taken: dict[int, int] = {}

    def counting(self):
        stream = np.random.Generator(np.random.Philox(key=self.seed))
        seed = self.seed

        class Counting:
            def random(self, size=None):
                taken[seed] = taken.get(seed, 0) + (1 if size is None else size)
                return stream.random(size)

        return Counting()

    monkeypatch.setattr(SamplingSettings, "draft_stream", counting)
    engine = Engine(small_target(), drafter_of("stopping"), batch_size=9, budget=8)
    asked = [one for one in seeded_requests(20, 6)]
    for generation in engine.generate(asked):
        drafted = sum(step.depth for step in generation.steps)
        settings = generation.request.settings
        assert taken.get(settings.seed, 0) == (0 if settings.greedy else 2 * drafted)
