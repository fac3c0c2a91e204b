"""Conversations to token rows: one rendering by the chat template, tokenised once, with labels by position.

    renderer = ChatRenderer(tokenizer, recipe.data.chat)
    row = renderer.row(conversation, max_length=2048)     # training
    ids = renderer.prompt(messages)                       # distilling, evaluating, generating

Labels are what the target itself writes at run time: the words of its turn and the token that ends the turn. Headers,
questions and whatever the generation prompt supplies (an empty think block) are context.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import jinja2
from transformers import BatchEncoding, PreTrainedTokenizerBase

from headstart.data.messages import Conversation, Message, SkipRow, role_list
from headstart.data.spans import Span, find_spans, prompt_end
from headstart.errors import DataError
from headstart.recipe import ChatSection

CHUNK = 256


@dataclass(frozen=True)
class Row:
    """One conversation as tokens."""

    row_id: str
    input_ids: list[int]
    supervised: list[bool]
    """Entry j is true where token j is a label: a word of the target's own, or the token that ends its turn."""
    kind: str | None = None
    topic: str | None = None
    origin: str = ""
    """Where it was read: `file:line`."""
    truncated: bool = False
    """The end was cut off by the length limit."""


@dataclass(frozen=True)
class Rendered:
    """What became of one conversation: a row, or the reason why there is none."""

    conversation: Conversation
    row: Row | None = None
    why: SkipRow | None = None
    mismatch: str | None = None
    """How the context of the row's last answer differs from the prompt that is met at run time; None: it doesn't."""


@dataclass(frozen=True)
class _Chat:
    """A conversation as text: its one rendering, where the own words are, and the prompt of the last answer."""

    messages: list[Message]
    text: str
    spans: list[Span]
    last_prompt: str


