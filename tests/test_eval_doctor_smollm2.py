"""The doctor on the real bundled target, with a head that was trained for about a minute."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from doctor_cases import change_tensors

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
    change_tensors(run / "head/head.safetensors", lambda tensors: tensors["blocks.0.weight"].normal_(std=0.05))
    assert causes(run)[0] == "head-tensors"
