"""What every drafter owes: the target's own text under every limit, and drafts that follow from the text alone.

One drafter of every kind that has a name on the command line, those that are trained half knowing the answers by heart,
for a target whose layers see 16 tokens and all of them by turns. The reference is transformers' generate.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import stubs
import tiny
import torch
from eagle_cases import learn_by_heart, learnt, requests, target_of
from test_decode_exact import accepted_of, requests_of, run, tokens_of

from headstart.data.datastore import Datastore, suffix_array
from headstart.decode.draft_length import StepCosts
from headstart.decode.drafters.adaptive import AdaptiveDrafter
from headstart.decode.drafters.base import Drafter, NoDraft, Request
from headstart.decode.drafters.heads import head_drafter
from headstart.decode.drafters.layer_skip import EarlyExitDrafter, SkippingDrafter
from headstart.decode.drafters.lookahead import LookaheadDrafter
from headstart.decode.drafters.model import ModelDrafter
from headstart.decode.drafters.ngram import NgramDrafter
from headstart.decode.drafters.plans import DynamicTree, SampledChain, SampledTree
from headstart.decode.drafters.quantised import QuantisedDrafter
from headstart.decode.drafters.retrieval import RetrievalDrafter
from headstart.decode.drafters.union import UnionDrafter
from headstart.decode.engine import Engine
from headstart.decode.sampling import SamplingSettings
from headstart.decode.skips import Skips
from headstart.decode.tree import TokenTree
from headstart.eval.drafters import KINDS
from headstart.eval.timing import PLAIN
from headstart.heads.configs import DraftConfig, MedusaConfig
from headstart.heads.store import build_head
from headstart.target import Target

FAMILY, WINDOW, POSITIONS = "hyb", 16, 128
NEW = 24
COSTS = StepCosts(seconds=(1.0, 1.1, 1.2, 1.3, 1.4, 1.5), budgets=(1, 2, 3, 4, 5, 6))


@functools.lru_cache
def prompts() -> list[list[int]]:
    """Of 3, 7 and 14 tokens."""
    return [list(request.prompt_ids) for request in requests(lengths=(3, 7, 14))]


@functools.lru_cache
def reference():
    return tiny.model(FAMILY, dtype=torch.float64)


@functools.lru_cache
def answers() -> list[list[int]]:
    return stubs.plain_answers(reference(), prompts(), NEW)


@functools.lru_cache
def store() -> Datastore:
    """The answers, cut so that a look-up is right for a while and then finds nothing."""
    separator = target_of(FAMILY).vocab_size
    texts = [answer[start : start + 6] for answer in answers() for start in range(0, NEW, 8)]
    tokens = np.array([token for text in texts for token in (*text, separator)], np.uint32)
    return Datastore(tokens, suffix_array(tokens), separator)


@functools.lru_cache
def by_heart(kind: str):
    config = DraftConfig(num_layers=3) if kind == "draft" else MedusaConfig(num_heads=3)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return learn_by_heart(build_head(config, target_of(FAMILY)).double(), FAMILY, 12)


def another(target: Target, *, drawn: bool = True, length: int = 4) -> ModelDrafter:
    return ModelDrafter(stubs.half_right(FAMILY), target, length, drawn=drawn)


DRAFTERS: dict[str, Callable[[Target], Drafter]] = {
    "none": lambda target: NoDraft(),
    "ngram": lambda target: NgramDrafter(4),
    "ngram@tree": lambda target: NgramDrafter(4, take="tree", num_nodes=8),
    "retrieval": lambda target: RetrievalDrafter(store(), target.end_token_ids, num_nodes=10, length=5),
    "lookahead": lambda target: LookaheadDrafter(4, 3, 4, from_text=True),
    "layer-skip@exit": lambda target: EarlyExitDrafter(target, 3, 4),
    "layer-skip": lambda target: SkippingDrafter(target, Skips(attention=(2,)), 4),
    "quantised": lambda target: QuantisedDrafter(target, 8, 4),
    "model": another,
    "model of a student": lambda target: head_drafter(by_heart("draft"), target, SampledChain(length=4)),
    "head of medusa": lambda target: head_drafter(by_heart("medusa"), target, stubs.full_tree(2, 3)),
    "head@tree": lambda target: head_drafter(learnt("eagle", FAMILY), target, stubs.full_tree(2, 3)),
    "head@dynamic": lambda target: head_drafter(
        learnt("eagle3", FAMILY), target, DynamicTree(depth=4, width=3, num_nodes=10)
    ),
    "head@drawn": lambda target: head_drafter(learnt("eagle3", FAMILY), target, SampledChain(length=4)),
    "head@sampled": lambda target: head_drafter(
        learnt("eagle3", FAMILY), target, SampledTree(paths=stubs.full_tree(2, 3))
    ),
    "union": lambda target: UnionDrafter([NgramDrafter(4), another(target, drawn=False), LookaheadDrafter(3, 3, 3)]),
    "adaptive": lambda target: AdaptiveDrafter(another(target, length=5), COSTS),
}
DRAWING = {"layer-skip@exit", "layer-skip", "quantised", "model", "model of a student", "head@drawn", "head@sampled"}
DRAWING |= {"adaptive"}
REMEMBERING = {"lookahead", "union", "adaptive"}
"""Their drafts follow from the steps so far too, and not from the row's text alone."""
OFTEN_RIGHT = {"retrieval", "quantised", "model", "model of a student", "head@tree", "head@dynamic", "head@drawn"}
OFTEN_RIGHT |= {"head@sampled", "head of medusa", "union", "adaptive"}

