"""Trackers: what the real packages keep, one run however often resumed, and no wait for one that is slow or gone."""

from __future__ import annotations

import json
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import head_cases
import pytest
import tiny
import torch
import train_cases as cases
import wandb
from accelerate import Accelerator
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker
from wandb.proto import wandb_internal_pb2

from headstart.decode.cost import RankedAnswer
from headstart.eval import measure
from headstart.train import trackers
from headstart.train.metrics import Metrics
from headstart.train.run_folder import RunFolder
from headstart.train.shown import coloured, drafted_tokens, samples_page, tree_page
from headstart.train.trackers import Trackers

TRACKED = ("train.max_steps=4", "train.eval_every=2", "train.save_every=2")
PAGES = ("samples", "tree")
RANKS = [[0, 0], [5, 5], [5, 5], [1, 0], [-1, 0], [0, 9], [9, -1]]
"""Along an answer of seven tokens; with the tree (0), (1), (0, 0): two drafts accepted, one, one."""


@pytest.fixture
def offline(tmp_path, monkeypatch) -> Path:
    """wandb and trackio keep everything under this folder, and ask nobody."""
    for name, value in {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_CONFIG_DIR": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    return tmp_path


def run_twice(folder: Path, recipe: Any) -> RunFolder:
    """A training that is stopped and resumed, with forecasts from then on."""
    for resume in (False, True):
        training = cases.training(folder, recipe, resume=resume, forecast=resume)
        if not resume:
            cases.stop_after_save(training, 2)
            with pytest.raises(cases.Stopped):
                training.finish()
            training.metrics.close()
        else:
            training.finish()
    return training.run


def wandb_records(file: Path) -> Iterator[Any]:
    """What wandb wrote: protobuf messages in a log of blocks of 32 KiB (that of LevelDB) behind 7 bytes of header."""
    content, at, parts = file.read_bytes(), 7, b""
    while at + 7 <= len(content):
        left = 32768 - at % 32768
        if left < 7:
            at += left
        _, length, kind = struct.unpack("<IHB", content[at : at + 7])
        parts += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part of several
            record = wandb_internal_pb2.Record()
            record.ParseFromString(parts)
            parts = b""
            yield record


def history(records: list[Any]) -> list[dict[str, Any]]:
    rows = [record.history for record in records if record.WhichOneof("record_type") == "history"]
    return [{(item.key or ".".join(item.nested_key)): json.loads(item.value_json) for item in row.item} for row in rows]


def test_wandb_offline_keeps_numbers_texts_tree_and_head_under_one_id(offline):
    run = run_twice(offline / "run", cases.recipe(*TRACKED, "logging.trackers=[wandb]"))
    wandb.teardown()  # what is buffered is on the disk now
    files = sorted((run.path / "wandb").glob(f"offline-run-*/run-{run.run_id}.wandb"))
    assert len(files) == 2, "one for each launch, of one id"
    launches = [list(wandb_records(file)) for file in files]
    steps = [row["_step"] for launch in launches for row in history(launch) if "train/loss" in row]
    assert steps == [1, 2, 3, 4]
    last = history(launches[1])[-1]
    assert last["_step"] == 4 and last["held_out/forecast_speedup"] > 0 and last["held_out/top_1/1"] is not None
    assert any(name.startswith("held_out/forecast_acceptance_by_depth/") for name in last)
    samples, tree = ((files[1].parent / "files" / last[f"held_out/{name}.path"]).read_text() for name in PAGES)
    assert "tokens drafted and accepted" in samples and "<svg" in tree
    (artifact,) = [record.artifact for record in launches[1] if record.WhichOneof("record_type") == "artifact"]
    assert (artifact.type, artifact.name) == ("model", "demo")
    assert {entry.path for entry in artifact.manifest.contents} == {"config.json", "head.safetensors"}
    assert not [record for record in launches[0] if record.WhichOneof("record_type") == "artifact"]


@pytest.mark.slow
def test_tensorboard_and_trackio_take_the_same_setting(offline):
    pytest.importorskip("tensorboard")
    pytest.importorskip("trackio")
    run = run_twice(offline / "run", cases.recipe(*TRACKED, "logging.trackers=[tensorboard, trackio]"))
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run.path / "tensorboard"))
    events.Reload()
    assert [one.step for one in events.Scalars("train/loss")] == [1, 2, 3, 4]
    assert {"held_out/samples/text_summary", "held_out/tree/text_summary"} <= set(events.Tags()["tensors"])
    from trackio.sqlite_storage import SQLiteStorage

    name = f"demo-{run.run_id}"
    assert SQLiteStorage.get_runs("headstart") == [name]
    rows = SQLiteStorage.get_logs("headstart", name)
    assert [row["step"] for row in rows if "train/loss" in row] == [1, 2, 3, 4]


class Slow(GeneralTracker):
    """Takes nothing until it is let go."""

    name, requires_logging_directory = "wandb", False
    let_go = threading.Event()
    fails: list[str] = []
    modes: list[str | None] = []

    def __init__(self, project: str, **options: Any):
        super().__init__()
        type(self).modes.append(options.get("mode"))
        self.online = options.get("mode") is None

    @property
    def tracker(self) -> Any:
        return self

    def start(self) -> None:
        if self.online and self.fails:
            raise ConnectionError(self.fails[0])

    def store_init_configuration(self, values: dict) -> None: ...

    def log(self, values: dict, step: int | None = None, **kwargs: Any) -> None:
        self.let_go.wait(20)


