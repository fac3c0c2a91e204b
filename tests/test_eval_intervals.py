"""Bootstrap intervals and the exact test: coverage, pairing, seeds, hand-computed p values."""

from __future__ import annotations

import numpy as np
import pytest

from headstart.eval.intervals import RESAMPLES, more_often, ratio_interval, speedup_interval


def test_intervals_hold_the_pooled_ratio_and_repeat_with_the_seed():
    rng = np.random.default_rng(1)
    step_counts = rng.integers(20, 60, size=40).tolist()
    tokens = [steps * rng.normal(1.8, 0.2) for steps in step_counts]
    low, high = ratio_interval(tokens, step_counts) or (0, 0)
    pooled = sum(tokens) / sum(step_counts)
    assert low < pooled < high and high - low < 0.25
    assert ratio_interval(tokens, step_counts) == (low, high)
    assert ratio_interval(tokens, step_counts, seed=1) != (low, high)
    assert RESAMPLES >= 2000


def test_the_interval_covers_the_truth_about_as_often_as_it_says():
    rng = np.random.default_rng(2)
    hits = 0
    for trial in range(200):
        seconds = rng.uniform(1, 3, size=40)
        tokens = 10 * seconds + rng.normal(0, 2, size=40)
        low, high = ratio_interval(tokens.tolist(), seconds.tolist(), seed=trial) or (0, 0)
        hits += low <= 10 <= high
    assert 0.88 <= hits / 200 <= 1.0


def test_arms_are_paired_by_prompt():
    # Prompts differ widely in speed, but drafting is exactly twice as fast on each of them.
    seconds = np.linspace(1, 50, 30)
    assert speedup_interval([100] * 30, (seconds / 2).tolist(), [100] * 30, seconds.tolist()) == pytest.approx(
        (2.0, 2.0)
    )


def test_one_prompt_has_no_interval():
    assert ratio_interval([3], [2]) is None
    assert ratio_interval([], []) is None
    assert ratio_interval([0, 0], [0, 0]) is None


def test_more_often_is_the_exact_one_sided_mcnemar_test():
    assert more_often([True] * 7, [False] * 7) == pytest.approx(2**-7)
    assert more_often([True] * 7 + [False], [False] * 7 + [True]) == pytest.approx((8 + 1) / 256)
    assert more_often([True, False], [True, False]) == 1.0
    assert more_often([False] * 5, [True] * 5) == 1.0
