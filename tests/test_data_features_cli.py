"""`headstart data features`, from the command line to training without the target's layers."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
import torch
import train_cases as cases

from headstart import cli
from headstart.data import distill
from headstart.data.feature_cache import FeatureCache, FeatureWriter
from headstart.data.feature_key import cache_key
from headstart.heads.store import build_head, save_head
from headstart.recipe import load_recipe
from headstart.scripts import features
from headstart.target import load_target
from headstart.train.feature_loss import storage_loss

RECIPE = """\
name: tiny
target: {name: model, dtype: float32}
head: {type: medusa, num_heads: 2}
data:
  train: [{source: chats.jsonl}]
  held_out: {fraction: 0.2}
  max_length: 64
train: {max_steps: 4, dtype: float32, eval_every: 2, save_every: null}
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A tiny target, twelve chats and a recipe, all found by relative paths."""
    monkeypatch.chdir(tmp_path)
    tiny.save(tmp_path / "model", "llama")
    rows = [
        {"messages": [{"role": "user", "content": f"say {n}"}, {"role": "assistant", "content": "yes " * (n % 5 + 1)}]}
        for n in range(12)
    ]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "tiny.yaml").write_text(RECIPE)
    return tmp_path


def run(*words: str) -> int:
    return cli.main(["data", "features", "--recipe", "tiny.yaml", "--device", "cpu", *words])


def opened(folder: Path, name: str = "features/tiny", layers: tuple[int, ...] = ()) -> FeatureCache:
    target = load_target(str(folder / "model"), dtype="float32")
    return FeatureCache(folder / name, cache_key(target, load_recipe("tiny.yaml"), layers, None))


def test_the_cache_is_announced_written_gone_on_with_and_checked(folder, capsys):
    assert run("--limit", "5") == 0
    said = capsys.readouterr().out
    announced = re.search(r"features: 0 rows are in features/tiny, 5 rows of (\d+) tokens .*float32, 261 bytes a", said)
    assert announced and "GB are free there" in said and "processes: 1" in said
    assert re.search(rf"process 0: 5 rows, {announced[1]} tokens in \d+ s, \d+ tokens/s", said)
    assert said.index("are free there") < said.index("process 0") < said.index("data.feature_cache=features/tiny")
    before = {path.name: path.read_bytes() for path in (folder / "features/tiny").glob("shard*")}
    assert run() == 0
    assert "5 rows are in features/tiny, 7 rows of" in capsys.readouterr().out
    assert len(opened(folder)) == 12
    assert all((folder / "features/tiny" / name).read_bytes() == content for name, content in before.items())
    assert run() == 0
    assert "all 12 rows are there, as they were written" in capsys.readouterr().out
    shard = next((folder / "features/tiny").glob("shard*"))
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    assert run() == 1
    error = capsys.readouterr().err
    assert f"{shard.name} is damaged" in error.splitlines()[-1] and "Traceback" not in error
    shard.unlink()
    assert run() == 0 and len(opened(folder)) == 12


def test_what_does_not_fit_is_refused_before_anything_is_written(folder, capsys, monkeypatch):
    usage = shutil.disk_usage(folder)
    monkeypatch.setattr(features.shutil, "disk_usage", lambda path: usage._replace(free=1000))
    assert run() == 1
    error = capsys.readouterr().err
    assert "0.0 MB are free there. That does not fit; make room" in error and "--dtype int8" in error
    assert not [path for path in (folder / "features/tiny").iterdir() if path.stat().st_size]


def test_a_changed_recipe_is_refused_in_one_sentence(folder, capsys):
    assert run("--dtype", "int8") == 0
    capsys.readouterr()
    assert run("--set", "data.max_length=32") == 1
    assert "made otherwise: data.max_length: it has 64, this run has 32" in capsys.readouterr().err
    assert run("--dtype", "float32") == 1
    assert "made otherwise: dtype: it has 'int8', this run has 'float32'" in capsys.readouterr().err
    assert run("--layers", "1,3") == 1
    assert "made otherwise: layers: it holds [], this run reads [1, 3]" in capsys.readouterr().err
    assert run("--layers", "one") == 2
    assert run("--layers", "1,3", "--output", "other") == 0
    assert opened(folder, "other", (3,)).layers == [1, 3]


def test_an_eagle3_recipe_keeps_the_layers_that_its_head_reads(folder):
    (folder / "tiny.yaml").write_text(RECIPE.replace("type: medusa, num_heads: 2", "type: eagle3, layers: [1, 2, 4]"))
    assert run() == 0
    assert opened(folder, layers=(1, 2, 4)).layers == [1, 2]


def signalled_at(monkeypatch, owner: object, name: str, call: int) -> None:
    """This process gets SIGTERM within that call of a function."""
    plain, calls = getattr(owner, name), []

    def then(*words, **named):
        calls.append(1)
        if len(calls) == call:
            os.kill(os.getpid(), signal.SIGTERM)
        return plain(*words, **named)

    monkeypatch.setattr(owner, name, then)


def test_sigterm_keeps_the_rows_that_are_computed_and_the_same_command_goes_on(folder, capsys, monkeypatch):
    assert run("--output", "straight") == 0
    with monkeypatch.context() as patched:
        signalled_at(patched, FeatureWriter, "add", 6)
        before = signal.getsignal(signal.SIGTERM)
        assert run() == 143 and signal.getsignal(signal.SIGTERM) is before
    said = capsys.readouterr().err
    assert said.endswith("stopped by SIGTERM; what is finished is kept, and the same command goes on\n"), said
    assert len(opened(folder)) == 5
    assert run() == 0
    straight, gone_on = opened(folder, "straight"), opened(folder)
    assert set(straight.hashes()) == set(gone_on.hashes())
    for row in straight.hashes():
        assert torch.equal(straight.read(row)["final"], gone_on.read(row)["final"])


def test_sigterm_keeps_the_answers_that_are_finished_and_their_states(folder, capsys, monkeypatch):
    words = ["data", "distill", "--recipe", "tiny.yaml", "--device", "cpu", "--set", "data.distill.max_new_tokens=4"]
    assert cli.main([*words, "--output", "straight.jsonl"]) == 0
    words += ["--output", "answers.jsonl", "--features", "states"]
    with monkeypatch.context() as patched:
        signalled_at(patched, distill, "_append", 4)
        assert cli.main(words) == 143
    assert "stopped by SIGTERM; what is finished is kept" in capsys.readouterr().err
    finished = (folder / "answers.jsonl").read_bytes()
    assert finished.count(b"\n") == 3 and finished.endswith(b"\n")
    assert opened(folder, "states").num_tokens() > 0, "their states are on the disk too"
    assert cli.main(words) == 0
    lines = (folder / "answers.jsonl").read_bytes()
    assert lines.startswith(finished), "what was finished is as it was"
    assert sorted(lines.splitlines()) == sorted((folder / "straight.jsonl").read_bytes().splitlines())


def test_two_processes_write_what_one_does(folder):
    assert run("--output", "one") == 0
    command = [sys.executable, "-m", "headstart.cli", "data", "features", "--recipe", "tiny.yaml", "--device", "cpu"]
    environment = {**os.environ, "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen([*command, "--output", "two"], env={**environment, "RANK": str(rank)}, stdout=subprocess.PIPE)
        for rank in range(2)
    ]
    outputs = [process.communicate(timeout=300)[0].decode() for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert "processes: 2" in outputs[0] and "are free" not in outputs[1]
    one, two = opened(folder, "one"), opened(folder, "two")
    assert set(one.hashes()) == set(two.hashes())
    for row in one.hashes():
        assert torch.equal(one.read(row)["final"], two.read(row)["final"])


def test_training_from_it_loads_no_layer_and_gives_the_head_of_online_training(folder, capsys):
    from headstart.train import medusa

    assert run() == 0
    words = ["--recipe", "tiny.yaml"]
    medusa.main([*words, "--name", "online"])
    online = capsys.readouterr().out
    offline = ["--set", "data.features=offline", "--set", "data.feature_cache=features/tiny"]
    medusa.main([*words, "--name", "offline", *offline])
    said = capsys.readouterr().out
    (whole,), (light,) = (re.findall(r"trainable of ([\d,]+)", text) for text in (online, said))
    layers = sum(p.numel() for p in load_target("model", dtype="float32").layers.parameters())
    assert int(whole.replace(",", "")) - int(light.replace(",", "")) == layers
    for name, value in cases.weights(folder / "runs/online/head").items():
        assert torch.equal(value, cases.weights(folder / "runs/offline/head")[name])
    one, other = (json.loads((folder / f"runs/{name}/head/config.json").read_text()) for name in ("online", "offline"))
    assert one["target"] == other["target"]
    (folder / "model/model.safetensors").rename(folder / "model/elsewhere")
    with pytest.raises(SystemExit):
        medusa.main([*words, "--name", "gone", *offline])
    assert "cannot be read in parts" in capsys.readouterr().err


def test_the_cost_of_int8_is_measured_on_a_head(folder, capsys):
    target = load_target(str(folder / "model"), dtype="float32")
    head = build_head(load_recipe("tiny.yaml").head, target)
    save_head(head, folder / "trained", fingerprint=target.fingerprint())
    assert run("--dtype", "int8", "--head", "trained") == 0
    assert re.search(r"int8 features: τ of a chain \d\.\d+, with exact ones \d\.\d+ \([+-]", capsys.readouterr().out)


def test_exact_storage_costs_nothing_and_coarse_storage_little():
    target, rows = tiny.target(), list(cases.random_rows(20, longest=60, shortest=40))
    head = build_head(cases.recipe().head, target)
    exact = storage_loss(head, target, rows, "float32")
    assert exact.exact == exact.stored and exact.top_1_exact == exact.top_1_stored and "(+0.0%)" in str(exact)
    coarse = storage_loss(head, target, rows, "int8")
    assert coarse.exact == exact.exact and coarse.top_1_exact == exact.top_1_exact
    assert all(abs(one - other) < 0.05 for one, other in zip(coarse.top_1_exact, coarse.top_1_stored, strict=True))
