"""The benchmark of growth: every series takes steps, its law is a line, and a stopped run goes on."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from headstart.eval import bench_growth
from headstart.eval.bench_growth import SERIES, fit, measure, recipe_of

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 64,
}


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(bench_growth, "DIMENSIONS", SMALL)
    monkeypatch.setattr(bench_growth, "LENGTH", 16)
    for name, values in {"sequence length": (8, 16), "vocabulary": (64, 96), "world size": (1, 2)}.items():
        monkeypatch.setitem(SERIES, name, replace(SERIES[name], values=values))


@pytest.mark.parametrize("name", [name for name in SERIES if name != "world size"])
def test_every_series_takes_steps_at_all_its_values(name, small):
    seconds = measure(name, repeats=1, steps=1)
    assert tuple(seconds) == SERIES[name].values and all(cost > 0 for cost in seconds.values())


def test_a_series_changes_what_it_is_called_after():
    assert recipe_of("sequence length", 64).data.max_length == 64
    assert recipe_of("heads", 8).head.num_heads == 8  # pyright: ignore[reportAttributeAccessIssue]
    assert recipe_of("draft layers", 2).head.num_layers == 2  # pyright: ignore[reportAttributeAccessIssue]


def test_the_line_is_the_one_through_the_points():
    line = fit(SERIES["heads"], {1: 3.0, 2: 5.0, 4: 9.0})
    assert (line["fixed"], line["slope"]) == pytest.approx((1.0, 2.0)) and line["largest_error"] < 1e-9
    bent = fit(SERIES["heads"], {1: 1.0, 2: 4.0, 4: 16.0})
    assert bent["largest_error"] > 0.2
    exchange = fit(SERIES["world size"], {1: 1.0, 2: 3.0, 4: 4.0})  # 2 (n - 1) / n is 0, 1, 1.5
    assert (exchange["fixed"], exchange["slope"]) == pytest.approx((1.0, 2.0))


def test_a_stopped_run_goes_on(small, tmp_path, capsys, monkeypatch):
    output = tmp_path / "growth.json"
    words = ["--repeats", "1", "--steps", "1", "--output", str(output), "--only", "heads"]
    assert bench_growth.main(words) == 0
    first = json.loads(output.read_text())
    said = capsys.readouterr().out
    assert "heads: 1: " in said and "law: a line in the heads" in said
    monkeypatch.setattr(bench_growth, "measure", lambda *_, **__: pytest.fail("measured again"))
    assert bench_growth.main(words) == 0
    assert json.loads(output.read_text()) == first and capsys.readouterr().out == said


def test_wrong_words_end_in_one_sentence(tmp_path, capsys):
    assert bench_growth.main(["--only", "width"]) == 2
    assert "--only is width, expected one of sequence length, vocabulary" in capsys.readouterr().err
    other = tmp_path / "other.json"
    other.write_text('{"results": []}')
    assert bench_growth.main(["--output", str(other)]) == 1
    assert "holds no figures of this benchmark" in capsys.readouterr().err


@pytest.mark.slow
def test_processes_train_together(tmp_path):
    seconds = measure("world size", repeats=1, steps=1)
    assert set(seconds) == {1, 2, 4} and all(cost > 0 for cost in seconds.values())
