"""What the head learnt from: are the answers the target's own, are they the labels, and are there enough of them?

All three end in a head that is accepted along what it learnt and not along what it meets. That gap is measured; which
of the three it is, is told by its sign: the target's agreement with labels and with what is no label, the number of
labels, and held-out against training rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from headstart.data.agreement import FOREIGN_BELOW
from headstart.data.reports import LOW_SHARE
from headstart.eval.diagnosis.evidence import Evidence
from headstart.eval.diagnosis.finding import Finding, counts
from headstart.heads.draft import DraftHead

INVERTED = 0.2
"""By so much more the target agrees with what is no label than with the labels, where the mask is wrong."""
A_TENTH = 0.1
"""What answers of the target's own were worth where published: about a tenth of the acceptance length."""
BY_HEART = 0.7
"""Share of the drafts accepted along training rows that is lost on held-out ones where a head knows those by heart.
Heads that went over a thousand chats six times still lose a half, and are none the worse for it."""
STILL_RISING = 0.4
"""Share of the accepted drafts that came in the second half of the training or later, above which it was short. Every
head still learns a little when it stops."""


def loss_mask(evidence: Evidence) -> Iterator[Finding]:
    """Few labels, or labels that the target would not write beside text that it would."""
    rows = evidence.training_rows
    labels, tokens = sum(sum(row.supervised) for row in rows), sum(len(row.input_ids) for row in rows)
    per_row = sorted(sum(row.supervised) for row in rows)[len(rows) // 2]
    depths = 2 if isinstance(evidence.head, DraftHead) else evidence.head.num_depths + 2
    remedy = "`headstart data prepare --recipe RECIPE` shows rows with their labels: mend the mask, and train again"
    if labels < LOW_SHARE * tokens or per_row < depths:
        figure = f"{labels} of {tokens} tokens of {len(rows)} training rows are labels ({labels / tokens:.1%})"
        if per_row < depths:
            figure += (
                f", {per_row} in the middle row; a head of {evidence.head.num_depths} depths needs {depths} in a row"
            )
        yield Finding("loss-mask", _estimate(evidence, 1.0), figure, remedy, measured=False)
        return
    others = [replace(row, supervised=[not label for label in row.supervised]) for row in rows]
    labelled, rest = evidence.agreement, evidence.agreement_with(others)
    if rest.tokens and rest.share - labelled.share > INVERTED:
        figure = (
            f"the target would have written {labelled.share:.0%} of the {labelled.tokens} labels looked at, and "
            f"{rest.share:.0%} of the tokens that are none"
        )
        yield Finding("loss-mask", _estimate(evidence, 1.0), figure, remedy, measured=False)


def foreign_data(evidence: Evidence) -> Iterator[Finding]:
    """Answers that the target would not have written."""
    found = evidence.agreement
    if not found.tokens or found.share >= FOREIGN_BELOW:
        return
    name = "RECIPE" if evidence.named.run is None else str(evidence.named.run / "recipe.yaml")
    yield Finding(
        "foreign-data",
        _estimate(evidence, 1 - found.share / FOREIGN_BELOW),
        f"the target itself would have written {found.share:.0%} of the {found.tokens} training labels looked at; of "
        "its own answers it is nearly all",
        f"headstart data distill --recipe {name} --output own.jsonl, and train on that",
        measured=False,
    )


def little_data(evidence: Evidence) -> Iterator[Finding]:
    """Training rows known by heart, or a learning curve that is still steep at its end."""
    learnt, met = evidence.learnt.tau, evidence.held_out.tau
    count = len(evidence.data.train)
    if len(evidence.data.held_out) and learnt - met > BY_HEART * (learnt - 1) and counts(learnt - met, learnt - 1):
        yield Finding(
            "little-data",
            learnt - met,
            f"acceptance length {learnt:.2f} along training rows, {met:.2f} along held-out ones: {count} conversations "
            "are known by heart",
            "train on more conversations (headstart data distill makes them), or with head.dropout",
            measured=False,
        )
        return
    curve = _curve(evidence)
    if len(curve) < 2:
        return
    (step, tau), (earlier, before) = (
        curve[-1],
        next((point for point in reversed(curve) if point[0] <= curve[-1][0] / 2), curve[0]),
    )
    if step >= 2 * earlier and tau - before > STILL_RISING * (tau - 1) and counts(tau - before, tau - 1):
        yield Finding(
            "little-data",
            tau - before,
            f"along held-out answers τ rose from {before:.2f} at step {earlier} to {tau:.2f} at step {step}, the last: "
            "as much again may come with as much again of training",
            f"train longer: --set train.max_steps={2 * step}, with more conversations if it learns these by heart",
            measured=False,
        )


def _estimate(evidence: Evidence, severity: float) -> float:
    """What wrong labels cost: the gap between what was learnt and what is met, and a tenth at least of what is
    accepted, by how wrong they are (0 to 1)."""
    gap = max(0.0, evidence.learnt.tau - evidence.base.tau)
    return max(gap, A_TENTH * evidence.base.tau) * severity


def _curve(evidence: Evidence) -> list[tuple[int, float]]:
    """(step, τ) of the chain along held-out answers, as training measured it."""
    key = "forecast_chain_acceptance_length"
    return [(line["step"], float(line[key])) for line in evidence.metrics if line.get(key) is not None]
