"""What is tried: the same head along the same texts with one thing changed. A change that brings acceptance back names
the fault.

No trial is ever better than it would be while drafting, with one exception that is guarded: features that are read one
position late hold the answer.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from headstart.decode.cost import accepted_at
from headstart.decode.drafters.plans import chain_paths
from headstart.decode.forecast import Recorded
from headstart.eval.diagnosis.evidence import Evidence, reads_states, unrolled
from headstart.eval.diagnosis.finding import Along, Finding, NotLookedAt, gained
from headstart.eval.diagnosis.recording import Known, accepted_along
from headstart.heads.base import Head
from headstart.heads.configs import UnrolledConfig
from headstart.heads.draft_layer import Rotary
from headstart.heads.eagle3 import Eagle3Head
from headstart.heads.starting import as_used
from headstart.heads.unrolled import UnrolledHead
from headstart.target import Features

LEAKS = 4.0
"""So many times the drafts must be accepted where a trial lets the head see the answer."""


@dataclass(frozen=True)
class Trial:
    """One change. what: in words that go on from "with". remedy: what to type if it helps. head, text: what changes."""

    cause: str
    what: str
    remedy: str
    head: Callable[[Head], None] | None = None
    text: Callable[[Known], Recorded] | None = None


def run_trials(evidence: Evidence, trials: Iterator[Trial]) -> Iterator[Finding]:
    """The best trial of each cause, where it brings enough."""
    best: dict[str, tuple[Along, Trial]] = {}
    for trial in trials:
        found = evidence.along(*changed(evidence, trial))
        if trial.cause not in best or found.tau > best[trial.cause][0].tau:
            best[trial.cause] = found, trial
    for cause, (found, trial) in best.items():
        yield from gained(cause, evidence.base, found, trial.what, trial.remedy)


def changed(evidence: Evidence, trial: Trial) -> tuple[Head, list[Recorded]]:
    """The head and the texts of a trial."""
    head = evidence.drafting
    if trial.head is not None:
        head = copy.deepcopy(head)
        trial.head(head)
    texts = evidence.served.texts
    return head, [known.text if trial.text is None else trial.text(known) for known in texts]


def config_of(evidence: Evidence) -> str:
    """Where a head's settings are mended."""
    return str(evidence.folder / "config.json")


# -- which states are read, and from which side of a norm --------------------------------------------------------------


def feature_layers(evidence: Evidence) -> Iterator[Finding]:
    """All layers one off, or one of them; for a head that reads the final state, the layer before."""
    if not reads_states(evidence.head):
        raise NotLookedAt("a student reads no states of the target")
    yield from run_trials(evidence, _layer_trials(evidence))


def _layer_trials(evidence: Evidence) -> Iterator[Trial]:
    wants, last = evidence.head.wants, evidence.target.num_layers
    if not wants:
        yield Trial(
            "feature-layers",
            f"the states of layer {last - 1}, one earlier",
            "hand the head the state after the last layer, or train it again on what it is handed",
            text=lambda known: with_final(known.text, _normed(evidence, known.text.features.taps[last - 1])),
        )
        return
    shifts = [(step,) * len(wants) for step in (-1, 1)]
    if len(wants) > 1:
        shifts += [
            tuple(step * (tap == one) for tap in range(len(wants))) for one in range(len(wants)) for step in (-1, 1)
        ]
    for shift in shifts:
        layers = [layer + step for layer, step in zip(wants, shift, strict=True)]
        if not (0 <= layers[0] and layers[-1] <= last and sorted({*layers}) == layers):
            continue
        said = ", ".join(map(str, layers))
        imported = evidence.description.get("training", {}).get("imported")
        remedy = f'set "layers": [{said}] in {config_of(evidence)}'
        if imported:
            spelt = said.replace(" ", "")
            remedy = (
                f"headstart import {imported['folder']} --target {evidence.target.name} --output DIR --layers {spelt}"
            )
        yield Trial("feature-layers", f"the states of layers {said}", remedy, head=_reading(layers))


def _reading(layers: list[int]) -> Callable[[Head], None]:
    def change(head: Head) -> None:
        head.wants = tuple(layers)

    return change


def final_norm(evidence: Evidence) -> Iterator[Finding]:
    """States from the other side of the target's final norm, and the norms of an EAGLE-3 head the other way."""
    if not reads_states(evidence.head):
        raise NotLookedAt("a student reads no states of the target")
    yield from run_trials(evidence, _norm_trials(evidence))