@pytest.fixture
def slow(monkeypatch) -> type[Slow]:
    class Tracker(Slow):
        let_go, fails, modes = threading.Event(), [], []

    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "wandb", Tracker)
    return Tracker


def opened(tmp_path: Path) -> Trackers:
    return Trackers(RunFolder(tmp_path, "abc", False), cases.recipe("logging.trackers=[wandb]"), step=0)


def test_a_tracker_that_hangs_costs_training_nothing(tmp_path, monkeypatch, slow, capsys):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setattr(trackers, "WAITING", 50)
    monkeypatch.setattr(trackers, "LAST_SECONDS", 0.1)
    hung, started = opened(tmp_path), time.monotonic()
    for step in range(60):
        hung.log(step, {"loss": 1.0})
    hung.close()
    assert time.monotonic() - started < 5 and not hung
    assert capsys.readouterr().err.count("calls behind; going on without them") == 1
    waits = opened(tmp_path)
    waits.log(1, {"loss": 1.0})
    waits.close()
    assert "have not taken everything" in capsys.readouterr().err
    slow.let_go.set()


def test_wandb_without_a_key_or_a_server_keeps_its_records_for_later(tmp_path, monkeypatch, slow, capsys):
    monkeypatch.setenv("WANDB_MODE", "online")
    slow.let_go.set()
    monkeypatch.setattr("wandb.login", lambda **_: False)
    opened(tmp_path).close()
    assert slow.modes == ["offline"] and "no key is known: `wandb login`" in capsys.readouterr().err
    monkeypatch.setattr("wandb.login", lambda **_: True)
    monkeypatch.setattr("wandb.teardown", lambda: None)
    slow.fails.append("no route")
    opened(tmp_path).close()
    said = capsys.readouterr().err
    assert slow.modes[1:] == [None, "offline"] and said.count("warning:") == 1
    assert "ConnectionError: no route" in said and f"wandb sync --append {tmp_path}/wandb/offline-run-*" in said


def test_only_the_main_process_has_trackers(tmp_path, monkeypatch, slow):
    monkeypatch.setattr(Accelerator, "is_main_process", False)
    run = RunFolder(tmp_path, "abc", False)
    metrics = Metrics(run, cases.recipe("logging.trackers=[wandb]"), Accelerator(cpu=True), step=0)
    metrics.write(1, "train", {"loss": 1.0})
    metrics.close()
    assert slow.modes == [] and not list(tmp_path.iterdir())


def test_the_report_of_an_evaluation_joins_the_run_that_it_measured(offline, monkeypatch):
    sent: list[tuple] = []

    class Recorder(Slow):
        def log(self, values: dict, step: int | None = None, **kwargs: Any) -> None:
            sent.append((step, values))

    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "wandb", Recorder)
    run = head_cases.untrained_run(offline / "demo", tiny.save(offline / "tiny", "llama"))
    (run / "environment.json").write_text(json.dumps({"run_id": "abc"}))
    (run / "metrics.jsonl").write_text('{"step": 7, "kind": "train"}\n')
    recipe = (run / "recipe.yaml").read_text().replace("trackers: []", "trackers: [wandb]")
    (run / "recipe.yaml").write_text(recipe)
    (offline / "mine.jsonl").write_text('{"turns": ["Say 1"]}\n')
    few = ["eval.max_new_tokens=8", "eval.identity_prompts=0"]
    report = measure.run(head=str(run), bench=str(offline / "mine.jsonl"), overrides=few, output=str(run), device="cpu")
    assert {step for step, _ in sent} == {7}
    names = {name for _, values in sent for name in values}
    assert {"report/acceptance_length", "report/headline", "report/by_depth", "report/settings"} <= names
    assert sent[0][1]["report/acceptance_length"] == report["acceptance_length"]


def test_accepted_drafts_are_coloured_and_nothing_else_is():
    answer = RankedAnswer(torch.tensor(RANKS), list("<b>né!".encode()))
    drafted = drafted_tokens(answer, [(0,), (1,), (0, 0)])
    assert drafted == [True, True, False, True, False, True, False]
    page = coloured(answer.token_ids, drafted, tiny.tokenizer())
    plain = "".join(part.partition(">")[2] if part.startswith("strong") else part for part in page.split("<"))
    assert page.count("<strong") == 4 and "é" in page and "\ufffd" not in page
    assert plain.replace("/strong>", "") == "&lt;b&gt;né!"
    assert "4 of 7 tokens drafted and accepted" in samples_page([answer], [(0,), (1,), (0, 0)], tiny.tokenizer())


def test_a_tree_is_drawn_with_all_its_nodes():
    page = tree_page([(0,), (1,), (0, 0)])
    assert page.count("<circle") == 4 and page.count("<line") == 3
    assert "4 nodes with the root, by their ranks: 0 1 0.0" in page
    assert tree_page([]).count("<circle") == 1
