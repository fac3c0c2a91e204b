"""Penalties, forbidden and forced tokens: drafted answers are those of transformers.generate under the same processors.

Each setting is shown to change most of the answers, so that ignoring it could not pass.
"""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import pytest
import stubs
import tiny
import torch
from stubs import TREES
from transformers import LogitsProcessor, SequenceBiasLogitsProcessor

from headstart.decode import engine as engine_module
from headstart.decode.drafters.base import NoDraft, Request
from headstart.decode.drafters.ngram import NgramDrafter
from headstart.decode.engine import Engine
from headstart.decode.processors import CountPenalty, Text
from headstart.decode.sampling import SamplingSettings
from headstart.errors import HeadstartError

LENGTHS = (3, 7, 12, 15, 16, 17, 20, 32)
NEW_TOKENS = 24
END = 5


@functools.lru_cache
def target():
    return tiny.target("llama", dtype=torch.float64)


@functools.lru_cache
def model():
    return tiny.model("llama", dtype=torch.float64)


class OnlyEven(LogitsProcessor):
    """One's own: after an even token only even ones, so that every token depends on the one before."""

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        odd = torch.arange(scores.shape[-1]) % 2 == 1
        return scores.masked_fill(odd[None] & (input_ids[:, -1:] % 2 == 0), -torch.inf)


@functools.lru_cache
def answers(name: str | None) -> list[list[int]]:
    """Of transformers, under one of CASES; None: under none."""
    theirs = dict(CASES[name][1]) if name else {}
    processors = theirs.pop("processors", ())
    if name == "count-penalty":  # transformers has none, and its processors do not know the prompt's length
        return [
            answer
            for prompt in prompts()
            for answer in plain([prompt], processors=[CountPenalty(len(prompt), 0.5, 0.3)], end_token_ids=[END])
        ]
    return plain(prompts(), processors=processors, end_token_ids=[END], **theirs)


def plain(prompts: list[list[int]], **settings: Any) -> list[list[int]]:
    return stubs.plain_answers(model(), prompts, NEW_TOKENS, **settings)


@functools.lru_cache
def prompts() -> list[list[int]]:
    return stubs.prompts_of(LENGTHS, target().vocab_size)


@functools.lru_cache
def frequent() -> list[int]:
    """Tokens that the plain answers hold most often."""
    counts = Counter(token for answer in stubs.plain_answers(model(), prompts(), NEW_TOKENS) for token in answer)
    return [token for token, _ in counts.most_common(12)]


def bad_words() -> tuple[tuple[int, ...], ...]:
    found = stubs.plain_answers(model(), prompts(), NEW_TOKENS)
    return tuple((answer[2], answer[3]) for answer in found) + ((found[0][0],), (found[1][5],))


def bias() -> SequenceBiasLogitsProcessor:
    return SequenceBiasLogitsProcessor(
        {**{(token,): -9.0 for token in frequent()}, **{word: -9.0 for word in bad_words()}}
    )


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "repetition": ({"repetition_penalty": 1.3}, {"repetition_penalty": 1.3}),
    "count-penalty": ({"frequency_penalty": 0.5, "presence_penalty": 0.3}, {}),
    "no-repeat": ({"no_repeat_ngram_size": 1}, {"no_repeat_ngram_size": 1}),
    "bad-words": ({"bad_words_ids": bad_words()}, {"bad_words_ids": [list(word) for word in bad_words()]}),
    "suppress": ({"suppress_tokens": tuple(frequent())}, {"suppress_tokens": frequent()}),
    "own": ({"processors": (OnlyEven(),)}, {"processors": (OnlyEven(),)}),
    "bias": (
        {"processors": (bias(),)},
        {"processors": (bias(),)},
    ),
    "several": (
        {"repetition_penalty": 1.2, "no_repeat_ngram_size": 2, "suppress_tokens": tuple(frequent()[:3])},
        {"repetition_penalty": 1.2, "no_repeat_ngram_size": 2, "suppress_tokens": frequent()[:3]},
    ),
}


def drafters(name: str) -> dict[str, Any]:
    known = dict(enumerate(answers(name)))
    return {
        "none": NoDraft(),
        "ngram": NgramDrafter(),
        **{
            f"{kind} {tree}": stubs.stub(kind, known, TREES[tree], target().vocab_size)
            for kind, tree in [("oracle", "chain4"), ("random", "full3x3"), ("mixed", "sparse25")]
        },
    }


def decode(drafter: Any, settings: SamplingSettings, batch_size: int = 3, **more: Any) -> list[list[int]]:
    requests = [
        Request(prompt_ids=prompt, max_new_tokens=NEW_TOKENS, settings=settings, request_id=number, **more)
        for number, prompt in enumerate(prompts())
    ]
    target().end_token_ids = (END,)
    done = Engine(target(), drafter, batch_size=batch_size).generate(requests)
    return [one.token_ids for one in sorted(done, key=lambda one: one.request.request_id)]


