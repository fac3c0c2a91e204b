"""Draft lengths replayed, and transformers' assisted generation beside ours, end to end on a tiny target."""

from __future__ import annotations

import json

import eagle_cases
import pytest
import stubs
import tiny
import torch

from headstart.decode.draft_length import StepCosts
from headstart.decode.drafters.base import NoDraft, Request
from headstart.decode.engine import Engine
from headstart.decode.sampling import SamplingSettings
from headstart.eval import bench_adaptive, bench_assisted
from headstart.heads.store import save_head
from headstart.recipe import load_recipe


def test_speeds_are_those_of_the_cost_table():
    costs = StepCosts(seconds=(1.0, 1.5, 2.0), budgets=(1, 2, 3))
    found = bench_adaptive.compare([[2, 1, 0] * 40, [0] * 30], costs)
    # constant 2: the first text in 40 steps of 2 s, the second in 30; plain decoding in 150 steps of 1 s
    assert found["constant_speedup"] == pytest.approx([1.0, 150 / (80 * 1.5 + 30 * 1.5), 150 / (40 * 2 + 30 * 2)])
    assert found["best_constant"] == 2 and found["tokens"] == 150
    assert found["adaptive_over_best_constant"] == pytest.approx(
        found["adaptive_speedup"] / found["constant_speedup"][2]
    )
    hard = bench_adaptive.compare([[0] * 2000], costs)
    assert hard["best_constant"] == 0 and hard["adaptive_speedup"] > 0.97 > hard["heuristic_speedup"]


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    target = tiny.target("llama", max_position_embeddings=1024)
    place = tiny.save(folder / "target", "llama", max_position_embeddings=1024)
    head = eagle_cases.learnt("eagle3").float()
    save_head(head, folder / "head", fingerprint=target.fingerprint(), training_record={})
    changes = [f"target.name={place}", "target.architecture=null", "target.dtype=float32", "eval.max_new_tokens=12"]
    (folder / "recipe.yaml").write_text(load_recipe("quickstart.yaml", changes).to_yaml())
    return folder


@pytest.mark.slow
def test_every_kind_is_replayed(run_folder, tmp_path, capsys):
    words = ["--head", str(run_folder), "--each", "2", "--output", str(tmp_path / "adaptive.json")]
    assert bench_adaptive.main(words) == 0
    report = json.loads((tmp_path / "adaptive.json").read_text())
    assert list(report["kinds"]) == [*bench_adaptive.KINDS, bench_adaptive.RANDOM]
    assert len(report["step_seconds"]) == bench_adaptive.LONGEST + 1
    assert all(one["texts"] == 2 and one["adaptive_speedup"] > 0 for one in report["kinds"].values())
    assert "of the best constant" in capsys.readouterr().out


def test_a_forced_text_is_written_by_either_side():
    target = tiny.target("llama")
    prompt, text = stubs.prompts_of([7, 12], 250)
    forced = SamplingSettings(processors=(bench_assisted.ForcedText(prompt + text),))
    request = Request(prompt_ids=prompt, max_new_tokens=len(text), settings=forced, ignore_end=True)
    (ours,) = Engine(target, NoDraft()).generate([request])
    assert ours.token_ids == text
    arms = bench_assisted.time_rivals(target, tiny.target("llama", seed=4), [(prompt, text)] * 2, 3)
    for by_arm in arms.values():
        assert list(by_arm) == ["ours", "theirs", "theirs, plain linears"]
        assert all(0 < tokens < len(text) and seconds > 0 for pairs in by_arm.values() for tokens, seconds in pairs)


@pytest.mark.slow
def test_the_comparison_with_assisted_generation(tmp_path, capsys):
    place = tiny.save(tmp_path / "target", "llama", max_position_embeddings=1024)
    draft = tiny.save(tmp_path / "draft", "llama", max_position_embeddings=1024, seed=3)
    words = ["--target", str(place), "--draft", str(draft), "--questions", "3", "--identity-questions", "2"]
    words += ["--set", "eval.max_new_tokens=12", "--output", str(tmp_path / "out.json")]
    torch.manual_seed(0)
    assert bench_assisted.main(words) == 0
    report = json.loads((tmp_path / "out.json").read_text())
    assert set(report["rates"]) == set(report["identity"]) == {"prompt lookup", "draft model"}
    assert all(one["passed"] for one in report["identity"].values())
    for by_arm in report["rates"].values():
        assert by_arm["theirs"]["ours_over_it"] > 0 and len(by_arm["theirs"]["interval"]) == 2
    assert "texts identical" in capsys.readouterr().out
