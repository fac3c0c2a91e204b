"""Run folders as training and `headstart eval` leave them, with made-up answers whose figures are known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import head_cases
import test_eval_summary as cases
import tiny

from headstart.eval.report import write_report
from headstart.heads.store import save_head
from headstart.recipe import load_recipe

SETTINGS = {
    "drafter": "head",
    "nodes_at_most": 3,
    "temperature": 0.0,
    "max_new_tokens": 20,
    "batch_size": 1,
    "questions": 6,
}
LOOPING = [1, 2] * 20


def report(accepted: list[tuple[int, ...]], **options: Any) -> dict[str, Any]:
    """A report of one answer of 20 tokens for each tuple of accepted drafts by step; None: one that loops.

    A step of two drafts takes 0.12 s, a plain one 0.1 s. options: of `build_report`.
    """
    answers = [
        cases.answer(place, ids=LOOPING, accepted=(2,) * 14)
        if steps is None
        else cases.answer(place, accepted=steps, ids=list(range(20)))
        for place, steps in enumerate(accepted)
    ]
    for answer in answers:
        answer.prompt_ids[:] = [answer.group, 1, 2]
    return cases.report_of(cases.measurement(*answers), **{"settings": SETTINGS, **options})


def run_folder(folder: Path, made: dict[str, Any] | None, *settings: str, kind: str = "medusa", **head: Any) -> Path:
    """A finished run with this report (None: not measured yet). settings: of its recipe."""
    target = tiny.target("llama")
    save_head(
        head_cases.head_for(target, kind=kind, **head),
        folder / "head",
        fingerprint=target.fingerprint(),
        training_record={"world_size": 1, "tokens": 50},
    )
    recipe = "smollm2-medusa.yaml" if kind == "medusa" else "smollm2-eagle3.yaml"
    name = [f"name={folder.name}", *(f"head.{key}={json.dumps(value)}" for key, value in head.items())]
    (folder / "recipe.yaml").write_text(load_recipe(recipe, [*name, *settings]).to_yaml())
    lines = [
        {"step": 10, "kind": "train", "loss": 3.0, "tokens": 4000, "seconds": 2.0, "cpu_seconds": 3.5},
        {"step": 10, "kind": "held_out", "loss": 3.1},
        {"step": 20, "kind": "train", "loss": 2.0, "tokens": 8000, "seconds": 2.5, "cpu_seconds": 4.5},
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "environment.json").write_text(json.dumps({"device": "a CPU"}))
    if made is not None:
        write_report(made, folder)
    return folder