class ChatRenderer:
    """Renders with one tokenizer and one set of template arguments; every stage of a recipe uses the same one."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, chat: ChatSection):
        if not tokenizer.is_fast:
            raise DataError(
                f"The tokenizer {type(tokenizer).__name__} doesn't say which characters a token covers; expected a "
                "fast tokenizer, one with a tokenizer.json."
            )
        self.tokenizer = tokenizer
        self.chat = chat
        # what can end a turn: tokens that the text is split at before any merge
        self._added_ids = {id for id, token in tokenizer.added_tokens_decoder.items() if token.content.strip()}

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of the messages with the generation prompt: what the target reads before it answers.

        Raises SkipRow, a DataError, where the template refuses them.
        """
        return self._encode([self._render(self.with_system(messages), True)])["input_ids"][0]

    def text_prompt(self, text: str) -> list[int]:
        """Token ids of plain text, with the special tokens that the tokenizer adds by itself."""
        return self.tokenizer(text, verbose=False)["input_ids"]

    def row(self, conversation: Conversation, max_length: int) -> Row:
        """The conversation's tokens and labels, cut to `max_length`. Raises SkipRow where it teaches nothing, or where
        its labels can't be told exactly."""
        (rendered,) = self.rows([conversation], max_length)
        if rendered.row is None:
            assert rendered.why is not None
            raise rendered.why
        return rendered.row

    def rows(self, conversations: Iterable[Conversation], max_length: int) -> Iterator[Rendered]:
        """Every conversation in order, with its row or the reason why there is none."""
        conversations = iter(conversations)
        while chunk := list(itertools.islice(conversations, CHUNK)):  # tokenised together, on all cores
            laid_out = [self._lay_out(conversation) for conversation in chunk]
            chats = [chat for chat in laid_out if isinstance(chat, _Chat)]
            texts = [text for chat in chats for text in (chat.text, chat.last_prompt)]
            encoded = self._encode(texts) if texts else {"input_ids": [], "offset_mapping": []}
            tokens = zip(encoded["input_ids"], encoded["offset_mapping"], strict=True)
            for conversation, chat in zip(chunk, laid_out, strict=True):
                try:
                    if isinstance(chat, SkipRow):
                        yield Rendered(conversation, why=chat)
                        continue
                    if chat is None:
                        row = _cut(conversation, *self._without_template(conversation), max_length)
                        yield Rendered(conversation, row)
                        continue
                    (input_ids, offsets), (prompt, _) = next(tokens), next(tokens)
                    row = _cut(
                        conversation, input_ids, self._labels(conversation, chat, input_ids, offsets), max_length
                    )
                    yield Rendered(conversation, row, mismatch=self._mismatch(prompt, row))
                except SkipRow as why:
                    yield Rendered(conversation, why=why)

    def _lay_out(self, conversation: Conversation) -> _Chat | SkipRow | None:
        """The rendering of a chat, or why there is none; None for what needs no template."""
        if conversation.messages is None:
            return None
        messages = self.with_system(conversation.messages)
        while messages and messages[-1]["role"] != "assistant":  # nothing to learn from a question without an answer
            messages.pop()
        try:
            if not messages:
                raise SkipRow("no assistant turn", role_list(conversation.messages))
            text = self._render(messages, False)
            spans = find_spans(self._render, messages, text)
            if self.chat.supervise == "last":
                spans = spans[-1:]
            return _Chat(messages, text, spans, self._render(messages[:-1], True))
        except SkipRow as why:
            return why

    def _labels(
        self, conversation: Conversation, chat: _Chat, input_ids: list[int], offsets: list[tuple[int, int]]
    ) -> list[bool]:
        starts, ends = [start for start, _ in offsets], [end for _, end in offsets]
        if starts != sorted(starts) or ends != sorted(ends):
            raise SkipRow("the tokenizer's offsets are out of order")
        supervised = [False] * len(input_ids)
        for span in chat.spans:
            first = bisect_right(ends, span.start)
            if first < len(starts) and starts[first] < span.start:
                # a token across the border (" Hi" after "assistant:"): the target writes it if its prompt ends before
                first += starts[first] < prompt_end(self._render, chat.messages, chat.text, span.turn)
            last = bisect_left(starts, span.end)
            if not (conversation.cut and span is chat.spans[-1]):
                last = self._turn_end(input_ids, offsets, chat.text, last)
            supervised[first:last] = [True] * (last - first)
        return supervised

    def _turn_end(self, input_ids: list[int], offsets: list[tuple[int, int]], text: str, after: int) -> int:
        """One past the token that ends a turn whose words end before token `after`; `after` where no token ends it."""
        for position in range(after, len(input_ids)):
            if input_ids[position] in self._added_ids:
                return position + 1
            start, end = offsets[position]
            if text[start:end].strip():
                break
        return after

    def _mismatch(self, prompt: list[int], row: Row) -> str | None:
        """The prompt must be the beginning of the row, and nothing may stand between it and the first label."""
        for position, (expected, found) in enumerate(zip(prompt, row.input_ids, strict=False)):
            if expected != found:
                return f"token {position} is {self._name(found)} in the row, {self._name(expected)} in the prompt"
        between = row.supervised[len(prompt) :]
        if not any(between) or between[0]:
            return None
        extra = row.input_ids[len(prompt) : len(prompt) + between.index(True)]
        return f"the row has {decode(self.tokenizer, extra)!r} before the answer, and the prompt hasn't"

    def _without_template(self, conversation: Conversation) -> tuple[list[int], list[bool]]:
        if conversation.text is None:
            return list(conversation.input_ids or ()), list(conversation.supervised or ())
        encoded = self.tokenizer(conversation.text, return_special_tokens_mask=True, verbose=False)
        return encoded["input_ids"], [not special for special in encoded["special_tokens_mask"]]

    def with_system(self, messages: Sequence[Message]) -> list[Message]:
        """The messages with the recipe's system turn before them, where they have none."""
        if self.chat.system is None or (messages and messages[0]["role"] in ("system", "developer")):
            return list(messages)
        return [{"role": "system", "content": self.chat.system}, *messages]

    def _render(self, messages: Sequence[Message], generation_prompt: bool) -> str:
        if self.tokenizer.chat_template is None:
            raise DataError(
                f"The tokenizer of {self.tokenizer.name_or_path or 'this target'} has no chat template; chats can't be "
                "rendered: use an instruction-tuned target, or rows of plain text."
            )
        try:
            text = self.tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=generation_prompt, **self.chat.arguments
            )
        except (jinja2.TemplateError, TypeError, KeyError, ValueError) as error:
            raise SkipRow(f"the chat template refuses it: {error}", role_list(list(messages))) from None
        assert isinstance(text, str)
        return text

    def _encode(self, texts: list[str]) -> BatchEncoding:
        # the template has written every special token that belongs there; the tokenizer must not add a second begin
        return self.tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True, verbose=False)

    def _name(self, token: int) -> str:
        return f"{token} {decode(self.tokenizer, [token])!r}"


def _cut(conversation: Conversation, input_ids: list[int], supervised: list[bool], max_length: int) -> Row:
    """The row, cut to `max_length` tokens, if there is something to learn left."""
    if not any(supervised):
        raise SkipRow("no supervised token", tokens=len(input_ids))
    if not any(supervised[:max_length]):
        detail = f"{supervised.index(True)} tokens before the first, {max_length} kept"
        raise SkipRow("no supervised token left", detail, tokens=len(input_ids))
    return Row(
        row_id=conversation.row_id,
        input_ids=input_ids[:max_length],
        supervised=supervised[:max_length],
        kind=conversation.kind,
        topic=conversation.topic,
        origin=conversation.origin,
        truncated=len(input_ids) > max_length,
    )


def decode(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int]) -> str:
    """The text of the tokens, special ones spelt out."""
    text = tokenizer.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    assert isinstance(text, str)
    return text


def label_runs(row: Row) -> list[tuple[int, int]]:
    """The runs of labels in a row, as (first, one past the last) positions."""
    edges = [False, *row.supervised, False]
    changes = [position for position in range(len(row.supervised) + 1) if edges[position] != edges[position + 1]]
    return list(zip(changes[0::2], changes[1::2], strict=True))
