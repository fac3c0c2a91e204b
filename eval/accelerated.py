"""The front door in Python: from a name to text that is drafted by a head and verified by its target.

    from headstart import load_head, generate, evaluate

    accelerated = load_head("runs/my-model")                 # or the folder of a head, or ORG/NAME on the hub
    print(generate(accelerated, "Explain tides to a child."))
    for piece in accelerated.stream("Explain tides to a child."):
        print(piece, end="")
    report = evaluate(accelerated, ["Explain tides to a child."], max_new_tokens=64)

`headstart generate` and `headstart eval` go the same way. The text is the target's own, as plain decoding would have
written it (docs/exactness.md).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from headstart.data.messages import SkipRow, chat
from headstart.decode.decode_copy import make_faster, shared_copy
from headstart.decode.drafters.base import NoDraft, Request
from headstart.decode.engine import Engine, Generation
from headstart.decode.sampling import SamplingSettings
from headstart.errors import DataError, HeadstartError, RecipeError, refuse_unwritable
from headstart.eval.acceptance import StepCounts, count_steps
from headstart.eval.drafters import DrafterPlan, plan_drafter, plan_drafters
from headstart.eval.measure import measure
from headstart.eval.prompts import ELSEWHERE, Question, check_questions, choose, load_questions
from headstart.eval.report import write_report
from headstart.eval.tables import Report
from headstart.eval.timing import PLAIN
from headstart.eval.trained import Trained, find_named, load_named
from headstart.recipe import override
from headstart.target import Target

Prompt = str | Sequence[Mapping[str, Any]] | Sequence[int]
"""What is answered: a user's turn; a conversation, `[{"role": "user", "content": "..."}, ...]`; or token ids, which are
read as they are."""


@dataclass(frozen=True)
class Answer:
    """One answer, with what it took."""

    text: str
    """Without special tokens."""
    generation: Generation
    """Its tokens and the record of every step."""

    @property
    def token_ids(self) -> list[int]:
        """The new tokens; an end token is included, nothing after it is."""
        return self.generation.token_ids

    @property
    def drafted(self) -> list[bool]:
        """Of every token, whether it was drafted and accepted; the others are the target's own, one in each step."""
        return [place < step.accepted for step in self.generation.steps for place in range(step.emitted)]

    @property
    def finish_reason(self) -> Literal["end", "stop", "length", "positions"]:
        """An end token, a stop string, `max_new_tokens`, or the last position that the target has."""
        return self.generation.finish_reason

    @property
    def counts(self) -> StepCounts:
        """Steps, tokens and acceptance by depth."""
        return count_steps([self.generation.steps])

    @property
    def acceptance_length(self) -> float | None:
        """τ: tokens per step, the target's own one counted; None where every step was cut short."""
        return self.counts.acceptance_length

    @property
    def seconds(self) -> float:
        """Of decoding; reading the prompt (`generation.prefill_seconds`) stands apart."""
        return self.generation.decode_seconds

    def __str__(self) -> str:
        return self.text


class Stream(Iterator[str]):
    """An answer as it is written: pieces of text as they become certain. `answer` is the whole of it, and waits for
    what is not written yet."""

    def __init__(self, engine: Engine, request: Request):
        self._decode = engine.target.tokenizer.decode
        self._generation = Generation(request)
        self._text, self._cut_off = "", False
        self._steps = engine.stream(request)

    def __next__(self) -> str:
        if self._cut_off:
            raise HeadstartError(
                "this answer was cut off when the same head began another one; read it to its end first, or load the "
                "head a second time"
            )
        while True:
            try:
                _, self._generation = next(self._steps)
            except StopIteration:
                rest = self._rest(whole=True)
                if rest:
                    return rest
                raise
            piece = self._rest(whole=False)
            if piece:
                return piece

    def _rest(self, whole: bool) -> str:
        """What has not been given out; a character whose bytes are not all there yet waits for the rest."""
        text = str(self._decode(self._generation.token_ids, skip_special_tokens=True))
        if text.endswith("\ufffd") and not whole:
            return ""
        piece, self._text = text[len(self._text) :], text
        return piece

    @property
    def answer(self) -> Answer:
        for _ in self:
            pass
        return Answer(self._text, self._generation)

    def cut_off(self) -> None:
        """Makes room for another answer; this one, unless it was read to its end, is lost."""
        self._cut_off = next(self._steps, None) is not None
        self._steps.close()


