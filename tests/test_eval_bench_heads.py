"""The comparison of heads: what is pooled, and what is paired with what."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from headstart.decode.cost import RankedAnswer, replay_crosswise
from headstart.eval import bench_heads
from headstart.eval.bench_heads import KINDS, TOPICS, compare_acceptance, compare_speed


def acceptance_of(tokens: list[int], steps: int = 10) -> dict:
    """A seed whose answers take `steps` steps each; the last answer loops."""
    one = {
        "loops": [False] * (len(tokens) - 1) + [True],
        "plans": {"chain 3": [[count, steps] for count in tokens]},
        "by_depth": [[4, 2, 1] for _ in tokens],
    }
    return {TOPICS: one, KINDS: one}


def test_seeds_are_pooled_and_differences_are_paired_by_answer():
    weak = [acceptance_of([12, 16, 20, 90]), acceptance_of([12, 14, 20, 90])]
    strong = [acceptance_of([14, 18, 22, 90]), acceptance_of([14, 16, 22, 90])]
    found = compare_acceptance({"weak": weak, "strong": strong}, TOPICS)
    assert (found["answers"], found["looping"]) == (3, 1)
    tau = found["acceptance_length"]["weak"]["chain 3"]
    assert tau["value"] == pytest.approx(94 / 60) and tau["seeds"] == pytest.approx([1.6, 46 / 30])
    ((pair, by_plan),) = found["differences"].items()
    assert pair == "strong - weak" and by_plan["chain 3"]["value"] == pytest.approx(0.2)
    assert by_plan["chain 3"]["interval"] == pytest.approx((0.2, 0.2)), "the same prompts are drawn on both sides"
    low, high = tau["interval"]
    assert high - low > 0.2, "while each side alone depends on what is drawn"
    assert found["by_depth"]["weak"] == [0.5, 0.5]


def test_speeds_are_over_plain_decoding_of_the_same_prompts():
    records = [
        {
            "question": str(number),
            "population": population,
            "loops": number == 3,
            "plain": [10, 10.0 * slow],
            "arms": {
                f"{run}, {arm}": [10, 10.0 * slow / speed, 10, 5]
                for run, speed in RUNS.items()
                for arm in bench_heads.ARMS
            },
        }
        for population in (TOPICS, KINDS)
        for number, slow in enumerate([1, 2, 3, 99])
    ]
    found = compare_speed(records, {"a": [Path("x/a0"), Path("x/a1")], "b": [Path("x/b0"), Path("x/b1")]}, KINDS)
    assert (found["answers"], found["looping"]) == (3, 1)
    assert found["arms"]["a, tuned"]["speedup"] == pytest.approx(1.2)
    assert found["arms"]["b, tuned"]["speedup"] == pytest.approx(1.6)
    assert found["arms"]["b, chain 3"]["acceptance_length"] == 2.0
    assert found["differences"]["b - a, tuned"]["value"] == pytest.approx(0.4)
    assert found["differences"]["b - a, tuned"]["interval"] == pytest.approx((0.4, 0.4))


RUNS = {"a0": 1.2, "a1": 1.2, "b0": 1.6, "b1": 1.6}


def test_trees_are_scored_on_answers_they_were_not_chosen_on():
    easy, hard = RankedAnswer(torch.zeros(12, 3).long()), RankedAnswer(torch.full((12, 3), 1))
    across = replay_crosswise([easy, hard, easy, hard], 2)
    assert all(accepted == 0 for steps in across for _, accepted in steps)
    (own,) = replay_crosswise([easy], 2)
    assert own and all(accepted == 1 for _, accepted in own)
