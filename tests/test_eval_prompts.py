"""Where the questions of an evaluation come from: bundled splits, files, Spec-Bench; turns, choice, one begin token."""

from __future__ import annotations

import json
from collections import Counter

import pytest
import tiny

from headstart.data.rendering import ChatRenderer
from headstart.errors import DataError
from headstart.eval.prompts import Question, choose, load_questions
from headstart.recipe import ChatSection, load_recipe


def recipe(*overrides):
    return load_recipe("quickstart.yaml", list(overrides))


def from_file(path, *overrides):
    return load_questions(recipe(f"eval.prompts=[{{source: '{path}'}}]", *overrides), tiny.tokenizer())


def text_of(ids):
    return str(tiny.tokenizer().decode(list(ids)))


def write(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_bundled_splits_say_how_new_their_questions_are():
    for split, novelty in [
        ("held_out_kinds", "kind held out"),
        ("held_out_topics", "kind seen, topic held out"),
        ("train", "seen in training"),
    ]:
        questions = load_questions(
            recipe(f"eval.prompts=[{{source: 'bundled:chats', split: {split}}}]"), tiny.tokenizer()
        )
        assert {question.novelty for question in questions} == {novelty}
        assert all(question.category == question.kind for question in questions)
    assert any(len(question.turns) == 2 for question in questions)


def test_without_prompts_the_held_out_sources_are_asked():
    questions = load_questions(recipe("eval.prompts=[]"), tiny.tokenizer())
    assert {question.novelty for question in questions} == {"kind seen, topic held out"}


def test_spec_bench_turns_and_its_six_groups(tmp_path):
    mt_bench = [
        {"question_id": 81 + i, "category": kind, "turns": [f"first {i}", f"second {i}"]}
        for i, kind in enumerate(["writing"] * 10 + ["coding"] * 10)
    ]
    others = [
        {"question_id": 200 + i, "category": kind, "turns": [f"ask {i}"]}
        for i, kind in enumerate(["translation"] * 20 + ["rag"] * 20)
    ]
    questions = from_file(write(tmp_path / "question.jsonl", *mt_bench, *others))
    assert Counter(question.category for question in questions) == {"MT conversation": 20, "translation": 20, "RAG": 20}
    assert questions[0].question_id == "81" and [turn[0]["content"] for turn in questions[0].turns] == [
        "first 0",
        "second 0",
    ]
    chosen = choose(questions, 12)
    assert Counter(question.category for question in chosen) == {"MT conversation": 4, "translation": 4, "RAG": 4}
    conversations = [question.question_id for question in chosen if question.category == "MT conversation"]
    assert conversations == ["81", "91", "86", "96"], "two of each kind, evenly spaced, in turn"
    assert len({question.category for question in chosen[:3]}) == 3, "the first few are a mixture"


def test_a_writing_category_of_another_file_is_its_own_group(tmp_path):
    questions = from_file(write(tmp_path / "mine.jsonl", {"category": "writing", "prompt": "Write."}))
    assert questions[0].category == "writing" and questions[0].novelty == "from elsewhere"


def test_answers_in_a_file_are_left_out_and_every_user_turn_is_asked(tmp_path):
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "1"},
        {"role": "user", "content": "Two?"},
        {"role": "assistant", "content": "2"},
    ]
    (question,) = from_file(write(tmp_path / "chats.jsonl", {"messages": messages}))
    assert [[message["content"] for message in turn] for turn in question.turns] == [["Be brief.", "One?"], ["Two?"]]
    renderer = ChatRenderer(tiny.tokenizer(), ChatSection())
    second = text_of(question.prompt_ids(renderer, ["uno"]))
    assert "uno" in second and "Two?" in second and "1<" not in second


def test_text_and_token_rows(tmp_path):
    path = write(tmp_path / "text.jsonl", {"text": "Once upon a time"})
    (question,) = load_questions(recipe(f"eval.prompts=[{{source: '{path}'}}]"), tiny.tokenizer(adds_begin=True))
    assert question.ids is not None and question.ids[0] == tiny.BEGIN and question.ids.count(tiny.BEGIN) == 1
    (question,) = from_file(write(tmp_path / "ids.jsonl", {"input_ids": [5, 6, 7, 8], "prompt_tokens": 2}))
    assert question.ids == (5, 6)


def test_one_begin_token_where_the_template_writes_it():
    template = "<|begin|>" + tiny.CHAT_TEMPLATE
    renderer = ChatRenderer(tiny.tokenizer(adds_begin=True, template=template), ChatSection())
    question = Question("1", "chat", "chat", "from elsewhere", (({"role": "user", "content": "Hi"},),))
    ids = question.prompt_ids(renderer)
    assert ids[0] == tiny.BEGIN and ids.count(tiny.BEGIN) == 1


def test_template_arguments_reach_the_prompt():
    template = tiny.CHAT_TEMPLATE + "{% if add_generation_prompt and not enable_thinking %}<t></t>{% endif %}"
    question = Question("1", "chat", "chat", "from elsewhere", (({"role": "user", "content": "Hi"},),))
    for thinking in (True, False):
        chat = ChatSection(arguments={"enable_thinking": thinking})
        ids = question.prompt_ids(ChatRenderer(tiny.tokenizer(template=template), chat))
        assert text_of(ids).endswith("<t></t>") is not thinking


def test_held_out_fraction_of_the_training_rows(tmp_path):
    chats = [
        {"messages": [{"role": "user", "content": f"Q{i}"}, {"role": "assistant", "content": f"A{i}"}]}
        for i in range(20)
    ]
    path = write(tmp_path / "chats.jsonl", *chats)
    questions = load_questions(
        recipe("eval.prompts=[]", "data.held_out={fraction: 0.2}", f"data.train=[{{source: '{path}'}}]"),
        tiny.tokenizer(),
    )
    assert len(questions) == 4 and {question.novelty for question in questions} == {"held out by prompt"}
    assert all(text_of(question.ids or ()).endswith("<assistant>") for question in questions)


def test_choice_is_balanced_and_never_more_than_there_are():
    def make(category, count):
        return [Question(f"{category}{i}", category, category, "", ((),), (1,)) for i in range(count)]

    questions = make("a", 100) + make("b", 2) + make("c", 100)
    assert Counter(question.category for question in choose(questions, 12)) == {"a": 5, "b": 2, "c": 5}
    assert sorted(q.question_id for q in choose(questions, 500)) == sorted(q.question_id for q in questions)


def test_a_file_without_prompts_is_refused(tmp_path):
    with pytest.raises(DataError, match="gives no prompt"):
        from_file(write(tmp_path / "bad.jsonl", {"nothing": 1}))


def test_a_recipe_that_holds_nothing_out_gives_no_questions(tmp_path):
    chat = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    write(tmp_path / "one.jsonl", {"messages": chat})
    source = f"data.train=[{{source: '{tmp_path / 'one.jsonl'}'}}]"
    with pytest.raises(DataError, match="holds out no rows to ask"):
        load_questions(recipe("eval.prompts=[]", "data.held_out={fraction: 0.5}", source), tiny.tokenizer())
