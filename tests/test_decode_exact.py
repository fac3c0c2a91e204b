"""Drafted decoding writes, token by token, what transformers.generate writes: in float64, without exceptions.

The reference is an untouched second instance of the model, with the attention that transformers gives it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pytest
import stubs
import tiny
import torch
from stubs import TREES

from headstart.decode import engine as engine_module
from headstart.decode.attention import prefill_mask, tree_mask
from headstart.decode.cache import KVCache
from headstart.decode.drafters.base import Drafter, NoDraft, Request
from headstart.decode.drafters.ngram import NgramDrafter
from headstart.decode.engine import Engine, Generation
from headstart.decode.sampling import SamplingSettings
from headstart.decode.tree import Topology
from headstart.errors import HeadstartError
from headstart.eval.acceptance import count_steps
from headstart.target import Target

FAMILIES = tiny.TREE_FAMILIES
WINDOWED = ["swa", "hyb", "qwen2", "gemma2"]
LENGTHS = (3, 7, 12, 15, 16, 17, 32)
"""Prompt lengths; the windows are 16 tokens wide."""
NEW_TOKENS = 24


@functools.lru_cache
def target_of(family: str) -> Target:
    return tiny.target(family, dtype=torch.float64)


@functools.lru_cache
def reference_of(family: str):
    return tiny.model(family, dtype=torch.float64)


@functools.lru_cache
def case(
    family: str, lengths: tuple[int, ...] = LENGTHS, new_tokens: int = NEW_TOKENS
) -> tuple[Target, list[list[int]], list[list[int]]]:
    """A target, prompts, and what transformers writes after them."""
    target = target_of(family)
    prompts = stubs.prompts_of(lengths, target.vocab_size)
    return target, prompts, plain(family, prompts, new_tokens, end_token_ids=target.end_token_ids)


def plain(family: str, prompts: Sequence[Sequence[int]], new_tokens: int, **settings: Any) -> list[list[int]]:
    return stubs.plain_answers(reference_of(family), prompts, new_tokens, **settings)


def drafter_of(
    kind: str | Mapping[int, str], tree: str | list, answers: Sequence[Sequence[int]], vocab: int
) -> Drafter:
    if kind == "none":
        return NoDraft()
    if kind == "ngram":
        return NgramDrafter()
    return stubs.stub(kind, dict(enumerate(answers)), TREES[tree] if isinstance(tree, str) else tree, vocab)


class WatchedEngine(Engine):
    """Compares every row's cache with a fresh prefill of its text after every step."""

    watched = 0

    def _step(self) -> list[Generation]:
        finished = super()._step()
        texts = [ids[:-1] for ids in self.rows.ids]
        if texts:
            fresh = prefilled(self.target, texts)
            assert self.cache.lengths == [len(text) for text in texts]
            pairs = []
            for row in range(len(texts)):
                for layer in range(self.target.num_layers):
                    pairs += zip(self.cache.read(layer, row), fresh.read(layer, row), strict=True)
            stubs.assert_all_close(pairs, 1e-12)
            self.watched += 1
        return finished


def prefilled(target: Target, texts: list[list[int]]) -> KVCache:
    """A new cache that holds these texts, read in one plain causal forward."""
    longest = max(map(len, texts))
    cache = KVCache(target.num_layers, len(texts), longest)
    cache.join(len(texts))
    cache.begin(0, len(texts))
    tokens = torch.tensor([text + [0] * (longest - len(text)) for text in texts])
    allowed, distance, positions = prefill_mask(0, longest, len(texts), torch.device("cpu"))
    target.forward(tokens, positions, target.masks(allowed, distance), cache=cache.as_transformers)
    for row, text in enumerate(texts):
        cache.extend(row, len(text))
    return cache


def run(
    target: Target, drafter: Drafter, requests: Iterable[Request], *, engine: type[Engine] = Engine, **settings: Any
) -> list[Generation]:
    """Generations in the order of their requests' ids."""
    return sorted(
        engine(target, drafter, **settings).generate(requests), key=lambda generation: generation.request.request_id
    )


