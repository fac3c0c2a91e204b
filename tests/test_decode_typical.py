"""Typical acceptance: the paper's rule against all paths walked one by one, and told apart from exact figures."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from stubs import full_tree
from test_decode_frequencies import FAULT_LEVEL, WORLDS, World, decoded, expected, g_test
from test_decode_rejection import drafter_of, head_of
from test_decode_sampling import PROMPT, small_target
from test_eval_timing import renderer

from headstart.decode.drafters.base import NoDraft, Request
from headstart.decode.drafters.heads import head_drafter
from headstart.decode.engine import Engine, Generation
from headstart.decode.processors import Text, text_processors
from headstart.decode.sampling import SamplingSettings, choose, probabilities
from headstart.decode.tree import TokenTree, Topology
from headstart.decode.verify import verify
from headstart.errors import HeadstartError
from headstart.eval.timing import time_arms

TYPICAL = SamplingSettings(temperature=0.8, lossy="typical")


def random_trees(rows: int, nodes: int, vocab: int, generator: torch.Generator) -> TokenTree:
    """Every node hangs below any earlier one; siblings differ."""
    tokens, parents = [], []
    for _ in range(rows):
        above = [-1] + [int(torch.randint(0, node, (), generator=generator)) for node in range(1, nodes)]
        order = torch.randperm(vocab, generator=generator).tolist()
        tokens.append([order[above[:node].count(above[node])] for node in range(nodes)])
        parents.append(above)
    topology = Topology(torch.tensor(parents), torch.ones(rows, nodes, dtype=torch.bool))
    return TokenTree(torch.tensor(tokens), topology)


def longest_typical_path(tree: TokenTree, row: int, logits: torch.Tensor, settings: SamplingSettings) -> list[int]:
    """Over all nodes: those whose every edge is typical; the deepest, of equally deep ones the likeliest."""
    tokens, parents = tree.tokens[row].tolist(), tree.topology.parents[row].tolist()
    p = probabilities(logits, settings).numpy()

    def chances(node: int) -> list[float]:
        return [] if node == 0 else [*chances(parents[node]), float(p[parents[node], tokens[node]])]

    def floor(node: int) -> float:
        entropy = -sum(one * math.log(one) for one in p[node] if one > 0)
        return min(settings.typical_epsilon, settings.typical_delta * math.exp(-entropy))

    def typical(node: int) -> bool:
        return node == 0 or (typical(parents[node]) and chances(node)[-1] > floor(parents[node]))

    def path(node: int) -> list[int]:
        return [0] if node == 0 else [*path(parents[node]), node]

    found = [node for node in range(len(tokens)) if typical(node)]
    return path(max(found, key=lambda node: (len(path(node)), math.prod(chances(node)), -node)))


@pytest.mark.parametrize("changes", [{}, {"typical_epsilon": 0.3, "typical_delta": 0.9}, {"top_k": 3}])
def test_the_longest_typical_path_is_taken_and_one_token_drawn_behind_it(changes):
    generator = torch.Generator().manual_seed(0)
    rows, nodes, vocab = 200, 12, 12
    settings = replace(TYPICAL, **changes)
    tree = random_trees(rows, nodes, vocab, generator)
    logits = 2.5 * torch.randn(rows, nodes, vocab, generator=generator, dtype=torch.float64)
    uniforms = torch.rand(rows, nodes, generator=generator, dtype=torch.float64)
    verdicts = verify(tree, logits, [settings] * rows, uniforms)
    for row, verdict in enumerate(verdicts):
        path = longest_typical_path(tree, row, logits[row], settings)
        assert [int(tree.tokens[row, node]) for node in path[1:]] == verdict.tokens[:-1]
        drawn = choose(logits[row, path[-1:]], [settings], uniforms[row, [len(path) - 1]])
        assert verdict.tokens[-1] == int(drawn)
    depths = [verdict.accepted for verdict in verdicts]
    assert 0.3 < np.mean(depths) < tree.topology.max_depth and len(set(depths)) > 2


def test_processors_see_every_nodes_ancestors():
    """A token that the answer holds already is typical no more, once its presence costs it enough."""
    settings = replace(TYPICAL, presence_penalty=50.0)
    processors = text_processors(settings, prompt_length=1, max_new_tokens=9, end_token_ids=[])
    tree = TokenTree(torch.tensor([[0, 2, 3, 2, 1]]), Topology.chain(4))
    logits = torch.zeros(1, 5, 4, dtype=torch.float64)
    (verdict,) = verify(tree, logits, [settings], torch.zeros(1, 5).double(), texts=[Text([0], processors)])
    assert verdict.path == [0, 1, 2] and verdict.tokens == [2, 3, 0]


def answers(drafter, **settings: Any) -> list[Generation]:
    asked = [
        Request(
            prompt_ids=PROMPT,
            max_new_tokens=20,
            request_id=seed,
            settings=SamplingSettings(**({"temperature": 1.0, "seed": seed} | settings)),
        )
        for seed in range(30)
    ]
    return sorted(
        Engine(small_target(), drafter, batch_size=30).generate(asked), key=lambda one: one.request.request_id
    )


def texts(generations: list[Generation]) -> list[list[int]]:
    return [one.token_ids for one in generations]


def test_between_nothing_and_everything_is_typical():
    plain = answers(NoDraft())
    assert texts(answers(NoDraft(), lossy="typical")) == texts(plain)
    nothing = answers(drafter_of("own"), lossy="typical", typical_epsilon=1.0, typical_delta=1e9)
    assert texts(nothing) == texts(plain)
    everything = answers(drafter_of("own"), lossy="typical", typical_epsilon=0.0)
    assert all(step.accepted == step.depth for one in everything for step in one.steps if not step.cut)
    tree = head_drafter(head_of("own"), small_target(), full_tree(2, 2))
    typical, exact = answers(tree, lossy="typical"), answers(tree)
    accepted = [sum(step.accepted for one in each for step in one.steps) for each in (typical, exact)]
    assert accepted[0] > 1.1 * accepted[1]
    assert texts(answers(drafter_of("own"), lossy="typical", temperature=0.0)) == texts(
        answers(NoDraft(), temperature=0.0)
    )


def test_lossy_is_what_it_is():
    """The exact rule's own test rejects it."""
    world = WORLDS["near"]
    lossy = World(world.p, world.q, {"temperature": 1.0, "lossy": "typical"})
    for rule in ("tree", "by-rank"):
        assert g_test(decoded(lossy, rule, 4_000, 3), expected(world)) < FAULT_LEVEL


def test_lossy_answers_are_told_apart_and_stand_in_no_table_with_exact_ones():
    kinds: list[tuple[dict[str, Any], bool]] = [
        ({}, True),
        ({"lossy": "typical"}, False),
        ({"lossy": "typical", "temperature": 0.0}, True),
    ]
    for settings, exact in kinds:
        assert answers(NoDraft(), **settings)[0].exact is exact
    with pytest.raises(HeadstartError, match="lossy='typical' changes what the target writes.*leave it out"):
        time_arms(small_target(), {}, [], renderer(), max_new_tokens=1, settings=TYPICAL)
    faults: list[dict[str, Any]] = [{"typical_epsilon": 1.5}, {"typical_delta": -1.0}]
    for wrong in faults:
        with pytest.raises(HeadstartError, match=rf"{next(iter(wrong))}=.* is out of range; give "):
            SamplingSettings(**wrong)
