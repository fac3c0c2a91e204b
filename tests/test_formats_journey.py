"""One head from its training to a process that knows the export alone: what it computes stays the same all the way."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import train_cases as cases
from eagle_cases import decode, requests, texts, unroll_text
from head_cases import collate, forward
from test_train_learns import counting_rows

from headstart.decode.drafters.base import NoDraft
from headstart.decode.drafters.heads import head_drafter
from headstart.heads.formats import WRITERS, load_foreign, write_foreign
from headstart.heads.formats.lint import check
from headstart.heads.medusa import MedusaHead
from headstart.heads.store import load_head
from headstart.heads.unrolled import UnrolledHead
from headstart.target import Target, load_target

SCALED = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
EAGLE3 = "head={type: eagle3, layers: [2, 4, 5], norm_output: true, unrolled_steps: 2}"
EAGLE = "head={type: eagle, noise: 0.1, unrolled_steps: 1}"
TEXT = [7, 30, 31, 200, 5, 9, 77, 78, 79, 4]

ELSEWHERE = """
import sys, torch
from eagle_cases import unroll_text
from headstart.heads.formats import load_foreign
from headstart.target import load_target
target = load_target(sys.argv[1], dtype="float32", device="cpu")
head = load_foreign(sys.argv[2], target).eval()
torch.save((unroll_text(head, target, eval(sys.argv[4]), 3), head.rotary.frequencies), sys.argv[3])
"""


@pytest.mark.parametrize("head", [EAGLE3, EAGLE], ids=["eagle3", "eagle"])
def test_trained_resumed_exported_and_read_by_another_process(tmp_path, head):
    """B34, B38 and B40 on a target of hidden size 48 with heads of width 32 and scaled rotary frequencies."""
    tiny.save(tmp_path / "target", "headdim", num_hidden_layers=8, rope_parameters=SCALED)
    target = load_target(str(tmp_path / "target"), dtype="float32", device="cpu")
    frequencies = target.model.get_submodule("model.rotary_emb").inv_freq
    recipe = cases.recipe(head, "train.save_every=2", "train.max_steps=4", "train.lr=1e-3")

    stopped = cases.training(tmp_path / "run", recipe, target=target)
    cases.stop_after_save(stopped, 2)
    with pytest.raises(cases.Stopped):
        stopped.finish()
    resumed = cases.training(tmp_path / "run", recipe, target=target, resume=True)
    assert resumed.progress.step == 2
    resumed.finish()
    trained = load_head(tmp_path / "run/head", target)
    assert isinstance(trained, UnrolledHead)
    assert trained.state_dict()["layers.0.self_attn.q_proj.weight"].shape[0] == 128

    wide = load_target(str(tmp_path / "target"), dtype="float64", device="cpu")
    drafter: Any = head_drafter(load_head(tmp_path / "run/head", wide), wide, [(0,), (1,), (0, 0)])
    asked = requests(12)
    assert texts(decode(wide, drafter, asked)) == texts(decode(wide, NoDraft(), asked))
    for one in (stopped.head, resumed.head, trained, drafter.head):
        assert torch.equal(one.rotary.frequencies.float(), frequencies)

    exported = write_foreign(trained, target, tmp_path / "export", "sglang")
    expected = unroll_text(trained, target, TEXT, 3)
    shutil.rmtree(tmp_path / "run")
    logits, theirs = read_elsewhere(tmp_path / "target", exported, tmp_path / "found.pt")
    assert torch.equal(theirs, frequencies)
    assert torch.equal(logits, expected)


def read_elsewhere(target: Path, export: Path, output: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Draft logits and rotary frequencies of an export, by a new process."""
    words = [sys.executable, "-c", ELSEWHERE, target, export, output, str(TEXT)]
    done = subprocess.run(words, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return torch.load(output, weights_only=True)


@pytest.mark.parametrize("output", ["shared", "own"])
def test_heads_that_are_right_stay_right_in_every_layout(tmp_path, output):
    """B55: three Medusa heads above 95%, and exactly as good after an export and an import."""
    recipe = cases.recipe(
        *("head.num_heads=3", "head.num_layers=1", "head.dropout=0", "head.loss=hard-ce", f"head.output={output}"),
        *("train.lr=3e-2", "train.max_steps=60", "train.batch_size=8", "train.accumulation=1", "train.clip=null"),
    )
    training = cases.training(tmp_path / "run", recipe, rows=counting_rows(8, 0))
    training.finish()
    target = training.target
    head = load_head(tmp_path / "run/head", target)
    right = accuracy(head, target)
    assert len(right) == 3 and min(right) > 0.95
    formats = [name for name, kinds in WRITERS.items() if "medusa" in kinds]
    assert len(formats) >= 2
    for name in formats:
        folder = write_foreign(head, target, tmp_path / name, name)
        again = load_foreign(folder, target)
        assert isinstance(again, MedusaHead) and accuracy(again, target) == right, name
        assert check(folder, target=target, head=head).ok


def accuracy(head: Any, target: Target) -> list[float]:
    """The share of right first choices of every head on the rows that were learnt."""
    rows = counting_rows(8, 0)
    out = forward(head.float().eval(), target, collate(rows, [[number] for number in range(len(rows))]))
    return [share for share in out.accuracy(1) if share is not None]