every_drafter = pytest.mark.parametrize("name", DRAFTERS)


def make(name: str) -> Drafter:
    return DRAFTERS[name](target_of(FAMILY))


@pytest.fixture(autouse=True)
def no_ends(monkeypatch):
    """Answers end where they are told to, until a test names end tokens."""
    monkeypatch.setattr(target_of(FAMILY), "end_token_ids", ())


def test_every_kind_of_drafter_is_here():
    assert {re.split("[@ ]", name)[0] for name in DRAFTERS} == {PLAIN, *KINDS}


@every_drafter
def test_rows_of_a_batch_are_their_solo_runs_past_the_window(name):
    """B61, B63; and B73: a step emits what it accepted and one token more."""
    limits = [NEW, 5, NEW]
    asked = [
        Request(prompt_ids=prompt, max_new_tokens=limit, request_id=row)
        for row, (prompt, limit) in enumerate(zip(prompts(), limits, strict=True))
    ]
    together = run(target_of(FAMILY), make(name), asked, batch_size=3, budget=16)
    for row, one in enumerate(together):
        assert one.token_ids == answers()[row][: limits[row]] and one.finish_reason == "length"
        assert all(step.emitted == step.accepted + 1 for step in one.steps if not step.cut)
        assert sum(step.emitted for step in one.steps) == len(one.token_ids)
        (alone,) = run(target_of(FAMILY), make(name), asked[row : row + 1], budget=16)
        assert alone.token_ids == one.token_ids
        if name not in REMEMBERING:
            assert accepted_of(alone) == accepted_of(one)
    contexts = {step.context_length for one in together for step in one.steps}
    assert min(contexts) < WINDOW and max(contexts) > 2 * WINDOW
    accepted = sum(sum(accepted_of(one)) for one in together)
    assert accepted >= 8 if name in OFTEN_RIGHT else accepted >= 0


class Noting(Engine):
    """Keeps what is drafted for its first row, and behind which text."""

    def __init__(self, *inputs: Any, **settings: Any):
        super().__init__(*inputs, **settings)
        self.noted: list[tuple[list[int], list[list[int]]]] = []

    def _fit(self, tree: TokenTree) -> TokenTree:
        valid = tree.topology.valid[0]
        drafts = [part[0][valid][1:].tolist() for part in (tree.tokens, tree.topology.parents)]
        self.noted.append((list(self.rows.ids[0]), drafts))
        return super()._fit(tree)


def noted(name: str, prompt: Sequence[int], new_tokens: int) -> list:
    engine = Noting(target_of(FAMILY), make(name), budget=16)
    list(engine.generate(requests_of([prompt], new_tokens)))
    return engine.noted