def _norm_trials(evidence: Evidence) -> Iterator[Trial]:
    head, last = evidence.head, evidence.target.num_layers
    train_again = "train it again on what it is handed, or undo the {} in what it was trained on"
    if not head.wants:
        yield Trial(
            "final-norm",
            "the state before the target's final norm",
            train_again.format("missing norm"),
            text=lambda known: with_final(known.text, known.unnormed),
        )
        yield Trial(
            "final-norm",
            "the final norm applied twice",
            train_again.format("second norm"),
            text=lambda known: with_final(known.text, _normed(evidence, known.text.features.final)),
        )
    if last in head.wants:
        yield Trial(
            "final-norm",
            f"layer {last} before the target's final norm",
            train_again.format("missing norm"),
            text=lambda known: with_taps(known.text, {last: known.unnormed}),
        )
    if isinstance(head, Eagle3Head):
        for flag in ("norm_before_residual", "norm_output"):
            other = not getattr(head.config, flag)
            value = "true" if other else "false"
            yield Trial(
                "final-norm", f"{flag} {value}", f'set "{flag}": {value} in {config_of(evidence)}', _set(flag, other)
            )


def _set(name: str, value: Any) -> Callable[[Head], None]:
    def change(head: Head) -> None:
        head.config = head.config.model_copy(update={name: value})

    return change


def with_final(text: Recorded, final: Tensor) -> Recorded:
    return replace(text, features=Features(final, text.features.taps))


def with_taps(text: Recorded, taps: dict[int, Tensor]) -> Recorded:
    return replace(text, features=Features(text.features.final, {**text.features.taps, **taps}))


@torch.no_grad()
def _normed(evidence: Evidence, states: Tensor) -> Tensor:
    return evidence.target.output.normalise(states)


# -- positions ---------------------------------------------------------------------------------------------------------


def rope(evidence: Evidence) -> Iterator[Finding]:
    """Rotary parameters of the run's recipe, of the target, and the usual bases."""
    yield from run_trials(evidence, _rope_trials(evidence, unrolled(evidence.head)))


def _rope_trials(evidence: Evidence, head: UnrolledHead) -> Iterator[Trial]:
    stored = None if evidence.stored is None else evidence.stored.head
    own = [stored] if isinstance(stored, UnrolledConfig) and stored.rope is not None else []
    targets = as_used(head.config.model_copy(update={"rope": None}), evidence.target).rope
    assert targets is not None
    candidates: dict[str, dict[str, Any]] = {
        f"the rope of the run's recipe ({one.rope})": one.rope or {} for one in own
    }
    candidates |= {f"the target's rope ({targets})": targets}
    candidates |= {
        f"rope_theta {theta:g}": {"rope_type": "default", "rope_theta": theta}
        for theta in (float(targets["rope_theta"]), 10000.0)
    }
    for what, candidate in candidates.items():
        if candidate == head.config.rope:
            continue
        written = str(candidate).replace("'", '"')
        yield Trial("rope", what, f'set "rope": {written} in {config_of(evidence)}', head=_turning(candidate))


def _turning(candidate: dict[str, Any]) -> Callable[[Head], None]:
    def change(head: Head) -> None:
        assert isinstance(head, UnrolledHead) and head.config.max_positions is not None
        head.rotary = Rotary(candidate, head.head_dim, head.config.max_positions)

    return change


def position_offset(evidence: Evidence) -> Iterator[Finding]:
    """Features one position early, or late. Late ones hold the answer to the first draft, so that they must bring
    back several times what is accepted, and at the second draft too."""
    if not reads_states(evidence.head):
        raise NotLookedAt("a student reads no states of the target")
    remedy = "pair them as heads/unrolled.py says (features of j with token j + 1), and train or convert the head again"
    early, late = (
        Trial(
            "position-offset",
            f"features one position {word}",
            remedy,
            text=lambda known, step=step: shifted(known.text, step),
        )
        for word, step in (("earlier", 1), ("later", -1))
    )
    yield from run_trials(evidence, iter([early]))
    ranks = evidence.ranked(*changed(evidence, late))
    found = accepted_along(ranks, evidence.trial_depth)
    first = [one for answer in ranks for one in accepted_at(answer, chain_paths(evidence.trial_depth)) if one]
    goes_on = evidence.trial_depth > 1 and sum(one > 1 for one in first) > 0.5 * len(first)
    if goes_on and found.tau - 1 > LEAKS * (evidence.base.tau - 1):
        yield from gained("position-offset", evidence.base, found, late.what, remedy)


def shifted(text: Recorded, step: int) -> Recorded:
    """Features moved so that position j has those of j - step."""

    def move(states: Tensor) -> Tensor:
        moved = states.roll(step, dims=1)
        edge = slice(0, step) if step > 0 else slice(step, None)
        moved[:, edge] = states[:, edge]
        return moved

    features = text.features
    return replace(text, features=Features(move(features.final), {k: move(tap) for k, tap in features.taps.items()}))
