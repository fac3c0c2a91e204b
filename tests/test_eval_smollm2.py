"""The identity checks on the real bundled target: they pass as it is, and each fails with a fault in the cache."""

from __future__ import annotations

import faults
import pytest
import stubs
import torch

from headstart import bundled
from headstart.data.rendering import ChatRenderer
from headstart.decode.decode_copy import in_float32, make_faster
from headstart.decode.drafters.base import NoDraft, Request
from headstart.decode.engine import Engine
from headstart.eval.identity import check_full_precision, check_half_precision, decode
from headstart.eval.prompts import choose, load_questions
from headstart.recipe import ChatSection, load_recipe
from headstart.target import load_target

pytestmark = pytest.mark.slow
TOKENS, WIDTH = 24, 5


@pytest.fixture(scope="module")
def target():
    return load_target(bundled.NAME, dtype="bfloat16", device="cpu")


def prompts_of(target, count):
    renderer = ChatRenderer(target.tokenizer, ChatSection())
    questions = choose(load_questions(load_recipe("quickstart.yaml"), target.tokenizer), count)
    return [question.prompt_ids(renderer) for question in questions]


def drafted_texts(target, prompts, plain, monkeypatch=None):
    """With a chain of four that is wrong at every third token; perhaps with the fault."""
    drafter = stubs.stub("mixed", dict(enumerate(plain)), stubs.chain(WIDTH - 1), target.vocab_size)
    if monkeypatch is not None:
        faults.leave_a_stale_row(monkeypatch, drafter)
    requests = [Request(prompt_ids=prompt, max_new_tokens=TOKENS, request_id=i) for i, prompt in enumerate(prompts)]
    return [one.token_ids for one in Engine(target, drafter, budget=WIDTH).generate(requests)]


def test_float32(target, monkeypatch):
    wide = in_float32(target)
    prompts = prompts_of(target, 3)
    plain = decode(wide, NoDraft(), prompts, TOKENS, 1)
    right = check_full_precision(wide, prompts, plain, drafted_texts(wide, prompts, plain), WIDTH)
    assert right.passed and right.row_difference < 1e-2
    wrong = check_full_precision(wide, prompts, plain, drafted_texts(wide, prompts, plain, monkeypatch), WIDTH)
    assert not wrong.passed


def test_bfloat16(target, monkeypatch):
    wide = in_float32(target)
    prompts = prompts_of(target, 14)
    make_faster(target)
    plain = decode(target, NoDraft(), prompts, TOKENS, 1)
    control = decode(target, NoDraft(WIDTH), prompts, TOKENS, WIDTH)
    right = check_half_precision(target, wide, prompts, plain, drafted_texts(target, prompts, plain), control)
    assert right.passed and right.share_could_fail
    faulty = drafted_texts(target, prompts, plain, monkeypatch)
    wrong = check_half_precision(target, wide, prompts, plain, faulty, control)
    assert not wrong.tokens_passed and not wrong.share_passed
    assert torch.isfinite(torch.tensor([right.logit_error, wrong.largest_gap])).all()