def requests_of(prompts: Sequence[Sequence[int]], new_tokens: int = NEW_TOKENS, **settings: Any) -> list[Request]:
    return [
        Request(prompt_ids=prompt, max_new_tokens=new_tokens, request_id=index, **settings)
        for index, prompt in enumerate(prompts)
    ]


def tokens_of(generations: Sequence[Generation]) -> list[list[int]]:
    return [generation.token_ids for generation in generations]


def accepted_of(generation: Generation) -> list[int]:
    return [step.accepted for step in generation.steps]


# -- every family, drafter, tree and batch size ------------------------------------------------------------------------


QUICK = [(family, "mixed", "sparse25", 3) for family in FAMILIES] + [
    (family, *rest)
    for family in ("llama", "headdim", "hyb", "swa", "gpt2")
    for rest in (("random", "chain4", 7), ("ngram", "chain4", 2))
]


@pytest.mark.parametrize(("family", "kind", "tree", "batch_size"), QUICK)
def test_tokens_are_those_of_transformers_and_the_cache_that_of_a_prefill(family, kind, tree, batch_size):
    target, prompts, answers = case(family)
    drafter = drafter_of(kind, tree, answers, target.vocab_size)
    out = run(target, drafter, requests_of(prompts), engine=WatchedEngine, batch_size=batch_size)
    assert tokens_of(out) == answers


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["none", "ngram", *stubs.GUESSES])
def test_every_drafter_over_every_tree_in_every_batch(family, kind):
    target, prompts, answers = case(family)
    trees = list(TREES) if kind in stubs.GUESSES else ["chain1"]
    for tree in trees:
        for batch_size in (1, 7) if tree in ("chain1", "sparse25") else (2, 7):
            drafter = drafter_of(kind, tree, answers, target.vocab_size)
            engine = WatchedEngine if batch_size == 7 else Engine
            out = run(target, drafter, requests_of(prompts), engine=engine, batch_size=batch_size)
            assert tokens_of(out) == answers, (tree, batch_size)


@pytest.mark.slow
@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("kind", ["oracle", "anti-oracle", "random", "mixed"])
def test_fifty_prompts_of_sixty_tokens(kind, tree):
    target, prompts, answers = case("llama", tuple(5 + index % 10 * 3 for index in range(50)), 60)
    drafter = drafter_of(kind, tree, answers, target.vocab_size)
    out = run(target, drafter, requests_of(prompts, 60), batch_size=25)
    assert tokens_of(out) == answers


def test_lookup_accepts_where_a_text_repeats_itself():
    target, prompts, answers = case("gpt2")  # its texts loop
    out = run(target, NgramDrafter(), requests_of(prompts), batch_size=7)
    assert tokens_of(out) == answers and sum(sum(accepted_of(generation)) for generation in out) > 10


def test_no_nodes_is_plain_decoding_and_so_is_a_budget_of_one():
    target, prompts, answers = case("llama")
    for paths, budget in [([], 64), (TREES["sparse25"], 1)]:
        out = run(target, drafter_of("oracle", paths, answers, 264), requests_of(prompts), batch_size=7, budget=budget)
        assert tokens_of(out) == answers
        assert all(step.nodes == 1 and step.emitted == 1 for generation in out for step in generation.steps)


def test_a_smaller_budget_changes_the_steps_only():
    target, prompts, answers = case("llama")
    steps = []
    for budget in (2, 4, 26):
        drafter = drafter_of("oracle", "sparse25", answers, 264)
        out = run(target, drafter, requests_of(prompts), batch_size=7, budget=budget)
        assert tokens_of(out) == answers and max(step.nodes for step in out[0].steps) == budget
        steps.append(len(out[0].steps))
    assert steps == sorted(steps, reverse=True)


