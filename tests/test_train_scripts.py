"""The training scripts from the command line: every packaged recipe runs small, and mistakes end in one sentence."""

from __future__ import annotations

import errno
import importlib.machinery
import sys
from pathlib import Path

import pytest

from headstart.cli import TRAINING_SCRIPTS
from headstart.heads.configs import HEADS
from headstart.heads.store import read_description
from headstart.recipe import PACKAGED, load_recipe
from headstart.train import draft, eagle, medusa, preparation
from headstart.train.metrics import read_metrics

ROOT = Path(__file__).resolve().parents[1]
RECIPES = sorted(path.name for path in PACKAGED.glob("*.yaml"))
FAST = "llama8b.yaml"
SCRIPTS = {"medusa": medusa.main, "eagle": eagle.main, "eagle3": eagle.main, "draft": draft.main}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in (FAST, "smollm2-eagle3.yaml") else pytest.mark.slow) for name in RECIPES],
)
def test_every_packaged_recipe_smoke_runs(tmp_path, capsys, name):
    main = SCRIPTS[load_recipe(name).head.type]
    main(["--recipe", name, "--smoke", "--output", str(tmp_path)])
    run = tmp_path / f"{load_recipe(name).name}-smoke"
    text = capsys.readouterr().out
    assert "--smoke: target: random weights in the architecture of" in text
    assert "outside of it lie" in text and ("unrolled steps: 1 in steps 1 to" in text) == ("eagle" in name)
    assert "world size 1" in text and "trainable of" in text and text.rstrip().endswith(f"headstart eval --head {run}")
    record = read_description(run / "head")["training"]
    assert record["recipe"] == run.name and record["chat"] == load_recipe(name).data.chat.model_dump()
    lines = read_metrics(run / "metrics.jsonl")
    assert [line["step"] for line in lines if line["kind"] == "train"] == list(range(1, 7))
    assert [line["step"] for line in lines if line["kind"] == "held_out"] == [3, 6]
    assert load_recipe(run / "recipe.yaml").train.max_steps == 6

    with pytest.raises(SystemExit) as stopped:
        main(["--recipe", name, "--smoke", "--output", str(tmp_path)])
    assert stopped.value.code == 1 and "holds a run already" in capsys.readouterr().err
    main(["--recipe", name, "--smoke", "--output", str(tmp_path), "--resume"])
    assert "going on from" in capsys.readouterr().out
    assert read_metrics(run / "metrics.jsonl") == lines


@pytest.mark.parametrize(
    ("arguments", "status", "sentence"),
    [
        (["--set", "train.lrr=1"], 2, "train.lr"),
        (["--set", "target.placement=shard"], 1, "target.placement: shard, which takes ZeRO-3"),
        (["--set", "train.dtype=float16"], 2, "use bfloat16 or float32"),
        (["--set", "train.world_size=4"], 1, "world size 1"),
        (["--recipe", "quickstrat.yaml"], 2, "did you mean quickstart"),
        (["--set", "target.name=/nowhere/model"], 1, "no folder /nowhere/model"),
    ],
)
def test_mistakes_end_in_a_sentence_before_a_folder_is_made(tmp_path, capsys, arguments, status, sentence):
    with pytest.raises(SystemExit) as stopped:
        medusa.main(["--recipe", "quickstart.yaml", "--output", str(tmp_path), *arguments])
    assert stopped.value.code == status
    assert sentence in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_every_head_has_a_script():
    assert TRAINING_SCRIPTS.keys() == HEADS.keys() == SCRIPTS.keys()
    for kind, name in TRAINING_SCRIPTS.items():
        assert SCRIPTS[kind].__module__ == name


def test_a_recipe_for_another_head_is_sent_to_the_verb_that_finds_its_script(tmp_path, capsys):
    for main, name in ((medusa.main, "smollm2-eagle.yaml"), (eagle.main, FAST)):
        with pytest.raises(SystemExit) as stopped:
            main(["--recipe", name, "--output", str(tmp_path)])
        assert stopped.value.code == 2
        assert f"`headstart train --recipe {name}` finds the right one" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["7", "1e3", "on", "null"])
def test_a_name_that_yaml_would_read_as_something_else_is_a_name(name):
    options = preparation.parse_arguments("", ["--recipe", FAST, "--name", name])
    assert preparation.read_recipe(options, "medusa")[0].name == name


def test_a_resume_without_a_run_is_told(tmp_path, capsys):
    options = preparation.parse_arguments("", ["--recipe", FAST, "--resume", "--output", str(tmp_path)])
    preparation.run_path(load_recipe(FAST), options)
    assert "there is no run" in capsys.readouterr().err


def test_a_place_where_no_folder_can_be_made_is_one_sentence(capsys):
    with pytest.raises(SystemExit) as stopped, preparation.user_errors():
        raise NotADirectoryError(errno.ENOTDIR, "Not a directory", "notes.txt/quickstart")
    assert stopped.value.code == 1
    assert "notes.txt/quickstart cannot be written or read (not a directory)" in capsys.readouterr().err


def test_no_file_of_the_room_hides_a_module_that_others_import():
    """`python train/medusa.py` puts train/ first on sys.path."""
    elsewhere = [entry for entry in sys.path if Path(entry or ".").resolve() != ROOT / "train"]
    names = [file.stem for file in (ROOT / "train").glob("*.py") if file.stem != "__init__"]
    found = [name for name in names if importlib.machinery.PathFinder.find_spec(name, elsewhere)]
    assert not found and not set(names) & set(sys.stdlib_module_names)
