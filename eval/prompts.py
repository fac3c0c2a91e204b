"""The questions of an evaluation: where they come from, which of them are asked, and what the target reads.

    questions = choose(load_questions(recipe, target.tokenizer), recipe.eval.num_prompts)
    prompt_ids = questions[0].prompt_ids(renderer)

Any source that training can read will do: the bundled prompts, files of messages, Spec-Bench's `question.jsonl`.
Answers in it are left out; the user's turns are asked one by one, each after the target's own answer to the last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from headstart.data.formats import Conversation, Message
from headstart.data.prepare import prepare
from headstart.data.rendering import ChatRenderer, Row
from headstart.data.sources import SkipReport, check_source, display_name, read
from headstart.errors import DataError
from headstart.recipe import Recipe, Source

NOVELTY = {
    "held_out_kinds": "kind held out",
    "held_out_topics": "kind seen, topic held out",
    "train": "seen in training",
}
"""How new a question of the bundled chats is to a head that was trained on them, by split."""
ELSEWHERE, HELD_OUT = "from elsewhere", "held out by prompt"

MT_BENCH = frozenset("writing roleplay reasoning math coding extraction stem humanities".split())
"""Categories that Spec-Bench counts as one group of its six, MT-bench."""
SPEC_BENCH_MARK = frozenset({"math_reasoning", "summarization", "translation", "rag", "qa"})


@dataclass(frozen=True)
class Question:
    """One prompt of one or several turns of the user."""

    question_id: str
    category: str
    """What tables are grouped by: the kind of task; Spec-Bench's group."""
    kind: str
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


def load_questions(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> list[Question]:
    """All questions of `eval.prompts`; without those, of the held-out sources or the held-out rows of training.

    Raises DataError where a source cannot be opened or gives no prompt at all.
    """
    sources = recipe.eval.prompts or recipe.data.held_out.sources
    if not sources:
        rows = prepare(recipe, tokenizer).held_out
        if not len(rows):
            raise DataError("the recipe holds out no rows to ask; name prompts with --bench, or data.held_out.sources")
        return [_from_row(row) for row in rows]
    questions: list[Question] = []
    for source in sources:
        reports: dict[str, SkipReport] = {}
        conversations = list(read(source, reports, answers=False))
        if not conversations:
            reasons = "; ".join(report.summary() for report in reports.values())
            raise DataError(f"{display_name(source)} gives no prompt to decode: {reasons}")
        kinds = {conversation.kind for conversation in conversations}
        grouped = bool(kinds & SPEC_BENCH_MARK)
        questions += [_question(conversation, source, tokenizer, grouped) for conversation in conversations]
    return questions


def choose(questions: Sequence[Question], count: int) -> list[Question]:
    """`count` of them, the same number of every category as far as they last, evenly spaced within each.

    They come category by category in turn, so that the first few are a mixture as well.
    """
    by_category: dict[str, list[Question]] = {}
    for question in questions:
        by_category.setdefault(question.category, []).append(question)
    quotas = dict.fromkeys(by_category, 0)
    while sum(quotas.values()) < min(count, len(questions)):
        for category, members in by_category.items():
            if quotas[category] < len(members) and sum(quotas.values()) < count:
                quotas[category] += 1
    chosen = {
        category: [members[place * len(members) // quotas[category]] for place in range(quotas[category])]
        for category, members in by_category.items()
    }
    longest = max(quotas.values(), default=0)
    return [members[place] for place in range(longest) for members in chosen.values() if place < len(members)]


def _question(
    conversation: Conversation, source: Source, tokenizer: PreTrainedTokenizerBase, spec_bench: bool
) -> Question:
    kind = conversation.kind or display_name(source)
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
        category="mt_bench" if spec_bench and kind in MT_BENCH else kind,
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