class Accelerated:
    """A target with what drafts for it, ready to write. Made by `load_head` or `load_drafter`; one answer at a time."""

    def __init__(self, trained: Trained, drafter: str, plan: DrafterPlan | None, allow_other_target: bool = False):
        """plan: how to make `drafter`, None for plain decoding."""
        self.trained, self.drafter = trained, drafter
        self.allow_other_target = allow_other_target
        make_faster(trained.target)
        made = NoDraft() if plan is None else plan.make(trained.target)
        self._engine = Engine(trained.target, made, budget=1 if plan is None else plan.budget)
        self._stream: Stream | None = None

    @property
    def target(self) -> Target:
        return self.trained.target

    def stream(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int = 256,
        temperature: int | float = 0.0,
        seed: int = 0,
        stop: str | Sequence[str] = (),
        settings: SamplingSettings | None = None,
    ) -> Stream:
        """The answer, piece by piece; see `generate`. An answer that was not read to its end stops here."""
        request = Request(
            prompt_ids=question(prompt).prompt_ids(self.trained.renderer),
            max_new_tokens=max_new_tokens,
            settings=_sampling(settings, temperature, seed),
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
        )
        if not isinstance(max_new_tokens, int) or max_new_tokens < 1:
            raise HeadstartError(f"max_new_tokens is {max_new_tokens}, expected a whole number above 0")
        if len(request.prompt_ids) >= self.target.max_positions:
            raise DataError(
                f"the prompt has {len(request.prompt_ids)} tokens, and {self.target.name} takes "
                f"{self.target.max_positions}, answer included; shorten the prompt"
            )
        if self._stream is not None:
            self._stream.cut_off()
        self._stream = Stream(self._engine, request)
        return self._stream


def load_head(
    head: str | Path,
    target: str | Target | None = None,
    *,
    drafter: str = "head",
    device: str | None = None,
    dtype: str | None = None,
    allow_other_target: bool = False,
) -> Accelerated:
    """A trained head with the target that it was trained for, ready to write.

    head: a run folder, the folder of a head, or ORG/NAME on the hub. target: a hub id, folder or bundled:NAME instead
    of the one in the head's record; or one that is loaded, `Target(model, tokenizer, name="...")`, which is not
    changed: its weights are shared. drafter: another plan for the head (`head@chain3`, `head@tree16`, ...) or anything
    of docs/drafters.md. device, dtype: of a target that is loaded here; by default the first GPU or else the CPU, and
    what the recipe says. Raises HeadstartError in one sentence for what cannot be used, among them a target other than
    the head's (`allow_other_target`: only warned of).
    """
    return load_drafter(drafter, target, head=head, device=device, dtype=dtype, allow_other_target=allow_other_target)


def load_drafter(
    drafter: str,
    target: str | Target | None = None,
    *,
    head: str | Path | None = None,
    device: str | None = None,
    dtype: str | None = None,
    allow_other_target: bool = False,
) -> Accelerated:
    """A target with any drafter by its name (docs/drafters.md): `ngram`, `model:ID`, ..., or `none`, plain decoding.

    head: what `head` in that name means. The rest is that of `load_head`.
    """
    if isinstance(target, Target) and (device or dtype):
        raise RecipeError("the target is loaded already, on its own device and in its own dtype; leave both out")
    named = find_named(head, _name(target))
    # what was mistyped shows here, before the target is loaded
    plan = None
    if drafter != PLAIN:
        plan = plan_drafter(drafter, named.head, named.recipe.eval.tree, allow_other_target)
        if others := [folder for folder in plan.heads if folder != named.head]:
            named = find_named(head, _name(target), others=others)
    given = shared_copy(target) if isinstance(target, Target) else None
    trained = load_named(named, target=given, device=device, dtype=dtype)
    return Accelerated(trained, drafter, plan, allow_other_target)


def generate(
    accelerated: Accelerated,
    prompt: Prompt,
    *,
    max_new_tokens: int = 256,
    temperature: int | float = 0.0,
    seed: int = 0,
    stop: str | Sequence[str] = (),
    settings: SamplingSettings | None = None,
) -> Answer:
    """The answer to one prompt: text, token ids, acceptance length and counts.

    temperature: 0 is greedy; above, tokens are drawn from the target's own distribution, by `seed`. stop: the answer
    ends with the first token that completes one of these. settings: all of the sampling at once (top_p, penalties,
    processors, ...) instead of temperature and seed. Raises HeadstartError for what cannot be decoded.
    """
    return (
        _checked(accelerated)
        .stream(prompt, max_new_tokens=max_new_tokens, temperature=temperature, seed=seed, stop=stop, settings=settings)
        .answer
    )