def test_plain_decoding_at_a_padded_width_is_plain_decoding():
    target, prompts, answers = case("hyb")
    out = run(target, NoDraft(width=7), requests_of(prompts), engine=WatchedEngine, batch_size=3)
    assert tokens_of(out) == answers
    assert all(step.nodes == 1 and step.depth == 0 for generation in out for step in generation.steps)


# -- sliding windows ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", WINDOWED)
@pytest.mark.parametrize("tree", ["chain4", "sparse25"])
def test_texts_that_pass_the_window(family, tree):
    """Window 16, prompts around it, 40 new tokens: roll-backs at text lengths 15, 16, 17 and 32 among others."""
    target, prompts, answers = case(family, (14, 15, 16, 17, 31), 40)
    drafter = drafter_of("mixed", tree, answers, target.vocab_size)
    out = run(target, drafter, requests_of(prompts, 40), engine=WatchedEngine, batch_size=5)
    assert tokens_of(out) == answers
    assert {step.context_length for generation in out for step in generation.steps} >= {14, 15, 16, 31}
    assert any(0 < step.accepted < step.depth for step in out[0].steps)


# -- batches -----------------------------------------------------------------------------------------------------------

KINDS = {0: "oracle", 1: "anti-oracle", 2: "mixed"}


@pytest.mark.parametrize("family", ["llama", "hyb"])
@pytest.mark.parametrize("tree", ["chain4", "full3x3"])
def test_rows_of_a_batch_equal_their_solo_runs(family, tree):
    """Rows of 3, 7 and 12 tokens accept all, nothing and something; the middle one ends early and stays as it is."""
    target, prompts, answers = case(family, (3, 7, 12))
    lengths = [NEW_TOKENS, 5, NEW_TOKENS]
    requests = [
        Request(prompt_ids=prompt, max_new_tokens=length, request_id=index)
        for index, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
    ]
    drafter = drafter_of(KINDS, tree, answers, target.vocab_size)
    finished = {}
    engine = WatchedEngine(target, drafter, batch_size=3)
    together = []
    for generation in engine.generate(requests):
        finished[generation.request.request_id] = (list(generation.token_ids), len(generation.steps))
        together.append(generation)
    assert engine.watched
    for generation in together:
        assert finished[generation.request.request_id] == (generation.token_ids, len(generation.steps))
        index = generation.request.request_id
        assert generation.token_ids == answers[index][: lengths[index]]
        (alone,) = run(target, drafter_of(KINDS, tree, answers, target.vocab_size), [requests[index]])
        assert alone.token_ids == generation.token_ids and alone.finish_reason == generation.finish_reason
        assert accepted_of(alone) == accepted_of(generation)
        assert [step.context_length for step in alone.steps] == [step.context_length for step in generation.steps]


def test_rows_join_as_others_leave():
    target, prompts, answers = case("hyb")
    lengths = [4, 24, 1, 9, 24, 13, 2]
    requests = [
        Request(prompt_ids=prompt, max_new_tokens=length, request_id=index)
        for index, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
    ]
    for kind in ("mixed", "ngram"):
        drafter = drafter_of(kind, "sparse25", answers, target.vocab_size)
        out = run(target, drafter, requests, engine=WatchedEngine, batch_size=3)
        assert tokens_of(out) == [answer[:length] for answer, length in zip(answers, lengths, strict=True)]
        assert max(step.rows for generation in out for step in generation.steps) == 3


@pytest.mark.parametrize("chunk", [1, 5, 16])
def test_prompts_longer_than_the_prefill_chunk(chunk):
    for family in ("llama", "swa"):
        target, prompts, answers = case(family)
        drafter = drafter_of("mixed", "chain4", answers, target.vocab_size)
        settings = {"engine": WatchedEngine, "batch_size": 3, "prefill_chunk": chunk}
        assert tokens_of(run(target, drafter, requests_of(prompts), **settings)) == answers


