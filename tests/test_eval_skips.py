"""`headstart skips` and `headstart data datastore`: what they write can be drafted with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny

from headstart import cli
from headstart.decode.drafters.layer_skip import skipping_drafter
from headstart.decode.skips import load_skips
from headstart.eval.drafters import plan_drafter


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("target"), "llama")


def test_blocks_are_searched_saved_and_drafted_without(target_folder, tmp_path, capsys):
    words = ["skips", "--target", str(target_folder), "--output", str(tmp_path / "skips"), "--tries", "6"]
    source = '[{source: "bundled:chats", split: held_out_topics, limit: 6}]'
    words += ["--set", f"data.held_out.sources={source}", "--set", "data.max_length=128"]
    assert cli.main([*words, "--dtype", "float32", "--device", "cpu"]) == 0
    target = tiny.target("llama")
    skips, length = load_skips(tmp_path / "skips", target)
    assert length >= 1 and skips.num_blocks >= 1
    assert skipping_drafter(tmp_path / "skips", target).skips == skips
    stored = json.loads((tmp_path / "skips/skips.json").read_text())
    assert stored["search"]["tries"] == 6 and 0 <= stored["search"]["agreement"] <= 1
    told = capsys.readouterr().out
    assert "are left out" in told and "forecast" in told


def test_a_datastore_is_built_and_drafted_from(target_folder, tmp_path, capsys):
    (tmp_path / "text.txt").write_text("one two three. one two three.")
    words = ["data", "datastore", str(tmp_path / "text.txt"), "--target", str(target_folder)]
    assert cli.main([*words, "--output", str(tmp_path / "store")]) == 0
    assert "text.txt" in capsys.readouterr().out
    drafter = plan_drafter(f"retrieval:{tmp_path / 'store'}", None, "auto").make(tiny.target("llama"))
    assert drafter.num_bytes() > 0
    assert cli.main([*words, "--output", str(tmp_path / "store")]) == 1
    assert "holds something already" in capsys.readouterr().err
