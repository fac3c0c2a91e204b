"""What the doctor looks at, each part gathered once, when the first check asks for it.

    evidence = gather("runs/quickstart")
    evidence.served.along.tau               # of a short decode: the head's chain, prompts as they are served
    evidence.along(head, texts)             # what a head, perhaps a changed one, would be accepted along these texts

The texts are the target's own answers to a handful of prompts, decoded with the head, so exact whatever the head does.
Every trial replays the head along them; the target is not run again.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from headstart.data.agreement import Agreement, agreement
from headstart.data.messages import Message
from headstart.data.packing import collate, spread
from headstart.data.prepare import Prepared, prepare
from headstart.data.rendering import ChatRenderer, Row
from headstart.data.sources import with_limit
from headstart.decode.cost import RankedAnswer, mean_tokens, replay
from headstart.decode.decode_copy import make_faster
from headstart.decode.drafters.base import Request
from headstart.decode.drafters.heads import head_drafter
from headstart.decode.drafters.plans import chain_paths
from headstart.decode.engine import Engine
from headstart.decode.forecast import Recorded, rank_answer, rank_rows
from headstart.decode.sampling import SamplingSettings
from headstart.errors import DataError, HeadstartWarning
from headstart.eval.acceptance import StepCounts, count_steps
from headstart.eval.diagnosis.finding import Along, NotLookedAt
from headstart.eval.diagnosis.recording import Known, accepted_along, answered_row, record
from headstart.eval.prompts import Question, choose, load_questions
from headstart.eval.trained import Named, find_named, load_named
from headstart.heads.base import Head
from headstart.heads.draft import DraftHead
from headstart.heads.store import load_head, read_description
from headstart.heads.unrolled import UnrolledHead
from headstart.recipe import ChatSection, Recipe, load_recipe, quoted
from headstart.target import Target
from headstart.train.forecasting import NUM_ANSWERS, tree_depth
from headstart.train.metrics import read_metrics

NUM_PROMPTS, NEW_TOKENS = 8, 48
"""Answers that are decoded, and their longest."""
NUM_ROWS, LABELS = 12, 384
"""Training rows that are looked at, and their labels that are compared with the target's own choice."""
LARGEST_SOURCE = 2000
"""Rows of each source of the recipe that are read."""
TRIAL_DEPTH = 3
"""Drafts of a step while something is tried: what goes wrong shows in the first few."""


@dataclass(frozen=True)
class Answers:
    """What a short decode gave."""

    texts: list[Known]
    counts: StepCounts
    """Of a chain of first choices, as deep as `Evidence.depth`."""
    along: Along
    """The same as one figure, and by answer."""