def test_a_prompt_of_one_token_needs_no_prefill():
    target, prompts, answers = case("llama", (1, 1, 4))
    drafter = drafter_of("mixed", "chain4", answers, 264)
    out = run(target, drafter, requests_of(prompts), engine=WatchedEngine, batch_size=3)
    assert tokens_of(out) == answers


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"prompt_ids": []}, "no tokens"),
        ({"prompt_ids": [3, 264]}, "token id 264, but tiny-llama has ids 0 to 263"),
        ({"prompt_ids": [-1, 3]}, "token id -1"),
        ({"prompt_ids": [3], "stop": ("a", "")}, "stop string is empty"),
    ],
)
def test_requests_that_cannot_be_decoded_are_refused_in_a_sentence(wrong, message):
    with pytest.raises(HeadstartError, match=message):
        list(Engine(target_of("llama"), NoDraft()).generate([Request(max_new_tokens=3, **wrong)]))


def test_a_length_limit_may_be_far_beyond_the_positions():
    target, prompts, answers = case("llama", (120,), 8)
    settings = SamplingSettings(temperature=1e-6)
    (out,) = run(target, NoDraft(), requests_of(prompts, 10**9, settings=settings, ignore_end=True))
    assert out.token_ids == answers[0] and out.finish_reason == "positions"


def test_an_engine_serves_again_after_a_caller_stopped_listening():
    target, prompts, answers = case("llama")
    engine = Engine(target, drafter_of("mixed", "chain4", answers, 264), batch_size=3)
    next(iter(engine.generate(requests_of(prompts))))
    assert len(engine.rows) in (0, 2, 3)
    out = sorted(engine.generate(requests_of(prompts)), key=lambda generation: generation.request.request_id)
    assert tokens_of(out) == answers and len(engine.rows) == 0


# -- acceptance --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("new_tokens", [20, 23])  # a multiple of chain4's steps of 5, and none
@pytest.mark.parametrize("tree", TREES)
def test_oracle_and_anti_oracle_bound_the_acceptance_length(tree, new_tokens):
    target, prompts, answers = case("tied", LENGTHS, 40)  # no end token: every limit is the length's
    depth = max(map(len, TREES[tree]))
    for kind, expected in [("oracle", depth + 1), ("anti-oracle", 1)]:
        drafter = drafter_of(kind, tree, answers, target.vocab_size)
        out = run(target, drafter, requests_of(prompts, new_tokens), batch_size=4)
        assert tokens_of(out) == [answer[:new_tokens] for answer in answers]
        counts = count_steps(generation.steps for generation in out)
        assert counts.acceptance_length == expected
        assert counts.cut_steps == (len(prompts) if new_tokens % expected else 0)
        for generation in out:
            assert sum(step.emitted for step in generation.steps) == new_tokens
            assert all(step.emitted <= step.accepted + 1 for step in generation.steps)
            assert not any(step.cut for step in generation.steps[:-1])


def test_rounds_that_accept_three_none_and_two():
    target, prompts, answers = case("tied", (5,), 40)
    wrong = {4, 7}  # positions 0-2 right, bonus 3; 4 wrong; 5, 6 right, 7 wrong

    def guess(position: int, rank: int, width: int, truth: int) -> int:
        return (truth + (position in wrong)) % target.vocab_size

    drafter = stubs.StubDrafter({0: answers[0]}, guess, stubs.chain(3))
    (out,) = run(target, drafter, requests_of(prompts, 8))
    assert accepted_of(out) == [3, 0, 2] and not any(step.cut for step in out.steps)
    counts = count_steps([out.steps])
    assert counts.acceptance_length == pytest.approx(8 / 3) and counts.mean_accepted == pytest.approx(5 / 3)
    assert counts.draft_acceptance == pytest.approx(5 / 9)
    assert counts.per_position == pytest.approx([2 / 3, 2 / 3, 1 / 3])
    assert counts.conditional == pytest.approx([2 / 3, 1, 1 / 2])


