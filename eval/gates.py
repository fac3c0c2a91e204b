"""What must hold before a speedup is believed. Each gate says what it found; a failed identity withholds the speedup.

A gate is {"name", "passed", "text"}; `passed` is None where there was nothing to judge.
"""

from __future__ import annotations

from typing import Any

from headstart.eval.acceptance import mean_and_median

Gate = dict[str, Any]
SPEEDUPS = ("by_category", "by_kind", "by_context", "by_novelty", "looping", "prompts")
"""The details whose rows have speedups."""
ACCOUNTED = 0.05
"""Largest share of an arm's wall time that its steps need not account for."""


def gates(figures: dict[str, Any], identity: dict[str, Any] | None, notes: list[str]) -> list[Gate]:
    """All gates of one drafter; figures are those of `summary.summarise`."""
    return [
        _texts(figures),
        _identity(identity),
        _below_acceptance(figures),
        _accounted(figures),
        *({"name": "note", "passed": None, "text": note} for note in notes),
    ]


def withhold(figures: dict[str, Any], found: list[Gate]) -> None:
    """A drafter whose texts are not the target's has no speedup, in no table either."""
    if any(gate["name"] == "identity" and gate["passed"] is False for gate in found):
        nothing = {"speedup": None, "speedup_interval": None}
        figures.update(nothing)
        details = figures["details"]
        for name in SPEEDUPS:
            details[name] = [{**row, **{key: None for key in nothing if key in row}} for row in details[name]]
        details["over_prompts"] = {**details["over_prompts"], "speedup": mean_and_median([])}


def _texts(figures: dict[str, Any]) -> Gate:
    same, all_texts = figures["identical_outputs"], figures["compared_outputs"]
    rows = figures["details"]["prompts"]
    plain, drafted = (sum(row[f"{arm}_tokens"] for row in rows) for arm in ("plain", "drafted"))
    text = f"{same} of {all_texts} texts are equal; {plain} tokens plain, {drafted} drafted"
    if same < all_texts:
        text += (
            ". Texts that part have their own lengths, so times are compared per token; identity tells why they part"
        )
    return {"name": "texts", "passed": True if same == all_texts else None, "text": text}


def _identity(identity: dict[str, Any] | None) -> Gate:
    if identity is None:
        return {"name": "identity", "passed": None, "text": "not checked (eval.identity_prompts is 0, or sampling)"}
    full, half = identity["full_precision"], identity["half_precision"]
    parts = []
    if full is not None:
        parts.append(
            f"{full['dtype']}: {full['identical']} of {full['compared']} texts equal, "
            f"{sum(one['allowed'] for one in full['divergences'])} part at a tie"
        )
        wrong = sum(not one["allowed"] for one in full["divergences"])
        parts += [f"{wrong} part where nothing ties"] * bool(wrong)
    if half is not None:
        parts.append(
            f"{half['dtype']}: {len(half['outside'])} of {half['tokens']} tokens outside the error, largest gap "
            f"{half['largest_gap']:.3g} of {half['limit']:.3g} allowed; {half['compared'] - half['identical']} texts "
            f"part, {half['compared'] - half['control_identical']} of the control's (p = {half['p_value']:.2g})"
        )
        parts += ["too few texts for that last test to fail"] * (not half["share_could_fail"])
    return {"name": "identity", "passed": identity["passed"], "text": "; ".join(parts)}


def _below_acceptance(figures: dict[str, Any]) -> Gate:
    """A step that verifies a tree costs no less than a plain one, so nothing is sped up by more than tau."""
    speedup, tau = figures["speedup"], figures["acceptance_length"]
    if speedup is None or tau is None:
        return {"name": "speedup within acceptance length", "passed": None, "text": "nothing was measured"}
    low = (figures["speedup_interval"] or [speedup])[0]
    high = (figures["acceptance_length_interval"] or [tau])[-1]
    return {
        "name": "speedup within acceptance length",
        "passed": low <= high,
        "text": f"speedup {speedup:.2f}, acceptance length {tau:.2f}: a step is never cheaper for verifying drafts",
    }


def _accounted(figures: dict[str, Any]) -> Gate:
    steps = figures["details"]["seconds_per_step"]
    shares = [
        steps[arm]["other"] / steps[arm]["all"] for arm in ("plain", "drafted") if steps[arm]["all"] not in (None, 0)
    ]
    worst = max(shares, default=None, key=abs)
    return {
        "name": "time accounted for",
        "passed": None if worst is None else abs(worst) <= ACCOUNTED,
        "text": "nothing was timed" if worst is None else f"{worst:.1%} of the wall time lies outside the steps",
    }
