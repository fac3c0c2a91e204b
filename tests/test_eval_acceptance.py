"""Acceptance figures against worked examples: names, formulas, pooling, cut steps, loops."""

from __future__ import annotations

import itertools

import pytest

from headstart.decode.engine import StepRecord
from headstart.eval.acceptance import FORMULAS, StepCounts, count_steps, loops, mean_and_median


def step(accepted: int, depth: int = 3, cut: bool = False) -> StepRecord:
    return StepRecord(depth + 1, depth, accepted, accepted + 1, cut, 0.01, 0.1, 0.01, context_length=10, rows=1)


def steps(*accepted: int, depth: int = 3) -> list[StepRecord]:
    return [step(one, depth) for one in accepted]


def test_a_chain_of_three_that_accepts_3_0_2():
    counts = count_steps([steps(3, 0, 2)])
    assert counts.acceptance_length == pytest.approx(8 / 3)
    assert counts.mean_accepted == pytest.approx(5 / 3)
    assert counts.draft_acceptance == pytest.approx(5 / 9)
    assert counts.per_position == pytest.approx([2 / 3, 2 / 3, 1 / 3])
    assert counts.conditional == pytest.approx([2 / 3, 1, 1 / 2])
    assert counts.alpha == pytest.approx((2 + 2 + 1) / (3 + 2 + 2)) and counts.mean_depth == 3
    figures = {name for name in dir(StepCounts) if isinstance(getattr(StepCounts, name), property)}
    assert figures == set(FORMULAS), "every figure has its formula printed"
    assert all(getattr(StepCounts, name).__doc__ for name in figures)


def test_leading_runs_are_pooled_whatever_the_batches():
    runs = [3, 2, 1, 0]
    for order in itertools.permutations(runs):
        for split in range(5):
            counts = count_steps([steps(*order[:split]), steps(*order[split:])])
            assert counts.mean_accepted == 1.5 and counts.acceptance_length == 2.5


def test_cut_steps_stand_apart():
    counts = count_steps([[*steps(3, 0, 2), step(1, cut=True)], [step(3, cut=True)]])
    assert (counts.steps, counts.cut_steps) == (3, 2)
    assert counts.acceptance_length == pytest.approx(8 / 3)
    assert counts.conditional == pytest.approx([2 / 3, 1, 1 / 2])


def test_a_depth_is_judged_only_by_trees_that_reach_it():
    counts = count_steps([steps(1, 1, depth=1) + steps(2, 1, 0, depth=2)])
    assert counts.reached == (5, 3) and counts.tested == (5, 2) and counts.passed == (4, 1)
    assert counts.per_position == pytest.approx([4 / 5, 1 / 3])
    assert counts.conditional == pytest.approx([4 / 5, 1 / 2])


def test_plain_decoding_and_nothing_at_all():
    plain = count_steps([steps(0, 0, 0, depth=0)])
    assert plain.acceptance_length == 1 and plain.draft_acceptance is None and plain.conditional == []
    assert plain.alpha is None and plain.mean_depth == 0
    nothing = count_steps([])
    assert nothing.acceptance_length is None and nothing.per_position == []


def test_mean_and_median_over_prompts():
    assert mean_and_median([1.0, 2.0, None, 6.0]) == {"mean": 3.0, "median": 2.0}
    assert mean_and_median([None]) == {"mean": None, "median": None}


def test_an_answer_loops_when_an_8_gram_occurs_three_times():
    gram = list(range(8))
    assert loops(gram * 3)
    assert loops([99, *gram, 50, *gram, 51, *gram, 52])
    assert not loops(gram * 2 + [7, 8])
    assert loops([5] * 10) and not loops([5] * 9)
    assert not loops(list(range(100))) and not loops([])