# -- every stop --------------------------------------------------------------------------------------------------------


def with_ends(target: Target, monkeypatch: pytest.MonkeyPatch, *ends: int) -> None:
    monkeypatch.setattr(target, "end_token_ids", ends)


def distinct_start(answers: Sequence[Sequence[int]], count: int) -> int:
    """An answer whose first `count` tokens are all different."""
    return next(index for index, answer in enumerate(answers) if len(set(answer[:count])) == count)


@pytest.mark.parametrize("slot", range(6))
@pytest.mark.parametrize("kind", ["oracle", "mixed", "anti-oracle"])
def test_the_end_token_in_every_slot(slot, kind, monkeypatch):
    """A block of five drafts and the bonus: nothing is written after the end, wherever it falls."""
    target, prompts, answers = case("tied", LENGTHS, 40)
    index = distinct_start(answers, 6)
    with_ends(target, monkeypatch, answers[index][slot])
    (expected,) = plain("tied", [prompts[index]], 12, end_token_ids=target.end_token_ids)
    assert expected == answers[index][: slot + 1]
    drafter = stubs.stub(kind, {0: answers[index]}, stubs.chain(5), target.vocab_size)
    (out,) = run(target, drafter, requests_of([prompts[index]], 12))
    assert out.token_ids == expected and out.finish_reason == "end"
    assert sum(step.emitted for step in out.steps) == slot + 1
    if kind == "oracle":
        (step,) = out.steps
        assert step.accepted == min(slot + 1, 5)  # discarded drafts do not count
        assert step.cut == (slot < 5)
    chunks = list(Engine(target, drafter).stream(requests_of([prompts[index]], 12)[0]))
    assert sum((tokens for tokens, _ in chunks), []) == expected and chunks[-1][1].finish_reason == "end"


def test_the_end_token_may_be_the_id_that_pads(monkeypatch):
    """The engine pads with id 0 and transformers too: a model whose end is 0 still ends where it should."""
    _, prompts, answers = case("llama")
    index = distinct_start(answers, 6)
    for slot in range(6):
        token = answers[index][slot]
        models = [tiny.model("llama", dtype=torch.float64) for _ in range(2)]
        with torch.no_grad():
            for model in models:  # rename the token to 0 and 0 to the token
                for weight in (model.get_input_embeddings().weight, model.get_output_embeddings().weight):
                    weight[[0, token]] = weight[[token, 0]].clone()
        rename = {0: token, token: 0}
        prompt = [rename.get(one, one) for one in prompts[index]]
        target = Target(models[0], tiny.tokenizer(pad_is_end=True), name="renamed")
        with_ends(target, monkeypatch, 0)
        (expected,) = stubs.plain_answers(models[1], [prompt], 12, end_token_ids=[0])
        assert expected == [rename.get(one, one) for one in answers[index][: slot + 1]]
        for batch in ([prompt], [prompt, prompts[0][:2], prompt]):
            truths = [expected, [0], expected]
            out = run(target, drafter_of("oracle", stubs.chain(5), truths, 264), requests_of(batch, 12), batch_size=3)
            assert out[0].token_ids == expected and out[0].finish_reason == "end"


def test_any_of_several_end_tokens_ends(monkeypatch):
    target, prompts, answers = case("tied", LENGTHS, 40)
    ends = sorted({answer[place] for answer, place in zip(answers, (2, 3, 5, 8), strict=False)})
    with_ends(target, monkeypatch, *ends)
    expected = plain("tied", prompts, NEW_TOKENS, end_token_ids=ends)
    assert min(map(len, expected)) < NEW_TOKENS
    for kind in ("mixed", "random", "ngram"):
        out = run(target, drafter_of(kind, "full3x3", answers, 257), requests_of(prompts), batch_size=3)
        assert tokens_of(out) == expected
        assert [one.finish_reason for one in out] == ["end" if one[-1] in ends else "length" for one in expected]


