"""The doctor on the real bundled target, with a head that was trained for about a minute."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from headstart import cli
from headstart.train import medusa

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    settings = {
        "data.train": '[{source: "bundled:chats", split: train, limit: 300}]',
        "data.held_out.sources": '[{source: "bundled:chats", split: held_out_topics, limit: 24}]',
        "train.cpu_seconds": "null",
        "train.max_steps": "100",  # one pass: nothing is known by heart
        "train.lr": "2e-3",
        "train.eval_every": "null",
        "eval.num_prompts": "6",
    }
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    medusa.main(["--recipe", "quickstart.yaml", "--output", str(folder), *words])
    return folder / "quickstart"


@pytest.fixture
def run(trained, tmp_path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run"))


def causes(run: Path, *words: str) -> list[str]:
    output = run / "doctor.json"
    status = cli.main(["doctor", "--head", str(run), "--json", str(output), *words])
    found = [one["cause"] for one in json.loads(output.read_text())["findings"]]
    assert status == bool(found)
    return found


def test_nothing_is_wrong_with_it(run):
    assert causes(run) == []


def test_weights_that_are_not_its_own(run):
    path = run / "head/head.safetensors"
    tensors = load_file(path)
    tensors["blocks.0.weight"].normal_(std=0.05)
    save_file(tensors, path)
    assert causes(run)[0] == "head-tensors"


def test_temperature(run):
    assert causes(run, "--set", "eval.temperature=2.0")[0] == "temperature"


def test_an_export_that_lacks_a_tensor(run, tmp_path):
    place = tmp_path / "export"
    assert cli.main(["export", "--head", str(run), "--format", "vllm-medusa", "--output", str(place)]) == 0
    tensors = load_file(place / "model.safetensors")
    tensors.pop(next(name for name in tensors if "blocks.1" in name))
    save_file(tensors, place / "model.safetensors")
    assert causes(run, "--export", str(place))[0] == "export-tensors"
