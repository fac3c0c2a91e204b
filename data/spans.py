"""Where a chat template put the assistant's own words: exact character spans in one rendering, or a refusal.

Looking for a reply's text in the rendering would find it in the question that quotes it; rendering turn by turn goes
wrong where a template looks ahead (drops the reasoning of all but the last answer). So the template itself is asked.
The same messages are rendered once more with a marker, which occurs nowhere else, in the place of every reply:

    marked:     A0 <marker 0> A1 <marker 1> A2
    rendering:  A0   reply 0  A1   reply 1  A2

The rendering must be the marked one with every marker replaced by its reply, as written or stripped of outer blanks,
to the last character; then the spans are known. A template that reads its replies (cuts them at `</think>`) fails this.
Its turns are found one at a time, by what moves in the rendering when one reply is replaced or gets a marker at its
end, and the text found must be the reply's own words. Whatever fails this too is refused.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headstart.data.messages import Message, SkipRow

Render = Callable[[Sequence[Message], bool], str]
"""(messages, with the generation prompt) -> text."""

FIELDS = ("reasoning_content", "content")
MARKER = re.compile("(\ue000\\d+[rc]\ue001)")


@dataclass(frozen=True)
class Span:
    """Characters start..end of the rendering are the own words of message number `turn`."""

    turn: int
    start: int
    end: int


def find_spans(render: Render, messages: Sequence[Message], text: str) -> list[Span]:
    """One span per assistant message, in order. `text` is `render(messages, False)`. Raises SkipRow."""
    turns = [turn for turn, message in enumerate(messages) if message["role"] == "assistant"]
    if any(not messages[turn]["content"].strip() for turn in turns):
        raise SkipRow("an empty answer")
    spans = _by_markers(render, messages, text, turns)
    if spans is None:
        spans = [_by_change(render, messages, text, turn) for turn in turns]
    if any(before.end > after.start for before, after in zip(spans, spans[1:], strict=False)):
        raise SkipRow("the answers can't be found exactly in what the chat template makes of them")
    return spans


def prompt_end(render: Render, messages: Sequence[Message], text: str, turn: int) -> int:
    """The character of `text` where the generation prompt for message `turn` ends, as far as both agree."""
    return len(os.path.commonprefix([text, render(messages[:turn], True)]))


def _marker(turn: int, field: str) -> str:
    # private-use characters, which no template strips, splits at or capitalises
    return f"\ue000{turn}{field[0]}\ue001"


def _replace(messages: Sequence[Message], turn: int, **fields: str) -> list[Message]:
    return [*messages[:turn], {**messages[turn], **fields}, *messages[turn + 1 :]]


def _by_markers(render: Render, messages: Sequence[Message], text: str, turns: list[int]) -> list[Span] | None:
    """All spans from one marked rendering; None where the rendering isn't the marked one with the replies put in."""
    marked_messages, slots = list(messages), {}
    for turn in turns:
        for field in FIELDS:
            if messages[turn].get(field):
                slots[_marker(turn, field)] = (turn, field)
                marked_messages = _replace(marked_messages, turn, **{field: _marker(turn, field)})
    pieces = MARKER.split(render(marked_messages, False))
    between, markers = pieces[0::2], pieces[1::2]
    # each once and in order; a template may drop reasoning, never a reply
    if markers != [marker for marker, slot in slots.items() if marker in markers or slot[1] == "content"]:
        return None

    bounds: dict[int, list[int]] = {turn: [] for turn in turns}
    position = 0
    for number, marker in enumerate(markers):
        turn, field = slots[marker]
        if not text.startswith(between[number], position):
            return None
        position += len(between[number])
        following = between[number + 1]
        rest = text[position:]
        for written in (reply := messages[turn][field], reply.rstrip(), reply.lstrip(), reply.strip()):
            after = rest[len(written) :] if number == len(markers) - 1 else rest[len(written) :][: len(following)]
            if rest.startswith(written) and after == following:
                break
        else:
            return None
        bounds[turn] += [position, position + len(written)]
        position += len(written)
    with_reasoning = {slots[marker][0] for marker in markers if slots[marker][1] != "content"}
    return [
        Span(turn, _opening(render, messages, text, turn, start) if turn in with_reasoning else start, ends[-1])
        for turn, (start, *ends) in bounds.items()
    ]


def _opening(render: Render, messages: Sequence[Message], text: str, turn: int, start: int) -> int:
    """Where the words of a turn with reasoning begin: at what opens it (`<think>`), unless the generation prompt does.

    The target writes the opening itself then. Before a reply without reasoning, an empty block is the template's own.
    """
    prompt = render(messages[:turn], True)
    return min(start, len(prompt)) if text.startswith(prompt) else start


def _by_change(render: Render, messages: Sequence[Message], text: str, turn: int) -> Span:
    """One span by two changes to its message: a marker at the end of the reply, and a marker instead of the reply."""
    refused = SkipRow("the answers can't be found exactly in what the chat template makes of them", f"turn {turn + 1}")
    message = messages[turn]
    marker = _marker(turn, "content")

    ended = render(_replace(messages, turn, content=message["content"].rstrip() + marker), False)
    end = ended.find(marker)
    blanks = len(text) - len(ended) + len(marker)  # those at the end of the reply, where the template keeps them
    if ended.count(marker) != 1 or blanks < 0 or text[end : end + blanks].strip():
        raise refused
    if ended[:end] != text[:end] or ended[end + len(marker) :] != text[end + blanks :]:
        raise refused

    fields = {field: marker for field in FIELDS if message.get(field)}
    replaced = render(_replace(messages, turn, **fields), False)
    start = len(os.path.commonprefix([text, replaced]))
    own = [letter for field in FIELDS for letter in message.get(field, "") if not letter.isspace()]
    found = [letter for letter in text[start:end] if not letter.isspace()]
    if not found or own[len(own) - len(found) :] != found:
        raise refused

    # what the reply holds before that too (`<think>`, which the replaced rendering had as well), up to the prompt's end
    first = min(prompt_end(render, messages, text, turn), start)
    unmatched, position = own[: len(own) - len(found)], start
    while position > first and (text[position - 1].isspace() or unmatched[-1:] == [text[position - 1]]):
        position -= 1
        if not text[position].isspace():
            unmatched.pop()
            start = position
    return Span(turn, start, end + blanks)
