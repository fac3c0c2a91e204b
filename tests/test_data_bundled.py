"""The bundled conversations: enough of them, varied, always the same, and with clean splits."""

import json
import subprocess
import sys
from collections import Counter

import pytest

from headstart.data import bundled
from headstart.data.bundled import SPLITS, prompts, rows, split_of
from headstart.data.bundled.prompts import HELD_OUT_KINDS, HELD_OUT_TOPICS, all_prompts, kinds, topics
from headstart.errors import DataError
from headstart.target import load_tokenizer


def test_there_are_many_kinds_topics_and_prompts():
    assert len(kinds()) >= 16 and len(topics()) >= 70
    assert 3000 <= len(all_prompts()) <= 4200
    assert all(len(kind["phrasings"]) >= 5 for kind in kinds().values())
    by_cell = Counter((row["kind"], row["topic"]) for row in prompts())
    assert len(by_cell) == len(kinds()) * len(topics()) and min(by_cell.values()) >= 2


def test_splits_are_disjoint_and_complete():
    assert len(HELD_OUT_KINDS) == 2 and HELD_OUT_KINDS <= set(kinds())
    assert len(HELD_OUT_TOPICS) == 6 and HELD_OUT_TOPICS <= set(topics())
    ids = {split: {row["row_id"] for row in prompts(split)} for split in SPLITS}
    assert sum(map(len, ids.values())) == len(set().union(*ids.values())) == len(all_prompts())
    for row in prompts("train"):
        assert row["kind"] not in HELD_OUT_KINDS and row["topic"] not in HELD_OUT_TOPICS
    assert {row["kind"] for row in prompts("held_out_kinds")} == HELD_OUT_KINDS
    assert {row["topic"] for row in prompts("held_out_topics")} == HELD_OUT_TOPICS
    assert split_of({"kind": "how-to", "topic": "bees"}) == "held_out_kinds"


def test_no_prompt_comes_twice_and_no_training_prompt_is_held_out():
    texts = Counter(json.dumps(row["messages"]) for row in prompts())
    assert [text for text, count in texts.items() if count > 1] == []


def test_other_wordings_repeat_no_prompt_and_keep_the_splits():
    texts = Counter(json.dumps(row["messages"]) for row in prompts(wordings=True))
    assert max(texts.values()) == 1 and not texts.keys() & {json.dumps(row["messages"]) for row in prompts()}
    assert len(texts) > 4 * len(all_prompts())
    ids = {split: {row["row_id"] for row in prompts(split, wordings=True)} for split in SPLITS}
    assert sum(map(len, ids.values())) == len(set().union(*ids.values())) == len(texts)
    assert not set().union(*ids.values()) & {row["row_id"] for row in prompts()}
    for row in prompts("train", wordings=True):
        assert row["kind"] not in HELD_OUT_KINDS and row["topic"] not in HELD_OUT_TOPICS


def test_topics_are_filled_evenly():
    fields = Counter(field for topic in topics().values() for field in topic)
    assert set(fields.values()) == {len(topics())}, fields
    for name, topic in topics().items():
        assert len(topic["terms"]) == len(set(topic["terms"])) >= 6, name
        assert len(topic["passages"]) >= 2, name
        for passage in topic["passages"]:
            assert 40 <= len(passage["text"].split()) <= 90, (name, len(passage["text"].split()))
        entries = [entry for entries in topic.values() if isinstance(entries, list) for entry in entries]
        # YAML reads yes, no and 12 as other things, and splits an unquoted entry at its comma.
        assert all(isinstance(entry, str | list | dict) for entry in entries), name
        assert all(len(pair) == 2 for pair in topic["pairs"]), name
        assert len(topic["task"]) == len(topic["choice"]) == len(topic["hero"]) == len(topic["speakers"]) == 2, name
        assert all(isinstance(thing, str) for groups in topic["sort"] for thing in groups["items"] + groups["into"])


