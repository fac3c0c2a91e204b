"""The attention of unrolled training: its fast form against the definition, and the definition against a loop."""

from __future__ import annotations

import pytest
import torch
from head_cases import collate, pad, row

from headstart.heads.unrolled_attention import UnrolledAttention, spans, spans_of_rows, unrolled_rows

F64 = torch.float64
HEADS, WIDTH = 6, 8


def packed():
    """Three sequences: two documents and padding, one document that fills it, one document and padding."""
    rows = [row(7, range(3, 7), 1), row(4, [1, 2], 2), row(13, range(5, 13), 3), row(9, range(4, 9), 4)]
    return pad(collate(rows, [[0, 1], [2], [3]]), 13)


def inputs(batch, kv_heads: int, steps: int, dtype=F64, seed: int = 0):
    """(query, key, value) of every step, as projections give them."""
    generator = torch.Generator().manual_seed(seed)
    shape = batch.input_ids.shape

    def draw(heads):
        drawn = torch.randn(*shape, heads, WIDTH, generator=generator, dtype=F64).to(dtype)
        return drawn.transpose(1, 2).requires_grad_()

    return [(draw(HEADS), draw(kv_heads), draw(kv_heads)) for _ in range(steps)]


def attend_all(batch, steps, eager: bool):
    attend = UnrolledAttention(batch, eager=eager)
    return [attend(0, *step) for step in steps]


def naive(batch, steps, line: int, head: int, position: int, step: int) -> torch.Tensor:
    """One query, straight from the definition, key by key."""
    query = steps[step][0][line, head, position]
    kv_head = head // (HEADS // steps[0][1].shape[1])
    same = batch.document_ids[line] == batch.document_ids[line, position]
    keys = [(steps[0], place) for place in range(position + 1) if same[place]]
    keys += [(steps[later], position) for later in range(1, step + 1)]
    scores = torch.stack([query @ given[1][line, kv_head, place] for given, place in keys]) / WIDTH**0.5
    values = torch.stack([given[2][line, kv_head, place] for given, place in keys])
    return scores.softmax(0) @ values


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "fast"])
@pytest.mark.parametrize("kv_heads", [1, 2, 6])
def test_every_query_gathers_what_the_definition_says(eager, kv_heads):
    batch = packed()
    steps = inputs(batch, kv_heads, 3)
    found = attend_all(batch, steps, eager)
    for line, position in (batch.document_ids >= 0).nonzero().tolist():
        for step in range(3):
            for head in range(HEADS):
                expected = naive(batch, steps, line, head, position, step)
                torch.testing.assert_close(found[step][line, head, position], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kv_heads", [1, 2, 6])
@pytest.mark.parametrize("num_steps", [1, 2, 4])
def test_the_fast_form_has_the_gradient_of_the_eager_one(kv_heads, num_steps):
    batch = packed()
    real = (batch.document_ids >= 0)[:, None, :, None]
    found = {}
    for eager in (True, False):
        steps = inputs(batch, kv_heads, num_steps)
        weights = inputs(batch, kv_heads, num_steps, seed=1)
        outs = attend_all(batch, steps, eager)
        sum((out * weight[0].detach() * real).sum() for out, weight in zip(outs, weights, strict=True)).backward()
        found[eager] = [tensor.grad for step in steps for tensor in step]
    for fast, eager in zip(found[False], found[True], strict=True):
        torch.testing.assert_close(fast, eager, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("dtype,tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
def test_both_forms_agree_in_lower_precision(dtype, tolerance):
    batch = packed()
    steps = inputs(batch, 2, 3, dtype)
    real = (batch.document_ids >= 0)[:, None, :, None]
    for fast, eager in zip(attend_all(batch, steps, False), attend_all(batch, steps, True), strict=True):
        assert fast.dtype == dtype
        torch.testing.assert_close(fast * real, eager * real, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "fast"])
def test_what_is_far_from_a_query_has_no_gradient(eager):
    """B51: no step looks across documents or ahead, and a later step's keys are its own position's alone."""
    batch = packed()
    steps = inputs(batch, 2, 3)
    attend_all(batch, steps, eager)[2][0, :, 5].sum().backward()
    for number, (query, key, value) in enumerate(steps):
        touched = [[0, 1, 2, 3, 4, 5], [5], [5]][number]
        for tensor in (key, value):
            assert tensor.grad.abs().sum((1, 3)).nonzero().tolist() == [[0, place] for place in touched]
        if number < 2:
            assert query.grad is None


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "fast"])
def test_extreme_scores_stay_finite(eager):
    batch = packed()
    steps = [tuple((tensor * 60).detach().requires_grad_() for tensor in step) for step in inputs(batch, 2, 3)]
    outs = attend_all(batch, steps, eager)
    sum(out.sum() for out in outs).backward()
    for tensor in [*outs, *(tensor.grad for step in steps for tensor in step)]:
        assert torch.isfinite(tensor).all()


def test_documents_are_found_where_they_stand():
    found = spans(packed())
    assert found == [(0, 0, 0, 7, 0), (0, 7, 7, 11, 7), (1, 0, 0, 13, 13), (2, 0, 0, 9, 26)]
    assert spans(collate([], [])) == []
    rows = unrolled_rows(packed(), torch.tensor([2, 3, 6, 9, 15, 25]))
    assert rows.tolist() == [2, 3, 4, 5, 6, 9, *range(15, 26)], "from the first to the last of each document"
    assert spans_of_rows(found, rows) == [(0, 0, 2, 7, 0), (0, 7, 9, 10, 5), (1, 0, 2, 13, 6)]
    assert unrolled_rows(packed(), rows[:0]).tolist() == []


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "fast"])
@pytest.mark.parametrize("first_everywhere", [True, False])
def test_some_positions_alone_gather_what_they_do_among_all(eager, first_everywhere):
    """And their gradients are the same; in step 0 the others may ask too, as in all layers but the last."""
    batch, found = packed(), {}
    rows = unrolled_rows(batch, torch.tensor([2, 6, 9, 15, 20, 30, 34]))
    for alone in (False, True):
        steps, weights = inputs(batch, 2, 3), inputs(batch, 2, 3, seed=1)
        attend, loss = UnrolledAttention(batch, rows if alone else None, eager=eager), torch.zeros((), dtype=F64)
        for number, (step, (weight, *_)) in enumerate(zip(steps, weights, strict=True)):
            given = list(step)
            if alone:
                for place in range(3) if number else [] if first_everywhere else [0]:
                    given[place] = at_rows(given[place], rows)
            out = attend(0, *given)
            out, weight = (one if one.shape[0] == 1 else at_rows(one, rows) for one in (out, weight.detach()))
            loss = loss + (out * weight).sum()
            found[alone, number] = out
        loss.backward()
        found[alone] = [tensor.grad for step in steps for tensor in step]
    for number in range(3):
        torch.testing.assert_close(found[True, number], found[False, number], rtol=1e-12, atol=1e-12)
    for one, other in zip(found[True], found[False], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-12)


def at_rows(tensor, rows):
    """[batch, heads, seq, width] at flattened positions, as a batch of one."""
    return tensor.transpose(1, 2).flatten(0, 1)[rows].transpose(0, 1)[None]
