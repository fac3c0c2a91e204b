"""`headstart tune`: what it writes can be drafted along, and its words follow from what it measured."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import head_cases
import pytest
import tiny
import torch

from headstart.decode.cost import SIZES, CostCurve, Forecast
from headstart.decode.drafters.heads import head_drafter
from headstart.decode.drafters.plans import DynamicTree
from headstart.errors import DataError, TargetError
from headstart.eval import measure, tune
from headstart.eval.trees import choose_plan, choose_tree
from headstart.heads.base import Head
from headstart.heads.configs import HEADS
from headstart.heads.store import build_head, load_head, save_head
from headstart.recipe import load_recipe
from headstart.target import Target


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory) -> Path:
    """A run with an untrained head of three levels, and chats of its own to tune on."""
    target = tiny.target("llama")
    return make_run(tmp_path_factory.mktemp("tune"), target, head_cases.head_for(target, num_heads=3))


@pytest.fixture(scope="module", params=["eagle", "eagle3"])
def eagle_run(request, tmp_path_factory) -> Path:
    """The same with an untrained head that reads its own states."""
    target = tiny.target("llama")
    config = HEADS[request.param].model_validate({"type": request.param, "unrolled_steps": 2})
    return make_run(tmp_path_factory.mktemp(request.param), target, build_head(config, target))


def make_run(folder: Path, target: Target, head: Head) -> Path:
    place = tiny.save(folder / "target", "llama")
    save_head(head, folder / "run/head", fingerprint=target.fingerprint(), training_record={})
    chats = [
        [{"role": "user", "content": f"Say {n}"}, {"role": "assistant", "content": f"{n}{n} " * 5}] for n in range(9)
    ]
    lines = [json.dumps({"id": str(number), "messages": chat}) for number, chat in enumerate(chats)]
    (folder / "chats.jsonl").write_text("\n".join(lines))
    source = f'[{{source: "{folder / "chats.jsonl"}"}}]'
    changes = [f"target.name={place}", "target.architecture=null", "target.dtype=float32", "name=run"]
    changes += [f"data.train={source}", "data.held_out={fraction: 0.5}", "data.max_length=64"]
    (folder / "run/recipe.yaml").write_text(load_recipe("quickstart.yaml", changes).to_yaml())
    return folder / "run"


@pytest.fixture(scope="module")
def trees(run_folder) -> dict:
    return tune.run(str(run_folder))


def test_every_size_has_a_tree_that_the_drafter_takes(run_folder, trees):
    assert json.loads((run_folder / "head/trees.json").read_text()) == trees
    assert [int(size) for size in trees["choices"]] == sorted({1, *SIZES})
    target = tiny.target("llama")
    head = load_head(run_folder / "head", target)
    for size, paths in trees["choices"].items():
        assert len(paths) <= int(size) - 1 and all(1 <= len(path) <= 3 for path in paths)
        head_drafter(head, target, [tuple(path) for path in paths])
    tree, forecast = choose_tree(run_folder / "head", "auto")[:2]
    assert [list(path) for path in tree] == trees["choices"][str(trees["best"])]
    assert forecast["speedup"] == trees["forecast"]["speedup"]


def test_the_forecast_follows_from_costs_and_acceptance(trees):
    seconds = {int(width): value for width, value in trees["step_seconds"].items()}
    for size, figures in trees["forecasts"].items():
        if size != "1":
            cost = seconds[int(size)] + trees["draft_seconds"]
            expected = figures["acceptance_length"] * seconds[1] / cost
            assert figures["speedup"] == pytest.approx(expected, rel=1e-3)
    assert trees["forecast"]["speedup"] == max(figures["speedup"] for figures in trees["forecasts"].values())


def test_trees_are_tuned_for_every_number_of_rows(tmp_path, capsys):
    run_folder = make_run(tmp_path, tiny.target("llama"), head_cases.head_for(tiny.target("llama"), num_heads=2))
    trees = tune.run(str(run_folder), overrides=["eval.batch_size=[1, 2, 4]"])
    assert trees["rows"] == 1 and list(trees["by_rows"]) == ["2", "4"]
    assert "for each of 4 rows" in capsys.readouterr().out
    for rows, one in (("2", trees["by_rows"]["2"]), ("4", trees["by_rows"]["4"])):
        assert one["rows"] == int(rows) and one["step_seconds"]["1"] > 0 and one["choices"] == trees["choices"]
    stored = run_folder / "head/trees.json"
    trees["by_rows"]["2"]["best"], trees["by_rows"]["4"]["best"] = 3, 4
    trees["best"] = 2
    stored.write_text(json.dumps(trees))
    sizes = {rows: 1 + len(choose_tree(run_folder / "head", "auto", rows)[0]) for rows in (1, 2, 3, 4, 9)}
    assert sizes == {1: 2, 2: 3, 3: 3, 4: 4, 9: 4}, "the next smaller number of rows that was tuned"


@pytest.mark.parametrize("eagle_run", ["eagle3"], indirect=True)
def test_dynamic_trees_are_tuned_beside_static_ones(eagle_run, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")  # or the headings of the table are broken into lines
    trees = tune.run(str(eagle_run))
    assert json.loads((eagle_run / "head/trees.json").read_text()) == trees
    target = tiny.target("llama")
    head = load_head(eagle_run / "head", target)
    assert trees["dynamic"]["choices"].keys() == trees["choices"].keys() - {"1"}
    for size, numbers in trees["dynamic"]["choices"].items():
        assert numbers["num_nodes"] == int(size) and numbers["depth"] < int(size)
        head_drafter(head, target, DynamicTree(**numbers))
        head_drafter(head, target, [tuple(path) for path in trees["choices"][size]])
    speedups = {kind: part["forecast"]["speedup"] for kind, part in (("tree", trees), ("dynamic", trees["dynamic"]))}
    assert speedups[trees["plan"]] == max(speedups.values())
    chosen, forecast, tuned_on = choose_plan(eagle_run / "head", None, "auto")
    assert isinstance(chosen, DynamicTree) == (trees["plan"] == "dynamic") and tuned_on == ("cpu", "float32")
    assert forecast["speedup"] == speedups[trees["plan"]]
    levels = trees["draft_seconds"]
    assert levels["first"] > 0 and levels["static_level"].keys() == levels["dynamic_level"].keys()
    text = capsys.readouterr().out
    assert "for each level more" in text and "dynamic: depth x width" in text


@pytest.mark.parametrize("eagle_run", ["eagle3"], indirect=True)
def test_a_report_compares_the_plans_of_a_head(eagle_run, tmp_path):
    if not (eagle_run / "head/trees.json").is_file():  # where another worker has the test before
        tune.run(str(eagle_run))
    names = ["head@chain2", "head@tree4", "head@dynamic4", "head@drawn2"]
    settings = ["eval.num_prompts=2", "eval.max_new_tokens=8", "eval.identity_prompts=2", "eval.prompts=[]"]
    report = measure.run(head=str(eagle_run), drafters=names, overrides=settings, output=str(tmp_path))
    assert [line["name"] for line in report["details"]["drafters"]] == names
    assert report["drafter_parameters"] == sum(p.numel() for p in load_head(eagle_run / "head").parameters())
    assert report["details"]["identity"]["passed"]


def test_another_target_can_be_named_and_is_compared_with_the_heads_own(tmp_path, monkeypatch):
    seconds = dict.fromkeys((1, *SIZES), 1.0)  # measured in the tests above
    costs = CostCurve(seconds=seconds, context_length=1, rows=1, device="cpu", dtype="float32")
    monkeypatch.setattr(tune, "measure_costs", lambda target, rows: costs)
    monkeypatch.setattr(tune, "dtype_advice", lambda *_: None)
    run = make_run(tmp_path, tiny.target("llama"), head_cases.head_for(tiny.target("llama"), num_heads=2))
    moved = tiny.save(tmp_path / "moved", "llama")
    tune.run(str(run), target=str(moved))
    other = tiny.save(tmp_path / "other", "llama", seed=1)
    with pytest.raises(TargetError, match="was trained on"):
        tune.run(str(run), target=str(other))
    with pytest.warns(UserWarning, match="was trained on"):
        tune.run(str(run), target=str(other), allow_other_target=True)


def test_too_few_held_out_answers_are_said(run_folder):
    with pytest.raises(DataError, match="held-out answers"):
        tune.run(str(run_folder), overrides=["data.held_out={fraction: 0.0001}"])


@pytest.mark.parametrize(
    ("dtype", "bfloat16", "float32", "told"),
    [
        (torch.bfloat16, {1: 0.02, 4: 0.08}, {1: 0.03, 4: 0.03}, "2.0 times faster in float32"),  # trees pay there only
        (torch.bfloat16, {1: 0.02, 4: 0.08}, {1: 0.06, 4: 0.07}, None),
        (torch.float32, {1: 0.02, 4: 0.02}, {1: 0.04, 4: 0.04}, "1.7 times faster in bfloat16"),
    ],
)
def test_the_dtype_with_more_tokens_per_second_is_told(monkeypatch, dtype, bfloat16, float32, told):
    own = bfloat16 if dtype == torch.bfloat16 else float32
    costs = CostCurve(
        seconds={size: own[size] + 0.01 for size in own}, context_length=1, rows=1, device="cpu", dtype="x"
    )
    forecasts = {
        1: Forecast(paths=[], acceptance_length=1.0, speedup=1.0),
        4: Forecast(paths=[], acceptance_length=2.65, speedup=2.65 * costs.at(1) / costs.at(4)),
    }
    monkeypatch.setattr(
        tune, "linear_seconds", lambda target, widths: {torch.bfloat16: bfloat16, torch.float32: float32}
    )
    advice = tune.dtype_advice(tiny.target("llama", dtype=dtype), forecasts, costs)
    assert advice is None if told is None else told in (advice or "")


def test_no_dtype_is_advised_that_memory_has_no_room_to_try(monkeypatch):
    costs = CostCurve(seconds={1: 0.1}, context_length=1, rows=1, device="cpu", dtype="x")
    monkeypatch.setattr(tune.psutil, "virtual_memory", lambda: SimpleNamespace(available=1000))
    monkeypatch.setattr(tune, "linear_seconds", None)
    assert tune.dtype_advice(tiny.target("llama"), {}, costs) is None