def test_messages_are_clean_user_turns():
    for row in prompts():
        assert len(row["messages"]) == (2 if row["kind"] == "follow-up" else 1)
        for message in row["messages"]:
            text = message["content"]
            assert message["role"] == "user" and text == text.strip()
            assert "{" not in text and "}" not in text and "  " not in text, text


def test_any_prefix_is_a_mixed_sample():
    first = list(prompts("train"))[:200]
    assert len({row["kind"] for row in first}) == len(kinds()) - len(HELD_OUT_KINDS)
    assert len({row["topic"] for row in first}) > 40
    eval_kinds = Counter(row["kind"] for row in list(prompts("held_out_kinds"))[:40])
    assert min(eval_kinds.values()) >= 10


def test_prompts_are_the_same_in_another_process():
    """Another hash seed would reorder sets and Python's own hash(); nothing may hang on either."""
    code = "import json; from headstart.data.bundled import prompts; print(json.dumps(list(prompts())))"
    command = [sys.executable, "-c", code]
    output = subprocess.run(command, env={"PYTHONHASHSEED": "7"}, capture_output=True, text=True, check=True).stdout
    assert json.loads(output) == list(prompts())


def test_prompt_lengths_in_tokens():
    tokenizer = load_tokenizer("bundled:smollm2-135m")
    turns = [(row["row_id"], message["content"]) for row in prompts() for message in row["messages"]]
    lengths = Counter()
    for (row_id, _), ids in zip(turns, tokenizer([text for _, text in turns])["input_ids"], strict=True):
        lengths[row_id] += len(ids)
    assert [row_id for row_id, length in lengths.items() if not 6 <= length <= 150] == []


@pytest.fixture
def answers(tmp_path, monkeypatch):
    """Puts other lines in the place of the committed answers: answers([line, ...]); None takes the file away."""
    path = tmp_path / "answers.jsonl"
    monkeypatch.setattr(bundled, "ANSWERS", path)

    def write(lines):
        bundled._answered.cache_clear()
        path.unlink(missing_ok=True)
        if lines is not None:
            path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")

    yield write
    bundled._answered.cache_clear()


def _answer(row, turns=None, cut=False):
    asked = row["messages"][:turns]
    messages = [turn for message in asked for turn in (message, {"role": "assistant", "content": "An answer."})]
    return row | {"messages": messages, "cut": cut, "temperature": 0.0}


def test_rows_join_the_answers(answers):
    first, second = list(prompts("train"))[:2]
    answers([_answer(first, cut=True)])
    assert list(rows("train")) == [first | {"messages": _answer(first)["messages"], "cut": True}]
    assert list(rows("held_out_kinds")) == []
    assert second in list(rows("train", answers=False))


def test_a_chat_may_end_with_a_cut_first_answer(answers):
    chat = next(row for row in prompts("train") if row["kind"] == "follow-up")
    answers([_answer(chat, turns=1, cut=True)])
    assert [len(row["messages"]) for row in rows("train")] == [2]


def test_answers_to_other_prompts_and_missing_answers_are_refused(answers):
    first = next(prompts("train"))
    answers([_answer(first | {"messages": [{"role": "user", "content": "Something else?"}]})])
    with pytest.raises(DataError, match="answers.jsonl:1: .* another prompt"):
        rows("train")
    answers([_answer(first | {"row_id": "explain/unicorns/1"})])
    with pytest.raises(DataError, match="another prompt"):
        rows("train")
    answers(None)
    with pytest.raises(DataError, match="headstart data distill"):
        rows("train")


def test_an_unknown_split_is_refused():
    with pytest.raises(DataError, match="held_out_topics"):
        prompts("test")


def test_committed_answers_are_whole():
    bundled._answered.cache_clear()
    for split in SPLITS:
        found = list(rows(split))
        assert found
        for row in found:
            roles = [message["role"] for message in row["messages"]]
            assert roles == ["user", "assistant"] * (len(roles) // 2)
