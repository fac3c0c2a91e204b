"""Closed forms against the papers' figures, and against steps that are really drawn."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from headstart.decode.closed_form import (
    best_length,
    expected_accepted,
    expected_tokens_of_tree,
    operations_factor,
    walltime_factor,
)
from headstart.errors import HeadstartError


@pytest.mark.parametrize(("alpha", "accepted"), [(0.9, 3.69), (0.5, 0.97), (1.0, 5.0), (0.0, 0.0)])
def test_the_classic_figure_of_five_drafts(alpha, accepted):
    assert expected_accepted([alpha] * 5) == pytest.approx(accepted, abs=0.005)
    if alpha < 1:
        assert 1 + expected_accepted([alpha] * 5) == pytest.approx((1 - alpha**6) / (1 - alpha))


def test_a_chain_accepts_what_drawing_its_drafts_accepts():
    rates, generator = [0.8, 0.5, 0.9], np.random.default_rng(0)
    right = generator.random((200_000, 3)) < rates
    assert expected_accepted(rates) == pytest.approx(right.cumprod(1).sum(1).mean(), abs=0.01)


def test_a_tree_accepts_what_walking_it_accepts():
    """Each node has at most one right child; a child of rank r is it with the chance share[depth][r]."""
    share = [[0.5, 0.3], [0.6, 0.1]]
    paths = [(0,), (1,), (0, 0), (0, 1), (1, 0)]
    generator, nodes, found = np.random.default_rng(0), set(paths), 0
    draws = 200_000
    for first, second in generator.random((draws, 2)):
        path: tuple[int, ...] = ()
        for depth, drawn in enumerate((first, second)):
            rank = int(np.searchsorted(np.cumsum(share[depth]), drawn, side="right"))
            if (*path, rank) not in nodes:
                break
            path = (*path, rank)
        found += 1 + len(path)
    tau = expected_tokens_of_tree(paths, lambda path: share[len(path) - 1][path[-1]])
    assert tau == pytest.approx(found / draws, abs=0.01)
    chain = [(0,), (0, 0)]
    assert expected_tokens_of_tree(chain, lambda path: 0.7) == pytest.approx(1 + expected_accepted([0.7, 0.7]))


@pytest.mark.parametrize(
    ("alpha", "cost", "length", "tokens", "speedup"),
    [
        (0.6, 0.02, 6, 2.43, 2.17),
        (0.6, 0.1, 3, 2.18, 1.67),
        (0.7, 0.1, 4, 2.77, 1.98),
        (0.8, 0.02, 11, 4.66, 3.82),
        (0.8, 0.1, 6, 3.95, 2.47),
        (0.8, 0.2, 4, 3.36, 1.87),
        (0.9, 0.1, 10, 6.86, 3.43),
    ],
)
def test_the_best_length_is_the_papers(alpha, cost, length, tokens, speedup):
    """Leviathan et al., figure 3 and table 1, worked out by hand from theorem 3.8."""
    assert best_length([alpha] * 64, lambda k: 1 + k * cost) == length
    assert 1 + expected_accepted([alpha] * length) == pytest.approx(tokens, abs=0.005)
    assert walltime_factor([alpha] * length, 1 + length * cost) == pytest.approx(speedup, abs=0.005)


def test_drafting_helps_where_drafts_are_accepted_more_often_than_they_cost():
    """Corollary 3.9: there is a gain exactly where alpha > c, and then at least (1 + alpha) / (1 + c)."""
    for alpha, cost in product([0.1, 0.3, 0.5, 0.7], [0.05, 0.2, 0.4, 0.6]):
        length = best_length([alpha] * 64, lambda k, cost=cost: 1 + k * cost)
        assert (length > 0) == (alpha > cost)
        if length:
            best = walltime_factor([alpha] * length, 1 + length * cost)
            assert best >= (1 + alpha) / (1 + cost) - 1e-12


def test_arithmetic_grows_by_what_is_verified_in_vain():
    assert operations_factor([1.0] * 4, 0.0) == 1.0
    assert operations_factor([0.0] * 4, 0.1) == pytest.approx(5.4)
    assert operations_factor([0.8] * 5, 0.1) == pytest.approx((1 - 0.8) * (5 * 0.1 + 6) / (1 - 0.8**6))


def test_rates_that_cannot_be_are_refused():
    for wrong in (-0.1, 1.1, float("nan")):
        with pytest.raises(HeadstartError, match="rate of acceptance"):
            expected_accepted([0.5, wrong])
    with pytest.raises(HeadstartError, match="children of tree node \\[0\\] sum to 1.4"):
        expected_tokens_of_tree([(0,), (0, 0), (0, 1)], lambda path: 0.7)
    with pytest.raises(HeadstartError, match="cost"):
        walltime_factor([0.5], 0.0)