@dataclass
class Evidence:
    """Everything about one head, its target and how it is served. stored: the recipe as the run has it; None where the
    folder of a head was given alone. export: a folder in another tool's layout, to look at too."""

    named: Named
    stored: Recipe | None
    description: dict[str, Any]
    target: Target
    head: Head
    export: Path | None = None
    not_looked_at: dict[str, str] = field(default_factory=dict)
    """Why, by the name of the check."""
    _questions: dict[str, list[Question]] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        assert self.named.head is not None
        return self.named.head

    @property
    def recipe(self) -> Recipe:
        """As the head is served: the run's, with what the command line changed."""
        return self.named.recipe

    @cached_property
    def drafting(self) -> Head:
        """The head in the dtype in which it drafts."""
        return copy.deepcopy(self.head).to(self.target.device, self.target.dtype).eval()

    @cached_property
    def depth(self) -> int:
        return tree_depth(self.head)

    @property
    def trial_depth(self) -> int:
        return min(self.depth, TRIAL_DEPTH)

    @cached_property
    def layers(self) -> list[int]:
        """The states that any trial reads: those of the head, and their neighbours."""
        last = self.target.num_layers
        near = {k + step for k in (*self.head.wants, last) for step in (-1, 0, 1)}
        return sorted(k for k in near if 0 <= k <= last)

    # -- the target's own answers --------------------------------------------------------------------------------------

    @cached_property
    def served(self) -> Answers:
        """The prompts as they are served, at the first temperature of the recipe."""
        return self.answer(self.recipe.data.chat, float(self.recipe.eval.temperature[0]))

    @property
    def texts(self) -> list[Recorded]:
        """The served answers with their features."""
        return [known.text for known in self.served.texts]

    @cached_property
    def ranks(self) -> list[RankedAnswer]:
        """Of the head as it is, along the served texts, at its whole depth."""
        return [rank_answer(self.drafting, self.target, text, depth=self.depth) for text in self.texts]

    @cached_property
    def base(self) -> Along:
        """What every trial is compared with: the head as it is."""
        return self.along(self.drafting, self.texts)

    def questions(self, chat: ChatSection) -> list[Question]:
        """A handful of them, the same whatever the chat section says of their rendering."""
        key = chat.model_dump_json()
        if key not in self._questions:
            self._questions[key] = self._read_questions(chat)
        return self._questions[key]

    def _read_questions(self, chat: ChatSection) -> list[Question]:
        data = self.recipe.data.model_copy(update={"chat": chat})
        recipe = with_limit(self.recipe.model_copy(update={"data": data}), LARGEST_SOURCE)
        return choose(load_questions(recipe, self.target.tokenizer), min(NUM_PROMPTS, recipe.eval.num_prompts))

    def prompts(self, chat: ChatSection, *, own_system: bool = True) -> list[list[int]]:
        """They as the target reads them; those that leave no room for an answer are passed over. own_system: with the
        system turns of the conversations themselves."""
        renderer = ChatRenderer(self.target.tokenizer, chat)
        questions = self.questions(chat)
        if not own_system:
            questions = [replace(one, turns=tuple(map(without_system, one.turns))) for one in questions]
        prompts = [question.prompt_ids(renderer) for question in questions]
        fitting = [ids for ids in prompts if len(ids) + 2 < self.target.max_positions]
        if not fitting:
            raise DataError(f"no prompt fits {self.target.name}, which takes {self.target.max_positions} tokens")
        return fitting

    def answer(self, chat: ChatSection, temperature: float, *, own_system: bool = True) -> Answers:
        """The target's answers to these prompts, drafted by the head's chain, and what is known of them."""
        paths = chain_paths(self.depth)
        requests = [
            Request(
                prompt_ids=ids,
                max_new_tokens=min(NEW_TOKENS, self.recipe.eval.max_new_tokens),
                request_id=number,
                settings=SamplingSettings(temperature=temperature, seed=number),
            )
            for number, ids in enumerate(self.prompts(chat, own_system=own_system))
        ]
        drafter = head_drafter(self.head, self.target, paths)
        engine = Engine(self.target, drafter, batch_size=len(requests), budget=len(paths) + 1)
        found = {one.request.request_id: one for one in engine.generate(requests)}
        generations = [found[request.request_id] for request in requests]
        rows = [answered_row(one.request.prompt_ids, one.token_ids) for one in generations]
        counts = count_steps(one.steps for one in generations)
        each = [count_steps([one.steps]).mean_accepted or 0.0 for one in generations]
        return Answers(self.record(rows), counts, Along(counts.acceptance_length or 1.0, each))

    def record(self, rows: Sequence[Row], target: Target | None = None) -> list[Known]:
        """The last answer of every row with its features; one forward each. target: None is the target itself."""
        return record(target or self.target, rows, self.layers)

    # -- what a head would be accepted ---------------------------------------------------------------------------------

    def ranked(self, head: Head, texts: Sequence[Recorded], target: Target | None = None) -> list[RankedAnswer]:
        """Ranks at the depth of trials. head: in the dtype in which it drafts."""
        return [rank_answer(head, target or self.target, text, depth=self.trial_depth) for text in texts]

    def along(self, head: Head, texts: Sequence[Recorded], target: Target | None = None) -> Along:
        """The same as acceptance, with a chain of `trial_depth` drafts."""
        return accepted_along(self.ranked(head, texts, target), self.trial_depth)

    # -- what training left --------------------------------------------------------------------------------------------

    @cached_property
    def trained_chat(self) -> ChatSection:
        """How conversations were rendered for training; as they are served, where nothing says so."""
        stored = self.description.get("training", {}).get("chat")
        if stored is not None:
            return ChatSection.model_validate(stored)
        return self.recipe.data.chat if self.stored is None else self.stored.data.chat

    @cached_property
    def data(self) -> Prepared:
        """Training and held-out rows as they were rendered for training, `LARGEST_SOURCE` of each source at most."""
        if self.stored is None:
            raise NotLookedAt("the head lies in no run folder, so nothing says what it was trained on")
        data = self.stored.data.model_copy(update={"chat": self.trained_chat})
        recipe = with_limit(self.stored.model_copy(update={"data": data}), LARGEST_SOURCE)
        try:
            found = prepare(
                recipe,
                self.target.tokenizer,
                vocab_size=self.target.vocab_size,
                max_positions=self.target.max_positions,
            )
        except DataError as error:
            raise NotLookedAt(f"the training data cannot be read: {error}") from None
        return found

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        """What training measured on held-out rows, oldest first; empty where nothing was written."""
        path = None if self.named.run is None else self.named.run / "metrics.jsonl"
        return read_metrics(path, "held_out") if path is not None and path.is_file() else []

    @cached_property
    def recorded(self) -> float | None:
        """τ of a chain along held-out rows, as training measured it for the head that was kept."""
        key, step = "forecast_chain_acceptance_length", self.description.get("training", {}).get("step")
        lines = [line for line in self.metrics if line.get(key) is not None]
        of_step = [line for line in lines if line["step"] == step] or lines[-1:]
        return float(of_step[0][key]) if of_step else None

    @cached_property
    def again(self) -> float:
        """The same, measured now."""
        return mean_tokens([replay(answer, chain_paths(self.depth)) for answer in self._held_out_ranks])

    @cached_property
    def held_out(self) -> Along:
        """The same at the depth of trials."""
        return accepted_along(self._held_out_ranks, self.trial_depth)

    @cached_property
    def learnt(self) -> Along:
        """Along training rows, at the depth of trials."""
        answers = rank_rows(self.head, self.target, self.training_rows, depth=self.trial_depth)
        return accepted_along(answers, self.trial_depth)

    @cached_property
    def _held_out_ranks(self) -> list[RankedAnswer]:
        rows = spread(self.data.held_out, NUM_ANSWERS)
        return rank_rows(self.head, self.target, rows, depth=self.depth)

    @cached_property
    def training_rows(self) -> list[Row]:
        """A few of them, from everywhere."""
        return spread(self.data.train, NUM_ROWS)

    @cached_property
    def agreement(self) -> Agreement:
        """Of the target with the labels of training."""
        return self.agreement_with(self.training_rows)

    def agreement_with(self, rows: Sequence[Row]) -> Agreement:
        batches = (collate([row], [[0]]) for row in rows)
        return agreement(self.target, batches, max_tokens=LABELS)

    @cached_property
    def missing(self) -> float:
        """What training measured and is no longer there, in tokens a step: what a difference between the target now
        and that of training may have cost. 0 where nothing was recorded."""
        if self.recorded is None:
            return 0.0
        try:
            return max(0.0, self.recorded - self.again)
        except NotLookedAt:
            return 0.0


