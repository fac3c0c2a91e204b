"""One record of a data set, whatever its shape, to a `Conversation`; what can't be one is skipped with a reason.

Shapes, told apart per record by their keys (`format: auto`) or named in the recipe:

| format | keys |
| --- | --- |
| messages | `messages`: a list of `{"role", "content"}` |
| sharegpt | `conversations` (or `conversation`): a list of `{"from", "value"}` |
| turns | `turns`: a list of user prompts, to be answered in sequence (found by `auto` only) |
| alpaca | `instruction`, and `input`, `output` if any |
| prompt-response | `prompt` (or `question`), and `response` (or `completion`, `answer`) if any |
| text | `text` |
| ids | `input_ids`, with `loss_mask`, `labels` (-100 where not trained) or `prompt_tokens` |

`loss_mask` and `labels` are aligned with `input_ids`: entry j says whether token j is a label, not the token after it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
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


def parse(record: object, *, format: str = "auto", merge: bool = False, origin: str, row_id: str) -> Conversation:
    """The conversation in one record; raises `SkipRow`.

    `row_id` is used where the record has no `row_id`, `id`, `question_id` or `prompt_id` of its own. `merge` mends what
    is skipped otherwise: blanks around role names, an answer before the first question (dropped), and neighbouring
    turns of one role (joined by an empty line).
    """
    if not isinstance(record, Mapping):
        raise SkipRow("not an object", f"found {_type_name(record)}")
    shape = _detect(record) if format == "auto" else format
    content = PARSERS[shape](record, merge)
    own_id = _label(record, "row_id", "id", "question_id", "prompt_id")
    return Conversation(
        row_id=own_id or row_id,
        origin=origin,
        kind=_label(record, "kind", "category"),
        topic=_label(record, "topic"),
        cut=record.get("cut") is True,
        **content,
    )


def _detect(record: Mapping[str, Any]) -> str:
    for key, shape in KEYS.items():
        if record.get(key) is not None:
            return shape
    for key, shape in KEYS.items():  # the field is there, but null: let its parser say so
        if key in record:
            return shape
    raise SkipRow("no field of a known format", f"fields: {', '.join(map(str, record)) or 'none'}")


def _messages(record: Mapping[str, Any], merge: bool) -> dict[str, Any]:
    return {"messages": _chat(_field(record, "messages"), merge)}


def _sharegpt(record: Mapping[str, Any], merge: bool) -> dict[str, Any]:
    return {"messages": _chat(_field(record, "conversations", "conversation"), merge)}


def _turns(record: Mapping[str, Any], merge: bool) -> dict[str, Any]:
    turns = _field(record, "turns")
    return {"messages": _chat([{"role": "user", "content": turn} for turn in _as_list(turns)], merge=False)}


def _alpaca(record: Mapping[str, Any], merge: bool) -> dict[str, Any]:
    question = _text(_field(record, "instruction"), "instruction")
    if record.get("input"):
        question = f"{question}\n\n{_text(record['input'], 'input')}"
    return {"messages": _exchange(record, question, ("output", "response"))}


def _prompt_response(record: Mapping[str, Any], merge: bool) -> dict[str, Any]:
    prompt = _field(record, "prompt", "question")
    answer_keys = ("response", "completion", "answer")
    if isinstance(prompt, list):  # both halves are lists of messages
        answer = next((record[key] for key in answer_keys if record.get(key) is not None), [])
        answer = [{"role": "assistant", "content": answer}] if isinstance(answer, str) else _as_list(answer)
        return {"messages": _chat([*prompt, *answer], merge)}
    return {"messages": _exchange(record, _text(prompt, "prompt"), answer_keys)}


def _exchange(record: Mapping[str, Any], question: str, answer_keys: tuple[str, ...]) -> tuple[Message, ...]:
    messages = [{"role": "system", "content": _text(record["system"], "system")}] if record.get("system") else []
    messages.append({"role": "user", "content": question})
    for key in answer_keys:
        if record.get(key) is not None:
            messages.append({"role": "assistant", "content": _text(record[key], key)})
            break
    return _chat(messages, merge=False)


def _plain_text(record: Mapping[str, Any], merge: bool) -> dict[str, Any]:
    text = _text(_field(record, "text"), "text")
    if not text.strip():
        raise SkipRow("empty text")
    return {"text": text}


def _ids(record: Mapping[str, Any], merge: bool) -> dict[str, Any]:
    ids = _field(record, "input_ids")
    if not isinstance(ids, list) or not all(type(token) is int and token >= 0 for token in ids):
        raise SkipRow("field 'input_ids' is not a list of token ids")
    if not ids:
        raise SkipRow("no tokens")
    return {"input_ids": tuple(ids), "supervised": _mask(record, len(ids))}


def _mask(record: Mapping[str, Any], length: int) -> tuple[bool, ...]:
    if record.get("prompt_tokens") is not None:
        prompt = record["prompt_tokens"]
        if type(prompt) is not int or prompt < 0:
            raise SkipRow("field 'prompt_tokens' is not a count", repr(prompt))
        return tuple(position >= prompt for position in range(length))
    for key in ("loss_mask", "labels"):
        mask = record.get(key)
        if mask is None:
            continue
        allowed = int if key == "labels" else (bool, int)
        if not isinstance(mask, list) or len(mask) != length or not all(isinstance(entry, allowed) for entry in mask):
            raise SkipRow(f"field '{key}' does not fit 'input_ids'", f"{length} numbers expected")
        return tuple(entry != -100 if key == "labels" else bool(entry) for entry in mask)
    raise SkipRow("tokens without 'loss_mask', 'labels' or 'prompt_tokens'")


PARSERS: dict[str, Callable[[Mapping[str, Any], bool], dict[str, Any]]] = {
    "messages": _messages,
    "sharegpt": _sharegpt,
    "turns": _turns,
    "alpaca": _alpaca,
    "prompt-response": _prompt_response,
    "text": _plain_text,
    "ids": _ids,
}
KEYS = {  # in order: a record with both `messages` and `prompt` is a chat
    "input_ids": "ids",
    "messages": "messages",
    "conversations": "sharegpt",
    "conversation": "sharegpt",
    "turns": "turns",
    "instruction": "alpaca",
    "prompt": "prompt-response",
    "question": "prompt-response",
    "text": "text",
}


def _chat(turns: object, merge: bool) -> tuple[Message, ...]:
    messages = [_message(turn, merge) for turn in _as_list(turns)]
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
        raise SkipRow("a turn is not an object", f"found {_type_name(turn)}")
    role_key = "role" if "role" in turn else "from"
    content_key = "content" if "content" in turn or "value" not in turn else "value"
    role = _role(turn.get(role_key), merge)
    if turn.get("tool_calls") or turn.get("function_call"):
        raise SkipRow("tool calls")
    message = {"role": role, "content": _text(turn.get(content_key), content_key)}
    reasoning = turn.get("reasoning_content") or turn.get("reasoning")
    if reasoning and role == "assistant":
        message["reasoning_content"] = _text(reasoning, "reasoning_content")
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


def _field(record: Mapping[str, Any], *keys: str) -> Any:
    for key in keys:
        if record.get(key) is not None:
            return record[key]
    if any(key in record for key in keys):
        raise SkipRow("no turns" if keys[0] in ("messages", "conversations", "turns") else f"field '{keys[0]}' is null")
    raise SkipRow(f"no field '{keys[0]}'", f"fields: {', '.join(map(str, record)) or 'none'}")


def _as_list(value: object) -> list[Any]:
    """A list of turns; some files hold it as JSON inside a string."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise SkipRow("the list of turns is broken JSON", str(error)) from None
    if not isinstance(value, list | tuple):
        raise SkipRow("the turns are not a list", f"found {_type_name(value)}")
    return list(value)


