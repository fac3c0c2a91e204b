"""Dynamic trees against a slow reference that scores every node by a forward of its own; ties; what levels cost."""

from __future__ import annotations

import math

import pytest
import torch
from eagle_cases import KINDS, decode, learnt, requests, target_of, unroll_text

from headstart.decode.cost import CostCurve, DraftCosts, GrownAnswer, best_size, replay_grown, tune_dynamic
from headstart.decode.drafters.eagle import EagleDrafter
from headstart.decode.drafters.growth import Growth, best_choices, log_probabilities, static_levels
from headstart.decode.drafters.plans import DynamicTree, SampledChain, StaticTree
from headstart.decode.forecast import measure_drafting, measure_levels
from headstart.decode.tree import Path, TokenTree


def slow_tree(head, target, ids: list[int], plan: DynamicTree) -> dict[Path, Path]:
    """The nodes of EAGLE-2's tree below the text, as token paths, each with its parent's: level by level, every node's
    choices from the training code's unrolled forward of text and path."""

    def choices(path: Path) -> list[tuple[float, int]]:
        logits = unroll_text(head, target, [*ids, *path], len(path) + 1)[len(ids) - 2, len(path)]
        extra = sorted(set(ids) - set(range(264) if head.vocab is None else head.vocab.ids.tolist()))
        assert not extra  # the reference knows static vocabularies only
        scores = logits.log_softmax(-1).tolist()
        named = range(264) if head.vocab is None else head.vocab.ids.tolist()
        return sorted(zip(scores, named, strict=True), key=lambda one: (-one[0], one[1]))[: plan.width]

    found: list[tuple[float, Path]] = []
    frontier: list[tuple[float, Path]] = [(0.0, ())]
    for depth in range(plan.depth):
        if depth and frontier[0][0] < math.log(plan.stop_below or 1e-300):
            break
        level = [(score + own, (*path, token)) for score, path in frontier for own, token in choices(path)]
        found += level
        frontier = sorted(level, key=lambda one: -one[0])[: plan.width]
    best = sorted(found, key=lambda one: (-one[0], len(one[1])))[: plan.num_nodes - 1]
    return {path: path[:-1] for _, path in best}


def paths_of(tree: TokenTree, row: int) -> dict[Path, Path]:
    tokens, parents = tree.tokens[row].tolist(), tree.topology.parents[row].tolist()
    named: list[Path] = [()]
    for node in range(1, len(tokens)):
        named.append((*named[parents[node]], tokens[node]))
    valid = tree.topology.valid[row].tolist()
    return {named[node]: named[parents[node]] for node in range(1, len(tokens)) if valid[node]}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "plan",
    [
        DynamicTree(depth=3, width=3, num_nodes=9),
        DynamicTree(depth=4, width=2, num_nodes=30),
        DynamicTree(depth=3, width=3, num_nodes=12, stop_below=0.6),
    ],
    ids=["kept", "whole", "stopping"],
)
def test_dynamic_trees_are_those_of_a_slow_reference(kind, plan):
    target, head, seen = target_of(), learnt(kind), []

    class Noting(EagleDrafter):
        def propose(self, rows, budget):
            tree = super().propose(rows, budget)
            seen.extend((list(ids), paths_of(tree, row)) for row, ids in enumerate(rows.ids) if len(ids) > 1)
            return tree

    decode(target, Noting(head, target, plan), requests(6, lengths=(2, 7, 3)), batch_size=3)
    assert len(seen) >= 5 and len({len(paths) for _, paths in seen}) >= (2 if plan.stop_below else 1)
    for ids, paths in seen:
        assert paths == slow_tree(head, target, ids, plan)
        assert all(parent in paths or parent == () for parent in paths.values())


def test_of_equal_logits_the_lower_column_comes_first():
    generator = torch.Generator().manual_seed(0)
    for count in (1, 2, 3, 7, 12):
        logits = torch.randint(0, 4, (3, 5, 12), generator=generator).to(torch.bfloat16)
        values, columns = best_choices(logits, count)
        for row, node in torch.cartesian_prod(torch.arange(3), torch.arange(5)).tolist():
            order = sorted(range(12), key=lambda column, at=(row, node): (-float(logits[at][column]), column))
            assert columns[row, node].tolist() == order[:count]
            assert torch.equal(values[row, node], logits[row, node, order[:count]])


def test_probabilities_never_pass_one_so_parents_stay_when_everything_ties():
    """A head that is certain gives every node probability 1: still each kept node's parent is kept before it."""
    logits = torch.full((1, 2, 6), -1e4)
    logits[..., 3] = 1e4
    values, columns = best_choices(logits[:, :1], 2)
    growth = Growth(torch.tensor([True]))
    growth.add(columns, log_probabilities(values, logits[:, :1]))
    for _ in range(3):
        assert growth.choose_frontier(2, None)
        values, columns = best_choices(logits, 2)
        assert log_probabilities(values, logits).max() <= 0
        growth.add(columns, log_probabilities(values, logits))
    for drafts in range(1, 8):
        tree = growth.tree(drafts)
        assert set(paths_of(tree, 0)) >= {(3,) * depth for depth in range(1, min(drafts, 4) + 1)}
        assert (tree.topology.parents[0] < torch.arange(drafts + 1)).all()