def gather(
    head: str,
    *,
    target: str | None = None,
    data: str | None = None,
    export: str | None = None,
    overrides: Sequence[str] = (),
    device: str | None = None,
    dtype: str | None = None,
) -> Evidence:
    """Loads head and target, another target too, whatever the head's fingerprint says. data: prompts to look at instead
    of the recipe's. Raises HeadstartError for what cannot be loaded at all."""
    if data is not None:
        overrides = [f"eval.prompts=[{{source: {quoted(data)}}}]", *overrides]
    named = find_named(head, target, overrides=overrides)
    assert named.head is not None
    stored = None if named.run is None else load_recipe(named.run / "recipe.yaml")
    with warnings.catch_warnings():  # what they say is found anyway
        warnings.simplefilter("ignore", HeadstartWarning)
        trained = load_named(named, device=device, dtype=dtype)
        module = load_head(named.head, trained.target, allow_other_target=True)
        make_faster(trained.target)
    return Evidence(
        named=named,
        stored=stored,
        description=read_description(named.head),
        target=trained.target,
        head=module,
        export=None if export is None else Path(export),
    )


def without_system(turn: tuple[Message, ...]) -> tuple[Message, ...]:
    return tuple(message for message in turn if message["role"] not in ("system", "developer"))


def reads_states(head: Head) -> bool:
    """Whether a head reads the target's states; a student reads tokens alone."""
    return not isinstance(head, DraftHead)


def unrolled(head: Head) -> UnrolledHead:
    """The head, if it reads its own states; else the check that asks has nothing to look at."""
    if not isinstance(head, UnrolledHead):
        raise NotLookedAt(f"a {head.config.type} head has no attention of its own")
    return head
