"""Lookahead decoding: the target's text whatever the windows hold, windows that hold what plain forwards of an
untouched model give, and extra queries that no draft ever notices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import stubs
import tiny
import torch
from test_decode_exact import (
    FAMILIES,
    WatchedEngine,
    accepted_of,
    case,
    plain,
    printable_pairs,
    reference_of,
    requests_of,
    run,
    target_of,
    tokens_of,
    with_ends,
)
from test_decode_sampling import DRAWS, SETTINGS, SMOKE_DRAWS, assert_distribution, seeds_from

from headstart.decode import engine as engine_module
from headstart.decode.attention import tree_mask
from headstart.decode.cache import KVCache
from headstart.decode.drafters.base import Committed, Drafter, NoDraft, Request, Rows
from headstart.decode.drafters.lookahead import LookaheadDrafter, NgramPool
from headstart.decode.drafters.ngram import NgramDrafter
from headstart.decode.drafters.union import UnionDrafter
from headstart.decode.engine import Engine
from headstart.decode.sampling import SamplingSettings
from headstart.decode.tree import ExtraQueries, TokenTree, Topology
from headstart.errors import HeadstartError
from headstart.target import Features

Branches = set[tuple[int, ...]]


def lookahead(**settings: Any) -> LookaheadDrafter:
    return LookaheadDrafter(**{"window": 4, "level": 4, "guesses": 3, **settings})


# -- a slow reference --------------------------------------------------------------------------------------------------


class SlowLookahead:
    """The paper's two branches for one row by plain forwards, one per guess, over a table of all guesses ever made.

    In step t the window's place x means x positions behind the root of step 0, had every step written one token:
    guess[s][x] is what step s guessed there, guess[-1] the random start. A guess of step t is made behind the text, the
    oldest guesses that are still in use, up to where its column begins, and one guess of each later step.
    """

    def __init__(self, start: Sequence[int], window: int, level: int, guesses: int):
        self.window, self.level, self.guesses = window, level, guesses
        self.guess: dict[int, dict[int, int]] = {-1: dict(enumerate(start, 1))}
        self.step = 0
        self.pool: list[tuple[int, ...]] = []
        """All n-grams, the latest last."""

    def drafts(self, token: int) -> Branches:
        """The beginnings of the latest few n-grams behind `token`."""
        latest = [ngram[1:] for ngram in self.pool if ngram[0] == token][-self.guesses :]
        return {ngram[:depth] for ngram in latest for depth in range(1, self.level)}

    def add(self, ngram: tuple[int, ...]) -> None:
        self.pool = [*(other for other in self.pool if other != ngram), ngram]

    def guess_again(self, model, ids: Sequence[int]) -> torch.Tensor:
        """Makes this step's guesses behind the text, and gives their logits, [columns, vocab]."""
        t, depth = self.step, min(self.step, self.level - 2)
        oldest = t - 1 - depth
        filling = depth < self.level - 2
        columns = range(1, self.window + self.level - 2 - t) if filling else range(self.window)
        self.guess[t], rows, ngrams = {}, [], []
        for c in columns:
            level_0 = [self.guess[oldest][t + place] for place in range(1, c + 1)]
            column = [self.guess[oldest + later][t + c + later] for later in range(1, depth + 1)]
            rows.append(model(torch.tensor([[*ids, *level_0, *column]]), use_cache=False).logits[0, -1])
            found = int(rows[-1].argmax())
            self.guess[t][t + c + depth + 1] = found
            ngrams.append((level_0[-1] if c else ids[-1], *column, found))
        if not filling:
            for ngram in ngrams:
                self.add(ngram)
        self.step += 1
        return torch.stack(rows)


