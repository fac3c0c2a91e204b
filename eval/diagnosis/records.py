"""What the head's records say of its training, against how it is served: target, template, system turn, precision,
length of the context."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from headstart.decode.forecast import Recorded
from headstart.eval.diagnosis.evidence import Evidence
from headstart.eval.diagnosis.finding import Finding, NotLookedAt, counts, gained
from headstart.eval.diagnosis.recording import answered_row
from headstart.eval.diagnosis.trials import config_of
from headstart.heads.unrolled import UnrolledHead
from headstart.recipe import Recipe
from headstart.recipe_target import load_recipe_target
from headstart.target import Features

SEEN = 0.01
"""What a difference is said to cost at least that the record names and nothing measures, in tokens a step: it stands
behind all that was measured."""

UNKNOWN = 0.2
"""Of the acceptance length: what such a difference is taken to cost where training left no figure."""


def other_target(evidence: Evidence) -> Iterator[Finding]:
    """Weights, configuration and tokenizer against the head's fingerprint, the chat template apart."""
    stored, current = evidence.description["target"], evidence.target.fingerprint()
    differing = []
    for section in ("weights", "config", "tokenizer"):
        before, after = stored.get(section, {}), current[section]
        for key in sorted({*before, *after}):
            old, new = before.get(key), after.get(key)
            if old == new or key == "template" or (section == "weights" and None in (old, new)):
                continue
            differing.append(f"{section} {key}")
    if differing:
        yield from _from_record(
            evidence,
            "other-target",
            f"{', '.join(differing[:4])} of {evidence.target.name} are not those of {stored.get('name')}",
            f"give the head its own target, --target {stored.get('name')}, or train a head for this one",
        )


def chat_template(evidence: Evidence) -> Iterator[Finding]:
    """The template itself, by its hash, and its arguments."""
    before = evidence.description["target"].get("tokenizer", {}).get("template")
    now = evidence.target.fingerprint()["tokenizer"]["template"]
    if before != now:
        yield from _from_record(
            evidence,
            "chat-template",
            "the target's chat template is another text than it was when the head was trained",
            "serve with the tokenizer of training (its chat_template), or train again with this one",
        )
    trained, served = evidence.trained_chat, evidence.recipe.data.chat
    if trained.arguments != served.arguments:
        chat = served.model_copy(update={"arguments": trained.arguments})
        found = evidence.answer(chat, float(evidence.recipe.eval.temperature[0])).along
        yield from gained(
            "chat-template",
            evidence.served.along,
            found,
            f"the template's arguments of training ({trained.arguments}; served: {served.arguments})",
            f"serve with data.chat.arguments={trained.arguments}, or train with those that you serve",
        )


def system_prompt(evidence: Evidence) -> Iterator[Finding]:
    """The system turn of the recipe, and those that the prompts bring with them."""
    trained, served = evidence.trained_chat, evidence.recipe.data.chat
    temperature = float(evidence.recipe.eval.temperature[0])
    if trained.system != served.system:
        found = evidence.answer(served.model_copy(update={"system": trained.system}), temperature).along
        yield from gained(
            "system-prompt",
            evidence.served.along,
            found,
            f"the system turn of training ({_short(trained.system)}; served: {_short(served.system)})",
            f"serve with the system turn of training, or train with --set data.chat.system={_short(served.system)}",
        )
    brings = [one for one in evidence.questions(served) if any(m["role"] == "system" for m in (*one.turns[0],))]
    if brings:
        found = evidence.answer(
            served.model_copy(update={"system": trained.system}), temperature, own_system=False
        ).along
        first = str(brings[0].turns[0][0]["content"])
        yield from gained(
            "system-prompt",
            evidence.served.along,
            found,
            f"the system turns of the prompts left out ({_short(first)})",
            "train on conversations that have the system turns that you serve, or with data.chat.system",
        )


