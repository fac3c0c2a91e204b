"""A launch that did not become what it asked for, or is not what the recipe names, is refused in a sentence."""

from __future__ import annotations

import pytest
import tiny
import torch
import train_cases as cases
import yaml
from accelerate import Accelerator

from headstart.errors import HeadError, TrainingError
from headstart.heads.store import build_head, save_head
from headstart.recipe import PACKAGED
from headstart.train.modes import (
    MODES,
    asked_mode,
    mode,
    placed_as_launched,
    refuse_other_launch,
    refuse_other_mode,
    start_processes,
)

ZERO3 = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3", "WORLD_SIZE": "2"}
FSDP = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "WORLD_SIZE": "2"}
ALONE = {"ACCELERATE_MIXED_PRECISION": "no", "MASTER_ADDR": "127.0.0.1"}  # what `--num_processes 2 --cpu` leaves


@pytest.mark.parametrize(
    ("environment", "real", "world_size", "message"),
    [
        (ZERO3 | {"ACCELERATE_USE_CPU": "true"}, "DDP", 2, "asks for ZeRO-3 and became 2 processes in DDP mode; ACCEL"),
        (FSDP | {"ACCELERATE_USE_CPU": "true"}, "DDP", 2, "asks for FSDP2 and became 2 processes in DDP mode"),
        (FSDP, "one process", 1, "asks for FSDP2 and became one process in one process mode; .* launch zero3-cpu.yaml"),
        (ALONE, "one process", 1, "asks for several processes, and this one would train alone; .*two-cpu.yaml"),
        ({"WORLD_SIZE": "2"}, "one process", 1, "asks for 2 processes, and this one would train alone"),
    ],
)
def test_a_launch_that_became_another_is_refused(environment, real, world_size, message):
    with pytest.raises(TrainingError, match=message):
        refuse_other_launch(environment, real, world_size)


def test_a_launch_that_became_what_it_asked_for_goes_on():
    refuse_other_launch(ZERO3, "ZeRO-3", 2)
    refuse_other_launch(FSDP, "FSDP2", 2)
    refuse_other_launch({"WORLD_SIZE": "2", "ACCELERATE_USE_CPU": "true"}, "DDP", 2)
    refuse_other_launch({"ACCELERATE_MIXED_PRECISION": "no"}, "one process", 1)
    refuse_other_launch({"MASTER_ADDR": "a-cluster-sets-it"}, "one process", 1)
    assert asked_mode({}) is None and asked_mode(ALONE) == "DDP"


@pytest.mark.parametrize(
    ("placement", "real", "message"),
    [
        ("replicate", "ZeRO-3", "mode ZeRO-3, recipe demo has target.placement: replicate, .*=shard"),
        (
            "shard",
            "DDP",
            "which takes ZeRO-3 or FSDP2; launch zero3.yaml or fsdp2.yaml of recipes/accelerate, or --set",
        ),
        ("tensor_parallel", "one process", "which takes DDP; launch eight-gpu.yaml .*=replicate"),
        ("replicate", "FSDP1", "which takes one process or DDP or ZeRO-2; .*recipes/accelerate$"),
    ],
)
def test_another_mode_than_the_recipe_names_is_refused(placement, real, message):
    with pytest.raises(TrainingError, match=message):
        refuse_other_mode(cases.recipe(f"target.placement={placement}"), real)
    for fitting in MODES[placement]:
        refuse_other_mode(cases.recipe(f"target.placement={placement}"), fitting)


def test_another_world_size_than_the_recipe_is_meant_for_is_refused():
    with pytest.raises(TrainingError, match="this launch has world size 1 .*meant for 8; launch 8 processes"):
        start_processes(cases.recipe("train.world_size=8"), smoke=True)


def test_a_smoke_run_takes_the_placement_of_its_launch_and_says_so():
    asked = cases.recipe("target.placement=shard")
    assert placed_as_launched(asked, "FSDP2") == (asked, [])
    recipe, said = placed_as_launched(asked, "DDP")
    assert recipe.target.placement == "replicate"
    assert said == ["target.placement: replicate instead of shard, as this launch is in mode DDP"]
    asked = cases.recipe("target.quantization=int8", "train.feature_memory=2")
    recipe, said = placed_as_launched(asked, "ZeRO-3")
    assert (recipe.target.placement, recipe.target.quantization, recipe.train.feature_memory) == ("shard", "none", 0)
    assert len(said) == 3
    with pytest.raises(
        TrainingError, match="mode ZeRO-1, which headstart does not know; launch one of one process, DDP"
    ):
        placed_as_launched(asked, "ZeRO-1")


def test_every_launch_file_is_a_document_of_one_mode():
    files = sorted(PACKAGED.glob("accelerate/*.yaml"))
    assert [file.stem for file in files] == (
        "eight-gpu fsdp2 one-gpu two-cpu two-nodes zero2-cpu zero2 zero3-cpu zero3".split()
    )
    for file in files:
        text, values = file.read_text(), yaml.safe_load(file.read_text())
        assert "# Launch " in text and "# Expect " in text and f"recipes/accelerate/{file.name}" in text
        assert f"world size {values['num_processes']}, mode {mode_of(values)}" in text, file.name
        assert values["use_cpu"] == file.stem.endswith("cpu") and values["mixed_precision"] == "no"
        assert max(map(len, text.splitlines())) <= 120


def mode_of(launch: dict) -> str:
    if launch["distributed_type"] == "DEEPSPEED":
        return f"ZeRO-{launch['deepspeed_config']['zero_stage']}"
    if launch["distributed_type"] == "FSDP":
        return f"FSDP{launch['fsdp_config']['fsdp_version']}"
    return "DDP" if launch["num_processes"] > 1 else "one process"


def test_an_empty_tensor_of_a_head_is_never_saved(tmp_path):
    """What ZeRO-3 leaves in the place of a weight that is not gathered."""
    head = build_head(cases.recipe().head, tiny.target())
    state = {**head.state_dict(), "blocks.0.weight": torch.empty(0)}
    with pytest.raises(HeadError, match="blocks.0.weight of the head has no numbers: it is sharded"):
        save_head(head, tmp_path / "head", fingerprint={}, state=state)
    assert not (tmp_path / "head").exists()


@pytest.mark.parametrize("setting", ["train.feature_memory=1", "data.features=hybrid"])
def test_what_runs_a_sharded_target_on_some_processes_only_is_refused(tmp_path, setting):
    made = cases.recipe("target.placement=shard", setting)
    with pytest.raises(TrainingError, match="is run by all processes together; set data.features: online"):
        cases.training(tmp_path / "run", made, processes=Accelerator(cpu=True, mixed_precision="no"))


def test_a_run_goes_on_with_other_steps_of_an_epoch_and_is_warned(tmp_path, capsys):
    """The world size is what `test_train_modes` changes; here one process takes twice the rows in a step."""
    made = cases.recipe("train.max_steps=null", "train.epochs=2", "train.save_every=2", "head.dropout=0")
    stopped = cases.training(tmp_path / "run", made)
    total = stopped.schedule.total_steps
    cases.stop_after_save(stopped, 2)
    with pytest.raises(cases.Stopped):
        stopped.finish()
    wider = cases.recipe("train.max_steps=null", "train.epochs=2", "train.accumulation=4", "head.dropout=0")
    resumed = cases.training(tmp_path / "run", wider, resume=True)
    assert "a step was of 4 sequences and is of 8 now" in capsys.readouterr().out
    assert resumed.schedule.total_steps == total, "the schedule is the one that was begun"
    resumed.finish()
    assert mode(resumed.accelerator) == "one process"
