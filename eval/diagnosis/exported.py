"""The export beside the head: what the linter says of it, and what it drafts once it is read back."""

from __future__ import annotations

import copy
from collections.abc import Iterator

from headstart.errors import HeadstartError
from headstart.eval.diagnosis.evidence import Evidence
from headstart.eval.diagnosis.finding import Finding, NotLookedAt, counts
from headstart.heads.draft import DraftHead
from headstart.heads.formats import load_foreign
from headstart.heads.formats.lint import check
from headstart.heads.formats.rules import Fault

CAUSE_OF = {
    "tie-flag": "tie-flag",
    "stored-dtype": "dtype",
    "rope-spellings": "rope",
    "positions": "context-length",
    "layer-ids": "feature-layers",
    "norm-flags": "final-norm",
    "norm-before-residual": "final-norm",
    "later-norms": "final-norm",
    "offsets": "draft-vocabulary",
    "membership": "draft-vocabulary",
    "draft-vocabulary": "draft-vocabulary",
    "token-map": "draft-vocabulary",
}
"""What a rule of the linter means here; of all others, that tensors are not what they should be."""
SLIGHT = {"stored-dtype", "positions", "architecture", "special-ids", "verifier-name", "proposal"}
"""Rules whose faults cost a part of the acceptance, or keep a server from starting; others cost all of it."""
A_PART = 0.15
"""Of the accepted drafts: what a slight fault is taken to cost."""


def export(evidence: Evidence) -> Iterator[Finding]:
    """Every fault of the export, by its rule; and what it is accepted along the same texts, read back as a head."""
    if evidence.export is None:
        raise NotLookedAt("no export is named; add --export DIR")
    if isinstance(evidence.head, DraftHead):
        raise NotLookedAt("a student is exported as a model of transformers, which no check knows more of")
    report = check(evidence.export, target=evidence.target, head=evidence.head)
    accepted = max(evidence.base.tau - 1, 0.0)
    back = _read_back(evidence)
    lost = accepted if back is None else evidence.base.tau - back
    by_cause: dict[str, list[Fault]] = {}
    for fault in report.faults:
        by_cause.setdefault(CAUSE_OF.get(fault.rule, "export-tensors"), []).append(fault)
    if "export-tensors" in by_cause and len(by_cause) > 1 and _only_logits(by_cause["export-tensors"]):
        del by_cause["export-tensors"]  # that other logits come of it says no more than the other faults
    if back is not None and not by_cause and counts(lost, accepted):
        yield Finding(
            "export-tensors",
            lost,
            f"acceptance length {evidence.base.tau:.2f} of the head, {back:.2f} of {evidence.export} read back",
            _export_again(evidence),
        )
    for cause, faults in by_cause.items():
        slight = all(fault.rule in SLIGHT for fault in faults)
        cost = max(lost, A_PART * accepted if slight else accepted)
        figure = "; ".join(f"{fault.rule}: expected {fault.expected}, got {fault.got}" for fault in faults[:2])
        if back is None:
            figure += "; it cannot be read back"
        elif counts(lost, accepted):
            figure += f"; acceptance length {evidence.base.tau:.2f} of the head, {back:.2f} of the export read back"
        yield Finding(cause, cost, f"{evidence.export}: {figure}", faults[0].remedy, measured=False)


def _only_logits(faults: list[Fault]) -> bool:
    return all(fault.rule == "draft-logits" for fault in faults)


def _read_back(evidence: Evidence) -> float | None:
    """τ of the export along the served texts; None where it is no head for this target."""
    assert evidence.export is not None
    try:
        head = load_foreign(evidence.export, evidence.target)
    except HeadstartError:
        return None
    head = copy.deepcopy(head).to(evidence.target.device, evidence.target.dtype).eval()
    if not set(head.wants) <= set(evidence.layers):
        return None
    return evidence.along(head, evidence.texts).tau


def _export_again(evidence: Evidence) -> str:
    return f"headstart export --head {evidence.named.run or evidence.folder} --format FORMAT --output DIR --check"
