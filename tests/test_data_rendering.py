"""One rendering, exact labels: whatever the template does, what is supervised is what the target writes at run time."""

from __future__ import annotations

import random

import pytest

from headstart.data.messages import Conversation, Message, SkipRow
from headstart.data.rendering import ChatRenderer, Row, decode, label_runs
from headstart.errors import DataError
from headstart.recipe import ChatSection
from headstart.target import load_tokenizer
from tests import chat_templates, tiny

LONG = 10_000


def chat(*contents: str, **options) -> Conversation:
    """User and assistant in turn."""
    roles = ("user", "assistant")
    messages = tuple({"role": roles[turn % 2], "content": content} for turn, content in enumerate(contents))
    return Conversation(row_id="r", origin="f:1", messages=messages, **options)


def renderer(template: str | None = tiny.CHAT_TEMPLATE, *, chat: ChatSection | None = None, **options) -> ChatRenderer:
    return ChatRenderer(tiny.tokenizer(template=template, **options), chat or ChatSection())


def labelled(render: ChatRenderer, row: Row) -> list[str]:
    """The text of each run of labels."""
    return [decode(render.tokenizer, row.input_ids[start:end]) for start, end in label_runs(row)]


def mismatch(render: ChatRenderer, conversation: Conversation) -> str | None:
    (rendered,) = render.rows([conversation], LONG)
    return rendered.mismatch


def text(render: ChatRenderer, row: Row) -> str:
    return decode(render.tokenizer, row.input_ids)


def test_words_and_turn_ends_are_labels_without_generation_markers():
    """B14: a template without markers gives exact spans."""
    render = renderer()
    row = render.row(chat("ab", "cd", "ef", "gh"), LONG)
    assert (
        text(render, row)
        == "<user>ab<|turn_end|>\n<assistant>cd<|turn_end|>\n<user>ef<|turn_end|>\n<assistant>gh<|turn_end|>\n"
    )
    assert labelled(render, row) == ["cd<|turn_end|>", "gh<|turn_end|>"]
    assert sum(row.supervised) == 6
    assert [token for token, label in zip(row.input_ids, row.supervised, strict=True) if label][2] == tiny.TURN_END


def test_the_same_words_in_two_answers_and_in_the_questions():
    """B23: headers and the template's empty block are no labels; both answers are, 4 + 1 tokens each."""
    render = renderer(chat_templates.EMPTY_THOUGHT)
    row = render.row(chat("same", "same", "same<t></t>same", "same"), LONG)
    assert labelled(render, row) == ["same<|turn_end|>"] * 2
    assert [end - start for start, end in label_runs(row)] == [5, 5]
    first, second = (start for start, _ in label_runs(row))
    assert decode(render.tokenizer, row.input_ids[:first]).endswith("<assistant><t></t>")
    assert decode(render.tokenizer, row.input_ids[:second]).endswith("same<|turn_end|><assistant><t></t>")


def test_only_what_the_generation_prompt_supplies_is_taken_from_the_turn():
    """B23: all of the assistant's turn minus the labels is the generation prompt, and nothing else."""
    for template in (chat_templates.EMPTY_THOUGHT, tiny.CHAT_TEMPLATE, chat_templates.STRICT):
        render = renderer(template)
        conversation = chat("question", "answer")
        row = render.row(conversation, LONG)
        prompt = render.prompt((conversation.messages or ())[:1])
        ((start, end),) = label_runs(row)
        assert row.input_ids[:start] == prompt
        assert text(render, row)[len(decode(render.tokenizer, prompt)) :].rstrip("\n") == "answer<|turn_end|>"


def test_a_default_system_turn_belongs_to_the_context():
    render = renderer(chat_templates.DEFAULT_SYSTEM)
    row = render.row(chat("Be good.", "Be good."), LONG)
    assert text(render, row).startswith("<system>Be good.<|turn_end|>\n<user>Be good.")
    assert labelled(render, row) == ["Be good.<|turn_end|>"]
    own = renderer(chat_templates.DEFAULT_SYSTEM, chat=ChatSection(system="Be brief."))
    assert text(own, own.row(chat("a", "b"), LONG)).startswith("<system>Be brief.<|turn_end|>\n<user>a")
    assert decode(own.tokenizer, own.prompt([{"role": "user", "content": "a"}])).startswith("<system>Be brief.")


