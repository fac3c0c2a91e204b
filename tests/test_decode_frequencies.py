"""Verification alone keeps the target's frequencies: chains, sampled trees and deterministic trees, all by one walk.

Target and drafter are tables here, the next token's distribution by the last token, so that answers of three tokens are
enumerated in one line and many thousands are verified at once; drafts are drawn, and numbers handed out, by the code
that does so while decoding. One G-test for each of the 1296 answers, for every rule and world, none of which may reject
at a family level of 0.001 (Holm). Faults planted in small functions of the real code must be rejected at p < 1e-6.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from stubs import chain, full_tree
from test_decode_sampling import FAMILY_LEVEL, FAULT_LEVEL, g_test, processed

from headstart.decode import verify as verify_module
from headstart.decode.drafters.base import Request, Rows
from headstart.decode.drafters.drawing import draw_children, drawable
from headstart.decode.drafters.growth import StaticLayout, best_choices
from headstart.decode.engine import Engine
from headstart.decode.processors import Text, text_processors
from headstart.decode.sampling import SamplingSettings, choose
from headstart.decode.tree import DrawnFrom, Path, TokenTree, Topology
from headstart.decode.verify import verify

VOCAB, START, NEW_TOKENS = 6, 0, 3
DRAWS = 200_000
"""Answers per rule, over all worlds."""
SMOKE_DRAWS, FAULT_DRAWS = 18_000, 6_000

# -- worlds: what target and drafter think, by the last token ----------------------------------------------------------


@dataclass(frozen=True)
class World:
    p: np.ndarray
    """The target's logits, [last token, next token]."""
    q: np.ndarray
    """The drafter's, over the same tokens."""
    settings: dict[str, Any] = field(default_factory=lambda: {"temperature": 1.0})


def _logits(seed: int, sharpness: float) -> np.ndarray:
    return sharpness * np.random.default_rng(seed).normal(size=(VOCAB, VOCAB))


def _only(logits: np.ndarray, *tokens: int) -> np.ndarray:
    """No mass but on these."""
    return np.where(np.isin(np.arange(VOCAB), tokens), logits, -np.inf)


def _repeating(logits: np.ndarray) -> np.ndarray:
    """The last token comes again more often than not."""
    return logits + 2.5 * np.eye(VOCAB)


