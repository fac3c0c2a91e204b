"""Conversations to token rows: one rendering by the chat template, tokenised once, with labels by position.

    renderer = ChatRenderer(tokenizer, recipe.data.chat)
    row = renderer.row(conversation, max_length=2048)     # training
    ids = renderer.prompt(messages)                       # distilling, evaluating, generating

Labels are what the target itself writes at run time: the words of its turn and the token that ends the turn. Headers,
questions and whatever the generation prompt supplies (an empty think block) are context.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import jinja2
from transformers import BatchEncoding, PreTrainedTokenizerBase

from headstart.data.messages import Conversation, Message, SkipRow, role_list
from headstart.data.spans import find_spans, prompt_end
from headstart.errors import DataError
from headstart.recipe import ChatSection

NOTHING_LEFT = "no supervised token left"


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

    def row(self, conversation: Conversation, max_length: int) -> Row:
        """The conversation's tokens and labels, cut to `max_length`. Raises SkipRow where it teaches nothing, or where
        its labels can't be told exactly."""
        if conversation.messages is not None:
            input_ids, supervised = self._chat(conversation)
        elif conversation.text is not None:
            input_ids, supervised = self._text(conversation.text)
        else:
            input_ids, supervised = list(conversation.input_ids or ()), list(conversation.supervised or ())
        if not any(supervised):
            raise SkipRow("no supervised token", tokens=len(input_ids))
        truncated = len(input_ids) > max_length
        if not any(supervised[:max_length]):
            before = supervised.index(True)
            raise SkipRow(NOTHING_LEFT, f"{before} tokens before the first, {max_length} kept", tokens=len(input_ids))
        return Row(
            row_id=conversation.row_id,
            input_ids=input_ids[:max_length],
            supervised=supervised[:max_length],
            kind=conversation.kind,
            topic=conversation.topic,
            origin=conversation.origin,
            truncated=truncated,
        )

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of the messages with the generation prompt: what the target reads before it answers.

        Raises SkipRow, a DataError, where the template refuses them.
        """
        return self._encode(self._render(self._with_system(messages), True))["input_ids"]

    def text_prompt(self, text: str) -> list[int]:
        """Token ids of plain text, with the special tokens that the tokenizer adds by itself."""
        return self.tokenizer(text, verbose=False)["input_ids"]

    def prompt_mismatch(self, conversation: Conversation, row: Row) -> str | None:
        """How the last answer's context in `row` differs from the prompt met at run time; None where it doesn't.

        The ids of the prompt must be the beginning of the row, and nothing may stand between it and the first label.
        """
        if conversation.messages is None:
            return None
        messages = self._with_system(conversation.messages)
        last = max(turn for turn, message in enumerate(messages) if message["role"] == "assistant")
        prompt = self._encode(self._render(messages[:last], True))["input_ids"]
        for position, (expected, found) in enumerate(zip(prompt, row.input_ids, strict=False)):
            if expected != found:
                return f"token {position} is {self._name(found)} in the row, {self._name(expected)} in the prompt"
        between = row.supervised[len(prompt) :]
        if not between or between[0] or not any(between):
            return None
        extra = row.input_ids[len(prompt) : len(prompt) + between.index(True)]
        return f"the row has {self.tokenizer.decode(extra)!r} before the answer, and the prompt hasn't"

    def _chat(self, conversation: Conversation) -> tuple[list[int], list[bool]]:
        messages = self._with_system(conversation.messages or ())
        while messages and messages[-1]["role"] != "assistant":  # nothing to learn from a question without an answer
            messages.pop()
        if not messages:
            raise SkipRow("no assistant turn", role_list(conversation.messages or ()))
        text = self._render(messages, False)
        spans = find_spans(self._render, messages, text)
        if self.chat.supervise == "last":
            spans = spans[-1:]
        encoded = self._encode(text)
        input_ids, offsets = encoded["input_ids"], encoded["offset_mapping"]
        starts, ends = [start for start, _ in offsets], [end for _, end in offsets]
        if starts != sorted(starts) or ends != sorted(ends):
            raise SkipRow("the tokenizer's offsets are out of order")
        supervised = [False] * len(input_ids)
        for span in spans:
            first = bisect_right(ends, span.start)
            if first < len(starts) and starts[first] < span.start:
                # a token across the border (" Hi" after "assistant:"): the target writes it if its prompt ends before
                first += starts[first] < prompt_end(self._render, messages, text, span.turn)
            last = bisect_left(starts, span.end)
            if not (conversation.cut and span is spans[-1]):
                last = self._turn_end(input_ids, offsets, text, last)
            supervised[first:last] = [True] * (last - first)
        return input_ids, supervised

    def _turn_end(self, input_ids: list[int], offsets: list[tuple[int, int]], text: str, after: int) -> int:
        """One past the token that ends a turn whose words end before token `after`; `after` where no token ends it."""
        for position in range(after, len(input_ids)):
            if input_ids[position] in self._added_ids:
                return position + 1
            start, end = offsets[position]
            if text[start:end].strip():
                break
        return after

    def _text(self, text: str) -> tuple[list[int], list[bool]]:
        encoded = self.tokenizer(text, return_special_tokens_mask=True, verbose=False)
        return encoded["input_ids"], [not special for special in encoded["special_tokens_mask"]]

    def _with_system(self, messages: Sequence[Message]) -> list[Message]:
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
            return self.tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=generation_prompt, **self.chat.arguments
            )
        except (jinja2.TemplateError, TypeError, KeyError, ValueError) as error:
            raise SkipRow(f"the chat template refuses it: {error}", role_list(list(messages))) from None

    def _encode(self, text: str) -> BatchEncoding:
        # the template has written every special token that belongs there; the tokenizer must not add a second begin
        return self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)

    def _name(self, token: int) -> str:
        return f"{token} {self.tokenizer.decode([token])!r}"


def first_label(row: Row) -> int:
    """Position of the first label: the length of the row's prompt."""
    return row.supervised.index(True)


def label_runs(row: Row) -> list[tuple[int, int]]:
    """The runs of labels in a row, as (first, one past the last) positions."""
    edges = [False, *row.supervised, False]
    changes = [position for position in range(len(row.supervised) + 1) if edges[position] != edges[position + 1]]
    return list(zip(changes[0::2], changes[1::2], strict=True))