@pytest.mark.parametrize("thinking", [None, False])
def test_a_template_that_drops_earlier_reasoning(thinking):
    """Qwen3: what is left of each answer is found, whether the reasoning stands in the content or in its field."""
    arguments = {} if thinking is None else {"enable_thinking": thinking}
    render = renderer(chat_templates.QWEN3, chat=ChatSection(arguments=arguments))
    opening = "<think>\n" if thinking is None else ""  # otherwise the generation prompt has one
    inline = chat("q", "<think>\none\n</think>\n\nfirst", "q", "<think>\ntwo\n</think>\n\nlast \n")
    row = render.row(inline, LONG)
    assert "one" not in text(render, row)
    assert labelled(render, row) == ["first<|turn_end|>", f"{opening}two\n</think>\n\nlast \n<|turn_end|>"]

    messages: list[Message] = [dict(message) for message in chat("q", "first", "q", "last").messages or ()]
    messages[1]["reasoning_content"], messages[3]["reasoning_content"] = "one", "two"
    row = render.row(Conversation(row_id="r", origin="f:1", messages=tuple(messages)), LONG)
    assert labelled(render, row) == ["first<|turn_end|>", f"{opening}two\n</think>\n\nlast<|turn_end|>"]

    plain = render.row(chat("q", "first", "q", "last"), LONG)
    assert "<think>\n\n</think>\n\nlast" in text(render, plain)
    assert labelled(render, plain) == ["first<|turn_end|>", "last<|turn_end|>"]  # the empty block is the template's

    untidy = render.row(chat("q", "<think>two</think>last"), LONG)
    assert labelled(render, untidy) == [f"{opening}two\n</think>\n\nlast<|turn_end|>"]


def test_a_template_that_drops_all_reasoning():
    render = renderer(chat_templates.DROPS_ALL_THOUGHT)
    row = render.row(chat("q</think>q", "<think>\none\n</think>\n\nq", "q", "q"), LONG)
    assert labelled(render, row) == ["\n\nq<|turn_end|>", "q<|turn_end|>"]


def test_blanks_that_the_template_puts_around_the_words():
    """The target's prompt ends at the colon, so the blank after it is the target's; then words, blank, end token."""
    render = renderer(chat_templates.BLANKS_AROUND)
    row = render.row(chat("q", "a"), LONG)
    assert text(render, row) == "user: q assistant: a <|end|>"
    assert labelled(render, row) == ["a <|end|>"]  # one byte, one token: the blank before is a token of its own


def test_a_token_across_the_border_is_a_label_where_the_prompt_ends_before_it():
    """Real merges: " Paris" after "assistant:" is one token, which the target writes."""
    tokenizer = load_tokenizer("bundled:smollm2-135m")
    tokenizer.chat_template = chat_templates.BLANKS_AROUND.replace("<|end|>", "<|im_end|>")
    render = ChatRenderer(tokenizer, ChatSection())
    row = render.row(chat("Capital of France?", "Paris"), LONG)
    assert labelled(render, row) == [" Paris <|im_end|>"]
    tokenizer.chat_template = tokenizer.chat_template.replace("assistant:{%", "assistant: {%")
    row = render.row(chat("Capital of France?", "Paris is it"), LONG)
    assert labelled(render, row) == [" is it <|im_end|>"]  # the prompt has the blank: " Paris" is met nowhere
    assert "token" in (mismatch(render, chat("Capital of France?", "Paris is it")) or "")


def test_turns_that_no_token_ends():
    render = renderer(chat_templates.NO_TURN_END)
    assert labelled(render, render.row(chat("q", "a\n", "q", "b"), LONG)) == ["a\n", "b"]


@pytest.mark.parametrize(
    "template", [chat_templates.CHANGED, chat_templates.UPPER, chat_templates.TWICE, chat_templates.SKIPS]
)
def test_answers_that_cannot_be_told_exactly_are_refused(template):
    with pytest.raises(SkipRow, match="can't be found exactly"):
        renderer(template).row(chat("question", "answer"), LONG)


def test_empty_answers_and_questions_without_answers_are_refused():
    with pytest.raises(SkipRow, match="an empty answer"):
        renderer().row(chat("q", " ", "q", "a"), LONG)
    with pytest.raises(SkipRow, match="no assistant turn"):
        renderer().row(chat("q"), LONG)
    render = renderer()
    assert (
        text(render, render.row(chat("q", "a", "unanswered"), LONG))
        == "<user>q<|turn_end|>\n<assistant>a<|turn_end|>\n"
    )