@pytest.mark.parametrize("name", CASES)
def test_every_drafter_writes_what_transformers_does_under_the_same_processors(name):
    settings = SamplingSettings(**CASES[name][0])
    changed = sum(one != other for one, other in zip(answers(name), answers(None), strict=True))
    assert changed >= len(prompts()) // 2, "the setting matters"
    for kind, drafter in drafters(name).items():
        # alone too, with the drafter whose rows accept all, some and none
        for batch_size in (1, 3) if kind == "mixed sparse25" else (3,):
            assert decode(drafter, settings, batch_size) == answers(name), (kind, batch_size)


def test_rows_of_one_batch_keep_their_own_settings():
    names = [*CASES][: len(prompts())]
    requests = [
        Request(
            prompt_ids=prompt, max_new_tokens=NEW_TOKENS, settings=SamplingSettings(**CASES[name][0]), request_id=number
        )
        for number, (prompt, name) in enumerate(zip(prompts(), names, strict=True))
    ]
    target().end_token_ids = (END,)
    for done in Engine(target(), NgramDrafter(), batch_size=len(names)).generate(requests):
        number = done.request.request_id
        assert done.token_ids == answers(names[number])[number]


def test_an_answer_is_at_least_so_long_and_ends_as_it_is_told():
    """End tokens are what the plain answers write early, so that a least length matters."""
    ends = frequent()[:3]
    target().end_token_ids = tuple(sorted(ends))
    early = stubs.plain_answers(model(), prompts(), NEW_TOKENS, end_token_ids=ends)
    late = stubs.plain_answers(model(), prompts(), NEW_TOKENS, end_token_ids=ends, min_new_tokens=12)
    forced = stubs.plain_answers(model(), prompts(), 6, end_token_ids=[END], forced_eos_token_id=END)
    assert sum(len(answer) < 12 for answer in early) >= 2 and all(len(answer) >= 12 for answer in late)
    assert all(answer[-1] == END for answer in forced)
    known = dict(enumerate(late))
    for drafter in (NoDraft(), NgramDrafter(), stubs.stub("mixed", known, TREES["full3x3"], target().vocab_size)):
        for settings, new_tokens, end, expected in [
            (SamplingSettings(min_new_tokens=12), NEW_TOKENS, ends, late),
            (SamplingSettings(force_end=True), 6, [END], forced),
        ]:
            target().end_token_ids = tuple(end)
            requests = [
                Request(prompt_ids=prompt, max_new_tokens=new_tokens, settings=settings, request_id=number)
                for number, prompt in enumerate(prompts())
            ]
            for done in Engine(target(), drafter, batch_size=3).generate(requests):
                assert done.token_ids == expected[done.request.request_id]


def test_a_seed_gives_one_text_with_processors_too():
    settings = SamplingSettings(temperature=1.0, top_k=20, repetition_penalty=1.4, no_repeat_ngram_size=2, seed=3)
    alone = decode(NoDraft(), settings, 1)
    assert alone != decode(NoDraft(), SamplingSettings(temperature=1.0, top_k=20, seed=3), 1)
    known = dict(enumerate(alone))
    for drafter in (NgramDrafter(), stubs.stub("random", known, TREES["full3x3"], target().vocab_size)):
        assert decode(drafter, settings, 3) == alone


FAULTS = {
    "once per step": lambda self, logits, after=(): Text.process(self, logits),
    "the last token twice": lambda self, logits, after=(): Text.process(
        Text([*self.ids, *after, *after[-1:]], self.processors), logits
    ),
    "not at all": lambda self, logits, after=(): logits.double(),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_changes_the_answers(fault, monkeypatch):
    """Penalties by the text before the step alone, a token counted twice, raw logits: each is found by identity."""

    class Faulty(Text):
        process = FAULTS[fault]

    monkeypatch.setattr(engine_module, "Text", Faulty)
    name = "count-penalty" if fault == "the last token twice" else "repetition"
    drafter = stubs.stub("oracle", dict(enumerate(answers(name))), TREES["chain4"], target().vocab_size)
    assert decode(drafter, SamplingSettings(**CASES[name][0])) != answers(name)


@pytest.mark.parametrize(
    "wrong",
    [
        {"repetition_penalty": 0.0},
        {"frequency_penalty": float("nan")},
        {"presence_penalty": float("inf")},
        {"no_repeat_ngram_size": -1},
        {"min_new_tokens": -2},
        {"bad_words_ids": ((1, 2), ())},
    ],
)
def test_settings_out_of_range_are_refused_by_name(wrong):
    with pytest.raises(HeadstartError, match=next(iter(wrong))):
        SamplingSettings(**wrong)
