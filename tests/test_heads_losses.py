"""Every loss: the fast closed form against the readable one, in value and gradient."""

from __future__ import annotations

import pytest
import torch

from headstart.heads.losses import (
    REFERENCE_LOSSES,
    Teacher,
    label_ranks,
    log_softmax,
    loss_and_gradient,
    needs_teacher,
    reference_loss,
)

ROWS, HEADS, VOCAB = 7, 3, 11
MIXTURES = [{name: 1.0} for name in REFERENCE_LOSSES] + [
    {"soft-ce": 0.9, "tv": 0.1},
    {"hard-ce": 0.3, "soft-ce": 0.5, "lk": 0.7},
    {name: 0.1 + index for index, name in enumerate(REFERENCE_LOSSES)},
]


def logits(seed: int, *shape: int, dtype=torch.float64) -> torch.Tensor:
    return (3 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)).to(dtype)


def labels() -> torch.Tensor:
    return torch.arange(ROWS) % VOCAB


def slow(weights, draft, teacher_log_probs):
    """Value [rows, heads] and gradient by autograd, head by head."""
    draft = draft.clone().requires_grad_()
    value = torch.stack(
        [reference_loss(weights, draft[:, head], teacher_log_probs, labels()) for head in range(HEADS)], dim=1
    )
    value.sum().backward()
    return value.detach(), draft.grad


@pytest.mark.parametrize("weights", MIXTURES, ids=lambda weights: "+".join(weights))
def test_the_fast_form_equals_the_slow_one(weights):
    draft, teacher = logits(0, ROWS, HEADS, VOCAB), logits(1, ROWS, VOCAB)
    value, gradient = loss_and_gradient(weights, log_softmax(draft), Teacher.from_logits(teacher), labels())
    expected, expected_gradient = slow(weights, draft, teacher.log_softmax(-1))
    torch.testing.assert_close(value, expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", [name for name in REFERENCE_LOSSES if name != "reverse-kl"])
def test_a_top_k_teacher_is_the_renormalised_distribution_of_the_k_likeliest(name):
    draft, teacher = logits(0, ROWS, HEADS, VOCAB), logits(1, ROWS, VOCAB)
    cut = teacher.masked_fill(teacher < teacher.topk(4).values[:, -1:], -torch.inf)
    value, gradient = loss_and_gradient(
        {name: 1.0}, log_softmax(draft), Teacher.from_logits(teacher, top_k=4), labels()
    )
    expected, expected_gradient = slow({name: 1.0}, draft, cut.log_softmax(-1))
    torch.testing.assert_close(value, expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("weights", MIXTURES, ids=lambda weights: "+".join(weights))
def test_products_in_bf16_and_softmax_in_fp32_stay_near(weights):
    draft, teacher = logits(0, ROWS, HEADS, VOCAB), logits(1, ROWS, VOCAB)
    exact, exact_gradient = loss_and_gradient(weights, log_softmax(draft), Teacher.from_logits(teacher), labels())
    value, gradient = loss_and_gradient(
        weights, log_softmax(draft.bfloat16()), Teacher.from_logits(teacher.bfloat16()), labels()
    )
    assert value.dtype == gradient.dtype == torch.float32
    torch.testing.assert_close(value.double(), exact, rtol=0.02, atol=0.03 * sum(weights.values()))
    torch.testing.assert_close(gradient.double(), exact_gradient, rtol=0.05, atol=0.04 * sum(weights.values()))


def test_divergences_vanish_where_head_and_target_agree():
    teacher = logits(1, ROWS, VOCAB)
    draft = teacher[:, None].expand(-1, HEADS, -1)
    for name in ("kl", "reverse-kl", "tv", "lk"):
        value, gradient = loss_and_gradient({name: 1.0}, log_softmax(draft), Teacher.from_logits(teacher), labels())
        torch.testing.assert_close(value, torch.zeros_like(value), atol=1e-12, rtol=0)
        if name in ("kl", "reverse-kl"):  # the others have a corner there
            torch.testing.assert_close(gradient, torch.zeros_like(gradient), atol=1e-12, rtol=0)


@pytest.mark.parametrize("name", REFERENCE_LOSSES)
def test_extreme_logits_give_finite_losses(name):
    """A target sure of one token and a head sure of another, in fp32: probabilities underflow, losses do not."""
    draft, teacher = torch.zeros(1, 1, VOCAB), torch.zeros(1, VOCAB)
    draft[..., 2], teacher[..., 5] = 80.0, 80.0
    value, gradient = loss_and_gradient(
        {name: 1.0}, log_softmax(draft), Teacher.from_logits(teacher), torch.tensor([5])
    )
    assert torch.isfinite(value).all() and torch.isfinite(gradient).all()
    assert float(value) == pytest.approx(1.0 if name == "tv" else 80.0, rel=0.04)


def test_only_the_text_needs_no_teacher():
    assert not needs_teacher({"hard-ce": 2.0})
    assert needs_teacher({"hard-ce": 1.0, "tv": 0.1})


def test_ranks_count_preferred_tokens_and_split_ties_against_the_head():
    draft = torch.tensor([[[3.0, 1.0, 2.0, 0.0], [0.0, 0.0, 0.0, 0.0], [1.0, 1.0, 0.0, 0.0]]])
    assert label_ranks(draft, torch.tensor([0])).tolist() == [[0, 2, 1]]
    assert label_ranks(draft, torch.tensor([1])).tolist() == [[2, 2, 1]]
    assert label_ranks(log_softmax(draft.bfloat16()), torch.tensor([2])).tolist() == [[1, 2, 3]]
