"""A run that is worth publishing: a tiny target in a folder, an EAGLE-3 head, and what a report says of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tiny
import torch
from eagle_cases import PROMPT_LENGTHS, requests, target_of
from head_cases import head_for

from headstart.eval import measure
from headstart.heads.base import Head
from headstart.heads.store import save_head
from headstart.recipe import load_recipe

NEW_TOKENS = 12
CHAT = {"arguments": {}, "system": None, "supervise": "all"}


def prompts() -> list[list[int]]:
    """What the heads of `eagle_cases.learnt` have learnt the answers to."""
    return [list(request.prompt_ids) for request in requests(NEW_TOKENS)]


def write_bench(path: Path) -> Path:
    """A file of prompts as token ids, which no template touches."""
    rows = [
        {"id": f"p{number}", "input_ids": [*ids, 0], "prompt_tokens": len(ids)} for number, ids in enumerate(prompts())
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_target(folder: Path) -> Path:
    """In float64, where equal means equal."""
    return tiny.save(folder, "llama", dtype=torch.float64)


def write_run(
    folder: Path, target: str | Path, *settings: str, head: Head | None = None, record: dict[str, Any] | None = None
) -> Path:
    """The folder of a run whose head is for the target of `write_target`; None: one that has learnt nothing."""
    head = head or head_for(target_of(), kind="eagle3")
    described = {"chat": CHAT, "step": 40, "tokens": 1234, **(record or {})}
    save_head(head, folder / "head", fingerprint=target_of().fingerprint(), training_record=described)
    changes = [f"target.name={target}", "target.architecture=null", "target.dtype=float64", "name=demo", *settings]
    (folder / "recipe.yaml").write_text(load_recipe("smollm2-eagle3.yaml", changes).to_yaml())
    return folder


def evaluate(head: str | Path, bench: Path, output: Path | None = None) -> dict[str, Any]:
    """The report of a run or of a published head on the prompts of `write_bench`."""
    settings = [f"eval.max_new_tokens={NEW_TOKENS}", f"eval.num_prompts={len(PROMPT_LENGTHS)}"]
    return measure.run(
        head=str(head),
        bench=str(bench),
        overrides=[*settings, "eval.identity_prompts=1"],
        output=None if output is None else str(output),
        device="cpu",
    )


def write_report(folder: Path, prompts: str | list[str], **changes: Any) -> None:
    """As much of a report.json as a card reads, in a run or in one of its folders of a benchmark."""
    shares = [(0.7, 0.7), (0.5, 0.35), (None, None)]
    report = {
        "acceptance_length": 2.0425,
        "acceptance_length_interval": [1.9, 2.15],
        "speedup": 1.3121,
        "speedup_interval": [1.25, 1.37],
        "identical_outputs": 5,
        "compared_outputs": 5,
        "environment": {
            **{"target": "tiny", "dtype": "float64", "device": "Some CPU", "threads": 2},
            **{"date": "2026-11-30", "commit": "c" * 40},
        },
        "details": {
            "per_depth": [{"depth": d, "conditional": c, "per_position": p} for d, (c, p) in enumerate(shares, 1)],
            "settings": {"prompts": prompts, "batch_size": 1, "temperature": 0.0},
        },
        **changes,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.json").write_text(json.dumps(report, indent=1))