def test_timing_runs_go_through_end_tokens(monkeypatch):
    target, prompts, answers = case("tied", LENGTHS, 40)
    with_ends(target, monkeypatch, *{answer[3] for answer in answers})
    drafter = drafter_of("mixed", "chain4", answers, 257)
    out = run(target, drafter, requests_of(prompts, ignore_end=True), batch_size=3)
    assert tokens_of(out) == [answer[:NEW_TOKENS] for answer in answers]
    assert {generation.finish_reason for generation in out} == {"length"}


def printable_pairs(answers: Sequence[Sequence[int]]) -> list[tuple[int, int, str]]:
    """(answer, place, string): two printable ASCII bytes in a row that occur there for the first time."""
    found = []
    for index, answer in enumerate(answers):
        for place in range(len(answer) - 1):
            if all(33 <= token < 127 for token in answer[place : place + 2]):
                found.append((index, place, bytes(answer[place : place + 2]).decode()))
    return found


def test_stop_strings_end_where_transformers_ends():
    target, prompts, answers = case("llama", tuple(3 + index % 5 for index in range(30)), 20)
    pairs = printable_pairs(answers)
    assert len(pairs) > 20 and len({place for _, place, _ in pairs} & set(range(6))) > 4
    for index, place, string in pairs[:14]:
        stop = (string, "never written")
        (expected,) = plain("llama", [prompts[index]], 20, stop=stop, tokenizer=target.tokenizer)
        assert len(expected) <= place + 2
        for kind in ("oracle", "mixed", "none"):
            drafter = stubs.stub(kind, {0: answers[index]}, stubs.chain(5), 264) if kind != "none" else NoDraft()
            (out,) = run(target, drafter, requests_of([prompts[index]], 20, stop=stop))
            assert out.token_ids == expected and out.finish_reason == "stop"
            assert all(step.accepted <= step.emitted for step in out.steps)


def test_a_stop_string_of_several_bytes_per_character_and_one_that_starts_in_the_prompt(monkeypatch):
    """Stops look at the answer's own text: a string that begins in the prompt does not end it."""
    target, prompts, answers = case("llama")
    text = "né…".encode()
    wanted = [*text, 1, 2]

    class Scripted(Engine):
        """Emits a fixed text, whatever the target says."""

        def _end(self, row, verdict):
            done = len(self._done[row].token_ids)
            fixed = wanted[done : done + len(verdict.tokens)]
            return super()._end(row, type(verdict)(verdict.path[: len(fixed)], fixed))

    drafter = drafter_of("oracle", "chain4", answers, 264)
    (out,) = run(target, drafter, requests_of(prompts[:1], 6, stop=("é…",)), engine=Scripted)
    assert bytes(out.token_ids) == text and out.finish_reason == "stop"
    prompt = [ord("a")]
    (out,) = run(target, NoDraft(), requests_of([prompt], 4, stop=("an",)), engine=Scripted)
    assert out.finish_reason == "length" and len(out.token_ids) == 4


@pytest.mark.parametrize("new_tokens", [7, 1, 0])
@pytest.mark.parametrize("kind", ["oracle", "random"])
def test_never_more_tokens_than_asked_for(kind, new_tokens):
    target, prompts, answers = case("tied", LENGTHS, 40)
    drafter = drafter_of(kind, "chain4", answers, target.vocab_size)
    out = run(target, drafter, requests_of(prompts, new_tokens), batch_size=3)
    assert tokens_of(out) == [answer[:new_tokens] for answer in answers]
    assert all(generation.finish_reason == "length" and generation.cut for generation in out)