def test_a_reply_cut_by_the_length_limit_keeps_its_labels():
    """B16: 8 labels at 16..23 and no turn end among them; nothing left is counted as that."""
    render = renderer()
    tokens = Conversation(
        row_id="r",
        origin="f:1",
        input_ids=(*range(16), *[7] * 24, tiny.TURN_END),
        supervised=(*[False] * 16, *[True] * 25),
    )
    assert label_runs(render.row(tokens, 24)) == [(16, 24)]
    for candidate in (tokens, chat("q", "x" * 24)):
        start = label_runs(render.row(candidate, LONG))[0][0]
        cut = render.row(candidate, start + 8)
        assert cut.truncated and len(cut.input_ids) == start + 8
        assert label_runs(cut) == [(start, start + 8)]
        assert tiny.TURN_END not in cut.input_ids[start:]
        with pytest.raises(SkipRow, match="no supervised token left"):
            render.row(candidate, start)


def test_a_cut_answer_has_no_supervised_turn_end():
    """B08: the target never chose to end it there. Earlier answers it did end."""
    render = renderer()
    row = render.row(chat("q", "a", "q", "b", cut=True), LONG)
    assert labelled(render, row) == ["a<|turn_end|>", "b"]
    assert text(render, row).endswith("b<|turn_end|>\n")


def test_supervise_last_takes_the_last_answer_only():
    render = renderer(chat=ChatSection(supervise="last"))
    assert labelled(render, render.row(chat("q", "a", "q", "b"), LONG)) == ["b<|turn_end|>"]


def test_a_template_that_refuses_is_a_skipped_row_with_its_roles():
    """B09: the run goes on, the message holds the template's words and the role list."""
    render = renderer(chat_templates.STRICT)
    messages = ({"role": "user", "content": "a"}, *(chat("b", "c").messages or ()))
    with pytest.raises(SkipRow) as caught:
        render.row(Conversation(row_id="r", origin="f:7", messages=messages), LONG)
    assert caught.value.reason == (
        "the chat template refuses it: Conversation roles must alternate user/assistant/user/assistant/..."
    )
    assert caught.value.detail == "roles: user, user, assistant"


def test_one_begin_token_whoever_writes_it():
    """B26: template and tokenizer both write it; plain text keeps the tokenizer's own."""
    render = renderer(chat_templates.STRICT, adds_begin=True)
    row = render.row(chat("q", "a"), LONG)
    prompt = render.prompt([{"role": "user", "content": "q"}])
    for ids in (row.input_ids, prompt):
        assert [position for position, token in enumerate(ids) if token == tiny.BEGIN] == [0]
    plain = render.row(Conversation(row_id="t", origin="f:1", text="ab<|begin|>"), LONG)
    assert plain.input_ids == [tiny.BEGIN, 97, 98, tiny.BEGIN]
    assert plain.supervised == [False, True, True, True]
    assert render.text_prompt("ab") == [tiny.BEGIN, 97, 98]
    bare = renderer(chat_templates.STRICT)
    assert bare.row(Conversation(row_id="t", origin="f:1", text="ab"), LONG).input_ids == [97, 98]


def test_padding_that_is_the_end_token_changes_no_label():
    """B21, first half: labels are set by position; test_data_packing has the padding."""
    template = tiny.CHAT_TEMPLATE.replace("<|turn_end|>", "<|end|>")
    render = renderer(template, pad_is_end=True)
    assert render.tokenizer.pad_token_id == tiny.END
    row = render.row(chat("q", "a"), LONG)
    assert sum(label and token == tiny.END for token, label in zip(row.input_ids, row.supervised, strict=True)) == 1


def test_template_arguments_reach_rows_and_prompts_and_a_mismatch_is_said():
    """B11: the prompt's ids begin the row's, or the first differing token is named."""
    conversation = chat("q", "ok")
    with_thought = renderer(chat_templates.THOUGHT_BY_ARGUMENT, chat=ChatSection(arguments={"enable_thinking": False}))
    prompt = with_thought.prompt((conversation.messages or ())[:1])
    assert decode(with_thought.tokenizer, prompt).endswith("<assistant><t></t>")
    first = len("<user>q") + 1 + len("<assistant>")
    assert mismatch(with_thought, conversation) == (
        f"token {first} is {ord('o')} 'o' in the row, {ord('<')} '<' in the prompt"
    )
    default = renderer(chat_templates.THOUGHT_BY_ARGUMENT)
    assert mismatch(default, conversation) is None


