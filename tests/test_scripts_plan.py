"""`headstart plan`: what is dealt out over GPUs, what is assumed, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import tiny

from headstart import cli
from headstart.errors import HeadstartError
from headstart.eval.footprint import Footprint, TargetSizes
from headstart.recipe import load_recipe
from headstart.scripts import plan
from headstart.scripts.placements import Cluster, fastest, placements

GB = 10**9
TARGET = TargetSizes(
    parameters=70 * GB, layers=80, weights=140 * GB, borrowed=4 * GB, unit=2 * GB, splittable=136 * GB, key_heads=8,
    state=16384,
)  # fmt: skip
FOOTPRINT = Footprint(
    target=TARGET, head_parameters=GB, head=4 * GB, gradients=4 * GB, optimizer=8 * GB, features=1, logits=1,
    activations=1, working=6 * GB, working_offline=5 * GB, at_once=0, tokens=2048, taps=3,
    target_flops=300 * 10**12, head_flops=20 * 10**12,
)  # fmt: skip
CLUSTER = Cluster(
    gpus=8, memory=80 * GB, target_flops=1e15, head_flops=1e15, utilisation=0.5, bandwidth=450e9
)  # fmt: skip


def by_name(footprint: Footprint = FOOTPRINT, accumulation: int = 1, **cluster):
    found = placements(footprint, replace(CLUSTER, **cluster), accumulation=accumulation)
    return {placement.name: placement for placement in found}


def test_each_placement_divides_what_it_says():
    found = by_name()
    whole = 140 + 4 + 4 + 8 + 4 + 6  # target, head, gradients, optimiser, their second copy, what comes and goes
    assert found["replicate"].total == whole * GB
    assert found["zero2"].total == (140 + 4 + 0.5 + 1 + 4 + 6) * GB
    assert found["tensor_parallel"].total == (4 + 17 + 4 + 4 + 8 + 6) * GB
    assert found["shard"].total == (17.5 + 0.5 + 0.5 + 1 + 2 * 2 + 4 + 4 + 6) * GB
    assert found["offline"].total == (4 + 4 + 4 + 8 + 4 + 5) * GB
    assert [name for name, placement in found.items() if placement.fits] == ["tensor_parallel", "shard", "offline"]


def test_times_are_products_and_traffic():
    found = by_name()
    products, around = 320e12 / 0.5e15, 7 / 8 / 450e9
    assert found["replicate"].micro_batch_seconds == pytest.approx(products + 2 * around * 4 * GB)
    assert by_name(accumulation=4)["replicate"].micro_batch_seconds == pytest.approx(products + around * 2 * GB)
    assert found["shard"].micro_batch_seconds == pytest.approx(products + around * (140 + 8 + 4) * GB)
    sums = 2 * 80 * 2048 * 16384
    assert found["tensor_parallel"].micro_batch_seconds == pytest.approx(
        (300e12 / 8 + 20e12) / 0.5e15 + 2 * around * sums
    )
    assert found["tensor_parallel"].tokens_at_once == 2048 and found["shard"].tokens_at_once == 8 * 2048
    assert found["offline"].micro_batch_seconds == pytest.approx(20e12 / 0.5e15 + 2 * around * 4 * GB)


def test_one_gpu_needs_no_buffers_and_no_traffic():
    for placement in by_name(gpus=1).values():
        assert placement.parts["buffers"] == 0
        flops = 20e12 if placement.name == "offline" else 320e12
        assert placement.micro_batch_seconds == pytest.approx(flops / 0.5e15)


def test_a_way_that_cannot_be_gone_never_fits():
    odd = by_name(gpus=3)["tensor_parallel"]
    assert not odd.fits and odd.refusal == "8 key heads cannot be dealt to 3 GPUs"
    none = by_name(replace(FOOTPRINT, target=replace(TARGET, splittable=None)))["tensor_parallel"]
    assert not none.fits and none.refusal is not None and "no plan" in none.refusal


def test_the_fastest_of_those_that_fit():
    found = list(by_name().values())
    assert fastest(found, offline=True).name == "offline"  # pyright: ignore[reportOptionalMemberAccess]
    assert fastest(found, offline=False).name == "shard"  # pyright: ignore[reportOptionalMemberAccess]
    assert fastest(list(by_name(memory=GB).values()), offline=True) is None


@pytest.mark.parametrize(
    ("text", "count"), [("80GB", 80 * GB), ("80 GiB", 80 * 2**30), ("1.5tb", 1.5e12), ("24000MB", 24 * GB)]
)
def test_sizes_are_read_with_their_unit(text, count):
    assert plan.parse_bytes(text, "--memory") == count


@pytest.fixture
def small(tmp_path):
    """Words of a plan for a tiny model that is nowhere but in its config.json."""
    path = tmp_path / "config.json"
    path.write_text(tiny.config("llama").to_json_string(use_diff=False))
    words = ["plan", "--recipe", "llama8b.yaml", "--set", f"target.architecture={path}"]
    return [*words, "--set", "head.draft_vocab_size=64", "--set", "data.max_length=32"]


def test_the_page_and_its_figures(small, tmp_path, capsys):
    output = tmp_path / "plan.json"
    assert cli.main([*small, "--gpus", "2", "--memory", "1GB", "--tokens", "2e6", "--output", str(output)]) == 0
    figures = json.loads(output.read_text())
    found = {row["name"]: row for row in figures["placements"]}
    assert list(found) == ["replicate", "zero2", "tensor_parallel", "shard", "offline"]
    assert all(row["fits"] and row["hours"] > 0 for row in found.values())
    footprint = figures["footprint"]
    assert found["replicate"]["parts"]["target"] == footprint["target"]["weights"]
    assert footprint["tokens"] == 2 * 32 and figures["length"]["total"] == 2_000_000
    assert figures["cache_bytes"] == {"bfloat16": 2_000_000 * (64 * 2 + 5), "int8": 2_000_000 * (64 + 4 + 5)}
    page = " ".join(capsys.readouterr().out.split())
    for said in (
        "989 TFLOP/s in bfloat16, an NVIDIA H100 SXM's",
        "of which 40% are reached",
        "tokens: 2,000,000 a pass, as given",
        "450 GB/s to and from each GPU",
        "replicate*",
        "the recipe's own: replicate fits",
    ):
        assert said in page, said


def test_what_is_assumed_of_the_length_is_said(small, capsys):
    assert cli.main([*small, "--rows", "10"]) == 0
    assert "10 rows, each as long as data.max_length (32): an upper limit" in capsys.readouterr().out
    assert cli.main([*small, "--memory", "0.01MB"]) == 0
    page = " ".join(capsys.readouterr().out.split())
    assert "100,000,000 a pass, assumed" in page and "Nothing fits" in page and "replicate does not fit" in page


def test_data_that_lie_here_are_counted(tmp_path, capsys):
    target = tiny.save(tmp_path / "target")
    rows = tmp_path / "rows.jsonl"
    ids = [[1, 2, 3, 4, 5, 6], [7, 8, 9, 10]]
    rows.write_text("".join(json.dumps({"input_ids": row, "loss_mask": [1] * len(row)}) + "\n" for row in ids))
    recipe = load_recipe(
        "llama8b.yaml",
        [f"target.name={target}", "target.architecture=null", "head.draft_vocab_size=64", "train.max_steps=50",
         f"data.train=[{{source: {rows}, format: ids}}]", "data.max_length=32", "data.held_out={fraction: 0.5}"],
    )  # fmt: skip
    length = plan.run(recipe, tokens=None)["length"]
    assert length["tokens"] in (4, 6) and "counted" in length["source"]
    assert length["total"] == 50 * recipe.train.accumulation * recipe.train.batch_size * 32


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (["--memory", "80"], 2, "--memory is 80, expected a size such as 80GB or 80GiB."),
        (["--memory", "0GB"], 2, "--memory is 0GB, expected a size"),
        (["--bandwidth", "fast"], 2, "--bandwidth is fast, expected a size"),
        (["--utilisation", "40"], 2, "--utilisation is 40, expected a share above 0"),
        (["--tflops", "-1"], 2, "--tflops is -1, expected a number above 0"),
        (["--output", "nowhere/plan.json"], 1, "cannot be written or read"),
        (["--set", "target.architecture=none.json"], 2, "no file none.json"),
    ],
)
def test_wrong_words_end_in_one_sentence(words, status, said, capsys):
    assert cli.main(["plan", "--recipe", "llama8b.yaml", *words]) == status
    assert said in capsys.readouterr().err


def test_a_target_that_is_nowhere_is_told_what_helps(tmp_path):
    recipe = load_recipe("llama8b.yaml", ["target.architecture=null", f"target.name={tmp_path}"])
    with pytest.raises(HeadstartError, match="target.architecture=FILE"):
        plan.run(recipe)


@pytest.mark.parametrize("option", ["--tokens", "--rows"])
@pytest.mark.parametrize("text", ["0", "-5", "1.5", "many"])
def test_counts_are_whole_numbers(option, text, capsys):
    with pytest.raises(SystemExit):
        cli.main(["plan", "--recipe", "llama8b.yaml", f"{option}={text}"])
    assert f"found {text}, expected a whole number above 0" in capsys.readouterr().err


@pytest.mark.slow
def test_seventy_billion_parameters_are_planned_as_the_issue_asks():
    figures = plan.run(load_recipe("llama70b.yaml"), gpus=8, memory="80GB")
    footprint = figures["footprint"]
    assert footprint["target"]["parameters"] == pytest.approx(70.55e9, rel=1e-3)
    assert footprint["head_parameters"] == pytest.approx(268e6, rel=0.01)
    fits = {row["name"]: row["fits"] for row in figures["placements"]}
    assert not fits["replicate"] and fits["shard"] and fits["tensor_parallel"] and fits["offline"]
    per_token = footprint["target_flops"] / footprint["tokens"]
    assert 2 * 68e9 < per_token < 2 * 75e9
