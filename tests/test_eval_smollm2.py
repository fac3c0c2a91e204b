"""On the real bundled target: the identity checks pass as it is, and each fails with a fault in the cache; and what is
forecast along its texts is what is decoded."""

from __future__ import annotations

import faults
import pytest
import stubs
import torch

from headstart import bundled
from headstart.data.rendering import ChatRenderer, Row
from headstart.decode.cost import replay, replay_grown
from headstart.decode.decode_copy import in_float32, make_faster
from headstart.decode.drafters.base import NoDraft, Request
from headstart.decode.drafters.heads import head_drafter
from headstart.decode.drafters.plans import DynamicTree, StaticTree, chain_paths
from headstart.decode.engine import Engine
from headstart.decode.forecast import Recorded, grow_rows, rank_answer, record_rows
from headstart.eval.identity import check_full_precision, check_half_precision, decode
from headstart.eval.prompts import choose, load_questions
from headstart.heads.store import load_head
from headstart.recipe import ChatSection, load_recipe
from headstart.target import load_target
from headstart.train import eagle, medusa

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


SMALL = {
    "train": '[{source: "bundled:chats", split: train, limit: 60}]',
    "held_out.sources": '[{source: "bundled:chats", split: held_out_topics, limit: 4}]',
}
PLANS = {
    "chain": StaticTree(paths=chain_paths(4)),
    "tree": StaticTree(paths=[(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 1), (0, 0, 0, 0)]),
    "dynamic": DynamicTree(depth=4, width=3, num_nodes=10),
}


@pytest.fixture(scope="module")
def heads(tmp_path_factory):
    """One trained a little, of each kind that drafts in its own way."""
    folder = tmp_path_factory.mktemp("runs")
    for main, name in ((medusa.main, "smollm2-medusa"), (eagle.main, "smollm2-eagle3")):
        settings = [f"data.{key}={value}" for key, value in SMALL.items()]
        settings += ["target.dtype=float32", "train.cpu_seconds=null", "train.max_steps=40", "train.eval_every=null"]
        main(
            [
                "--recipe",
                f"{name}.yaml",
                "--output",
                str(folder),
                *(word for one in settings for word in ("--set", one)),
            ]
        )
    return folder


@pytest.mark.parametrize(("kind", "plan"), [("medusa", "tree")] + [("eagle3", plan) for plan in PLANS])
def test_drafts_accepted_along_the_texts_are_forecast(target, heads, kind, plan):
    """Within 1% in float32, where a draft may part at a tie of its logits."""
    wide, shape = in_float32(target), PLANS[plan]
    head = load_head(heads / f"smollm2-{kind}/head", wide)
    prompts = prompts_of(wide, 10)
    drafter = head_drafter(head, wide, shape)
    requests = [Request(prompt_ids=prompt, max_new_tokens=48, request_id=i) for i, prompt in enumerate(prompts)]
    forecast, decoded = [], []
    for generation in Engine(wide, drafter, budget=shape.num_nodes).generate(requests):
        decoded += [step.accepted for step in generation.steps if not step.cut]
        text = as_recorded(wide, generation, head.wants)
        if isinstance(shape, StaticTree):
            run = replay(rank_answer(head, wide, text, depth=4), shape.paths)
        else:
            (grown,) = grow_rows(head, wide, [text], depth=shape.depth, width=shape.width)
            run = replay_grown(grown, shape.depth, shape.num_nodes)
        forecast += [accepted for _, accepted in run]
    figures = [(sum(counts), len(counts)) for counts in (forecast, decoded)]
    print(f"{kind}, {plan}: (drafts, steps) forecast and decoded {figures}")
    assert sum(decoded) > 5
    assert sum(forecast) == pytest.approx(sum(decoded), rel=0.01, abs=1)
    assert len(forecast) == pytest.approx(len(decoded), rel=0.01, abs=1)


def as_recorded(target, generation, wants) -> Recorded:
    prompt = generation.request.prompt_ids
    ids = [*prompt, *generation.token_ids]
    (text,) = record_rows(target, [Row("text", ids, [place >= len(prompt) for place in range(len(ids))])], wants)
    return text
