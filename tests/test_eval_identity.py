"""Identity of drafted texts: a right decoder passes every check, and one with a stale row in its cache fails each."""

from __future__ import annotations

import faults
import pytest
import stubs
import tiny
import torch

from headstart.decode.decode_copy import in_float32
from headstart.decode.drafters.base import NoDraft, Request
from headstart.decode.engine import Engine
from headstart.eval.identity import (
    LEVEL,
    as_dict,
    check_full_precision,
    check_half_precision,
    decode,
    first_difference,
    row_difference,
)

PROMPTS, TOKENS, WIDTH = 12, 16, 5


class Case:
    """Texts of a tiny target, plain and drafted by a chain of four that is often right; with a planted fault or not."""

    def __init__(self, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch | None = None):
        self.target = tiny.target("llama", dtype=dtype, num_hidden_layers=2)
        self.target.end_token_ids = ()
        self.prompts = stubs.prompts_of([5 + index % 7 for index in range(PROMPTS)], 256)
        self.plain = decode(self.target, NoDraft(), self.prompts, TOKENS, 1)
        drafter = stubs.stub("mixed", dict(enumerate(self.plain)), stubs.chain(WIDTH - 1), self.target.vocab_size)
        if monkeypatch is not None:
            faults.leave_a_stale_row(monkeypatch, drafter)
        requests = [
            Request(prompt_ids=prompt, max_new_tokens=TOKENS, request_id=index)
            for index, prompt in enumerate(self.prompts)
        ]
        self.drafted = [one.token_ids for one in Engine(self.target, drafter, budget=WIDTH).generate(requests)]

    def full(self):
        return check_full_precision(self.target, self.prompts, self.plain, self.drafted, WIDTH)

    def half(self):
        control = decode(self.target, NoDraft(WIDTH), self.prompts, TOKENS, WIDTH)
        wide = in_float32(self.target)
        return check_half_precision(self.target, wide, self.prompts, self.plain, self.drafted, control)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_full_precision(dtype):
    outcome = Case(dtype).full()
    assert outcome.passed and outcome.identical == outcome.compared == PROMPTS
    assert 0 < outcome.row_difference < {torch.float64: 1e-12, torch.float32: 1e-3}[dtype]
    assert outcome.limit == (0 if dtype == torch.float64 else 4 * outcome.row_difference)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_stale_row_fails_full_precision(dtype, monkeypatch):
    outcome = Case(dtype, monkeypatch).full()
    assert not outcome.passed and outcome.identical < PROMPTS / 2
    gaps = [one.gap for one in outcome.divergences if one.gap is not None]
    assert min(gaps) > 100 * outcome.row_difference, "far from any tie"


def test_half_precision():
    outcome = Case(torch.bfloat16).half()
    assert outcome.passed and outcome.share_could_fail
    assert outcome.tokens == PROMPTS * TOKENS
    assert 0 < outcome.logit_error and outcome.largest_gap <= outcome.limit == 2 * outcome.logit_error


def test_a_stale_row_fails_both_halves_of_the_check_in_half_precision(monkeypatch):
    outcome = Case(torch.bfloat16, monkeypatch).half()
    assert not outcome.tokens_passed and outcome.largest_gap > 2 * outcome.limit
    assert not outcome.share_passed and outcome.p_value < LEVEL
    assert not as_dict(outcome)["passed"]


def test_a_tie_is_allowed_in_float32_and_counted():
    case = Case(torch.float32)
    token = case.plain[0][0]
    twin = token + 1 if token < 255 else token - 1
    with torch.no_grad():  # the same output row: whatever is before it, the two tokens tie
        case.target.model.lm_head.weight[twin] = case.target.model.lm_head.weight[token]
    case.plain = decode(case.target, NoDraft(), case.prompts, TOKENS, 1)
    assert case.plain[0][0] == min(token, twin)
    case.drafted = [[max(token, twin), *case.plain[0][1:]], *case.plain[1:]]
    outcome = case.full()
    (divergence,) = outcome.divergences
    assert divergence.allowed and divergence.gap is not None and divergence.gap < outcome.limit
    assert divergence.position == 0
    assert outcome.passed and outcome.identical == PROMPTS - 1


def test_a_text_that_ends_early_is_never_allowed():
    case = Case(torch.float32)
    case.drafted[2] = case.drafted[2][:-1]
    (divergence,) = case.full().divergences
    assert divergence.gap is None and not divergence.allowed and divergence.position == TOKENS - 1


def test_first_difference():
    assert first_difference([1, 2], [1, 2]) is None
    assert first_difference([1, 2], [1, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2


def test_one_row_and_n_rows_differ_by_rounding_alone():
    target = tiny.target("hyb", dtype=torch.float64)  # windows of 16, mixed with full layers
    ids = stubs.prompts_of([40], 256)[0]
    assert row_difference(target, ids[:20], ids[20:], 5) < 1e-12


@pytest.mark.parametrize("paths", list(stubs.TREES.values()), ids=list(stubs.TREES))
@pytest.mark.parametrize("kind", ["random", "oracle", "anti-oracle"])
def test_greedy_texts_do_not_depend_on_the_tree(paths, kind):
    """50 prompts, 60 new tokens, in float64: rounding is no excuse there."""
    target, prompts, plain = _plain_texts()
    drafter = stubs.stub(kind, dict(enumerate(plain)), paths, target.vocab_size)
    requests = [Request(prompt_ids=prompt, max_new_tokens=60, request_id=i) for i, prompt in enumerate(prompts)]
    engine = Engine(target, drafter, batch_size=len(prompts), budget=len(paths) + 1)
    drafted = {one.request.request_id: one.token_ids for one in engine.generate(requests)}
    assert [drafted[index] for index in range(len(prompts))] == plain


_PLAIN: list = []


def _plain_texts():
    """Made once: plain greedy texts of 50 prompts."""
    if not _PLAIN:
        target = tiny.target("llama", dtype=torch.float64, num_hidden_layers=2)
        target.end_token_ids = ()
        prompts = stubs.prompts_of([4 + index % 9 for index in range(50)], 256)
        engine = Engine(target, NoDraft(), batch_size=50, budget=1)
        requests = [Request(prompt_ids=prompt, max_new_tokens=60, request_id=i) for i, prompt in enumerate(prompts)]
        texts = {one.request.request_id: one.token_ids for one in engine.generate(requests)}
        _PLAIN.extend([target, prompts, [texts[index] for index in range(50)]])
    return _PLAIN
