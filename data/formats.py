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

from collections.abc import Callable, Mapping
from typing import Any

from headstart.data.messages import Conversation, Message, SkipRow, chat, list_of, text_of, type_name


def parse(record: object, *, format: str = "auto", merge: bool = False, origin: str, row_id: str) -> Conversation:
    """The conversation in one record; raises `SkipRow`.

    `row_id` is used where the record has no `row_id`, `id`, `question_id` or `prompt_id` of its own. `merge` mends what
    is skipped otherwise: blanks around role names, an answer before the first question (dropped), and neighbouring
    turns of one role (joined by an empty line).
    """
    if not isinstance(record, Mapping):
        raise SkipRow("not an object", f"found {type_name(record)}")
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
    return {"messages": chat(_field(record, "messages"), merge)}


def _sharegpt(record: Mapping[str, Any], merge: bool) -> dict[str, Any]:
    return {"messages": chat(_field(record, "conversations", "conversation"), merge)}


def _turns(record: Mapping[str, Any], merge: bool) -> dict[str, Any]:
    turns = _field(record, "turns")
    return {"messages": chat([{"role": "user", "content": turn} for turn in list_of(turns)], merge=False)}


def _alpaca(record: Mapping[str, Any], merge: bool) -> dict[str, Any]:
    question = text_of(_field(record, "instruction"), "instruction")
    if record.get("input"):
        question = f"{question}\n\n{text_of(record['input'], 'input')}"
    return {"messages": _exchange(record, question, ("output", "response"))}


def _prompt_response(record: Mapping[str, Any], merge: bool) -> dict[str, Any]:
    prompt = _field(record, "prompt", "question")
    answer_keys = ("response", "completion", "answer")
    if isinstance(prompt, list):  # both halves are lists of messages
        answer = next((record[key] for key in answer_keys if record.get(key) is not None), [])
        answer = [{"role": "assistant", "content": answer}] if isinstance(answer, str) else list_of(answer)
        return {"messages": chat([*prompt, *answer], merge)}
    return {"messages": _exchange(record, text_of(prompt, "prompt"), answer_keys)}


def _exchange(record: Mapping[str, Any], question: str, answer_keys: tuple[str, ...]) -> tuple[Message, ...]:
    messages = [{"role": "system", "content": text_of(record["system"], "system")}] if record.get("system") else []
    messages.append({"role": "user", "content": question})
    for key in answer_keys:
        if record.get(key) is not None:
            messages.append({"role": "assistant", "content": text_of(record[key], key)})
            break
    return chat(messages, merge=False)


def _plain_text(record: Mapping[str, Any], merge: bool) -> dict[str, Any]:
    text = text_of(_field(record, "text"), "text")
    if not text.strip():
        raise SkipRow("empty text")
    return {"text": text}


def _ids(record: Mapping[str, Any], merge: bool) -> dict[str, Any]:
    ids = _field(record, "input_ids")
    if not isinstance(ids, list) or not all(type(token) is int and 0 <= token < 2**31 for token in ids):
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


def _field(record: Mapping[str, Any], *keys: str) -> Any:
    for key in keys:
        if record.get(key) is not None:
            return record[key]
    if any(key in record for key in keys):
        raise SkipRow("no turns" if keys[0] in ("messages", "conversations", "turns") else f"field '{keys[0]}' is null")
    raise SkipRow(f"no field '{keys[0]}'", f"fields: {', '.join(map(str, record)) or 'none'}")


def _is_label(value: object) -> bool:
    return (isinstance(value, str) and bool(value)) or type(value) is int


def _label(record: Mapping[str, Any], *keys: str) -> str | None:
    found = next((str(record[key]) for key in keys if _is_label(record.get(key))), None)
    return found and found.encode(errors="replace").decode()
