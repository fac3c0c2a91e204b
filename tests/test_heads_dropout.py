"""Dropout by 16 bits a number: frequencies, scale, gradient, seeds, against what the definition says."""

from __future__ import annotations

import pytest
import torch

from headstart.heads.dropout import dropout


@pytest.mark.parametrize("rate", [0.001, 0.1, 0.5, 0.97])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_each_number_is_dropped_with_the_rate_and_the_rest_scaled(rate, dtype):
    states = torch.ones(1000, 501, dtype=dtype)
    torch.manual_seed(0)
    dropped = dropout(states, rate, True)
    assert dropped.dtype == dtype and dropped.shape == states.shape
    assert set(dropped.unique().tolist()) == {0.0, float(torch.ones(1, dtype=dtype) / (1 - rate))}
    deviation = (rate * (1 - rate)) ** 0.5
    for axis, count in ((0, 1000), (1, 501)):  # along rows and columns, five standard errors of each mean
        shares = (dropped == 0).double().mean(axis)
        assert (shares - rate).abs().max() < 1e-4 + 5 * deviation / count**0.5
    assert float((dropped == 0).double().mean()) == pytest.approx(rate, abs=5 * deviation / 501_000**0.5)


def test_neighbours_in_a_word_are_independent():
    """Four numbers come from one draw of 64 bits."""
    torch.manual_seed(0)
    kept = (dropout(torch.ones(100_000, 4), 0.3, True) > 0).double()
    correlation = torch.corrcoef(kept.T) - torch.eye(4)
    assert correlation.abs().max() < 5 / 100_000**0.5


@pytest.mark.parametrize("shape", [(3,), (1, 5, 7), (0, 4), (2, 8)])
def test_every_shape_and_the_gradient(shape):
    states = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    dropped = dropout(states, 0.5, True)
    dropped.sum().backward()
    assert states.grad is not None
    assert torch.equal(dropped.detach(), states.detach() * states.grad)
    assert set(states.grad.unique().tolist()) <= {0.0, 2.0}


def test_seeds_repeat_it_and_it_is_off_where_it_should_be():
    states = torch.randn(40, 6)
    torch.manual_seed(3)
    first, second = dropout(states, 0.4, True), dropout(states, 0.4, True)
    torch.manual_seed(3)
    assert torch.equal(first, dropout(states, 0.4, True)) and not torch.equal(first, second)
    before = torch.get_rng_state()
    assert torch.equal(dropout(states, 0.4, False), states) and torch.equal(dropout(states, 0.0, True), states)
    assert torch.equal(torch.get_rng_state(), before)