class Noting(LookaheadDrafter):
    """Keeps, by request, the start, and by step the text, the branches drafted, and the logits that came back."""

    def __init__(self, **settings: Any):
        super().__init__(**settings)
        self.noted: dict[Any, list[tuple[list[int], Branches, torch.Tensor]]] = {}
        self.starts: dict[Any, list[int]] = {}

    def start(self, rows: Rows, first: int) -> None:
        super().start(rows, first)
        for row in range(first, len(rows)):
            self.starts[rows.requests[row].request_id] = list(self._rows[row].window.levels[0])

    def propose(self, rows: Rows, budget: int) -> TokenTree:
        tree = super().propose(rows, budget)
        self._texts = [list(ids) for ids in rows.ids]
        self._drafted = [branches_of(tree, row) for row in range(len(rows))]
        return tree

    def commit(self, rows: Rows, first: int, committed: Committed) -> None:
        if rows.num_new(first):
            assert committed.extra_logits is not None
            for row, logits in enumerate(committed.extra_logits):
                key = rows.requests[row].request_id
                wanted = logits[: self._rows[row].num_wanted]
                self.noted.setdefault(key, []).append((self._texts[row], self._drafted[row], wanted))
        super().commit(rows, first, committed)


def branches_of(tree: TokenTree, row: int) -> Branches:
    branches: list[tuple[int, ...]] = [()]
    tokens, parents = tree.tokens[row].tolist(), tree.topology.parents[row].tolist()
    valid = tree.topology.valid[row].tolist()
    for node in range(1, len(tokens)):
        branches.append((*branches[parents[node]], tokens[node]))
    found = [branch for branch, real in zip(branches[1:], valid[1:], strict=True) if real]
    assert len(set(found)) == len(found), "shared beginnings stand once"
    return set(found)


REFERENCE_CASES = [
    ("llama", 4, 4, 3),
    ("swa", 5, 3, 2),  # layers that see 16 tokens
    ("hyb", 2, 5, 2),
    ("gpt2", 1, 4, 3),
]


@pytest.mark.parametrize(("family", "window", "level", "guesses"), REFERENCE_CASES)
@torch.no_grad()
def test_windows_drafts_and_logits_are_those_of_plain_forwards(family, window, level, guesses):
    """Rows of all states in one batch: they join at any step, and accept different numbers."""
    few = {"vocab_size": 20, "dtype": torch.float64}  # so few tokens that the pool is asked for known ones
    target, model = tiny.target(family, **few), tiny.model(family, **few)
    prompts = stubs.prompts_of((3, 12, 1, 17), target.vocab_size)
    lengths = [9, 5, 16, 12]
    requests = [
        Request(prompt_ids=prompt, max_new_tokens=length, request_id=index)
        for index, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
    ]
    drafter = Noting(window=window, level=level, guesses=guesses)
    out = run(target, drafter, requests, batch_size=2)
    for generation in out:
        key = generation.request.request_id
        start = drafter.starts[key]
        assert len(start) == window + level - 3 and set(start) <= set(prompts[key])
        slow = SlowLookahead(start, window, level, guesses)
        assert len(drafter.noted[key]) == len(generation.steps)
        for step, (text, drafted, logits) in enumerate(drafter.noted[key]):
            assert drafted == slow.drafts(text[-1])
            expected = slow.guess_again(model, text)
            assert step < level - 2 or len(logits) == window
            torch.testing.assert_close(logits, expected, rtol=1e-10, atol=1e-10)
    assert any(drafted for noted in drafter.noted.values() for _, drafted, _ in noted)


def test_a_step_costs_what_it_says():
    target, prompts, _ = case("llama")
    out = run(target, lookahead(window=5, level=4, guesses=3), requests_of(prompts, ignore_end=True), batch_size=1)
    for generation in out:
        sent = [step.extra_queries for step in generation.steps]
        assert sent[:2] == [6, 5 + 6] and set(sent[2:]) == {3 * 5 - 1}
        assert max(step.nodes for step in generation.steps) <= 1 + 3 * 3
    assert all(step.extra_queries == 0 for step in run(target, NgramDrafter(), requests_of(prompts))[0].steps)


# -- the target's text -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "swa", "hyb", "gpt2", "minicpm"])
@pytest.mark.parametrize(("batch_size", "from_text"), [(1, True), (3, False), (7, True)])
def test_tokens_are_those_of_transformers_and_the_cache_that_of_a_prefill(family, batch_size, from_text):
    target, prompts, answers = case(family)
    drafter = lookahead(from_text=from_text)
    out = run(target, drafter, requests_of(prompts), engine=WatchedEngine, batch_size=batch_size)
    assert tokens_of(out) == answers


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_in_every_size(family):
    target, prompts, answers = case(family)
    for window, level, guesses in [(1, 3, 1), (7, 5, 7), (3, 8, 2), (15, 3, 15)]:
        for batch_size, budget in [(1, 64), (7, 5)]:
            drafter = LookaheadDrafter(window, level, guesses, from_text=batch_size == 7)
            settings = {"engine": WatchedEngine, "batch_size": batch_size, "budget": budget}
            assert tokens_of(run(target, drafter, requests_of(prompts), **settings)) == answers, (window, level)


