"""The target answers the prompts itself: heads learn best from its own words.

    done = distill(prompts, generate, renderer, "answers.jsonl", settings=..., temperature=0.0)

`generate` is handed in (the engine's, or a server's client), since data knows nothing of decoding: it takes an iterator
of `Question` and gives an `Answer` for each, in any order, as they finish. It should draw questions only as it has room
for them, for the second question of a chat is asked as soon as the first is answered.

Every finished conversation is one line, written and flushed at once. A run that was killed goes on with the rows that
are not yet there, by row id; a last line without its end is dropped and done again.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from headstart.atomic import write_text
from headstart.data.checked_rows import intact, to_line
from headstart.data.formats import parse
from headstart.data.messages import Conversation, Message, SkipRow
from headstart.data.progress import Progress
from headstart.data.rendering import ChatRenderer
from headstart.data.reports import SkipReport
from headstart.data.sources import read_all, with_limit
from headstart.errors import DataError, naming
from headstart.recipe import Recipe


@dataclass(frozen=True)
class Question:
    """One turn to be answered. `messages` and `prompt_ids` are the same thing, for a server and for the engine."""

    request_id: str
    messages: tuple[Message, ...]
    prompt_ids: list[int]
    seed: int
    """For sampling: follows from the row id, so an answer doesn't depend on its neighbours or on a restart."""


@dataclass(frozen=True)
class Answer:
    """`cut`: ended by a limit of tokens and not by the target."""

    request_id: str
    text: str
    cut: bool
    num_tokens: int = 0
    reasoning: str = ""
    """What the target thought before it, where whoever answers tells the two apart."""
    refused: SkipRow | None = None
    """Why there is no answer: its conversation is skipped, and asked again when the same command is run again."""
    token_ids: Sequence[int] = ()
    """Prompt and answer as the target read them, where `states` come along."""
    states: Mapping[str, Tensor] | None = None
    """The target's states of the first of these tokens, under the names of the feature cache, each [tokens, dim]."""


Generate = Callable[[Iterator[Question]], Iterable[Answer]]
Finished = Callable[[Conversation, Answer], None]
"""Is given every conversation as it will be read again, with its last answer."""


@dataclass
class _Chat:
    """A conversation on its way: the questions still to come, each with the turns before it, and what was said."""

    conversation: Conversation
    questions: deque[list[Message]]
    said: list[Message] = field(default_factory=list)
    num_asked: int = 0


def distill(
    prompts: Iterable[Conversation],
    generate: Generate,
    renderer: ChatRenderer,
    output: str | Path,
    *,
    settings: dict[str, Any],
    temperature: float = 0.0,
    seed: int = 0,
    max_prompt_tokens: int | None = None,
    progress: Progress | None = None,
    finished: Finished | None = None,
) -> SkipReport:
    """Answers every user turn of every prompt in sequence; other people's answers in the prompts are left out.

    Appends {"row_id", "kind", "topic", "messages", "cut", "temperature", "check"} lines to `output`. An answer that is
    cut, or empty, ends its conversation. settings: what the answers depend on (target, lengths, sampling); they are
    kept beside the output, and going on with other ones is refused. max_prompt_tokens: longer prompts are skipped and
    counted.
    finished: is told of every conversation once its line is written.
    Returns the count of prompts and of those skipped, by reason; what an earlier run answered counts as kept.
    """
    output = Path(output)
    _check_settings(output, settings)
    report = SkipReport(str(output))
    waiting: dict[str, _Chat] = {}
    follow_ups: deque[_Chat] = deque()
    shown = progress or Progress("answering", extra="tokens")
    lines = _open_alone(output)
    fresh = _new_chats(prompts, _written(output), report, shown)

    def questions() -> Iterator[Question]:
        while (chat := follow_ups.popleft() if follow_ups else next(fresh, None)) is not None:
            try:
                question = _ask(chat, renderer, seed, max_prompt_tokens)
            except SkipRow as why:
                report.skip(chat.conversation.origin, why)
                continue
            waiting[question.request_id] = chat
            yield question

    with lines, shown:
        more = True
        while more:  # again where second questions came up after the last first question was drawn
            for answer in generate(questions()):
                chat = waiting.pop(answer.request_id)
                if answer.refused is not None:
                    report.skip(chat.conversation.origin, answer.refused)
                    continue
                chat.said.append(_turn(answer))
                if chat.questions and not answer.cut and answer.text.strip():
                    follow_ups.append(chat)
                    shown.add(0, answer.num_tokens)
                    continue
                row = _finished(chat, answer.cut, temperature)
                with naming(output):
                    _append(lines, to_line(row))
                if finished is not None:
                    finished(parse(row, origin=str(output), row_id=row["row_id"]), answer)
                shown.add(1, answer.num_tokens)
            more = bool(follow_ups)
    if waiting:
        raise DataError(f"{len(waiting)} questions were not answered; the same command goes on with them.")
    if not report.rows:
        raise DataError("There are no prompts to answer; name a file with at least one user turn in it.")
    return report