@pytest.mark.parametrize("family", ["llama", "opt", "gpt2"])
def test_the_position_limit_is_the_end(family):
    """A text stops at the model's last position: 128, or 64 of GPT-2's learned ones."""
    target = target_of(family)
    limit = target.max_positions
    assert limit == (64 if family == "gpt2" else 128)
    prompts = stubs.prompts_of((limit - 8, limit - 1, limit, limit + 5, 10), target.vocab_size)
    room = [max(limit - len(prompt), 0) for prompt in prompts[:4]]
    expected = [plain(family, [prompt], left)[0] if left else [] for prompt, left in zip(prompts, room, strict=False)]
    expected.append(plain(family, prompts[4:], 20)[0])
    truths = [answer or [0] for answer in expected]
    for kind, tree in [("oracle", "sparse25"), ("mixed", "sparse25"), ("oracle", "chain4"), ("none", "chain4")]:
        drafter = drafter_of(kind, tree, truths, target.vocab_size)
        for batch_size in (1, 4):
            requests = requests_of(prompts, 20, ignore_end=True)
            out = run(target, drafter, requests, engine=WatchedEngine, batch_size=batch_size, budget=26)
            assert tokens_of(out) == expected
            assert [generation.finish_reason for generation in out] == ["positions"] * 4 + ["length"]


def test_streaming_is_the_same_text_in_pieces():
    target, prompts, answers = case("llama")
    for index in (0, 3):
        drafter = stubs.stub("mixed", {0: answers[index]}, TREES["chain4"], 264)
        pieces = list(Engine(target, drafter).stream(requests_of([prompts[index]])[0]))
        assert sum((tokens for tokens, _ in pieces), []) == answers[index] and len(pieces) > 1
        assert all(tokens for tokens, _ in pieces) and len(pieces[-1][1].steps) == len(pieces)


# -- planted faults ----------------------------------------------------------------------------------------------------


def mismatches(family: str, kind: str, tree: str, new_tokens: int = NEW_TOKENS) -> int:
    """Rows that differ from transformers: what the tests above assert to be zero."""
    target, prompts, answers = case(family)
    drafter = drafter_of(kind, tree, answers, target.vocab_size)
    out = run(target, drafter, requests_of(prompts, new_tokens), batch_size=7)
    return sum(one != other for one, other in zip(tokens_of(out), answers, strict=True))


@pytest.mark.parametrize("family", ["llama", "hyb", "gpt2"])
@pytest.mark.parametrize(("kind", "tree"), [("mixed", "chain4"), ("anti-oracle", "chain1"), ("random", "sparse25")])
def test_one_stale_row_left_at_every_roll_back_is_noticed(family, kind, tree, monkeypatch):
    assert mismatches(family, kind, tree) == 0
    stubs.plant_stale_rows(monkeypatch)
    assert mismatches(family, kind, tree) > 0


def blind_mask(topology: Topology, lengths: torch.Tensor, num_keys: int):
    """Causal by slot: siblings see each other."""
    allowed, distance, positions = tree_mask(topology, lengths, num_keys)
    last = lengths[:, None] + torch.arange(topology.num_nodes)
    return torch.arange(num_keys) <= last[:, :, None], distance, positions


def positions_by_index(topology: Topology, lengths: torch.Tensor, num_keys: int):
    allowed, distance, _ = tree_mask(topology, lengths, num_keys)
    return allowed, distance, lengths[:, None] + torch.arange(topology.num_nodes)


def window_by_slot(topology: Topology, lengths: torch.Tensor, num_keys: int):
    allowed, _, positions = tree_mask(topology, lengths, num_keys)
    slots = lengths[:, None] + torch.arange(topology.num_nodes)
    return allowed, slots[:, :, None] - torch.arange(num_keys), positions


@pytest.mark.parametrize(
    ("fault", "families"),
    [(blind_mask, ["llama", "gpt2"]), (positions_by_index, ["llama", "opt"]), (window_by_slot, ["swa", "hyb"])],
)
def test_faults_in_the_masks_are_noticed(fault, families, monkeypatch):
    monkeypatch.setattr(engine_module, "tree_mask", fault)
    for family in families:
        for tree in ("full3x3", "sparse25"):
            assert mismatches(family, "mixed", tree) > 0
