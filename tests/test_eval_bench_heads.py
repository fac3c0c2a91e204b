"""The comparison of heads: what is paired with what, and a whole small run that is stopped and goes on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from headstart.decode.cost import RankedAnswer
from headstart.eval import bench_heads
from headstart.eval.bench_heads import KINDS, TOPICS, compare_acceptance, compare_speed, replay_trees


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
    answers = [easy, hard, easy, hard]
    across = replay_trees(answers, answers, 2, crosswise=True)
    assert all(accepted == 0 for steps in across for _, accepted in steps)
    own = replay_trees([easy], answers, 2, crosswise=False)
    assert len(own) == 1 and all(accepted == 1 for _, accepted in own[0])


@pytest.mark.slow
def test_a_small_comparison_is_run_and_goes_on_where_it_stopped(tmp_path, monkeypatch, capsys):
    small = ["train.cpu_seconds=null", "train.max_steps=3", "data.max_length=128", "target.dtype=float32"]
    small += ["eval.max_new_tokens=12", 'data.train=[{source: "bundled:chats", split: train, limit: 6}]']
    words = ["--recipes", "smollm2-medusa.yaml,smollm2-eagle3.yaml", "--seeds", "0", "--questions", "2", "--jobs", "2"]
    words += ["--output", str(tmp_path / "heads"), *(word for one in small for word in ("--set", one))]
    monkeypatch.setattr(bench_heads, "held_out_rows", few_rows(bench_heads.held_out_rows))
    assert bench_heads.main(words) == 0
    report = json.loads((tmp_path / "heads/heads.json").read_text())
    for population in (TOPICS, KINDS):
        for recipe in ("smollm2-medusa", "smollm2-eagle3"):
            taus = report["acceptance"][population]["acceptance_length"][recipe]
            assert list(taus) == ["chain 3", "tree 8", "tree 16", "tree 32"]
            assert all(one["value"] >= 1 for one in taus.values())
        assert set(report["speed"][population]["differences"]) == {
            f"smollm2-eagle3 - smollm2-medusa, {arm}" for arm in bench_heads.ARMS
        }
    speeds = (tmp_path / "heads/speed.jsonl").read_text()
    assert speeds.count("\n") == 4
    (tmp_path / "heads/speed.jsonl").write_text(speeds[: len(speeds) * 2 // 3])
    monkeypatch.setattr(bench_heads, "measure_acceptance", None)
    capsys.readouterr()
    assert bench_heads.main(words) == 0
    text = capsys.readouterr().out
    assert "headstart train" not in text and "| smollm2-eagle3 - smollm2-medusa |" in text
    again = [json.loads(line)["question"] for line in (tmp_path / "heads/speed.jsonl").read_text().splitlines()]
    assert sorted(again) == sorted(json.loads(line)["question"] for line in speeds.splitlines())


def few_rows(whole):
    return lambda trained, population: whole(trained, population).take(range(8))
