"""The comparison of heads: what is pooled, and what is paired with what."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny
import torch

from headstart.decode.cost import RankedAnswer, replay_crosswise
from headstart.eval import bench_heads
from headstart.eval.bench_heads import KINDS, TOPICS, compare_acceptance, compare_speed
from headstart.recipe import load_recipe


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


def test_heads_too_short_for_the_chain_are_refused_before_hours_of_training(tmp_path, capsys):
    words = ["--recipes", "smollm2-medusa.yaml", "--set", "head.num_heads=2", "--output", str(tmp_path)]
    assert bench_heads.main(words) != 0
    assert "head.num_heads" in capsys.readouterr().err and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("change", "told"), [("data.max_length=99", "data.max_length"), ("target.dtype=float32", "target.dtype")]
)
def test_heads_on_other_data_are_not_compared(change, told, tmp_path, capsys):
    (tmp_path / "other.yaml").write_text(load_recipe("smollm2-eagle3.yaml", [change]).to_yaml())
    words = ["--recipes", f"smollm2-eagle.yaml,{tmp_path / 'other.yaml'}", "--output", str(tmp_path / "out")]
    assert bench_heads.main(words) != 0
    assert told in capsys.readouterr().err and not list((tmp_path / "out").iterdir())


@pytest.mark.slow
def test_two_recipes_from_training_to_tables_and_nothing_twice(tmp_path, capsys):
    place, train = tiny.save(tmp_path / "target", "llama"), '[{source: "bundled:chats", split: train, limit: 8}]'
    small = [f"target.name={place}", "target.architecture=null", f"data.train={train}", "data.max_length=96"]
    small += ["train.cpu_seconds=null", "train.max_steps=3", "eval.max_new_tokens=8", "head.draft_vocab_size=64"]
    own = {"smollm2-medusa": ["head.num_heads=3"], "smollm2-eagle3": ["head.layers=[1,2]", "head.unrolled_steps=2"]}
    for name, settings in own.items():
        (tmp_path / f"{name}.yaml").write_text(load_recipe(f"{name}.yaml", [*small, *settings]).to_yaml())
    recipes = ",".join(str(tmp_path / f"{name}.yaml") for name in own)
    words = ["--recipes", recipes, "--seeds", "0", "--questions", "1", "--jobs", "2", "--output", str(tmp_path / "out")]
    assert bench_heads.main(words) == 0
    assert capsys.readouterr().out.count("$ headstart") == 5, "states once; two heads, trained and tuned"
    report = json.loads((tmp_path / "out/heads.json").read_text())
    for population in (TOPICS, KINDS):
        acceptance, speed = report["acceptance"][population], report["speed"][population]
        assert acceptance["answers"] + acceptance["looping"] > 50
        assert list(acceptance["differences"]) == ["smollm2-eagle3 - smollm2-medusa"]
        for by_plan in acceptance["acceptance_length"].values():
            assert list(by_plan) == ["chain 3", "tree 8", "tree 16", "tree 32"]
            assert all(1 <= one["value"] < 5 and len(one["seeds"]) == 1 for one in by_plan.values())
        assert speed["answers"] + speed["looping"] == 1
        assert list(speed["arms"]) == [f"{name}, {arm}" for name in own for arm in bench_heads.ARMS]

    stored = tmp_path / "out/speed.jsonl"
    first, second = stored.read_text().splitlines()
    stored.write_text(f"{first}\n{second[:9]}")  # stopped while it wrote the second
    assert bench_heads.main(words) == 0
    assert "$ headstart" not in capsys.readouterr().out
    assert stored.read_text().splitlines()[0] == first and len(stored.read_text().splitlines()) == 2
