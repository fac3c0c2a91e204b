"""Answers from a server: bounded, tried again, each row once, and one sentence where it can't work."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator
from email.utils import formatdate
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
import tiny
from fake_server import FakeServer

from headstart import cli
from headstart.data.distill import distill
from headstart.data.messages import Conversation
from headstart.data.prepare import prepare
from headstart.data.rendering import ChatRenderer, label_runs
from headstart.data.reports import SkipReport
from headstart.data.server import Server, retry_after
from headstart.errors import DataError, HeadstartWarning
from headstart.recipe import ChatSection, Recipe

RENDERER = ChatRenderer(tiny.tokenizer(), ChatSection(system="Be brief."))


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    with FakeServer() as server:
        server.count_tokens = lambda messages: len(RENDERER.prompt(messages))
        yield server


def client(fake: FakeServer, **options: Any) -> Server:
    server = Server(fake.url, **{"concurrency": 3, "first_wait": 0.01, "timeout": 5.0, **options})
    server.connect()
    return server


def answered(server: Server, output: Path, prompts: list[str]) -> tuple[SkipReport, list[dict[str, Any]]]:
    conversations = [
        Conversation(row_id=f"row {number}", origin=f"f:{number}", messages=({"role": "user", "content": text},))
        for number, text in enumerate(prompts)
    ]
    report = distill(conversations, server.answer, RENDERER, output, settings={"model": server.model})
    return report, [json.loads(line) for line in output.read_text().splitlines()]


def said(rows: list[dict[str, Any]]) -> dict[str, str]:
    return {row["messages"][-2]["content"]: row["messages"][-1]["content"] for row in rows}


PROMPTS = [f"q{number}" for number in range(8)]
ANSWERS = {text: text.upper() for text in PROMPTS}


def test_every_question_is_asked_once_and_at_most_so_many_at_a_time(fake, tmp_path):
    fake.together = threading.Barrier(3)
    server = client(fake, max_new_tokens=7, template_arguments={"enable_thinking": False})
    report, rows = answered(server, tmp_path / "out.jsonl", PROMPTS)
    assert said(rows) == ANSWERS and report.kept == 8 and not any(row["cut"] for row in rows)
    assert fake.most_under_way == 3 and set(fake.asked.values()) == {1}
    body = next(body for body in fake.bodies if body["messages"][-1]["content"] == "q0")
    assert body["messages"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "q0"}]
    assert (body["model"], body["max_tokens"], body["temperature"]) == ("tiny", 7, 0.0)
    assert body["chat_template_kwargs"] == {"enable_thinking": False} and body["seed"] != fake.bodies[-1]["seed"]
    assert (server.compared, server.summary()) == (8, None)


@pytest.mark.parametrize("fault", [500, 503, 429, "drop", "torn", "hang", {"message": None}])
def test_what_may_pass_is_tried_again(fake, tmp_path, fault):
    fake.faults = {0: fault, 3: fault}
    _, rows = answered(client(fake, timeout=2 if fault == "hang" else 60), tmp_path / "out.jsonl", PROMPTS)
    assert said(rows) == ANSWERS and sum(fake.asked.values()) >= 10


def test_retry_after_is_kept_to_in_both_its_forms(fake, tmp_path):
    fake.faults, fake.retry_after = {0: 429}, "1"
    start = time.monotonic()
    _, rows = answered(client(fake), tmp_path / "out.jsonl", ["q"])
    assert said(rows) == {"q": "Q"} and time.monotonic() - start > 0.9
    for header, low, high in [
        (formatdate(time.time() + 100, usegmt=True), 50, 101),
        ("-1", None, None),
        ("", None, None),
    ]:
        seconds = retry_after(httpx.Response(429, headers={"Retry-After": header}))
        assert seconds is low is None or low < seconds < high


@pytest.mark.parametrize("status", [500, 400])
def test_a_question_that_never_gets_an_answer_is_counted_and_left_for_the_next_run(fake, tmp_path, status):
    fake.poison = {"q5": status}
    output = tmp_path / "out.jsonl"
    report, rows = answered(client(fake), output, PROMPTS)
    assert len(rows) == report.kept == 7 and report.rows == 8 and "q5" not in said(rows)
    assert f"planted {status}" in report.summary()
    assert fake.asked["q5"] == (7 if status == 500 else 1)
    fake.poison, before = {}, fake.asked.copy()
    _, rows = answered(client(fake), output, PROMPTS)
    assert said(rows) == ANSWERS and fake.asked - before == {"q5": 1}


def test_a_server_that_goes_away_ends_in_a_sentence_and_keeps_what_was_answered(tmp_path):
    output = tmp_path / "out.jsonl"
    with FakeServer({number: "drop" for number in range(4, 500)}) as fake:
        with pytest.raises(DataError, match=r"doesn't answer \(.*\), after 7 tries; what was answered is kept"):
            answered(client(fake), output, PROMPTS)
        assert len(output.read_text().splitlines()) == 4
        fake.faults = {}
        _, rows = answered(client(fake), output, PROMPTS)
    assert said(rows) == ANSWERS and len(rows) == 8


def test_cut_answers_are_marked_and_their_end_is_no_label(fake, tmp_path):
    fake.faults = {0: {"finish_reason": "length", "message": {"content": "Q0 and\ufffd"}}}
    output = tmp_path / "out.jsonl"
    _, rows = answered(client(fake, concurrency=1), output, ["q0", "q1"])
    assert [(row["cut"], row["messages"][-1]["content"]) for row in rows] == [(True, "Q0 and"), (False, "Q1")]
    recipe = Recipe.model_validate(
        {"name": "r", "target": {"name": "t"}, "head": {"type": "medusa"}, "data": {"train": [{"source": str(output)}]}}
    )
    tokenizer = tiny.tokenizer()
    prepared = prepare(recipe, tokenizer)
    rows = sorted([*prepared.train, *prepared.held_out], key=lambda row: row.row_id)
    labels = [tokenizer.decode(row.input_ids[start:end]) for row in rows for start, end in label_runs(row)]
    assert labels == ["Q0 and", "Q1<|turn_end|>"]


def test_thoughts_come_along_and_other_endings_are_counted(fake, tmp_path):
    fake.faults = {
        0: {"message": {"content": "Q0", "reasoning_content": "hm"}},
        1: {"message": {"content": None}, "finish_reason": "tool_calls"},
    }
    report, rows = answered(client(fake, concurrency=1), tmp_path / "out.jsonl", ["q0", "q1"])
    assert [row["messages"][-1] for row in rows] == [{"role": "assistant", "content": "Q0", "reasoning_content": "hm"}]
    assert list(report.skipped) == ["the server ended the answer with 'tool_calls', not stop or length"]


def test_a_template_that_is_not_the_recipes_is_named(fake, tmp_path):
    fake.extra_tokens = 2
    server = client(fake)
    with pytest.warns(HeadstartWarning, match=r"the server reads \d+ tokens for the prompt row \d/1, the recipe's"):
        answered(server, tmp_path / "out.jsonl", PROMPTS)
    assert "8 of 8 prompts have another number of tokens" in (server.summary() or "")


def test_what_cannot_work_is_one_sentence(fake, tmp_path, monkeypatch):
    output = tmp_path / "out.jsonl"
    assert client(fake).model == "tiny" and Server(f"{fake.url}/v1/").connect() == 100
    with pytest.raises(DataError, match="has no model other.* It lists tiny"):
        answered(client(fake, model="other"), output, PROMPTS)
    with pytest.raises(DataError, match=r"doesn't speak the OpenAI protocol \(GET /models gives 404\)"):
        Server(f"{fake.url}/nowhere").connect()
    fake.poison = dict.fromkeys(PROMPTS, 422)
    with pytest.raises(DataError, match=r"refuses what it is asked \(422: planted 422\)"):
        answered(client(fake), output, PROMPTS)
    fake.models = ("a", "b")
    with pytest.raises(DataError, match="It lists a, b; say which with --model"):
        client(fake)
    fake.key = "secret"
    with pytest.raises(DataError, match="wants another key .*OPENAI_API_KEY"):
        client(fake, model="a")
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    assert client(fake, model="a").models == ["a", "b"]


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    tiny.tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in PROMPTS))
    (tmp_path / "r.yaml").write_text(
        "name: r\ntarget: {name: ./model}\nhead: {type: medusa}\n"
        "data: {train: [{source: prompts.jsonl}], distill: {max_new_tokens: 60, batch_size: 4}}\n"
    )
    return tmp_path


def test_the_verb_answers_through_a_server_and_loads_no_target(folder, fake, capsys):
    words = ["data", "distill", "--recipe", "r.yaml", "--output", "out.jsonl", "--server", fake.url]
    fake.count_tokens = lambda messages: len(ChatRenderer(tiny.tokenizer(), ChatSection()).prompt(messages))
    assert cli.main(words) == 0
    printed = capsys.readouterr()
    assert "tiny at http://127.0.0.1" in printed.out and "8 rows, 8 kept" in printed.out and not printed.err
    assert said([json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]) == ANSWERS
    assert cli.main([*words, "--set", "data.distill.max_new_tokens=61"]) == 1
    assert "begun with max_new_tokens 60" in capsys.readouterr().err
    assert cli.main([*words, "--set", "data.distill.max_new_tokens=100"]) == 1
    assert "leave no room for a prompt in the 100 positions of tiny" in capsys.readouterr().err
    for option in (["--device", "cpu"], ["--timeout", "0"]):
        assert cli.main([*words, *option]) == 2
    assert cli.main([*words[:-2], "--model", "tiny"]) == 2
    assert "--model has no meaning without --server" in capsys.readouterr().err


def test_a_server_that_is_not_there_is_one_sentence(folder, capsys):
    words = ["data", "distill", "--recipe", "r.yaml", "--output", "out.jsonl", "--server", "http://127.0.0.1:9"]
    assert cli.main(words) == 1
    assert re.fullmatch(r"No server answers at http://127.0.0.1:9/v1 \(.*\); start it.*\n", capsys.readouterr().err)
    assert not (folder / "out.jsonl").exists()
