"""Turns of a conversation: roles by any of their names, contents of any type that holds text, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headstart.errors import DataError

Message = dict[str, str]
"""`role`, `content`, and `reasoning_content` where the turn has one."""

ROLES = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
}
TOOL_ROLES = frozenset({"tool", "function", "function_call", "observation", "ipython", "tool_call", "tool_response"})
TEXT_PARTS = frozenset({"text", "input_text", "output_text"})


class SkipRow(DataError):
    """This row can't be used. `reason` is the same for all rows of the kind, `detail` is this row's own.

    `tokens`: its length, where it was rendered before it was found to be of no use.
    """

    def __init__(self, reason: str, detail: str = "", *, tokens: int = 0):
        super().__init__(f"{reason} ({detail})" if detail else reason)
        self.reason = reason
        self.detail = detail
        self.tokens = tokens


class UnknownRole(SkipRow):
    """A turn's role that is no known role."""

    def __init__(self, role: object):
        super().__init__("unknown role", repr(role))
        self.role = str(role)


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """One row of a data set: `messages`, or `text`, or `input_ids` with `supervised`; exactly one of the three."""

    row_id: str
    """Unique among the rows of a recipe: the record's own id where it has one, else its place."""
    origin: str
    """Where it stands: `chats.jsonl:12`, counted from 1."""
    messages: tuple[Message, ...] | None = None
    text: str | None = None
    input_ids: tuple[int, ...] | None = None
    supervised: tuple[bool, ...] | None = None
    """By position of the token itself: entry j is true where token j is a label."""
    kind: str | None = None
    topic: str | None = None
    cut: bool = False
    """The last answer was ended by a limit of tokens, so the target never chose to end it there."""

    @property
    def file(self) -> str:
        """The part of `origin` before the line number: the name of the report that counts this row."""
        return self.origin.rpartition(":")[0]


def chat(turns: object, merge: bool) -> tuple[Message, ...]:
    """The turns of a record as messages; at least one is the user's, and none of the assistant's comes before it."""
    messages = [_message(turn, merge) for turn in list_of(turns)]
    if not messages:
        raise SkipRow("no turns")
    if merge:
        messages = _merge(messages)
    roles = [message["role"] for message in messages]
    if "user" not in roles:
        raise SkipRow("no user turn", role_list(messages))
    if "assistant" in roles and roles.index("assistant") < roles.index("user"):
        raise SkipRow("opens with the assistant", role_list(messages))
    return tuple(messages)


def check_exchange(messages: tuple[Message, ...]) -> None:
    """Raises SkipRow unless the user and the assistant take turns; system turns may stand anywhere."""
    roles = [message["role"] for message in messages if message["role"] in ("user", "assistant")]
    if "assistant" not in roles:
        raise SkipRow("no assistant turn", role_list(messages))
    if any(before == after for before, after in zip(roles, roles[1:], strict=False)):
        raise SkipRow("the roles don't alternate", role_list(messages))


def _merge(messages: list[Message]) -> list[Message]:
    """Without answers to no question, and with neighbours of one role made one turn."""
    merged: list[Message] = []
    for message in messages:
        role = message["role"]
        if role == "assistant" and not any(earlier["role"] == "user" for earlier in merged):
            continue
        if merged and merged[-1]["role"] == role and "reasoning_content" not in message:
            merged[-1] = {**merged[-1], "content": f"{merged[-1]['content']}\n\n{message['content']}"}
        else:
            merged.append(message)
    return merged


def _message(turn: object, merge: bool) -> Message:
    if not isinstance(turn, Mapping):
        raise SkipRow("a turn is not an object", f"found {type_name(turn)}")
    role_key = "role" if "role" in turn else "from"
    content_key = "content" if "content" in turn or "value" not in turn else "value"
    role = _role(turn.get(role_key), merge)
    if turn.get("tool_calls") or turn.get("function_call"):
        raise SkipRow("tool calls")
    message = {"role": role, "content": text_of(turn.get(content_key), content_key)}
    reasoning = turn.get("reasoning_content") or turn.get("reasoning")
    if reasoning and role == "assistant":
        message["reasoning_content"] = text_of(reasoning, "reasoning_content")
    return message


def _role(name: object, merge: bool) -> str:
    if not isinstance(name, str):
        raise UnknownRole(name)
    name = name.strip().lower() if merge else name
    if name in TOOL_ROLES:
        raise SkipRow("tool calls")
    if name not in ROLES:
        raise UnknownRole(name)
    return ROLES[name]


def role_list(messages: tuple[Message, ...] | list[Message]) -> str:
    """`roles: user, user, assistant`: what to look for in the line that a message names."""
    return "roles: " + ", ".join(message["role"] for message in messages)


def list_of(value: object) -> list[Any]:
    """A list of turns; some files hold it as JSON inside a string."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise SkipRow("the list of turns is broken JSON", str(error)) from None
    if not isinstance(value, list | tuple):
        raise SkipRow("the turns are not a list", f"found {type_name(value)}")
    return list(value)


def text_of(value: object, field: str) -> str:
    """Text as a string, as text parts (joined), or as a whole number; the type may differ from record to record."""
    if type(value) is int:
        value = str(value)
    parts = value if isinstance(value, list) else [value]
    if not isinstance(value, str | list | Mapping):
        raise SkipRow(f"field '{field}' is {type_name(value)}", "text expected")
    text = "".join(_part(part, field) for part in parts)
    try:
        text.encode()
    except UnicodeEncodeError:  # JSON allows half a surrogate pair; no tokenizer does
        raise SkipRow("half a character", f"field '{field}'") from None
    return text


def _part(part: object, field: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        raise SkipRow(f"a part of field '{field}' is {type_name(part)}", "text expected")
    kind = part.get("type") or ("text" if isinstance(part.get("text"), str) else "unknown")
    if "image" in str(kind):
        raise SkipRow("image part")
    if kind not in TEXT_PARTS or not isinstance(part.get("text"), str):
        raise SkipRow(f"{kind} part")
    return part["text"]


def type_name(value: object) -> str:
    names = {type(None): "null", bool: "a truth value", int: "a number", float: "a number", str: "a string"}
    return names.get(type(value), "a list" if isinstance(value, list | tuple) else "an object")