def test_a_block_that_only_the_row_has_is_said_too():
    """Answers without reasoning, and a template that writes an empty block into the row but not into the prompt."""
    conversation = chat("q", "ok")
    render = renderer(chat_templates.QWEN3)
    assert mismatch(render, conversation) == (
        "the row has '<think>\\n\\n</think>\\n\\n' before the answer, and the prompt hasn't"
    )
    right = renderer(chat_templates.QWEN3, chat=ChatSection(arguments={"enable_thinking": False}))
    assert mismatch(right, conversation) is None


def test_rows_without_a_template_or_offsets_are_one_sentence(monkeypatch):
    with pytest.raises(DataError, match="has no chat template"):
        renderer(None).row(chat("q", "a"), LONG)
    with pytest.raises(DataError, match="has no chat template"):
        renderer(None).prompt([{"role": "user", "content": "q"}])
    slow = tiny.tokenizer()
    monkeypatch.setattr(type(slow), "is_fast", False)
    with pytest.raises(DataError, match="fast tokenizer"):
        ChatRenderer(slow, ChatSection())


PIECES = (
    *("a", "same", "<assistant>", "<t></t>", "\n", " ", "é", "🙂", "e\u0301", "<|turn_end|>", "user: ", "assistant:"),
    *("<think>\nx\n</think>\n\n", "</think>", "\ue000", "{{ x }}", "日本"),
)


def random_chats(count: int, seed: int) -> list[Conversation]:
    draw = random.Random(seed)
    contents = ["".join(draw.choices(PIECES, k=draw.randint(1, 5))) for _ in range(200)]
    return [chat(*draw.choices(contents, k=2 * draw.randint(1, 3))) for _ in range(count)]


@pytest.mark.parametrize("name", chat_templates.EXACT)
def test_labels_lie_inside_the_assistants_turns_for_any_contents(name):
    """A slow reference: grow the chat message by message. Where the renderings are prefixes of each other, the labels
    lie between the prompt's end and the turn's end, in one piece, and hold the answer's words."""
    render = renderer(chat_templates.EXACT[name])
    seen = 0
    for conversation in random_chats(40, seed=3):
        messages = list(conversation.messages or ())
        try:
            row = render.row(conversation, LONG)
        except SkipRow as why:
            # an empty answer, or one that the template cut through a `</think>` of ours: refused, never guessed
            assert why.reason == "an empty answer" or "</think>" in str(messages), why
            continue
        seen += 1
        full = text(render, row)
        runs = label_runs(row)
        for turn, message in enumerate(messages):
            if message["role"] == "user":
                continue
            start = render._render(messages[:turn], True)
            stop = render._render(messages[: turn + 1], False)
            if not (full.startswith(stop) and stop.startswith(start)):
                continue  # a template that looks ahead: the tests above hold its cases
            low, high = (len(ids) for ids in render._encode([start, stop])["input_ids"])
            inside = [position for position in range(low, high) if row.supervised[position]]
            words = decode(render.tokenizer, [row.input_ids[position] for position in inside])
            own = message["content"].split("</think>")[-1].strip()
            assert own in words
            assert inside == list(range(inside[0], inside[-1] + 1))
        if all(f"<{role}>" not in str(messages) for role in ("user", "assistant")):
            assert len(runs) == len(messages) // 2
    assert seen >= 10


@pytest.mark.parametrize("name", ["strict", "default system", "empty thought", "blanks around", "no turn end"])
def test_the_prompt_is_the_beginning_of_the_row_for_any_contents(name):
    render = renderer(chat_templates.EXACT[name])
    for conversation in random_chats(40, seed=4):
        try:
            row = render.row(conversation, LONG)
        except SkipRow:
            continue
        prompt = render.prompt((conversation.messages or ())[:-1])
        assert row.input_ids[: len(prompt)] == prompt
        start, end = label_runs(row)[-1]
        assert start >= len(prompt) and any(row.supervised[len(prompt) :])


def test_real_tokenizer_with_its_own_template():
    """SmolLM2: no markers, a default system turn, turn end = pad. Labels decode to the answers and nothing else."""
    render = ChatRenderer(load_tokenizer("bundled:smollm2-135m"), ChatSection())
    row = render.row(chat("Say hi", "Hello, 日本 🙂!", "again", "Hello, 日本 🙂!\n"), LONG)
    assert labelled(render, row) == ["Hello, 日本 🙂!<|im_end|>", "Hello, 日本 🙂!\n<|im_end|>"]
    assert mismatch(render, chat("Say hi", "Hello, 日本 🙂!", "again", "Hello, 日本 🙂!\n")) is None