def dtype(evidence: Evidence) -> Iterator[Finding]:
    """The target in the precision of training along the same texts, where it is served in another."""
    if evidence.stored is None:
        raise NotLookedAt("the head lies in no run folder, so nothing says its precision in training")
    trained = evidence.stored.target
    now = (str(evidence.target.dtype).removeprefix("torch."), evidence.recipe.target.quantization)
    before = (now[0] if trained.dtype == "auto" else trained.dtype, trained.quantization)
    if now == before:
        return
    section = evidence.recipe.target.model_copy(update={"dtype": before[0], "quantization": before[1]})
    target, _ = load_recipe_target(
        _with_target(evidence.recipe, section), device=evidence.target.device, dtype=before[0]
    )
    head = copy.deepcopy(evidence.head).to(target.device, target.dtype).eval()
    # the text is the served target's own; what the other one would have written differs, and is not asked
    rows = [answered_row(k.text.token_ids[: k.text.prompt_length], k.text.answer) for k in evidence.served.texts]
    found = evidence.along(head, [known.text for known in evidence.record(rows, target)], target)
    yield from gained(
        "dtype",
        evidence.base,
        found,
        f"the target in {_precision(before)}, as in training (served: {_precision(now)})",
        f"serve with --dtype {before[0]} and target.quantization={before[1]}, or train with those that you serve",
    )


def _precision(pair: tuple[str, str]) -> str:
    return pair[0] if pair[1] == "none" else f"{pair[1]} over {pair[0]}"


def _with_target(recipe: Recipe, section: Any) -> Recipe:
    return recipe.model_copy(update={"target": section})


def context_length(evidence: Evidence) -> Iterator[Finding]:
    """Where texts are longer than what the head was trained on, the head with its last so many tokens alone."""
    head = evidence.head
    if not isinstance(head, UnrolledHead):
        raise NotLookedAt(f"a {head.config.type} head looks back at nothing, or as the target does")
    most = head.config.max_positions or 0
    limits = [most] if evidence.stored is None else [most, evidence.stored.data.max_length]
    limit = min(limits)
    texts = evidence.texts
    longer = [text for text in texts if len(text.token_ids) > limit]
    if not longer:
        return
    lengths = sorted(text.prompt_length for text in longer)
    figure = (
        f"{len(longer)} of {len(texts)} texts are longer than the {limit} tokens that the head was trained on (prompts "
        f"of {lengths[0]} to {lengths[-1]} tokens)"
    )
    remedy = f"train with --set data.max_length={2 * max(len(text.token_ids) for text in longer)} on long conversations"
    if most == limit:
        remedy += f', and a larger "max_positions" in {config_of(evidence)}'
    found = evidence.along(evidence.drafting, [windowed(text, limit) for text in texts])
    tried = list(gained("context-length", evidence.base, found, f"its last {limit} tokens alone; {figure}", remedy))
    yield from tried or _shorter(evidence, figure, remedy, len(longer) / len(texts))


def _shorter(evidence: Evidence, figure: str, remedy: str, share: float) -> Iterator[Finding]:
    """Held-out answers, which are no longer than those of training, against the served ones. share: of long texts."""
    if not len(evidence.data.held_out):
        return
    short = evidence.held_out
    lost = (short.tau - evidence.base.tau) * share
    if counts(lost, short.tau - 1):
        figure += f"; acceptance length {evidence.base.tau:.2f} along them, {short.tau:.2f} along held-out answers"
        yield Finding("context-length", lost, figure, remedy, measured=False)


def windowed(text: Recorded, limit: int) -> Recorded:
    """The text from so far behind its start that `limit` tokens are left, two of the prompt at least; the features are
    still those of the whole."""
    first = max(0, min(len(text.token_ids) - limit, text.prompt_length - 2))
    features = text.features
    kept = Features(features.final[:, first:], {k: tap[:, first:] for k, tap in features.taps.items()})
    return replace(text, token_ids=text.token_ids[first:], prompt_length=text.prompt_length - first, features=kept)


def _from_record(evidence: Evidence, cause: str, figure: str, remedy: str) -> Iterator[Finding]:
    """A difference that no trial can undo; it may have cost what training measured and is gone."""
    if evidence.recorded is None:
        figure += "; what it costs is not known, since training left no figure to compare with"
        yield Finding(cause, UNKNOWN * evidence.base.tau, figure, remedy, measured=False)
        return
    if evidence.missing:
        figure += f"; along held-out answers τ was {evidence.recorded:.2f} in training and is {evidence.again:.2f} now"
    yield Finding(cause, max(evidence.missing, SEEN), figure, remedy, measured=False)


def _short(text: str | None) -> str:
    if text is None:
        return "none"
    return repr(text if len(text) <= 40 else f"{text[:37]}...")
