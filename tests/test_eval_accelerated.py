"""The front door in Python: three lines from a name to the target's own text, and one sentence for misuse."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import head_cases
import pytest
import stubs
import tiny

from headstart import Accelerated, SamplingSettings, Target, evaluate, generate, load_drafter, load_head
from headstart.data.rendering import ChatRenderer
from headstart.errors import HeadstartError
from headstart.eval import accelerated as front_door
from headstart.eval import trained
from headstart.recipe import ChatSection

QUESTION = "Say ééé 🙂"


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("accelerated")
    return head_cases.untrained_run(place / "demo", tiny.save(place / "tiny", "llama"))


@pytest.fixture(scope="module")
def accelerated(run_folder) -> Accelerated:
    return load_head(str(run_folder), device="cpu")


def plain_ids(prompt: str, count: int) -> list[int]:
    ids = ChatRenderer(tiny.tokenizer(), ChatSection()).prompt([{"role": "user", "content": prompt}])
    return stubs.plain_answers(tiny.model("llama"), [ids], count, end_token_ids=(tiny.END,))[0]


def test_three_lines_give_the_targets_own_text_and_what_it_took(accelerated):
    answer = generate(accelerated, QUESTION, max_new_tokens=24)
    assert answer.token_ids == plain_ids(QUESTION, 24) and str(answer) == answer.text
    assert answer.text == tiny.tokenizer().decode(answer.token_ids, skip_special_tokens=True)
    assert answer.finish_reason in ("length", "end") and answer.seconds > 0
    steps, whole = answer.generation.steps, answer.counts
    assert len(answer.drafted) == len(answer.token_ids) == sum(step.emitted for step in steps)
    assert sum(answer.drafted) == sum(step.accepted for step in steps)
    assert answer.acceptance_length == whole.emitted / whole.steps and whole.steps + whole.cut_steps == len(steps)


def test_a_stream_gives_the_same_text_in_pieces_that_are_whole_characters(accelerated):
    pieces = list(stream := accelerated.stream(QUESTION, max_new_tokens=24))
    assert all(pieces) and len(pieces) > 1
    answer = stream.answer
    assert "".join(pieces) == answer.text == generate(accelerated, QUESTION, max_new_tokens=24).text
    assert list(stream) == [] and stream.answer == answer


def test_an_answer_that_another_one_cuts_off_says_so(accelerated):
    first = accelerated.stream(QUESTION, max_new_tokens=24)
    assert next(first)
    assert generate(accelerated, QUESTION, max_new_tokens=8).token_ids == plain_ids(QUESTION, 8)
    with pytest.raises(HeadstartError, match="cut off when the same head began another one"):
        next(first)


def test_prompts_are_text_conversations_or_token_ids(accelerated):
    conversation = [{"role": "user", "content": QUESTION}]
    ids = accelerated.trained.renderer.prompt(conversation)
    answers = [generate(accelerated, prompt, max_new_tokens=8).token_ids for prompt in (QUESTION, conversation, ids)]
    assert answers[0] == answers[1] == answers[2]


def test_sampling_follows_from_the_seed(accelerated):
    def ids(**settings: Any) -> list[int]:
        return generate(accelerated, QUESTION, max_new_tokens=12, **settings).token_ids

    assert ids(temperature=1, seed=3) == ids(settings=SamplingSettings(temperature=1.0, seed=3))
    assert ids(temperature=1, seed=3) != ids(temperature=1, seed=4)
    text = generate(accelerated, QUESTION, max_new_tokens=24).text
    stop = text[4:6]
    stopped = generate(accelerated, QUESTION, max_new_tokens=24, stop=stop)
    assert stopped.finish_reason == "stop" and stopped.text.endswith(stop)


def test_a_loaded_target_is_used_and_left_as_it_was(run_folder):
    model = tiny.model("llama")
    before = model.config._attn_implementation
    head = load_head(run_folder, Target(model, tiny.tokenizer(), name="mine"))
    assert generate(head, QUESTION, max_new_tokens=12).token_ids == plain_ids(QUESTION, 12)
    assert model.config._attn_implementation == before and not any("Lean" in type(m).__name__ for m in model.modules())
    weight = head.target.model.get_input_embeddings().weight
    assert weight.data_ptr() == model.get_input_embeddings().weight.data_ptr(), "the weights are shared"
    with pytest.raises(HeadstartError, match="loaded already"):
        load_head(run_folder, Target(model, tiny.tokenizer(), name="mine"), dtype="float32")


def test_any_drafter_without_a_head(run_folder):
    target = str(run_folder.parent / "tiny")
    for name in ("ngram", "none"):
        drafted = load_drafter(name, target, device="cpu", dtype="float32")
        assert generate(drafted, QUESTION, max_new_tokens=12).token_ids == plain_ids(QUESTION, 12)


def test_evaluate_gives_the_report_that_the_verb_writes(accelerated, tmp_path):
    report = evaluate(
        accelerated, ["Say 1", "Say 2"], max_new_tokens=12, identity_prompts=1, temperature=0, output=tmp_path / "out"
    )
    written = json.loads((tmp_path / "out/report.json").read_text())
    assert written.keys() == report.keys() and written["acceptance_length"] == report["acceptance_length"] >= 1
    settings = report["details"]["settings"]
    assert settings["prompts"] == "given by the caller" and settings["questions"] == 2 and settings["drafter"] == "head"
    assert report["compared_outputs"] == 2 == report["identical_outputs"] and report["details"]["identity"]["passed"]


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda head: generate(head, []), "expected text, a conversation"),
        (lambda head: generate(head, [{"role": "wizard", "content": "x"}]), "no conversation: unknown role"),
        (lambda head: generate(head, "Hello", max_new_tokens=0), "max_new_tokens is 0, expected a whole number"),
        (lambda head: generate(head, "Hello", temperature=-1), "temperature=-1.0 is out of range"),
        (lambda head: generate(head, "Hello", temperature=1, settings=SamplingSettings()), "part of the settings"),
        (lambda head: generate(head, "word " * 2000), r"the prompt has \d+ tokens.*shorten the prompt"),
        (lambda head: generate(head, [9999]), "token id 9999"),
        (lambda head: evaluate(head, []), "there are no prompts"),
        (lambda head: evaluate(head, ["Hello"], num_prompts=0), "eval.num_prompts.*at least 1"),
        (lambda head: evaluate(head, "nowhere.jsonl"), "nowhere.jsonl"),
        (lambda head: load_head("nowhere"), "there is no run nowhere; name a folder that training wrote"),
        (lambda head: load_head(head.trained.run, drafter="telepathy"), "'telepathy' is not known"),
    ],
)
def test_wrong_use_ends_in_one_sentence(accelerated, call, sentence):
    with pytest.raises(HeadstartError, match=sentence) as raised:
        call(accelerated)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("check", "given", "sentence"),
    [
        (front_door._checked, "runs/demo", "first argument is a str, expected what load_head"),
        (front_door.question, 3, "prompt is int 3, expected text"),
        (front_door.question, [True], r"prompt is list \[True\], expected text"),
        (front_door._name, 3, "the target is a int, expected its name"),
    ],
)
def test_wrong_types_end_in_one_sentence(check, given, sentence):
    """Here and not through the functions, whose types the tests check."""
    with pytest.raises(HeadstartError, match=sentence):
        check(given)


def test_a_head_of_the_hub_is_found_by_its_name(run_folder, tmp_path, monkeypatch):
    """With the chat of its training record, for no recipe goes with it."""
    snapshot = tmp_path / "snapshot"
    shutil.copytree(run_folder / "head", snapshot)
    config = json.loads((snapshot / "config.json").read_text())
    config["training"]["chat"]["system"] = "Be brief."
    (snapshot / "config.json").write_text(json.dumps(config))
    asked = []

    def fetched(name: str, **_: Any) -> str:
        asked.append(name)
        return str(snapshot)

    monkeypatch.setattr("headstart.heads.published.snapshot_download", fetched)
    head = load_head("someone/demo-head", str(run_folder.parent / "tiny"), device="cpu", dtype="float32")
    assert asked == ["someone/demo-head"] and head.trained.run is None and not head.trained.notes
    assert head.trained.recipe.data.chat.system == "Be brief."
    assert generate(head, QUESTION, max_new_tokens=4).token_ids


def test_a_mistyped_run_is_not_looked_for_on_the_hub(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    Path("runs").mkdir()
    with pytest.raises(HeadstartError, match="there is no run runs/quikstart; name a folder"):
        trained.find_head(Path("runs/quikstart"))
