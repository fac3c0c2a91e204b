"""`headstart export` and `headstart import`: from a run to a checked folder and back, and what is said on the way."""

from __future__ import annotations

import json

import foreign_cases as cases
import pytest
import torch
from safetensors.torch import load_file, save_file
from test_formats_writing import head_of

from headstart import cli
from headstart.heads.formats import WRITERS
from headstart.heads.store import load_head, read_description, save_head
from headstart.target import load_target


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The target's files, in bfloat16 as most are."""
    path = tmp_path_factory.mktemp("models") / "target"
    return cases.tiny.save(path, "llama", dtype=torch.bfloat16, num_hidden_layers=8)


@pytest.fixture(scope="module")
def head(folder, tmp_path_factory):
    """A head's folder."""
    target = load_target(str(folder))
    head = head_of("eagle3", target, ids=cases.DRAFT_IDS)
    return save_head(head, tmp_path_factory.mktemp("run") / "head", fingerprint=target.fingerprint())


def run(*words) -> int:
    return cli.main([str(word) for word in words])


def test_export_check_import_and_export_again(folder, head, tmp_path, capsys):
    words = ("--target", folder, "--format", "speculators", "--target-name", "org/model", "--num-tokens", "5")
    assert run("export", "--head", head, *words, "--output", tmp_path / "a", "--check") == 0
    said = capsys.readouterr().out
    assert "model.safetensors" in said and "rules, no fault" in said
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    assert config["speculators_config"]["verifier"]["name_or_path"] == "org/model"
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 5
    assert run("export", "--check", tmp_path / "a", "--target", folder) == 0

    assert run("import", tmp_path / "a", "--target", folder, "--output", tmp_path / "b") == 0
    assert "a head of type eagle3" in capsys.readouterr().out
    assert read_description(tmp_path / "b")["training"]["imported"] == {
        "format": "speculators",
        "folder": "a",
        "target": "org/model",
    }
    assert load_head(tmp_path / "b", load_target(str(folder))).wants == load_head(head).wants
    assert run("export", "--head", tmp_path / "b", *words, "--output", tmp_path / "c") == 0
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in "ac")
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_a_fault_ends_in_status_1_with_its_name(folder, head, tmp_path, capsys):
    assert run("export", "--head", head, "--target", folder, "--format", "sglang", "--output", tmp_path / "a") == 0
    path = tmp_path / "a" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tie_word_embeddings": True}))
    assert run("export", "--check", tmp_path / "a") == 1
    said = capsys.readouterr().out
    assert "tie-flag: expected tie_word_embeddings false, got True; SGLang takes the embedding" in said
    assert "1 fault" in said


def test_a_checkpoint_that_is_not_finite_is_neither_passed_nor_imported(folder, head, tmp_path, capsys):
    assert run("export", "--head", head, "--target", folder, "--format", "sglang", "--output", tmp_path / "a") == 0
    path = tmp_path / "a" / "model.safetensors"
    tensors = load_file(path)
    tensors["fc.weight"][3, 4] = torch.nan
    save_file(tensors, path)
    assert run("export", "--check", tmp_path / "a", "--target", folder) == 1
    assert "finite-values: expected finite numbers in fc.weight" in capsys.readouterr().out
    assert run("import", tmp_path / "a", "--target", folder, "--output", tmp_path / "b") == 1
    assert "fc.weight holds values that are not finite" in capsys.readouterr().err


def test_an_export_is_no_head_and_says_what_makes_one_of_it(folder, head, tmp_path, capsys):
    assert run("export", "--head", head, "--target", folder, "--format", "sglang", "--output", tmp_path / "a") == 0
    assert run("tune", "--head", tmp_path / "a", "--target", folder) == 1
    assert f"headstart import {tmp_path / 'a'}" in capsys.readouterr().err


def test_a_layout_without_a_draft_vocabulary_says_what_follows(folder, tmp_path, capsys):
    target = load_target(str(folder))
    source = save_head(
        head_of("eagle", target, ids=cases.DRAFT_IDS), tmp_path / "head", fingerprint=target.fingerprint()
    )
    words = ("export", "--head", source, "--target", folder, "--output")
    assert run(*words, tmp_path / "a", "--format", "sglang") == 0
    said = capsys.readouterr()
    assert f"--speculative-token-map {tmp_path / 'a' / 'speculative_token_map.pt'}" in said.out
    assert run(*words, tmp_path / "b", "--format", "eagle") == 0
    said = capsys.readouterr().err.splitlines()
    assert "warning: the eagle layout has no draft vocabulary: all ids will be drafted" in said


def test_layers_can_be_said(folder, tmp_path, capsys):
    source = cases.eagle3_original(tmp_path / "a")
    words = ("import", source, "--target", folder, "--output", tmp_path / "b", "--layers")
    assert run(*words, "1,x") == 2
    assert "expected whole numbers such as 2,15,27" in capsys.readouterr().err
    assert run(*words, "1,2,6") == 0
    assert load_head(tmp_path / "b").wants == (1, 2, 6)
    assert run(*words, "1,2,6") == 1
    assert "exists already and is kept" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("--check",),
        ("--head", "runs/a"),
        ("--head", "runs/a", "--output", "b"),
        ("--head", "runs/a", "--check", "c"),
    ],
)
def test_half_a_command_line_is_refused_in_a_sentence(words, capsys):
    assert run("export", *words) == 2
    assert "needs --head RUN --format NAME --output DIR, or --check DIR" in capsys.readouterr().err


def test_the_formats_of_the_command_line_are_those_that_can_be_written():
    assert cli.EXPORT_FORMATS == (*WRITERS, "merged")