def evaluate(
    accelerated: Accelerated,
    prompts: str | Path | Sequence[Prompt] | None = None,
    *,
    num_prompts: int | None = None,
    max_new_tokens: int | None = None,
    temperature: int | float | Sequence[int | float] | None = None,
    batch_size: int | Sequence[int] | None = None,
    identity_prompts: int | None = None,
    output: str | Path | None = None,
) -> Report:
    """Acceptance, speedup and identity on prompts, each also decoded plainly: what `headstart eval` writes.

    prompts: a file or bundled set; or prompts as `generate` takes them; None: what the run's recipe asks for (its
    held-out conversations). The settings are those of a recipe's `eval` section, and its values where they are None.
    output: a folder for report.json, report.md and report.html; None: nothing is written. docs/evaluation.md says what
    the figures mean.
    """
    trained = _checked(accelerated).trained
    questions = None
    if prompts is not None and not isinstance(prompts, str | Path):
        questions = [question(prompt, f"prompt {number}") for number, prompt in enumerate(prompts, 1)]
        if not questions:
            raise DataError("there are no prompts to decode; give one or more, or none at all for the held-out ones")
        num_prompts = len(questions) if num_prompts is None else num_prompts
    settings = {
        "prompts": None if prompts is None or questions else [{"source": str(prompts)}],
        "num_prompts": num_prompts,
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "batch_size": batch_size,
        "identity_prompts": identity_prompts,
    }
    recipe = override(
        trained.recipe,
        [f"eval.{key}={json.dumps(value)}" for key, value in settings.items() if value is not None],
    )
    if questions is None:
        check_questions(recipe)
    if output is not None:
        Path(output).mkdir(parents=True, exist_ok=True)
        refuse_unwritable(output)
    names = [] if accelerated.drafter == PLAIN else [accelerated.drafter]
    plans = plan_drafters(names, trained.head, recipe.eval, accelerated.allow_other_target)
    known = load_questions(recipe, trained.target.tokenizer) if questions is None else questions
    report = measure(replace(trained, recipe=recipe), plans, choose(known, recipe.eval.num_prompts))
    if questions is not None:
        report["details"]["settings"]["prompts"] = "given by the caller"
    if output is not None:
        write_report(report, Path(output))
    return report


def question(prompt: Any, name: str = "prompt") -> Question:
    """A prompt in any of the forms of `Prompt`. Raises DataError for what is none."""
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    wrong = DataError(
        f"{name} is {type(prompt).__name__} {prompt!r:.40}, expected text, a conversation such as "
        '[{"role": "user", "content": "..."}], or token ids'
    )
    if not isinstance(prompt, Sequence) or not prompt:
        raise wrong
    turns, ids = [()], None
    if all(isinstance(part, Mapping) for part in prompt):
        try:
            turns = [chat(list(prompt), merge=False)]
        except SkipRow as error:
            raise DataError(f"{name} is no conversation: {error}") from None
    elif all(isinstance(part, int) and not isinstance(part, bool) for part in prompt):
        ids = tuple(int(str(part)) for part in prompt)
    else:
        raise wrong
    return Question(name, category="given", kind="given", novelty=ELSEWHERE, turns=tuple(turns), ids=ids)


def _name(target: Any) -> str | None:
    if isinstance(target, Target):
        return target.name
    if target is not None and not isinstance(target, str):
        kind = type(target).__name__
        raise RecipeError(f"the target is a {kind}, expected its name, or Target(model, tokenizer, name=...)")
    return target


def _sampling(settings: SamplingSettings | None, temperature: int | float, seed: int) -> SamplingSettings:
    if settings is None:
        return SamplingSettings(temperature=float(temperature), seed=seed)
    if temperature or seed:
        raise HeadstartError("temperature and seed are part of the settings that were given; set them there alone")
    return settings


def _checked(accelerated: Any) -> Accelerated:
    if not isinstance(accelerated, Accelerated):
        raise HeadstartError(
            f"the first argument is a {type(accelerated).__name__}, expected what load_head(RUN) gives back"
        )
    return accelerated
