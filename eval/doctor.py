"""`headstart doctor`: where acceptance is lost, the likeliest cause first, with the figure that shows it and a remedy.

headstart doctor --head runs/quickstart
headstart doctor --head runs/quickstart --data prompts.jsonl --set eval.temperature=1.0
headstart doctor --head runs/smollm2-eagle3 --export served --json doctor.json

A handful of prompts is decoded, and the head replayed along the answers: as it is, and with one thing changed at a time
(other layers, the norm on the other side, other rotary parameters, the system turn of training, ..). What a change
brings back is what the fault costs, in tokens a step, so all causes are ranked on one scale. What cannot be tried is
estimated, and said to be.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headstart.atomic import write_text
from headstart.errors import HeadstartError
from headstart.eval.diagnosis import decoding, exported, learning, records, tensors, trials
from headstart.eval.diagnosis.evidence import Evidence, gather
from headstart.eval.diagnosis.finding import CAUSES, Check, Finding, NotLookedAt, counts

CHECKS: dict[str, Check] = {
    "target": records.other_target,
    "chat template": records.chat_template,
    "system prompt": records.system_prompt,
    "precision": records.dtype,
    "length of the context": records.context_length,
    "feature layers": trials.feature_layers,
    "norms": trials.final_norm,
    "rope": trials.rope,
    "pairs of features and tokens": trials.position_offset,
    "tensors of the head": tensors.head_tensors,
    "draft vocabulary": tensors.draft_vocabulary,
    "loss mask": learning.loss_mask,
    "answers learnt from": learning.foreign_data,
    "amount of data": learning.little_data,
    "temperature": decoding.temperature,
    "forecast against decoding": decoding.forecast_apart,
    "size of the tree": decoding.tree_size,
    "export": exported.export,
}
"""Every check, in the order in which they are made."""


HARDLY_ANY = 0.1
"""Drafts accepted a step below which a head is of no use, whatever the cause."""


def run(
    head: str,
    *,
    target: str | None = None,
    data: str | None = None,
    export: str | None = None,
    overrides: Sequence[str] = (),
    output: str | None = None,
    device: str | None = None,
    dtype: str | None = None,
) -> int:
    """Looks, prints, and writes the same as JSON to `output` if given. Returns the status: 1 if a cause was found."""
    evidence = gather(head, target=target, data=data, export=export, overrides=overrides, device=device, dtype=dtype)
    findings = examine(evidence)
    print(describe(evidence, findings))
    if output is not None:
        write_text(Path(output), json.dumps(as_json(evidence, findings), indent=1) + "\n")
    return 1 if named(evidence, findings) else 0


def examine(evidence: Evidence) -> list[Finding]:
    """What all checks find, the costliest first; of two that cost the same, the one that was measured."""
    findings: list[Finding] = []
    for name, check in CHECKS.items():
        try:
            findings += check(evidence)
        except (NotLookedAt, HeadstartError) as why:  # what one check stumbles over is no reason to be silent
            evidence.not_looked_at[name] = str(why)
    return sorted(findings, key=lambda one: (-one.lost, not one.measured))


def named(evidence: Evidence, findings: Sequence[Finding]) -> list[Finding]:
    """Those that cost enough to be causes; the others are notes."""
    return [one for one in findings if counts(one.lost, evidence.base.tau - 1 + one.lost)]


def describe(evidence: Evidence, findings: Sequence[Finding]) -> str:
    """The answer as it is printed."""
    causes = named(evidence, findings)
    lines = [_state(evidence), ""]
    for number, one in enumerate(causes):
        if number == 0:
            lead = "likeliest cause" if one.measured else "likeliest cause, judged by a sign and not tried"
        else:
            lead = "then" if one.measured else "then, judged by a sign"
        lines += [f"{lead}: {CAUSES[one.cause]} (about {one.lost:.2f} tokens a step)"]
        lines += [f"  shown by  {one.figure}", f"  to do     {one.remedy}"]
    if not causes:
        lines.append(_nothing_found(evidence))
    notes = [one for one in findings if one not in causes]
    lines += [f"note: {CAUSES[one.cause]} ({one.figure}), and it costs nothing that shows" for one in notes]
    lines += [f"not looked at: {name}, since {why}" for name, why in evidence.not_looked_at.items()]
    return "\n".join(lines)


def _nothing_found(evidence: Evidence) -> str:
    if evidence.recorded is not None and counts(evidence.missing, evidence.recorded - 1):
        return (
            f"no cause found, though something is wrong: along held-out answers τ was {evidence.recorded:.2f} in "
            f"training and is {evidence.again:.2f} now"
        )
    if evidence.served.along.tau - 1 < HARDLY_ANY:
        return "no cause found, though hardly any draft is accepted: the head may have learnt nothing; train it longer"
    return "nothing wrong found"


def _state(evidence: Evidence) -> str:
    """What was measured, before anything is said of it."""
    served = evidence.served
    rates = " ".join("n/a" if rate is None else f"{rate:.2f}" for rate in served.counts.conditional)
    text = (
        f"{evidence.named.run or evidence.folder} ({evidence.head.config.type}) for {evidence.target.name}: acceptance "
        f"length {served.along.tau:.2f} with a chain of {evidence.depth}, over {served.counts.steps} steps; accepted "
        f"by depth {rates}"
    )
    if evidence.recorded is None:
        return text
    try:
        again, there, learnt = evidence.again, evidence.held_out.tau, evidence.learnt.tau
        return (
            f"{text}\nalong held-out answers: {again:.2f} now, {evidence.recorded:.2f} in training; with a chain of "
            f"{evidence.trial_depth}, {there:.2f} there and {learnt:.2f} along training rows"
        )
    except NotLookedAt:
        return text


def as_json(evidence: Evidence, findings: Sequence[Finding]) -> dict[str, Any]:
    """What `--json` writes."""
    causes = named(evidence, findings)
    return {
        "head": str(evidence.named.run or evidence.folder),
        "target": evidence.target.name,
        "acceptance_length": round(evidence.served.along.tau, 4),
        "steps": evidence.served.counts.steps,
        "conditional": evidence.served.counts.conditional,
        "recorded": evidence.recorded,
        "findings": [one.as_json() for one in causes],
        "notes": [one.as_json() for one in findings if one not in causes],
        "not_looked_at": evidence.not_looked_at,
    }