def test_rows_join_and_leave_and_each_equals_its_solo_run():
    target, prompts, answers = case("gpt2")
    lengths = [4, 24, 1, 9, 24, 13, 2]
    requests = [
        Request(prompt_ids=prompt, max_new_tokens=length, request_id=index)
        for index, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
    ]
    together = run(target, lookahead(), requests, engine=WatchedEngine, batch_size=3)
    assert tokens_of(together) == [answer[:length] for answer, length in zip(answers, lengths, strict=True)]
    for request, generation in zip(requests, together, strict=True):
        (alone,) = run(target, lookahead(), [request])
        assert accepted_of(alone) == accepted_of(generation)


@pytest.mark.parametrize("from_text", [False, True])
def test_a_text_that_repeats_itself_is_accepted(from_text):
    target, prompts, answers = case("gpt2")  # its texts loop
    out = run(target, lookahead(from_text=from_text), requests_of(prompts), batch_size=7)
    assert tokens_of(out) == answers
    accepted = [accepted_of(generation) for generation in out]
    assert sum(map(sum, accepted)) > 20 and max(map(max, accepted)) == 3


def test_the_budget_keeps_the_latest_ngrams():
    target, prompts, answers = case("gpt2")
    for budget in (1, 2, 4):
        out = run(target, lookahead(), requests_of(prompts), batch_size=7, budget=budget)
        assert tokens_of(out) == answers and max(step.nodes for one in out for step in one.steps) == budget


def test_ends_and_stops(monkeypatch):
    target, prompts, answers = case("gpt2", (3, 7, 12, 15), 20)
    with_ends(target, monkeypatch, *{answer[6] for answer in answers})
    expected = plain("gpt2", prompts, 20, end_token_ids=target.end_token_ids)
    assert min(map(len, expected)) < 20
    assert tokens_of(run(target, lookahead(from_text=True), requests_of(prompts, 20), batch_size=3)) == expected
    target, prompts, answers = case("llama", tuple(3 + index % 5 for index in range(30)), 20)
    for index, _, string in printable_pairs(answers)[:5]:
        (expected,) = plain("llama", [prompts[index]], 20, stop=(string,), tokenizer=target.tokenizer)
        (out,) = run(target, lookahead(from_text=True), requests_of([prompts[index]], 20, stop=(string,)))
        assert out.token_ids == expected and out.finish_reason == "stop"


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_window_stays_within_the_positions(family):
    """Near the end a row sends no more queries, in a batch with rows that do, and is right up to its last position."""
    target = target_of(family)
    limit = target.max_positions
    prompts = stubs.prompts_of((limit - 14, limit - 1, limit - 6, 10), target.vocab_size)
    expected = [plain(family, [prompt], min(20, limit - len(prompt)))[0] for prompt in prompts]
    window = {"window": 3, "level": 4}
    for batch_size in (1, 4):
        drafter = lookahead(from_text=True, **window)
        requests = requests_of(prompts, 20, ignore_end=True)
        out = run(target, drafter, requests, engine=WatchedEngine, batch_size=batch_size)
        assert tokens_of(out) == expected
        if batch_size == 1:
            for generation in out:
                for step in generation.steps:
                    fits = step.context_length + 3 + 4 - 3 < limit
                    assert (step.extra_queries > 0) == fits
    assert drafter.reach == 4


def test_same_seed_same_text_whatever_the_windows():
    target, prompts, _ = case("gpt2")
    settings = SamplingSettings(temperature=0.5, seed=3)
    texts = tokens_of(run(target, NoDraft(), requests_of(prompts, settings=settings)))
    for batch_size in (1, 7):
        drafter = lookahead(from_text=batch_size == 7)
        out = run(target, drafter, requests_of(prompts, settings=settings), batch_size=batch_size)
        assert tokens_of(out) == texts


# -- extra queries are nobody's business but the drafter's -------------------------------------------------------------