P, Q = _logits(0, 1.2), _logits(1, 1.2)
NEAR = P + 0.3 * _logits(2, 1.0)
WORLDS = {
    "near": World(P, NEAR),
    "far": World(P, -1.5 * P),
    "q-zero": World(P, _only(Q, 1, 4)),
    "p-zero": World(_only(P, 0, 2, 5), Q),
    "disjoint": World(_only(P, 0, 2, 5), _only(Q, 1, 3, 5)),
    "repeating": World(_repeating(P), _repeating(Q)),
    "sharp": World(6 * P, 6 * Q, {"temperature": 0.7}),
    "cool": World(P, NEAR, {"temperature": 0.6, "top_p": 0.9}),
    "few": World(P, Q, {"temperature": 1.0, "top_k": 2}),
}
RULES: dict[str, tuple[bool, list[Path]]] = {
    "chain": (True, chain(2)),
    "tree": (True, [(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (2, 0), (2, 1), (0, 1, 0), (0, 1, 1)]),
    "by-rank": (False, [(0,), (1,), (0, 0), (0, 1), (1, 2)]),
    "same-siblings": (False, [(0,), (1,), (0, 0), (1, 0), (1, 1)]),
}
"""Whether drafts are drawn, and their tree."""


def expected(world: World) -> np.ndarray:
    """Probability of every answer, [VOCAB ** NEW_TOKENS], by the definitions of the settings and of count penalties."""
    settings = dict(world.settings)
    frequency = settings.pop("frequency_penalty", 0.0)
    shares = []
    for answer in itertools.product(range(VOCAB), repeat=NEW_TOKENS):
        share = 1.0
        for place, token in enumerate(answer):
            counts = np.bincount(answer[:place], minlength=VOCAB)
            last = answer[place - 1] if place else START
            share *= processed(world.p[last] - frequency * counts, **settings)[token]
        shares.append(share)
    return np.array(shares)


# -- decoding in a world -----------------------------------------------------------------------------------------------


def draft(world: World, rule: str, rows: Rows) -> TokenTree:
    """A tree for every row, level by level as a head drafts it."""
    drawn, paths = RULES[rule]
    layout, logits = StaticLayout(paths), torch.tensor(world.q)
    sampled, count = [drawn] * len(rows), len(rows)
    levels, drawn_from, missing = [rows.roots()[:, None]], [], []
    for level in layout.levels:
        below = logits[levels[-1][:, level.expanded]]
        if drawn:
            columns, probs = draw_children(below, rows, sampled, level.num_ranks)
            drawn_from.append(probs)
            missing.append(~drawable(probs, sampled, level.num_ranks).flatten(1)[:, level.choice])
        else:
            columns = best_choices(below, level.num_ranks)[1]
            if rule == "same-siblings":
                columns = columns[..., :1].expand_as(columns)
        levels.append(columns.flatten(1)[:, level.choice])
    tokens, topology = torch.cat(levels, dim=1), layout.topology.expand(count)
    if not drawn:
        return TokenTree(tokens, topology)
    topology = topology.without(torch.nn.functional.pad(torch.cat(missing, dim=1), (1, 0), value=False))
    return TokenTree(
        tokens, topology, DrawnFrom(torch.cat(drawn_from, dim=1), torch.arange(VOCAB), sampled, layout.places)
    )


def decoded(world: World, rule: str, draws: int, seed: int, check: Callable = verify) -> np.ndarray:
    """How often each answer came, [VOCAB ** NEW_TOKENS]: as many steps as it takes, all rows at once."""
    generator = np.random.Generator(np.random.Philox(seed))
    settings = SamplingSettings(**world.settings)
    request = Request(prompt_ids=[START], max_new_tokens=NEW_TOKENS, settings=settings)
    processors = text_processors(settings, prompt_length=1, max_new_tokens=NEW_TOKENS, end_token_ids=[])
    depth = max(map(len, RULES[rule][1]))
    uniforms = generator.random((draws, NEW_TOKENS + depth + 1))
    texts = [[START] for _ in range(draws)]
    while going := [row for row in range(draws) if len(texts[row]) <= NEW_TOKENS]:
        ids = [texts[row] for row in going]
        rows = Rows(requests=[request] * len(going), ids=ids, streams=[generator] * len(going))
        tree = draft(world, rule, rows)
        numbers = np.stack(
            [uniforms[row, len(text) - 1 : len(text) + depth] for row, text in zip(going, ids, strict=True)]
        )
        verdicts = check(
            tree,
            torch.tensor(world.p)[tree.tokens],
            [settings] * len(going),
            torch.tensor(numbers),
            *Engine._next_trials(SimpleNamespace(rows=rows), tree),  # pyright: ignore[reportArgumentType]
            texts=[Text(text, processors) for text in ids] if len(processors) else [],
        )
        for text, verdict in zip(ids, verdicts, strict=True):
            text += verdict.tokens
    found = np.array([text[1 : 1 + NEW_TOKENS] for text in texts]) @ VOCAB ** np.arange(NEW_TOKENS)[::-1]
    return np.bincount(found, minlength=VOCAB**NEW_TOKENS)


def holm(p_values: dict[Any, float], level: float) -> list[Any]:
    """Which tests reject, no wrong one among them but with probability `level` (Holm 1979)."""
    rejected = []
    for place, (name, p) in enumerate(sorted(p_values.items(), key=lambda item: item[1])):
        if p > level / (len(p_values) - place):
            break
        rejected.append(name)
    return rejected


def rejected_worlds(draws: int) -> list[Any]:
    """Of all rules and worlds, `draws` answers for each rule, those whose frequencies are not the target's."""
    p_values = {}
    for number, (rule, name) in enumerate(itertools.product(RULES, WORLDS)):
        counts = decoded(WORLDS[name], rule, -(-draws // len(WORLDS)), 100 + number)
        p_values[rule, name] = g_test(counts, expected(WORLDS[name]))
    return holm(p_values, FAMILY_LEVEL)


def test_holm_goes_on_until_the_first_that_stands():
    assert holm({"a": 0.04, "b": 0.001, "c": 0.02, "d": 0.9}, 0.05) == ["b"]
    assert holm({"a": 0.02, "b": 0.001, "c": 0.015, "d": 0.9}, 0.05) == ["b", "c", "a"]


@pytest.mark.slow
def test_two_hundred_thousand_answers_by_every_rule_have_the_targets_frequencies():
    assert rejected_worlds(DRAWS) == []


def test_a_smaller_sample_has_the_targets_frequencies():
    assert rejected_worlds(SMOKE_DRAWS) == []


def test_the_worlds_are_as_hard_as_they_say():
    for name, lowest, highest in [("near", 0.0, 0.15), ("far", 0.4, 1.0), ("disjoint", 0.5, 1.0), ("sharp", 0.5, 1.0)]:
        p, q = (processed(table[START], **WORLDS[name].settings) for table in (WORLDS[name].p, WORLDS[name].q))
        assert lowest < np.abs(p - q).sum() / 2 <= highest, name
    shares = expected(WORLDS["p-zero"])
    assert shares.sum() == pytest.approx(1) and (shares == 0).sum() == VOCAB**3 - 27
    assert (expected(WORLDS["few"]) == 0).sum() == VOCAB**3 - 8


# -- the parts ---------------------------------------------------------------------------------------------------------


def test_children_are_drawn_without_replacement_in_order():
    """The pairs' frequencies are those of drawing twice from an urn; numbers are spent in order, one for each."""
    q, draws = torch.tensor([0.5, 0.3, 0.0, 0.2]), 20_000
    generator = np.random.default_rng(0)
    request = Request(prompt_ids=[0], max_new_tokens=1, settings=SamplingSettings(temperature=1.0))
    rows = Rows(requests=[request] * draws, ids=[[0]] * draws, streams=[generator] * draws)
    columns, probs = draw_children(q.double().log().expand(draws, 1, 4), rows, [True] * draws, 3)
    assert torch.equal(columns.sort(-1).values, torch.tensor([0, 1, 3]).expand(draws, 1, 3))
    torch.testing.assert_close(probs[0, 0], q.double(), atol=1e-7, rtol=0)
    pairs = {
        (one, two): q[one] * q[two] / (1 - q[one]) for one in range(4) for two in range(4) if one != two and q[one] > 0
    }
    found = np.bincount((columns[:, 0, 0] * 4 + columns[:, 0, 1]).numpy(), minlength=16)
    shares = np.zeros(16)
    for (one, two), share in pairs.items():
        shares[one * 4 + two] = share
    assert g_test(found, shares / shares.sum()) > 1e-3
    assert generator.random() == np.random.default_rng(0).random(3 * draws + 1)[-1]


def test_a_distribution_that_runs_out_has_no_more_children():
    request = Request(prompt_ids=[0], max_new_tokens=1, settings=SamplingSettings(temperature=1.0, top_k=2))
    greedy = replace(request, settings=SamplingSettings())
    rows = Rows(requests=[request, greedy, request], ids=[[0]] * 3, streams=[np.random.default_rng(0)] * 3)
    logits = torch.tensor([3.0, 1.0, 2.0, 0.0], dtype=torch.float64).expand(3, 1, 4)
    columns, probs = draw_children(logits, rows, [True, True, False], 3)
    assert sorted(columns[0, 0, :2].tolist()) == [0, 2] and columns[1, 0].tolist() == [0, 2, 1]
    assert drawable(probs, [True, False, True], 3).tolist() == [[[True, True, False]], [[True] * 3], [[False] * 3]]


def test_a_chain_is_the_tree_of_one_child_per_node():
    """Without places, with them, and padded: the same verdicts."""
    world, count = WORLDS["far"], 500
    request = Request(prompt_ids=[0], max_new_tokens=4, settings=SamplingSettings(temperature=1.0))
    generator = np.random.default_rng(5)
    rows = Rows(requests=[request] * count, ids=[[0]] * count, streams=[generator] * count)
    tree = draft(world, "chain", rows)
    drawn = tree.drawn
    assert drawn is not None and drawn.places == [0, 1, 0]
    bare = replace(tree, topology=Topology.chain(2).expand(count), drawn=replace(drawn, places=None))
    numbers = torch.tensor(generator.random((2, count, 3)))
    verdicts = [
        verify(one, torch.tensor(world.p)[one.tokens], [request.settings] * count, numbers[0], numbers[1])
        for one in (tree, bare, tree.padded(6))
    ]
    assert verdicts[0] == verdicts[1] == verdicts[2]
    assert {verdict.accepted for verdict in verdicts[0]} == {0, 1, 2}


# -- planted faults ----------------------------------------------------------------------------------------------------


def residual_not_taken(monkeypatch):
    """After a refusal, p stays as it was."""
    monkeypatch.setattr(verify_module, "residual", lambda p, q: p)


def residual_of_the_other_sign(monkeypatch):
    monkeypatch.setattr(verify_module, "residual", lambda p, q: (q - p).clamp(min=0))


def siblings_verified_with_replacement(monkeypatch):
    """A refused draft stays in what its siblings are tried against."""
    monkeypatch.setattr(verify_module, "without", lambda probs, tokens: probs)


def siblings_against_what_is_not_normalised(monkeypatch):
    monkeypatch.setattr(verify_module, "normalised", lambda mass: mass)


def siblings_out_of_order(monkeypatch):
    """The last that was drawn is tried first."""
    children = verify_module._children

    def backwards(*row):
        return {parent: dict(reversed(below.items())) for parent, below in children(*row).items()}

    monkeypatch.setattr(verify_module, "_children", backwards)


def drawn_from_something_sharper(monkeypatch):
    """Drafts come from another temperature than q is told at."""
    import headstart.decode.drafters.drawing as drawing

    draw_in_turn = drawing.draw_in_turn
    monkeypatch.setattr(drawing, "draw_in_turn", lambda probs, uniforms: draw_in_turn(probs.square(), uniforms))


def bonus_from_raw_logits(monkeypatch):
    """EAGLE-1: where nothing is left to be tried, the token is drawn without temperature and cuts."""
    choose_or_keep = verify_module.choose_or_keep

    def faulty(logits, settings, drafts, uniform):
        raw = choose(logits, [SamplingSettings(temperature=1.0)] * len(settings), uniform)
        bonus = (drafts.tokens < 0).all(1)
        return raw.where(bonus, choose_or_keep(logits, settings, drafts, uniform))

    monkeypatch.setattr(verify_module, "choose_or_keep", faulty)


def the_drafts_numbers_again(monkeypatch):
    """The number that drew a draft decides over it too: those of the last trees' drafts, in their order."""
    import headstart.decode.drafters.drawing as drawing

    draw_in_turn, taken = drawing.draw_in_turn, []

    def noting(probs, uniforms):
        taken.append(uniforms)
        return draw_in_turn(probs, uniforms)

    def again(self, tree):
        numbers = torch.cat([one.view(len(tree.tokens), -1) for one in taken], dim=1)
        taken.clear()
        return [numbers]

    monkeypatch.setattr(drawing, "draw_in_turn", noting)
    monkeypatch.setattr(Engine, "_next_trials", again)


def one_trial_for_all_siblings(monkeypatch):
    trials = Engine._next_trials
    monkeypatch.setattr(
        Engine, "_next_trials", lambda self, tree: [one[:, :1].expand_as(one) for one in trials(self, tree)]
    )


def penalties_once_per_step(monkeypatch):
    """B68: every node is processed with the text before the step, not with its ancestors'."""
    process = Text.process
    monkeypatch.setattr(Text, "process", lambda self, logits, after=(): process(self, logits))


def best_of_rows(tree, logits, settings, uniforms, trials=None, texts=()):
    """Every leaf's path verified by itself, with numbers of its own, and the longest taken."""
    parents, noise = tree.topology.parents[0].tolist(), torch.Generator().manual_seed(len(settings))
    fresh = lambda like: torch.rand(like.shape, generator=noise, dtype=torch.float64)  # noqa: E731
    best = None
    for leaf in [node for node in range(len(parents)) if node not in parents]:
        path, node = [], leaf
        while node >= 0:
            path.append(node)
            node = parents[node]
        elsewhere = torch.ones_like(tree.topology.valid)
        elsewhere[:, path] = False
        alone = replace(tree, topology=tree.topology.without(elsewhere))
        found = verify(alone, logits, settings, fresh(uniforms), None if trials is None else fresh(trials))
        pairs = zip(best or found, found, strict=True)
        best = [max(pair, key=lambda one: one.accepted) for pair in pairs]
    return best


PENALISED = World(P, P, {"temperature": 1.0, "frequency_penalty": 1.5})
FULL = full_tree(2, 2)
FAULTS = {
    "residual-chain": (residual_not_taken, "chain", "far"),
    "residual-tree": (residual_not_taken, "tree", "far"),
    "residual-sign": (residual_of_the_other_sign, "tree", "near"),
    "with-replacement": (siblings_verified_with_replacement, "tree", "far"),
    "not-normalised": (siblings_against_what_is_not_normalised, "tree", "far"),
    "order": (siblings_out_of_order, "tree", "far"),
    "q-chain": (drawn_from_something_sharper, "chain", "far"),
    "q-tree": (drawn_from_something_sharper, "tree", "near"),
    "raw-bonus-chain": (bonus_from_raw_logits, "chain", "cool"),
    "raw-bonus-tree": (bonus_from_raw_logits, "tree", "cool"),
    "reused-chain": (the_drafts_numbers_again, "chain", "far"),
    "reused-tree": (the_drafts_numbers_again, "full", "far"),
    "one-trial": (one_trial_for_all_siblings, "tree", "far"),
    "penalties-chain": (penalties_once_per_step, "chain", "penalised"),
    "penalties-tree": (penalties_once_per_step, "tree", "penalised"),
    "penalties-by-rank": (penalties_once_per_step, "by-rank", "penalised"),
}


@pytest.fixture
def further_worlds(monkeypatch):
    monkeypatch.setitem(WORLDS, "penalised", PENALISED)
    monkeypatch.setitem(RULES, "full", (True, FULL))


@pytest.mark.usefixtures("further_worlds")
@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_rejected(fault, monkeypatch):
    plant, rule, name = FAULTS[fault]
    plant(monkeypatch)
    counts = decoded(WORLDS[name], rule, FAULT_DRAWS, 7)
    assert g_test(counts, expected(WORLDS[name])) < FAULT_LEVEL


@pytest.mark.parametrize("rule", ["tree", "by-rank"])
def test_the_best_of_several_rows_is_rejected(rule):
    assert g_test(decoded(WORLDS["near"], rule, FAULT_DRAWS, 7, best_of_rows), expected(WORLDS["near"])) < FAULT_LEVEL


@pytest.mark.usefixtures("further_worlds")
@pytest.mark.parametrize("rule", ["chain", "tree", "by-rank", "full"])
def test_nothing_is_rejected_where_nothing_is_planted(rule):
    for name in ("penalised", "far"):
        assert g_test(decoded(WORLDS[name], rule, 4_000, 8), expected(WORLDS[name])) > FAMILY_LEVEL