def _text(value: object, field: str) -> str:
    """Text as a string, as text parts (joined), or as a whole number; the type may differ from record to record."""
    if isinstance(value, str):
        return value
    if type(value) is int:
        return str(value)
    if isinstance(value, Mapping):
        value = [value]
    if isinstance(value, list):
        return "".join(_part(part, field) for part in value)
    raise SkipRow(f"field '{field}' is {_type_name(value)}", "text expected")


def _part(part: object, field: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        raise SkipRow(f"a part of field '{field}' is {_type_name(part)}", "text expected")
    kind = part.get("type") or ("text" if isinstance(part.get("text"), str) else "unknown")
    if "image" in str(kind):
        raise SkipRow("image part")
    if kind not in TEXT_PARTS or not isinstance(part.get("text"), str):
        raise SkipRow(f"{kind} part")
    return part["text"]


def _is_label(value: object) -> bool:
    return (isinstance(value, str) and bool(value)) or type(value) is int


def _label(record: Mapping[str, Any], *keys: str) -> str | None:
    return next((str(record[key]) for key in keys if _is_label(record.get(key))), None)


def _type_name(value: object) -> str:
    names = {type(None): "null", bool: "a truth value", int: "a number", float: "a number", str: "a string"}
    return names.get(type(value), "a list" if isinstance(value, list | tuple) else "an object")