class Comparing(WatchedEngine):
    """Forwards every step's trees once more without their queries: the logits must be the same."""

    compared = 0

    def _logits(self, tree: TokenTree, features: Features):
        logits, extra = super()._logits(tree, features)
        if tree.extra is not None:
            lengths = torch.tensor(self.cache.lengths)
            self.cache.begin(0, len(self.rows))
            mask = tree_mask(tree.topology, lengths, self.cache.key_length(tree.num_nodes))
            alone = self.target.output.logits(self._forward(tree.tokens, *mask).final)
            torch.testing.assert_close(logits, alone, rtol=1e-12, atol=1e-12)
            self.compared += 1
        return logits, extra


@pytest.mark.parametrize("family", ["llama", "swa", "hyb", "olmoe"])
def test_the_trees_logits_do_not_change(family):
    target, prompts, answers = case(family)
    engine = Comparing(target, lookahead(from_text=True), batch_size=3)
    out = sorted(engine.generate(requests_of(prompts)), key=lambda one: one.request.request_id)
    assert tokens_of(out) == answers and engine.compared > 20


class Asking(NoDraft):
    """A drafter's trees with random queries behind them; keeps what it asked, and the logits that came back."""

    def __init__(self, inner: Drafter, vocab: int):
        super().__init__()
        self.inner, self.vocab = inner, vocab
        self.generator = torch.Generator().manual_seed(1)
        self.heard: list[tuple[list[int], torch.Tensor]] = []
        """A text, and the logits of the query that ends it."""

    def _below(self, most: Sequence[int]) -> list[int]:
        return [int(torch.randint(0, one, (1,), generator=self.generator)) for one in most]

    def propose(self, rows: Rows, budget: int) -> TokenTree:
        batch, num = len(rows), self._below([9])[0] + 1
        tokens = [self._below([self.vocab] * num) for _ in range(batch)]
        parents = [[one - 1 for one in self._below(range(1, num + 1))] for _ in range(batch)]
        wanted = [self._below([num] * 3) for _ in range(batch)]
        self.asked = [
            [list(ids) + spelled(*row, query) for query in queries]
            for ids, queries, *row in zip(rows.ids, wanted, tokens, parents, strict=True)
        ]
        extra = ExtraQueries(*map(torch.tensor, (tokens, parents, wanted)))
        tree = self.inner.propose(rows, budget)
        return replace(tree, extra=extra)

    def commit(self, rows: Rows, first: int, committed: Committed) -> None:
        if committed.extra_logits is not None:
            for texts, logits in zip(self.asked, committed.extra_logits, strict=True):
                self.heard += zip(texts, logits, strict=True)


def spelled(tokens: list[int], parents: list[int], query: int) -> list[int]:
    """The tokens from the root down to a query."""
    return (spelled(tokens, parents, parents[query]) if parents[query] >= 0 else []) + [tokens[query]]


@pytest.mark.parametrize("family", ["llama", "swa", "qwen2", "gpt2"])
@torch.no_grad()
def test_queries_of_any_shape_are_answered_as_by_a_plain_forward(family):
    """Random trees of queries behind random trees of drafts, in every row another one."""
    target, prompts, answers = case(family)
    inner = stubs.stub("mixed", dict(enumerate(answers)), stubs.TREES["sparse25"], target.vocab_size)
    drafter = Asking(inner, target.vocab_size)
    out = run(target, drafter, requests_of(prompts), engine=Comparing, batch_size=3)
    assert tokens_of(out) == answers and len(drafter.heard) > 100
    for text, logits in drafter.heard[::5]:
        expected = reference_of(family)(torch.tensor([text]), use_cache=False).logits[0, -1]
        torch.testing.assert_close(logits, expected, rtol=1e-10, atol=1e-10)


def mismatches(family: str, engine: type[Engine] = Engine) -> int:
    """Rows that differ from transformers: what the tests above assert to be zero."""
    target, prompts, answers = case(family)
    out = run(target, lookahead(from_text=True), requests_of(prompts), engine=engine, batch_size=7)
    return sum(one != other for one, other in zip(tokens_of(out), answers, strict=True))


