"""One context from preparing to exporting: template arguments, system turn, begin token and tokenizer of the training.

Field reports B11, B26 and B28, for evaluating and exporting; for preparing see test_data_rendering.py and
test_data_prepare.py.
"""

from __future__ import annotations

import json
from pathlib import Path

import head_cases
import pytest
import tiny

from headstart.data.formats import parse
from headstart.data.rendering import ChatRenderer
from headstart.errors import TargetError
from headstart.eval import measure
from headstart.eval.benchmarks import parse_bench
from headstart.eval.prompts import load_questions
from headstart.eval.trained import find_named
from headstart.heads.store import save_head
from headstart.loading import load_tokenizer
from headstart.scripts.export import run_export
from headstart.target import load_target

BLOCK = "{% if not enable_thinking %}<t></t>{% endif %}"
TEMPLATE = (
    "<|begin|>{% for message in messages %}<{{ message['role'] }}>"
    + "{% if message['role'] == 'assistant' %}"
    + BLOCK
    + "{% endif %}"
    + "{{ message['content'] }}<|turn_end|>\n{% endfor %}{% if add_generation_prompt %}<assistant>"
    + BLOCK
    + "{% endif %}"
)
CHAT = {"arguments": {"enable_thinking": False}, "system": "Be brief.", "supervise": "all"}


def tokenizer():
    return tiny.tokenizer(adds_begin=True, template=TEMPLATE)


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """A target whose template and tokenizer both write the begin token, two heads for it that learnt under other
    system turns, and a question."""
    place = tmp_path_factory.mktemp("records")
    target_folder = tiny.save(place / "target", "llama", make_tokenizer=tokenizer)
    target = load_target(str(target_folder), dtype="float32")
    heads = {}
    for name, chat in (("brief", CHAT), ("plain", {**CHAT, "system": None})):
        head = head_cases.head_for(target, num_heads=2)
        heads[name] = save_head(
            head, place / name, fingerprint=target.fingerprint(), training_record={"chat": chat, "steps": 1}
        )
    (place / "question.jsonl").write_text(json.dumps({"question_id": 1, "category": "qa", "turns": ["Why?"]}) + "\n")
    return {"target": target_folder, "question": place / "question.jsonl", **heads}


def test_an_evaluation_asks_what_training_learnt_to_answer(folders):
    """Exactly one begin token, the empty block and the system turn: the prompt begins the training row."""
    recipe = find_named(folders["brief"], str(folders["target"])).recipe
    assert recipe.data.chat.model_dump() == CHAT
    known = load_tokenizer(str(folders["target"]))
    renderer = ChatRenderer(known, recipe.data.chat)
    (question,) = load_questions(recipe, known, parse_bench(f"spec-bench={folders['question']}"))
    prompt = question.prompt_ids(renderer)
    assert prompt[0] == tiny.BEGIN and prompt.count(tiny.BEGIN) == 1
    assert str(known.decode(prompt)).endswith("<user>Why?<|turn_end|>\n<assistant><t></t>")
    assert "<system>Be brief.<|turn_end|>" in str(known.decode(prompt))
    answered = {"messages": [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]}
    row = renderer.row(parse(answered, origin="here:1", row_id="1"), 200)
    assert row.input_ids[: len(prompt)] == prompt and row.supervised.index(True) == len(prompt)


def test_what_another_head_learnt_is_named(folders):
    target, heads = str(folders["target"]), [folders["brief"], folders["plain"]]
    named = find_named(None, target, others=heads)
    assert named.recipe.data.chat.system == "Be brief.", "that of the first head"
    (note,) = named.notes
    assert note.startswith("head:plain was trained with data.chat.system=None, this evaluation renders with 'Be brief")
    named = find_named(None, target, overrides=["data.chat.system=Hm"], others=heads)
    assert [note.split()[0] for note in named.notes] == ["head:brief", "head:plain"]
    assert not find_named(None, target, others=heads[1:]).notes


def test_heads_are_measured_under_the_record_of_the_first(folders, tmp_path):
    report = measure.run(
        target=str(folders["target"]),
        drafters=["none", f"head:{folders['brief']}", f"head:{folders['plain']}"],
        bench=f"spec-bench={folders['question']}",
        overrides=["eval.max_new_tokens=4", "eval.identity_prompts=1"],
        output=str(tmp_path),
        device="cpu",
        dtype="float32",
    )
    (row,) = report["details"]["prompts"]
    rendered = "<|begin|><system>Be brief.<|turn_end|>\n<user>Why?<|turn_end|>\n<assistant><t></t>"
    assert row["prompt_tokens"] == len(tokenizer()(rendered, add_special_tokens=False)["input_ids"])
    assert any("head:plain was trained with data.chat.system=None" in one["text"] for one in report["details"]["gates"])
    assert report["details"]["settings"]["template_arguments"] == {"enable_thinking": False}
    assert report["details"]["settings"]["system"] == "Be brief."
    assert report["details"]["settings"]["benchmark"] == "spec-bench"


def test_a_target_with_another_tokenizer_is_refused_in_evaluating_and_exporting(folders, tmp_path):
    other = tiny.save(tmp_path / "target", "llama", make_tokenizer=lambda: tiny.tokenizer(template=TEMPLATE))
    with pytest.raises(TargetError, match="tokenizer ids of"):
        measure.run(
            head=str(folders["brief"]),
            target=str(other),
            bench=f"spec-bench={folders['question']}",
            output=str(tmp_path / "out"),
            device="cpu",
            dtype="float32",
        )
    with pytest.raises(TargetError, match="tokenizer ids of"):
        run_export(str(folders["brief"]), "medusa", str(tmp_path / "export"), target=str(other))
    assert not list((tmp_path / "out").iterdir()) and not (tmp_path / "export").exists()