def run(
    recipe: Recipe,
    output: str | Path,
    *,
    tokenizer: PreTrainedTokenizerBase,
    generate: Generate,
    limit: int | None = None,
    max_prompt_tokens: int | None = None,
    finished: Finished | None = None,
    served_as: str | None = None,
) -> SkipReport:
    """`headstart data distill`: answers the prompts of all sources of a recipe, held-out ones too; prints the counts.

    limit: the first so many rows of each source. served_as: the name of the model on the server that answers.
    """
    section = recipe.data.distill
    recipe = with_limit(recipe, limit)
    reports: dict[str, SkipReport] = {}
    progress = Progress("answering", extra="tokens")
    sources = [*recipe.data.train, *recipe.data.held_out.sources]
    report = distill(
        read_all(sources, reports, answers=False, announce=progress.expect),
        generate,
        ChatRenderer(tokenizer, recipe.data.chat),
        output,
        settings={
            "target": recipe.target.name,
            "revision": recipe.target.revision,
            "chat": recipe.data.chat.model_dump(exclude={"supervise"}),
            "max_new_tokens": section.max_new_tokens,
            "temperature": section.temperature,
            "seed": recipe.seed,
            **({} if served_as is None else {"model": served_as}),
        },
        temperature=section.temperature,
        seed=recipe.seed,
        max_prompt_tokens=max_prompt_tokens,
        progress=progress,
        finished=finished,
    )
    for source_report in reports.values():
        print(source_report.summary())
    print(report.summary())
    return report


def _new_chats(
    prompts: Iterable[Conversation], written: set[str], report: SkipReport, progress: Progress
) -> Iterator[_Chat]:
    """The chats that are not in the output yet."""
    for conversation in prompts:
        report.rows += 1
        if conversation.row_id in written:
            progress.add()
            continue
        questions: deque[list[Message]] = deque()
        before: list[Message] = []
        for message in conversation.messages or ():
            if message["role"] != "assistant":
                before.append(message)
            if message["role"] == "user":
                questions.append(before)
                before = []
        if questions:
            yield _Chat(conversation, questions)
        else:
            report.skip(conversation.origin, SkipRow("no user turn to answer"))


def _ask(chat: _Chat, renderer: ChatRenderer, seed: int, max_prompt_tokens: int | None) -> Question:
    chat.said += chat.questions.popleft()
    chat.num_asked += 1
    messages = renderer.with_system(chat.said)
    prompt_ids = renderer.prompt(messages)
    if max_prompt_tokens is not None and len(prompt_ids) > max_prompt_tokens:
        raise SkipRow("prompt too long", f"{len(prompt_ids)} tokens, {max_prompt_tokens} fit")
    request_id = f"{chat.conversation.row_id}/{chat.num_asked}"
    digest = hashlib.sha256(f"{seed} {request_id}".encode()).digest()
    return Question(request_id, tuple(messages), prompt_ids, int.from_bytes(digest[:4]))


def _turn(answer: Answer) -> Message:
    thought = {"reasoning_content": answer.reasoning} if answer.reasoning else {}
    return {"role": "assistant", "content": answer.text, **thought}


def _finished(chat: _Chat, cut: bool, temperature: float) -> dict[str, Any]:
    """The row of a conversation, as the output has it."""
    messages = chat.said
    if not messages[-1]["content"].strip() and chat.num_asked > 1:  # an empty later answer must not spoil the first
        last = max(turn for turn, message in enumerate(messages[:-1]) if message["role"] == "assistant")
        messages, cut = messages[: last + 1], False
    return {
        "row_id": chat.conversation.row_id,
        "kind": chat.conversation.kind,
        "topic": chat.conversation.topic,
        "messages": messages,
        "cut": cut,
        "temperature": temperature,
    }


def _open_alone(output: Path) -> FileIO:
    """The output, to be appended to by this process alone: two would answer the same prompts, and each twice."""
    lines = output.open("ab", buffering=0)
    try:
        fcntl.flock(lines, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lines.close()
        raise DataError(
            f"Another process is answering into {output} already; wait for it, or name another output (one process "
            "asks a server many questions at once: data.distill.batch_size)."
        ) from None
    return lines


def _append(lines: FileIO, line: bytes) -> None:
    """Writes the line, which a disk that fills up takes in parts. What it has no room for raises an OSError; the torn
    line is done again by the next run."""
    while line:
        line = line[lines.write(line) :]


def _written(output: Path) -> set[str]:
    """Row ids in the output. A last line without its end, from a run that was killed, is taken off the file."""
    if not output.exists():
        return set()
    written: set[str] = set()
    with output.open("rb+") as lines:
        for number, line in enumerate(iter(lines.readline, b""), start=1):
            if not line.endswith(b"\n"):
                lines.truncate(lines.tell() - len(line))
                break
            try:
                written.add(intact(json.loads(line))["row_id"])
            except (SkipRow, ValueError, KeyError, TypeError):
                raise DataError(
                    f"{output}:{number} is no line that distilling wrote, or was damaged since; take it out (its "
                    "prompt will be answered again), or name another output."
                ) from None
    return written


def _check_settings(output: Path, settings: dict[str, Any]) -> None:
    """Rows that were made with other settings are not to be mixed with new ones."""
    settings = json.loads(json.dumps(settings))
    beside = output.with_name(output.name + ".settings.json")
    if beside.exists() and output.exists() and output.stat().st_size:
        earlier = json.loads(beside.read_text(encoding="utf-8"))
        for key in sorted({*earlier, *settings}):
            if earlier.get(key) != settings.get(key):
                raise DataError(
                    f"{output} was begun with {key} {earlier.get(key)!r}, this run has {settings.get(key)!r}; name "
                    f"another output, or remove {output.name}."
                )
        return
    if output.exists() and output.stat().st_size:
        raise DataError(f"{output} is there already, and {beside.name} isn't; name an output that isn't there yet.")
    output.parent.mkdir(parents=True, exist_ok=True)
    write_text(beside, json.dumps(settings, indent=2) + "\n")
