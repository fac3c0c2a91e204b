"""Times several ways of decoding on the same prompts, interleaved in one run: drift of the machine meets all alike.

Every arm is the same engine with the same target; they differ in the drafter only, and arm `none` drafts nothing. The
order of the arms turns from prompt to prompt. A warm-up of every arm and of every width of a forward is thrown away.
Prefill stands apart: the seconds of an answer are those after its prompt was read. Answers that an earlier process has
measured, in all arms at one time, need not be measured again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable

import torch

from headstart.data.rendering import ChatRenderer
from headstart.decode.drafters.base import Drafter, NoDraft, Request
from headstart.decode.engine import WIDTHS, Engine, StepRecord
from headstart.decode.sampling import SamplingSettings
from headstart.errors import HeadstartError
from headstart.eval.memory import MemoryWatch
from headstart.eval.prompts import Question
from headstart.eval.transformers_arm import Generated, TransformersArm
from headstart.target import Target

PLAIN = "none"
"""The arm that everything is compared with: plain decoding by the same engine."""
WARM_UP_PROMPTS, WARM_UP_TOKENS = 2, 16
Clock = Callable[[], float]
"""Seconds; time.perf_counter, or a fake one in tests."""


@dataclass(frozen=True)
class Contender:
    """What is compared with plain decoding."""

    drafter: Drafter
    budget: int
    """Nodes of a drafted tree at most, root included."""


@dataclass(frozen=True)
class Timed:
    """One answer by one arm."""

    token_ids: list[int]
    finish_reason: str
    steps: list[StepRecord]
    prefill_seconds: float
    """Reading the prompt; of a batch, that of the whole batch."""
    seconds: float
    """Wall time after the prefill; of a batch, this answer's share, in proportion to its steps' time per row."""

    @property
    def chunk_seconds(self) -> list[float]:
        """From one emission to the next, each of one token or more: the duration of every step."""
        return [step.draft_seconds + step.verify_seconds + step.host_seconds for step in self.steps]

    @property
    def first_token_seconds(self) -> float:
        """From the request to the first emission: the prefill and the first step."""
        return self.prefill_seconds + self.chunk_seconds[0]


@dataclass(frozen=True)
class Answer:
    """One turn of one question, answered by every arm."""

    question: Question
    turn: int
    group: int
    """Questions decoded together: what the bootstrap draws. With a batch size of 1, one question with its turns."""
    prompt_ids: list[int]
    arms: dict[str, Timed]
    transformers: Generated | None = None
    """By `transformers.generate`, where it was asked."""


@dataclass
class Measurement:
    """All answers of one run, and what its arms held in memory."""

    answers: list[Answer] = field(default_factory=list)
    memory: dict[str, dict[str, int | None]] = field(default_factory=dict)
    too_long: list[str] = field(default_factory=list)
    """Questions left out because their prompt leaves no room for an answer."""
    earlier: int = 0
    """Of the answers, those that an earlier process measured."""

    def add(self, part: Measurement) -> None:
        """Takes in the answers of further groups; of memory, the most that each arm has held."""
        self.answers += part.answers
        self.too_long += part.too_long
        self.earlier += part.earlier
        for arm, counts in part.memory.items():
            self.memory[arm] = _larger(self.memory.get(arm, counts), counts)


def _larger(one: Mapping[str, int | None], other: Mapping[str, int | None]) -> dict[str, int | None]:
    counts = {key: None if value is None else max(value, other[key] or 0) for key, value in one.items()}
    return {**counts, "total_bytes": sum(counts[key] or 0 for key in ("cache_bytes", "mask_bytes", "drafter_bytes"))}


@runtime_checkable
class Kept(Protocol):
    """Where the answers of earlier processes are, and where new ones go; `eval.kept` has one on the disk."""

    def read(self, group: int, questions: Sequence[Question]) -> Measurement | None:
        """The answers to these, the questions of the group, if they were measured before."""
        ...

    def add(self, group: int, questions: Sequence[Question], part: Measurement) -> None: ...


def time_arms(
    target: Target,
    contenders: Mapping[str, Contender],
    questions: Sequence[Question],
    renderer: ChatRenderer,
    *,
    max_new_tokens: int,
    settings: SamplingSettings | None = None,
    batch_size: int = 1,
    transformers_questions: int = 0,
    warm_up: bool = True,
    clock: Clock = time.perf_counter,
    kept: Kept | None = None,
    progress: Callable[[int], None] = lambda tokens: None,
) -> Measurement:
    """Answers all questions by plain decoding and with each contender.

    settings: each question has its own seed, counted on from theirs. A further turn follows on the plain arm's answer
    in every arm, so all read the same prompts. transformers_questions: so many of the first ones are given to
    `transformers.generate` too (batch size 1 only). kept: answers of the same measurement that was stopped; those
    that are missing are added to it as they come. progress: is told the number of tokens of each new plain answer.
    """
    settings = settings or SamplingSettings()
    if not settings.exact:
        raise HeadstartError(
            f"lossy={settings.lossy!r} changes what the target writes, so its figures stand in no table with exact "
            "ones; leave it out here, or measure it alone with Engine.generate and eval.acceptance.count_steps"
        )
    engines = {PLAIN: Engine(target, NoDraft(), batch_size=batch_size, budget=1)}
    for name, one in contenders.items():
        engines[name] = Engine(target, one.drafter, batch_size=batch_size, budget=one.budget)
    ask_transformers = transformers_questions if batch_size == 1 else 0
    arms = _Arms(engines, TransformersArm(target) if ask_transformers else None, ask_transformers, clock, progress)

    def request(index: int, turn: int, answers: Sequence[str]) -> Request:
        seeded = replace(settings, seed=settings.seed + index)
        prompt_ids = questions[index].prompt_ids(renderer, answers)
        return Request(prompt_ids=prompt_ids, max_new_tokens=max_new_tokens, settings=seeded, request_id=(index, turn))

    run, warm, rounds = Measurement(), not warm_up, 0
    for group, first in enumerate(range(0, len(questions), batch_size)):
        together = questions[first : first + batch_size]
        part = kept.read(group, together) if kept else None
        if part is None:
            if not warm:
                few = [request(index, 0, ()) for index in range(min(WARM_UP_PROMPTS, len(questions)))]
                _warm_up(engines, few, arms.transformers)
                warm = True
            part = arms.answer(group, first, together, request, rounds)
            if kept:
                kept.add(group, together, part)
        run.add(part)
        rounds += len({answer.turn for answer in part.answers})
    return run


@dataclass
class _Arms:
    """All arms of a measurement."""

    engines: dict[str, Engine]
    transformers: TransformersArm | None
    transformers_questions: int
    clock: Clock
    progress: Callable[[int], None]

    def __post_init__(self) -> None:
        self.watch = MemoryWatch(self.engines)

    def answer(
        self,
        group: int,
        first: int,
        together: Sequence[Question],
        request: Callable[[int, int, Sequence[str]], Request],
        rounds: int,
    ) -> Measurement:
        """All turns of the questions that are decoded together, the first of them number `first`, by every arm.
        rounds: where the order of the arms stands."""
        part, target = Measurement(), self.engines[PLAIN].target
        questions = dict(enumerate(together, first))
        said: dict[int, list[str]] = {index: [] for index in questions}
        for turn in range(max(len(question.turns) for question in together)):
            requests = [request(*pair, said[pair[0]]) for pair in _asked(questions, said, turn)]
            part.too_long += [questions[one.request_id[0]].question_id for one in requests if not _fits(one, target)]
            requests = [one for one in requests if _fits(one, target)]
            if not requests:
                continue
            timed = {}
            for name in _turned(list(self.engines), rounds + turn):
                with self.watch.arm(name):
                    timed[name] = _run(self.engines[name], requests, self.clock)
            for one in requests:
                index, _ = key = one.request_id
                asked = self.transformers if index < self.transformers_questions else None
                part.answers.append(
                    Answer(
                        question=questions[index],
                        turn=turn,
                        group=group,
                        prompt_ids=list(one.prompt_ids),
                        arms={name: timed[name][key] for name in self.engines},
                        transformers=asked.generate(one, self.clock) if asked else None,
                    )
                )
                plain = timed[PLAIN][key].token_ids
                said[index].append(str(target.tokenizer.decode(plain, skip_special_tokens=True)))
                self.progress(len(plain))
        part.memory = self.watch.report()
        return part


def _asked(questions: Mapping[int, Question], answers: Mapping[int, list[str]], turn: int) -> list[tuple[int, int]]:
    """(question, turn) of those that have this turn and whose earlier ones were all answered."""
    return [(index, turn) for index in answers if turn < len(questions[index].turns) and len(answers[index]) == turn]


def _fits(request: Request, target: Target) -> bool:
    return len(request.prompt_ids) < target.max_positions


def _turned(names: list[str], rounds: int) -> list[str]:
    first = rounds % len(names)
    return names[first:] + names[:first]


def _run(engine: Engine, requests: Sequence[Request], clock: Clock) -> dict[tuple[int, int], Timed]:
    """Decodes requests that all fit in one batch; the wall time less the prefill is shared out over the answers."""
    started = clock()
    done = list(engine.generate(requests))
    if torch.device(engine.target.device).type == "cuda":
        torch.cuda.synchronize(engine.target.device)
    seconds = clock() - started - done[0].prefill_seconds
    busy = [
        sum((step.draft_seconds + step.verify_seconds + step.host_seconds) / step.rows for step in one.steps)
        for one in done
    ]
    return {
        one.request.request_id: Timed(
            one.token_ids, one.finish_reason, one.steps, one.prefill_seconds, seconds * share / sum(busy)
        )
        for one, share in zip(done, busy, strict=True)
    }


def _warm_up(engines: Mapping[str, Engine], requests: list[Request], transformers_arm: TransformersArm | None) -> None:
    """Runs every arm on a few prompts, and every width of a forward once; nothing of it is kept."""
    plain = engines[PLAIN]
    requests = [
        replace(request, max_new_tokens=min(WARM_UP_TOKENS, request.max_new_tokens))
        for request in requests
        if _fits(request, plain.target)
    ]
    for engine in engines.values():
        list(engine.generate(requests))
    for width in (width for width in WIDTHS if width <= max(engine.budget for engine in engines.values())):
        widened = Engine(plain.target, NoDraft(width), batch_size=plain.batch_size, budget=width)
        list(widened.generate([replace(request, max_new_tokens=2) for request in requests[:1]]))
    if transformers_arm is not None:
        for request in requests:
            transformers_arm.generate(request, time.perf_counter)
