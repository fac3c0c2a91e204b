"""Answers from `transformers serve` of the bundled target on loopback: killed in the middle, every row once."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
import torch

from headstart import bundled, cli
from headstart.data.prepare import prepare
from headstart.data.rendering import label_runs
from headstart.recipe import load_recipe
from headstart.target import load_target

PROMPTS = ["What is the capital of France?", "Name a colour.", "Count to three.", "What do bees make?", "Say hello."]
RECIPE = """
name: served
target: {name: "bundled:smollm2-135m", dtype: float32}
head: {type: medusa, num_heads: 2}
data:
  train: [{source: prompts.jsonl}]
  chat: {system: Answer in one word.}
  distill: {max_new_tokens: 10, batch_size: 2}
"""
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> Iterator[str]:
    """The address of a server, once it is ready."""
    folder = tmp_path_factory.mktemp("server")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    start = "from transformers.cli.transformers import main; main()"
    words = ["serve", str(bundled.folder()), "--port", port, "--host", "127.0.0.1", "--device", "cpu"]
    with (folder / "log").open("w") as log:
        server = subprocess.Popen(
            [sys.executable, "-c", start, *words, "--dtype", "float32"], stdout=log, stderr=log, cwd=folder
        )
    try:
        url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + 600
        while time.monotonic() < deadline and server.poll() is None:
            try:
                if httpx2.get(f"{url}/health", timeout=5).is_success:
                    break
            except httpx2.HTTPError:
                time.sleep(0.5)
        else:
            pytest.fail((folder / "log").read_text())
        yield url
    finally:
        server.kill()
        server.wait(30)


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_a_real_server_answers_and_a_killed_run_goes_on(served, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in PROMPTS))
    Path("served.yaml").write_text(RECIPE)
    output = Path("answers.jsonl")
    words = ["data", "distill", "--recipe", "served.yaml", "--output", str(output), "--server", served]
    words += ["--model", str(bundled.folder())]
    with subprocess.Popen([sys.executable, "-m", "headstart.cli", *words], start_new_session=True) as first:
        deadline = time.monotonic() + 600
        while not rows(output) and first.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        os.kill(first.pid, signal.SIGKILL)
    kept = output.read_bytes()
    assert 1 <= kept.count(b"\n")
    capsys.readouterr()
    assert cli.main(words) == 0
    printed = capsys.readouterr()
    assert "5 rows, 5 kept, 0 skipped" in printed.out
    assert "another number of tokens" not in printed.out + printed.err  # the server renders what the recipe renders
    assert output.read_bytes().startswith(kept[: kept.rindex(b"\n") + 1])
    found = rows(output)
    assert sorted(row["messages"][-2]["content"] for row in found) == sorted(PROMPTS)

    recipe = load_recipe("served.yaml", ["data.train=[{source: answers.jsonl}]"])
    target = load_target("bundled:smollm2-135m", dtype="float32", device="cpu")
    prepared = prepare(recipe, target.tokenizer)
    model: Any = target.model
    for row in [*prepared.train, *prepared.held_out]:  # the rows that heads learn from are what the target writes
        (start, end), *_ = label_runs(row)
        prompt = torch.tensor([row.input_ids[:start]])
        written = model.generate(prompt, max_new_tokens=10, do_sample=False, eos_token_id=list(target.end_token_ids))
        assert written[0, start:].tolist()[: end - start] == row.input_ids[start:end]
        cut = next(one["cut"] for one in found if one["row_id"] == row.row_id)
        assert (row.input_ids[end - 1] in target.end_token_ids) != cut

    assert cli.main([*words[:-1], "nobody/nothing"]) == 1
    refused = capsys.readouterr().err
    assert "begun with model" in refused