@pytest.mark.parametrize("name", [name for name in DRAFTERS if name not in REMEMBERING])
def test_drafts_are_those_of_a_fresh_start_behind_the_same_text(name):
    """B60: nothing of what was rejected is left in a drafter's own state, and nothing of what stayed is missing."""
    for text, drafts in noted(name, prompts()[1], NEW)[1::3]:
        assert noted(name, text, 1) == [(text, drafts)]


@every_drafter
def test_penalties_and_least_lengths_are_applied_token_by_token(name, monkeypatch):
    """B68, with an end token that the text would come to before it may."""
    end = answers()[0][2]
    monkeypatch.setattr(target_of(FAMILY), "end_token_ids", (end,))
    banned = (answers()[0][1], answers()[1][3])
    rules = {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "min_new_tokens": 6}
    settings = SamplingSettings(**rules, bad_words_ids=tuple((token,) for token in banned))
    expected = stubs.plain_answers(
        reference(), prompts(), 12, end_token_ids=[end], bad_words_ids=[[token] for token in banned], **rules
    )
    assert all(one[:6] != other[:6] for one, other in zip(expected[:2], answers(), strict=False))
    asked = requests_of(prompts(), 12, settings=settings)
    assert tokens_of(run(target_of(FAMILY), make(name), asked, batch_size=2, budget=16)) == expected


@every_drafter
def test_nothing_is_written_behind_an_end_token_in_any_slot(name, monkeypatch):
    """B69."""
    row = next(row for row, answer in enumerate(answers()) if len(set(answer[:6])) == 6)
    for slot in range(6):
        monkeypatch.setattr(target_of(FAMILY), "end_token_ids", (answers()[row][slot],))
        engine = Engine(target_of(FAMILY), make(name), budget=16)
        pieces = list(engine.stream(requests_of([prompts()[row]], 12)[0]))
        done = pieces[-1][1]
        assert done.token_ids == answers()[row][: slot + 1] and done.finish_reason == "end"
        assert [token for tokens, _ in pieces for token in tokens] == done.token_ids
        assert sum(step.emitted for step in done.steps) == slot + 1
        assert all(step.accepted <= step.emitted for step in done.steps)


@every_drafter
def test_limits_of_tokens_and_of_positions_are_kept(name):
    """B71."""
    for new_tokens in (7, 1, 0):
        done = run(target_of(FAMILY), make(name), requests_of(prompts(), new_tokens), batch_size=3, budget=16)
        assert tokens_of(done) == [answer[:new_tokens] for answer in answers()]
    long = stubs.prompts_of((POSITIONS - 8, POSITIONS - 1, POSITIONS), target_of(FAMILY).vocab_size)
    expected = [stubs.plain_answers(reference(), [prompt], POSITIONS - len(prompt))[0] for prompt in long[:2]]
    done = run(target_of(FAMILY), make(name), requests_of(long, 20), batch_size=2, budget=16)
    assert tokens_of(done) == [*expected, []]
    assert {one.finish_reason for one in done} == {"positions"}


@every_drafter
def test_a_seed_has_one_text_and_hardly_any_temperature_is_greedy(name):
    """B65, B67: drafts that are ranks leave the text of plain sampling, and with it its distribution. For those that
    are drawn, the joint distribution of whole answers is tested beside each of them."""
    warm = requests_of(prompts(), 12, settings=SamplingSettings(temperature=0.8, seed=4))
    texts = [tokens_of(run(target_of(FAMILY), make(name), warm, batch_size=rows, budget=16)) for rows in (1, 3)]
    assert texts[0] == texts[1]
    plainly = tokens_of(run(target_of(FAMILY), NoDraft(), warm, batch_size=3))
    assert (texts[0] == plainly) == (name not in DRAWING) and plainly[0] != answers()[0][:12]
    cold = requests_of(prompts(), 12, settings=SamplingSettings(temperature=1e-6, seed=4))
    done = run(target_of(FAMILY), make(name), cold, batch_size=3, budget=16)
    assert tokens_of(done) == [answer[:12] for answer in answers()]
