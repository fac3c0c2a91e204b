"""Timing of interleaved arms: a fake clock shows what is counted where; orders, warm-up, turns, batches, memory."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import stubs
import tiny
import torch

from headstart.data.rendering import ChatRenderer
from headstart.decode import engine as engine_module
from headstart.decode.drafters.ngram import NgramDrafter
from headstart.eval.prompts import Question
from headstart.eval.timing import PLAIN, Contender, time_arms
from headstart.recipe import ChatSection

TOKENS = 20


def question(index: int, *texts: str) -> Question:
    turns = tuple(({"role": "user", "content": text},) for text in texts or (f"Question {index}",))
    return Question(f"q{index}", "chat", "chat", "from elsewhere", turns)


def renderer() -> ChatRenderer:
    return ChatRenderer(tiny.tokenizer(), ChatSection())


class FakeClock:
    """Stands still but for the target: a prefill takes 1 s, a forward of a tree `step` seconds."""

    def __init__(self, target, monkeypatch, step=0.1, prefill=1.0, first_calls_cost=0.0):
        self.now, self.extra = 0.0, first_calls_cost
        forward = target.forward

        def timed_forward(input_ids, *args, **kwargs):
            self.now += (prefill if input_ids.shape[1] > 8 else step) + self.extra
            self.extra = 0.0
            return forward(input_ids, *args, **kwargs)

        monkeypatch.setattr(target, "forward", timed_forward)
        monkeypatch.setattr(engine_module, "time", SimpleNamespace(perf_counter=lambda: self.now))

    def __call__(self) -> float:
        return self.now


def texts_of(target, questions, max_new_tokens):
    """What the target answers, by the requests' ids."""
    run = time_arms(target, {}, questions, renderer(), max_new_tokens=max_new_tokens, warm_up=False)
    return {(index, 0): answer.arms[PLAIN].token_ids for index, answer in enumerate(run.answers)}


def test_prefill_stands_apart_in_every_arm(monkeypatch):
    target = tiny.target("llama")
    target.end_token_ids = ()
    questions = [question(0), question(1)]
    # An anti-oracle accepts nothing: both arms need as many steps, so both must show the same rate.
    drafter = stubs.stub("anti-oracle", texts_of(target, questions, TOKENS), stubs.chain(2), target.vocab_size)
    clock = FakeClock(target, monkeypatch)
    run = time_arms(
        target,
        {"stub": Contender(drafter, 3)},
        questions,
        renderer(),
        max_new_tokens=TOKENS,
        warm_up=False,
        clock=clock,
    )
    for answer in run.answers:
        for timed in answer.arms.values():
            assert timed.prefill_seconds == pytest.approx(1.0)
            assert len(timed.token_ids) == TOKENS and timed.seconds == pytest.approx(2.0)
            assert timed.first_token_seconds == pytest.approx(1.1)
            assert timed.chunk_seconds == pytest.approx([0.1] * TOKENS)


def test_the_first_call_is_paid_in_the_warm_up(monkeypatch):
    target = tiny.target("llama")
    target.end_token_ids = ()
    clock = FakeClock(target, monkeypatch, first_calls_cost=100.0)
    contenders = {"ngram": Contender(NgramDrafter(3), 4)}
    run = time_arms(target, contenders, [question(0)], renderer(), max_new_tokens=5, clock=clock)
    (answer,) = run.answers
    assert max(timed.seconds + timed.prefill_seconds for timed in answer.arms.values()) < 2


def test_the_order_of_the_arms_turns(monkeypatch):
    target = tiny.target("llama")
    ran: list[str] = []
    import headstart.eval.timing as timing

    original = timing._run
    monkeypatch.setattr(
        timing, "_run", lambda engine, *rest: ran.append(engine.drafter.name) or original(engine, *rest)
    )
    time_arms(
        target,
        {"ngram": Contender(NgramDrafter(3), 4)},
        [question(i) for i in range(3)],
        renderer(),
        max_new_tokens=3,
        warm_up=False,
    )
    assert ran == ["none", "ngram", "ngram", "none", "none", "ngram"]


@pytest.mark.parametrize("batch_size", [1, 3])
def test_every_arm_writes_the_same_text_and_turns_follow_the_plain_answer(batch_size):
    target = tiny.target("llama", dtype=torch.float64)
    questions = [question(0), question(1, "Say a", "Say b"), question(2), question(3, "Hm", "Why", "Ah")]
    run = time_arms(
        target,
        {"ngram": Contender(NgramDrafter(4), 5)},
        questions,
        renderer(),
        max_new_tokens=8,
        batch_size=batch_size,
        transformers_questions=2,
    )
    keys = {(answer.question.question_id, answer.turn) for answer in run.answers}
    assert keys == {("q0", 0), ("q1", 0), ("q1", 1), ("q2", 0), ("q3", 0), ("q3", 1), ("q3", 2)}
    for answer in run.answers:
        assert answer.arms[PLAIN].token_ids == answer.arms["ngram"].token_ids
        asked = batch_size == 1 and answer.question.question_id in ("q0", "q1")
        assert (answer.transformers is not None) == asked
        if answer.transformers:
            tokens, seconds = answer.transformers.tokens, answer.transformers.seconds
            assert tokens == len(answer.arms[PLAIN].token_ids) - 1 and (seconds > 0 or not tokens)
    first, second = (answer for answer in run.answers if answer.question.question_id == "q1")
    said = str(target.tokenizer.decode(first.arms[PLAIN].token_ids, skip_special_tokens=True))
    assert second.prompt_ids == renderer().prompt(
        [*questions[1].turns[0], {"role": "assistant", "content": said}, *questions[1].turns[1]]
    )
    assert {answer.group for answer in run.answers} == set(range(math.ceil(4 / batch_size)))


def test_shares_of_a_batch_add_up_to_its_wall_time(monkeypatch):
    target = tiny.target("llama")
    target.end_token_ids = ()
    clock = FakeClock(target, monkeypatch)
    questions = [question(i) for i in range(4)]
    run = time_arms(target, {}, questions, renderer(), max_new_tokens=10, batch_size=4, warm_up=False, clock=clock)
    assert sum(answer.arms[PLAIN].seconds for answer in run.answers) == pytest.approx(1.0)


def test_memory_is_counted_for_every_arm():
    target = tiny.target("llama")
    drafter = NgramDrafter(4)
    run = time_arms(target, {"ngram": Contender(drafter, 5)}, [question(0)], renderer(), max_new_tokens=6)
    plain, drafted = ({key: count or 0 for key, count in run.memory[arm].items()} for arm in (PLAIN, "ngram"))
    # 4 layers, keys and values, 2 heads of 16, 4 bytes
    assert plain["cache_bytes"] % (4 * 2 * 2 * 16 * 4) == 0 and drafted["cache_bytes"] > plain["cache_bytes"] > 0
    assert plain["drafter_bytes"] == 0 and drafted["drafter_bytes"] > 0
    assert drafted["total_bytes"] == sum(drafted[key] for key in ("cache_bytes", "mask_bytes", "drafter_bytes"))
    assert torch.cuda.is_available() or run.memory[PLAIN]["gpu_peak_bytes"] is None
    assert "select" not in vars(drafter), "the drafter is left as it was"


def test_a_prompt_without_room_for_an_answer_is_named():
    target = tiny.target("llama")
    long = question(1, "x" * 500)
    run = time_arms(target, {}, [question(0), long, question(2)], renderer(), max_new_tokens=3)
    assert run.too_long == ["q1"] and len(run.answers) == 2