def test_a_row_without_pairs_drafts_nothing():
    growth = Growth(torch.tensor([False, True]))
    growth.add(torch.tensor([[[1, 2]], [[3, 4]]]), torch.tensor([[[-1.0, -2.0]], [[-1.0, -2.0]]]))
    assert growth.tree(2).topology.valid.tolist() == [[True, False, False], [True, True, True]]


def test_levels_of_a_static_tree_expand_the_nodes_that_have_children():
    levels = static_levels([(0,), (1,), (2,), (0, 0), (2, 1), (2, 1, 0)])
    assert [level.expanded.tolist() for level in levels] == [[0], [0, 2], [1]]
    assert [level.above.tolist() for level in levels] == [[[0]], [[0, 0]], [[1]]]
    assert [level.choice.tolist() for level in levels] == [[0, 1, 2], [0, 3], [0]]
    assert [level.num_ranks for level in levels] == [3, 2, 1]


# -- costs and tuning --------------------------------------------------------------------------------------------------

COSTS = DraftCosts(first=1.0, static_level={1: 0.5, 4: 2.0}, dynamic_level={2: 1.0, 4: 2.0})


def test_drafting_costs_are_counted_by_level():
    assert COSTS.of([(0,)]) == 1.0
    assert COSTS.of([(0,), (0, 0), (0, 0, 0)]) == pytest.approx(2.0)
    assert COSTS.of(StaticTree(paths=[(0,), (1,), (0, 0), (1, 0)])) == pytest.approx(1.0 + 1.0)  # two nodes expanded
    assert COSTS.of(SampledChain(length=4)) == pytest.approx(2.5)
    assert COSTS.of(DynamicTree(depth=3, width=3, num_nodes=9)) == pytest.approx(1.0 + 2 * 1.5)
    assert COSTS.of(DynamicTree(depth=2, width=6, num_nodes=9)) == pytest.approx(1.0 + 3.0)
    assert COSTS.of(DynamicTree(depth=2, width=1, num_nodes=9)) == pytest.approx(1.0 + 1.0)


def grown(width: int, seed: int, bases: int = 60, levels: int = 4) -> GrownAnswer:
    generator = torch.Generator().manual_seed(seed)
    before = torch.randint(0, 3, (bases, levels, levels), generator=generator)
    found = (torch.rand(bases, levels, generator=generator) < 0.3 + 0.1 * width).int().cumprod(1).bool()
    return GrownAnswer(width, before.masked_fill(~found[..., None], -1))


def test_replay_of_a_grown_answer_by_hand():
    before = torch.tensor([[[0, 1], [1, 1]], [[2, 3], [-1, -1]], [[0, 0], [1, 0]], [[0, 0], [-1, -1]]])
    answer = GrownAnswer(2, before)
    assert replay_grown(answer, 2, 4) == [(0, 2)]  # base 3 accepts one draft, and its bonus would pass the end
    assert replay_grown(answer, 1, 2) == [(0, 1), (2, 1)]
    assert replay_grown(answer, 2, 2) == [(0, 0), (1, 0), (2, 1)]


def test_deeper_larger_trees_accept_more_and_costs_decide():
    answers = {width: [grown(width, seed) for seed in range(6)] for width in (2, 4)}
    curve = CostCurve(seconds={1: 1.0, 8: 1.0, 64: 1.0}, context_length=64, rows=1, device="cpu", dtype="float32")
    free = DraftCosts(first=0.0, static_level={1: 0.0}, dynamic_level={1: 0.0})
    dear = DraftCosts(first=0.0, static_level={1: 9.0}, dynamic_level={1: 9.0})
    without, with_levels = (tune_dynamic(answers, curve, one, sizes=(1, 4, 8, 64)) for one in (free, dear))
    assert set(without) == {4, 8, 64}
    assert without[64].plan.width == 4 and without[64].plan.depth == 4
    taus = [without[size].acceptance_length for size in (4, 8, 64)]
    assert taus == sorted(taus) and without[64].speedup == pytest.approx(taus[-1])
    assert all(forecast.plan.depth == 1 for forecast in with_levels.values())
    assert best_size(without) == 64


def test_costs_of_levels_are_measured():
    target, head = target_of(), learnt("eagle3")
    costs = measure_levels(head, target, widths=(1, 2), depth=3, steps=4)
    assert costs.first > 0 and set(costs.static_level) == set(costs.dynamic_level) == {1, 2}
    assert costs.of(DynamicTree(depth=3, width=2, num_nodes=5)) > costs.first
    assert measure_drafting(head, target, SampledChain(length=2), steps=4) > 0