def leave_a_query(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on the last committed slot holds, in all layers, keys and values of the last extra query."""
    with_queries, compact, last = TokenTree.with_queries, KVCache.compact, {}

    def noting(self: TokenTree) -> TokenTree:
        sent = with_queries(self)
        last["node"] = sent.num_nodes - 1 if self.extra is not None else None
        return sent

    def leaving(self: KVCache, paths: Sequence[Sequence[int]]) -> None:
        before = list(self.lengths)
        compact(self, paths)
        for row, length in enumerate(self.lengths):
            if last["node"] is not None:
                for store in self._storage.values():
                    store[:, row, :, length - 1] = store[:, row, :, before[row] + last["node"]]

    monkeypatch.setattr(TokenTree, "with_queries", noting)
    monkeypatch.setattr(KVCache, "compact", leaving)


def drafts_that_see_queries(topology: Topology, lengths: torch.Tensor, num_keys: int):
    """Every node sees the last slot of its step."""
    allowed, distance, positions = tree_mask(topology, lengths, num_keys)
    last = lengths + topology.num_nodes - 1
    return allowed | (torch.arange(num_keys) == last[:, None, None]), distance, positions


def test_a_key_left_in_the_cache_and_drafts_that_see_queries_are_noticed(monkeypatch):
    for family in ("llama", "gpt2"):
        assert mismatches(family) == 0
    with monkeypatch.context() as patch:
        leave_a_query(patch)
        assert mismatches("llama") > 0 and mismatches("gpt2") > 0
        with pytest.raises(AssertionError, match="not close"):
            mismatches("llama", WatchedEngine)
    with monkeypatch.context() as patch:
        patch.setattr(engine_module, "tree_mask", drafts_that_see_queries)
        assert mismatches("llama") > 0 and mismatches("gpt2") > 0
        with pytest.raises(AssertionError, match="not close"):
            mismatches("llama", Comparing)


# -- sampling ----------------------------------------------------------------------------------------------------------

SMALL = {"window": 3, "level": 3, "guesses": 3, "from_text": True}


seed_of = seeds_from(801, ["lookahead"])


def assert_sampled(setting: str, draws: int) -> None:
    seed = seed_of("lookahead", setting)
    drafter = LookaheadDrafter(**SMALL)
    assert_distribution(drafter, setting, draws, seed, tests=len(SETTINGS), accepted=(0.02, 2))


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["warm", "top-p"])
def test_three_tokens_have_the_targets_joint_distribution(setting):
    assert_sampled(setting, DRAWS)


def test_a_smaller_sample_has_the_targets_joint_distribution():
    assert_sampled("top-p", SMOKE_DRAWS)


# -- the parts ---------------------------------------------------------------------------------------------------------


def test_the_pool_keeps_the_latest_of_every_first_token():
    pool = NgramPool(2)
    for ngram in [(5, 1, 2), (5, 1, 3), (6, 1, 2), (5, 1, 2), (5, 4, 4)]:
        pool.add(ngram)
    assert list(pool.branches(5)) == [(4,), (4, 4), (1,), (1, 2)]  # (1, 2) came again after (1, 3)
    assert list(pool.branches(6)) == [(1,), (1, 2)] and list(pool.branches(7)) == []
    assert pool.num_bytes() > 0


@pytest.mark.parametrize("wrong", [{"window": 0}, {"level": 2}, {"guesses": 0}])
def test_windows_that_look_nowhere_are_refused(wrong):
    with pytest.raises(HeadstartError, match=f"{next(iter(wrong))}={next(iter(wrong.values()))} cannot look ahead"):
        LookaheadDrafter(**wrong)


def test_a_union_carries_the_queries_of_one_drafter():
    target, prompts, answers = case("gpt2")
    alone = run(target, lookahead(), requests_of(prompts), batch_size=3)
    out = run(target, UnionDrafter([NgramDrafter(), lookahead()]), requests_of(prompts), batch_size=3)
    assert tokens_of(out) == answers and out[0].steps[0].extra_queries == alone[0].steps[0].extra_queries > 0
    assert sum(sum(accepted_of(one)) for one in out) >= sum(sum(accepted_of(one)) for one in alone)
    with pytest.raises(HeadstartError, match="lookahead and lookahead both have extra queries"):
        run(target, UnionDrafter([lookahead(), lookahead()]), requests_of(prompts))
