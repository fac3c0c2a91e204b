"""`headstart data distill`, from the command line to the file: the target's own greedy answers, resumable."""

from __future__ import annotations

import json
from typing import Any

import pytest
import tiny
import torch

from headstart import cli

PROMPTS = ["Name three colours.", "Why is the sky blue?", "Count to five.", "Say hello."]
RECIPE = """\
name: tiny
target: {name: model, dtype: float64}
head: {type: medusa}
data:
  train: [{source: prompts.jsonl}]
  distill: {max_new_tokens: 12, temperature: 0.0, batch_size: 3}
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A tiny target with its tokenizer, prompts and a recipe, all found by relative paths."""
    monkeypatch.chdir(tmp_path)
    tiny.save(tmp_path / "model", "llama")
    rows = [{"messages": [{"role": "user", "content": text}]} for text in PROMPTS]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "tiny.yaml").write_text(RECIPE)
    return tmp_path


def distill(*words: str) -> int:
    return cli.main(
        ["data", "distill", "--recipe", "tiny.yaml", "--output", "answers.jsonl", "--device", "cpu", *words]
    )


def test_answers_are_the_targets_own_greedy_words_and_a_second_run_adds_nothing(folder, capsys):
    assert distill("--limit", "2") == 0
    first = (folder / "answers.jsonl").read_text()
    assert len(first.splitlines()) == 2
    assert distill() == 0 and "4 kept" in capsys.readouterr().out
    text = (folder / "answers.jsonl").read_text()
    assert text.startswith(first) and distill() == 0 and (folder / "answers.jsonl").read_text() == text

    target = tiny.target("llama", dtype=torch.float64)
    model: Any = target.model
    tokenizer: Any = target.tokenizer
    rows = [json.loads(line) for line in text.splitlines()]
    assert sorted(row["messages"][0]["content"] for row in rows) == sorted(PROMPTS)
    for row in rows:
        prompt = tokenizer.apply_chat_template(
            row["messages"][:1], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        ids = model.generate(**prompt, max_new_tokens=12, do_sample=False, eos_token_id=list(target.end_token_ids))
        new = ids[0, prompt["input_ids"].shape[1] :].tolist()
        ended = new[-1] in target.end_token_ids
        answer = tokenizer.decode(new[:-1] if ended else new)
        assert row["messages"][1] == {"role": "assistant", "content": answer if ended else answer.rstrip("\ufffd")}
        assert row["cut"] == (not ended)


def test_a_target_that_is_nowhere_is_one_sentence(folder, capsys):
    (folder / "tiny.yaml").write_text(RECIPE.replace("name: model", "name: ./nowhere"))
    assert distill() == 1
    error = capsys.readouterr().err
    assert "nowhere" in error and "Traceback" not in error


def test_answers_longer_than_the_target_reads_are_refused(folder, capsys):
    assert distill("--set", "data.distill.max_new_tokens=100000") == 1
    assert "leave no room for a prompt" in capsys.readouterr().err and not (folder / "answers.jsonl").exists()
