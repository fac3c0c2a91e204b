"""The fixed task: what its protocol counts, and a whole small run of it."""

from __future__ import annotations

import json

import pytest
import tiny
import torch
import train_cases as cases

from headstart.decode.cost import RankedAnswer
from headstart.errors import DataError
from headstart.eval import fixed_task
from headstart.eval.fixed_task import by_depth, crosswise, from_second_token, read_rows


def write_task(folder, count=12):
    folder.mkdir()
    for name, seed in (("train", 0), ("held_out", 1)):
        rows = cases.random_rows(count, seed=seed)
        lines = [json.dumps({"input_ids": row.input_ids, "prompt_tokens": len(row.input_ids) // 4}) for row in rows]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def test_rows_are_learnt_from_the_answer_on(tmp_path):
    rows = read_rows(write_task(tmp_path / "task") / "train.jsonl")
    assert len(rows) == 12 and rows[3].input_ids == cases.random_rows(12)[3].input_ids
    assert rows[3].supervised == [place >= len(rows[3].input_ids) // 4 for place in range(len(rows[3].input_ids))]
    (tmp_path / "task/train.jsonl").write_text('{"input_ids": [1]}\n')
    with pytest.raises(DataError, match="train.jsonl:1 has no"):
        read_rows(tmp_path / "task/train.jsonl")


def test_the_replay_begins_behind_the_token_that_the_target_gives():
    answer = RankedAnswer(torch.tensor([[0, 0], [0, 12], [3, 0], [0, -1]]))
    assert from_second_token(answer).ranks.tolist() == [[0, -1], [3, 0], [0, -1]], "ranks of 10 and more are misses"


def test_depths_are_judged_by_the_steps_that_reach_them():
    assert by_depth([[(0, 2), (3, 0)], [(0, 1), (2, 5)]])[:3] == [3 / 4, 2 / 3, 1 / 2]


def test_trees_are_scored_on_the_half_they_were_not_chosen_on():
    easy, hard = RankedAnswer(torch.zeros(12, 5).long()), RankedAnswer(torch.full((12, 5), 1))
    assert crosswise([easy, easy, easy, easy], 2) == 2.0
    assert crosswise([easy, hard, easy, hard], 2) == 1.0, "a tree of first choices is worth nothing on second ones"


def test_a_whole_run_is_written(tmp_path, capsys):
    target = tiny.save(tmp_path / "target")
    (tmp_path / "small.yaml").write_text(
        cases.recipe("head={type: eagle3, draft_vocab_size: 64}", f"target.name={target}").to_yaml()
    )
    words = ["--recipe", str(tmp_path / "small.yaml"), "--task", str(write_task(tmp_path / "task"))]
    words += ["--set", "train.max_steps=3", "--seeds", "0,1"]
    words += ["--runs", str(tmp_path / "runs"), "--output", str(tmp_path / "task.json")]
    assert fixed_task.main(words) == 0
    report = json.loads((tmp_path / "task.json").read_text())
    assert [result["seed"] for result in report["results"]] == [0, 1] and report["answers"] == 12
    for result in report["results"]:
        assert result["steps"] == 3 and result["cpu_seconds"] > 0
        taus = [*result["static"]["chain"].values(), *result["static"]["tree"].values()]
        assert len(taus) == 7 and all(1 <= tau < 2 for tau in taus)
        assert result["widened"].keys() == result["static"].keys()
    assert report["summary"]["chain 3"]["mean"] >= 1
    assert (tmp_path / "runs/demo-seed1/head/head.safetensors").is_file()
    assert "chain 3: 1." in capsys.readouterr().out
    assert fixed_task.main(words) == 1, "a run that stands already is not trained over"
