"""The questions of an evaluation: where they come from, which of them are asked, and what the target reads.

    questions = choose(load_questions(recipe, target.tokenizer), recipe.eval.num_prompts)
    prompt_ids = questions[0].prompt_ids(renderer)

Any source that training can read will do: the bundled prompts, files of messages, and the benchmarks of
`eval/benchmarks.py`. Answers in it are left out; the user's turns are asked one by one, each after the target's own
answer to the last.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from headstart.data.formats import Conversation, Message
from headstart.data.prepare import prepare
from headstart.data.rendering import ChatRenderer, Row
from headstart.data.sources import SkipReport, check_source, display_name, read
from headstart.errors import DataError
from headstart.eval.benchmarks import SPEC_BENCH_GROUPS, SPEC_BENCH_MARK, Benchmark
from headstart.recipe import Recipe, Source

NOVELTY = {
    "held_out_kinds": "kind held out",
    "held_out_topics": "kind seen, topic held out",
    "train": "seen in training",
}
"""How new a question of the bundled chats is to a head that was trained on them, by split."""
ELSEWHERE, HELD_OUT = "from elsewhere", "held out by prompt"


@dataclass(frozen=True)
class Question:
    """One prompt of one or several turns of the user."""

    question_id: str
    category: str
    """The group of tasks that is drawn from evenly and that tables show first: one of Spec-Bench's six, or the kind."""
    kind: str
    """The kind of task: one of a benchmark's own categories, 13 in Spec-Bench."""
    novelty: str
    """Whether training had seen its like."""
    turns: tuple[tuple[Message, ...], ...]
    """What is added to the conversation before each answer. One empty turn where `ids` are given."""
    ids: tuple[int, ...] | None = None
    """The prompt as tokens, where it was never a conversation."""

    def prompt_ids(self, renderer: ChatRenderer, answers: Sequence[str] = ()) -> list[int]:
        """What the target reads before its next answer, the earlier ones given."""
        if self.ids is not None:
            return list(self.ids)
        messages: list[Message] = []
        for turn in range(len(answers) + 1):
            messages += self.turns[turn]
            if turn < len(answers):
                messages.append({"role": "assistant", "content": answers[turn]})
        return renderer.prompt(messages)


def check_questions(recipe: Recipe) -> None:
    """Raises DataError where a source of the questions is no file and no bundled set; the hub is not asked."""
    for source in recipe.eval.prompts or recipe.data.held_out.sources:
        check_source(source, answers=False)


def load_questions(
    recipe: Recipe, tokenizer: PreTrainedTokenizerBase, benchmark: Benchmark | None = None
) -> list[Question]:
    """All questions of the benchmark; without one, of `eval.prompts`; without those, of the held-out sources or the
    held-out rows of training.

    Raises DataError where a source cannot be opened or gives no prompt at all.
    """
    if benchmark is not None:
        return _read(benchmark, tokenizer)
    sources = recipe.eval.prompts or recipe.data.held_out.sources
    if not sources:
        rows = prepare(recipe, tokenizer).held_out
        if not len(rows):
            raise DataError("the recipe holds out no rows to ask; name prompts with --bench, or data.held_out.sources")
        return [_from_row(row) for row in rows]
    return [question for source in sources for question in _read(Benchmark("", source), tokenizer)]


def _read(benchmark: Benchmark, tokenizer: PreTrainedTokenizerBase) -> list[Question]:
    source, reports = benchmark.source, dict[str, SkipReport]()
    try:
        conversations = list(read(source, reports, answers=False, to_record=benchmark.to_record))
    except DataError as error:
        if benchmark.name and not Path(source.source).exists():
            raise DataError(f"{error} A copy on the disk will do: --bench {benchmark.name}=PATH") from None
        raise
    if not conversations:
        reasons = "; ".join(report.reasons() for report in reports.values())
        raise DataError(f"{display_name(source)} gives no prompt to decode: {reasons}")
    for report in reports.values():
        if report.skipped:
            print(report.summary())
    name = benchmark.name or display_name(source)
    kinds = {conversation.kind or name for conversation in conversations}
    benchmark.check_categories(kinds)
    groups = benchmark.groups or (SPEC_BENCH_GROUPS if kinds & SPEC_BENCH_MARK else {})
    return [_question(one, source, tokenizer, one.kind or name, groups) for one in conversations]


def choose(questions: Sequence[Question], count: int) -> list[Question]:
    """`count` of them, always the same ones: as many of every category as of every other, as far as they last, within
    a category as many of every kind, and of a kind evenly spaced ones.

    They come category by category and kind by kind in turn, so that the first few are a mixture as well.
    """
    return _draw(questions, count, [lambda question: question.category, lambda question: question.kind])


def _draw(questions: Sequence[Question], count: int, keys: Sequence[Callable[[Question], str]]) -> list[Question]:
    count = min(count, len(questions))
    if not keys:
        return [questions[place * len(questions) // count] for place in range(count)]
    parts: dict[str, list[Question]] = {}
    for question in questions:
        parts.setdefault(keys[0](question), []).append(question)
    quotas = dict.fromkeys(parts, 0)
    while sum(quotas.values()) < count:
        for name, members in parts.items():
            if quotas[name] < len(members) and sum(quotas.values()) < count:
                quotas[name] += 1
    chosen = [_draw(members, quotas[name], keys[1:]) for name, members in parts.items()]
    return [one for turn in zip_longest(*chosen) for one in turn if one is not None]


def _question(
    conversation: Conversation,
    source: Source,
    tokenizer: PreTrainedTokenizerBase,
    kind: str,
    groups: Mapping[str, str],
) -> Question:
    ids = None
    turns: list[tuple[Message, ...]] = [()]
    if conversation.messages is not None:
        turns, waiting = [], []
        for message in conversation.messages:
            if message["role"] == "assistant":
                continue
            waiting.append(message)
            if message["role"] == "user":
                turns.append(tuple(waiting))
                waiting = []
    elif conversation.text is not None:
        ids = tuple(tokenizer(conversation.text)["input_ids"])
    else:
        ids = _prompt_part(list(conversation.input_ids or ()), list(conversation.supervised or ()))
    return Question(
        question_id=conversation.row_id,
        category=groups.get(kind, kind),
        kind=kind,
        novelty=NOVELTY[source.split] if source.source == "bundled:chats" else ELSEWHERE,
        turns=tuple(turns),
        ids=ids,
    )


def _from_row(row: Row) -> Question:
    kind = row.kind or "held out"
    prompt = _prompt_part(row.input_ids, row.supervised)
    return Question(question_id=row.row_id, category=kind, kind=kind, novelty=HELD_OUT, turns=((),), ids=prompt)


def _prompt_part(ids: list[int], supervised: list[bool]) -> tuple[int, ...]:
    """The tokens before the first label, or all where nothing is."""
    end = supervised.index(True) if any(supervised) else len(ids)
    return tuple(ids[: max(end, 1)])
