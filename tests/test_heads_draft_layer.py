"""The norm of a draft layer: torch's own values and gradients."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from headstart.heads.draft_layer import RMSNorm


@pytest.mark.parametrize("shape", [(6,), (2, 3, 6), (1, 6), (0, 6)])
def test_the_norm_is_torchs_own(shape):
    torch.manual_seed(0)
    norm = RMSNorm(6, 1e-3).double()
    with torch.no_grad():
        norm.weight.normal_()
    states = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    weight = norm.weight.detach().clone().requires_grad_(True)
    same = states.detach().clone().requires_grad_(True)
    given, expected = norm(states), functional.rms_norm(same, (6,), weight, 1e-3)
    pull = torch.randn_like(given)
    given.backward(pull)
    expected.backward(pull)
    torch.testing.assert_close(given, expected)
    torch.testing.assert_close(states.grad, same.grad)
    torch.testing.assert_close(norm.weight.grad, weight.grad)
    if states.numel():
        assert torch.autograd.gradcheck(norm, (states.detach().requires_grad_(True),))


def test_a_norm_in_bf16_computes_in_fp32():
    torch.manual_seed(0)
    norm, states = RMSNorm(64, 1e-5), torch.randn(5, 64).bfloat16().requires_grad_(True)
    given = norm(states)
    given.backward(torch.ones_like(given))
    wide = states.detach().float().requires_grad_(True)
    expected = functional.rms_norm(wide, (64,), eps=1e-5)
    expected.sum().backward()
    assert given.dtype == states.grad.dtype == torch.bfloat16 and norm.weight.grad.dtype == torch.float32
    assert torch.equal(given, expected.bfloat16())
    torch.testing.assert_close(states.grad, wide.grad.bfloat16(), atol=1e-3, rtol=1e-2)
