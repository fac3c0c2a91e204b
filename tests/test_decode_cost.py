"""The cost curve, the replay that forecasts acceptance, and the choice of a tree."""

from __future__ import annotations

import itertools

import pytest
import tiny
import torch

from headstart.decode.cost import (
    CostCurve,
    RankedAnswer,
    best_size,
    grow_tree,
    mean_tokens,
    measure_costs,
    replay,
    tune,
)


def flat_costs(seconds: dict[int, float]) -> CostCurve:
    return CostCurve(seconds=seconds, context_length=64, rows=1, device="cpu", dtype="float32")


def random_ranks(seed: int, answers: int = 6, positions: int = 40, depth: int = 3) -> list[RankedAnswer]:
    generator = torch.Generator().manual_seed(seed)
    return [RankedAnswer(torch.randint(-1, 3, (positions, depth), generator=generator)) for _ in range(answers)]


def test_replay_moves_on_by_what_was_accepted_plus_one():
    answer = RankedAnswer(torch.tensor([[0, 0], [5, 5], [5, 5], [1, 0], [-1, 0], [0, 9], [9, -1]]))
    # base 0 accepts both levels, base 3 accepts (1,) but not (1, 0), base 5 accepts (0,)
    assert replay(answer, [(0,), (1,), (0, 0)]) == [(0, 2), (3, 1), (5, 1)]
    assert replay(answer, []) == [(base, 0) for base in range(7)]


def test_a_step_that_would_emit_past_the_end_token_is_left_out():
    answer = RankedAnswer(torch.tensor([[9, 9], [0, 0], [0, -1]]))
    # at base 1 both drafts, the second of them the end token, are right: nothing can follow it
    assert replay(answer, [(0,), (0, 0)]) == [(0, 0)]
    # with one level the end token is the bonus token of the step
    assert replay(answer, [(0,)]) == [(0, 0), (1, 1)]


def test_the_last_steps_count_where_they_emit_no_more_than_there_is():
    wrong = RankedAnswer(torch.tensor([[9, 9], [9, 9], [9, -1]]))
    assert replay(wrong, [(0,)]) == [(0, 0), (1, 0), (2, 0)]


def test_mean_tokens_pools_steps_over_answers():
    assert mean_tokens([[(0, 3), (4, 0)], [(0, 2)]]) == pytest.approx(8 / 3)
    assert mean_tokens([[], []]) == 1.0


def test_a_grown_tree_holds_every_parent_and_beats_no_other_by_brute_force():
    ranks = random_ranks(0, answers=4, positions=25, depth=2)
    chosen = grow_tree(ranks, 4)
    assert len(chosen) == 3 and all(path[:-1] in chosen or len(path) == 1 for path in chosen)
    nodes = [(a,) for a in range(3)] + [(a, b) for a in range(3) for b in range(3)]
    best = 0.0
    for paths in itertools.combinations(nodes, 3):
        if all(len(path) == 1 or path[:1] in paths for path in paths):
            best = max(best, mean_tokens([replay(one, list(paths)) for one in ranks]))
    assert mean_tokens([replay(one, chosen) for one in ranks]) >= best - 0.05


def test_more_nodes_never_lower_the_forecast_on_the_same_answers():
    ranks = random_ranks(1)
    taus = [mean_tokens([replay(one, grow_tree(ranks, size)) for one in ranks]) for size in (1, 2, 4, 8, 16)]
    assert taus == sorted(taus) and taus[0] == 1.0


def test_the_size_follows_the_costs():
    ranks = random_ranks(2)
    free = tune(ranks, flat_costs({1: 1.0, 2: 1.0, 4: 1.0, 8: 1.0}), 0.0, sizes=(1, 2, 4, 8))
    dear = tune(ranks, flat_costs({1: 1.0, 2: 9.0, 4: 9.0, 8: 9.0}), 0.0, sizes=(1, 2, 4, 8))
    assert best_size(free) == 8 and best_size(dear) == 1
    assert free[8].speedup == pytest.approx(free[8].acceptance_length)
    assert dear[1].speedup == 1.0 and dear[1].paths == []


def test_drafting_time_counts_against_a_tree():
    ranks = random_ranks(3)
    costs = flat_costs({1: 1.0, 4: 1.0})
    without, with_drafting = tune(ranks, costs, 0.0, sizes=(4,))[4], tune(ranks, costs, 1.0, sizes=(4,))[4]
    assert with_drafting.speedup == pytest.approx(without.speedup / 2)


def test_costs_are_measured_for_every_width_and_padding_is_paid_for():
    target = tiny.target("llama", dtype=torch.float32)
    costs = measure_costs(target, widths=(1, 2, 4), context_length=16, repeats=2)
    assert set(costs.seconds) == {1, 2, 4} and all(seconds > 0 for seconds in costs.seconds.values())
    assert costs.at(3) == costs.seconds[4] and costs.ratio(1) == 1.0
    assert costs.dtype == "float32"


def test_costs_of_a_target_with_few_positions_are_measured_too():
    target = tiny.target("gpt2", dtype=torch.float32)  # 64 positions, fewer than there are steps to time
    costs = measure_costs(target, widths=(1, 2, 4, 8, 16), repeats=8, rows=2)
    assert all(seconds > 0 for seconds in costs.seconds.values()) and costs.rows == 2
