"""From measured answers to the figures of a report, for one drafter against plain decoding.

Rates are pooled: all tokens / all seconds, prefill apart; means and medians over prompts stand beside them, named.
Answers that loop in either arm are left out of every headline figure and shown apart: they flatter every drafter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import sha256
from typing import Any

from headstart.decode.engine import StepRecord
from headstart.eval.acceptance import FORMULAS, Number, StepCounts, count_steps, loops, mean_and_median, ratio
from headstart.eval.by_context import by_context
from headstart.eval.identity import first_difference
from headstart.eval.intervals import Interval, group_sums, ratio_interval, speedup_interval
from headstart.eval.latency import LATENCY_FORMULAS, latency
from headstart.eval.timing import PLAIN, Answer, Measurement, Timed

Figures = dict[str, Any]

COST_FORMULAS = {
    "break_even_acceptance_length": "seconds of a drafted step / seconds of a plain one",
    "draft_cost": "c: seconds of drafting per level drafted / seconds of a plain step",
}
"""How figures of time are computed; those of acceptance are in `eval.acceptance`."""


def summarise(run: Measurement, drafter: str) -> Figures:
    """The measured headline figures of `drafter`, and under `details` the tables below them."""
    looping = [answer for answer in run.answers if _loops(answer, drafter)]
    kept = [answer for answer in run.answers if not _loops(answer, drafter)]
    plain, drafted = [answer.arms[PLAIN] for answer in kept], [answer.arms[drafter] for answer in kept]
    asked = [answer for answer in kept if answer.transformers is not None]
    identical = [_difference(answer, drafter) is None for answer in run.answers]
    waits = latency(kept, drafter)
    headline = {
        "plain_tokens_per_second": _pooled_rate(plain),
        "transformers_generate_tokens_per_second": _transformers_rate(asked),
        "drafted_tokens_per_second": _pooled_rate(drafted),
        "speedup": _speedup(kept, drafter),
        "speedup_interval": _speedup_interval(kept, drafter),
        "acceptance_length": count_steps(timed.steps for timed in drafted).acceptance_length,
        "acceptance_length_interval": _acceptance_interval(kept, drafter),
        "identical_outputs": sum(identical),
        "compared_outputs": len(identical),
        **{name: _p50_and_p95(waits[name]) for name in ("time_to_first_token", "inter_chunk_latency")},
        "memory": {"plain": run.memory[PLAIN], "drafted": run.memory[drafter]},
    }
    return headline | {"details": {**_details(run, kept, looping, asked, drafter), "latency": waits}}


def token_rates(tokens: Sequence[Number], seconds: Sequence[Number]) -> dict[str, float | None]:
    """Tokens per second: `pooled` is sum / sum, which long answers weigh in; `mean` and `median` are over answers."""
    rates = [ratio(count, time) for count, time in zip(tokens, seconds, strict=True)]
    return {"pooled": ratio(sum(tokens), sum(seconds)), **mean_and_median(rates)}


def _details(run: Measurement, kept: list[Answer], looping: list[Answer], asked: list[Answer], drafter: str) -> Figures:
    counts = count_steps(answer.arms[drafter].steps for answer in kept)
    rows = [_row(answer, drafter) for answer in run.answers]
    kept_rows = [row for row in rows if not row["loops"]]
    plain_where_asked = _pooled_rate([answer.arms[PLAIN] for answer in asked])
    return {
        "formulas": FORMULAS | COST_FORMULAS | LATENCY_FORMULAS,
        "answers": {
            "decoded": len(run.answers),
            "looping": len(looping),
            "in_headline": len(kept),
            "questions_without_room": run.too_long,
        },
        "acceptance": _acceptance(counts),
        "per_depth": _per_depth(counts),
        "over_prompts": {
            "acceptance_length": mean_and_median(row["acceptance_length"] for row in kept_rows),
            "speedup": mean_and_median(row["speedup"] for row in kept_rows),
            "plain_tokens_per_second": _rates(kept, PLAIN),
            "drafted_tokens_per_second": _rates(kept, drafter),
        },
        "by_category": _table(kept, drafter, lambda answer: answer.question.category),
        "by_kind": _table(kept, drafter, lambda answer: answer.question.kind),
        "by_context": by_context(kept, drafter),
        "by_novelty": _table(kept, drafter, lambda answer: answer.question.novelty),
        "looping": _table(looping, drafter, lambda answer: "looping answers"),
        "seconds_per_step": _seconds_per_step(kept, drafter),
        "transformers_generate": {
            "answers": len(asked),
            "plain_tokens_per_second_on_these": plain_where_asked,
            "plain_over_transformers": _over(plain_where_asked, _transformers_rate(asked)),
        },
        "prompts": rows,
    }


def _loops(answer: Answer, drafter: str) -> bool:
    return loops(answer.arms[PLAIN].token_ids) or loops(answer.arms[drafter].token_ids)


def _difference(answer: Answer, drafter: str) -> int | None:
    return first_difference(answer.arms[PLAIN].token_ids, answer.arms[drafter].token_ids)


def _over(top: Number | None, bottom: Number | None) -> float | None:
    return None if top is None or bottom is None else ratio(top, bottom)


def _pooled_rate(answers: Sequence[Timed]) -> float | None:
    return ratio(sum(len(timed.token_ids) for timed in answers), sum(timed.seconds for timed in answers))


def _rates(answers: Sequence[Answer], arm: str) -> dict[str, float | None]:
    timed = [answer.arms[arm] for answer in answers]
    return token_rates([len(one.token_ids) for one in timed], [one.seconds for one in timed])


def _transformers_rate(asked: Sequence[Answer]) -> float | None:
    known = [answer.transformers for answer in asked if answer.transformers is not None]
    return ratio(sum(one.tokens for one in known), sum(one.seconds for one in known))


def _speedup(answers: Sequence[Answer], drafter: str) -> float | None:
    return _over(
        _pooled_rate([answer.arms[drafter] for answer in answers]),
        _pooled_rate([answer.arms[PLAIN] for answer in answers]),
    )


def _group_sums(answers: Sequence[Answer], value: Callable[[Answer], Number]) -> list[Number]:
    """Per group of questions decoded together; what the bootstrap draws."""
    return group_sums([answer.group for answer in answers], [value(answer) for answer in answers])


def _speedup_interval(answers: Sequence[Answer], drafter: str) -> Interval | None:
    columns = []
    for arm in (drafter, PLAIN):
        columns.append(_group_sums(answers, lambda answer, arm=arm: len(answer.arms[arm].token_ids)))
        columns.append(_group_sums(answers, lambda answer, arm=arm: answer.arms[arm].seconds))
    return speedup_interval(*columns)


def _acceptance_interval(answers: Sequence[Answer], drafter: str) -> Interval | None:
    def whole(answer: Answer) -> list[StepRecord]:
        return [step for step in answer.arms[drafter].steps if not step.cut]

    emitted = _group_sums(answers, lambda answer: sum(step.emitted for step in whole(answer)))
    return ratio_interval(emitted, _group_sums(answers, lambda answer: len(whole(answer))))


def _p50_and_p95(arms: Figures) -> Figures:
    return {arm: {name: seconds[name] for name in ("p50", "p95")} for arm, seconds in arms.items()}


def _acceptance(counts: StepCounts) -> Figures:
    return {
        "steps": counts.steps,
        "cut_steps": counts.cut_steps,
        "emitted": counts.emitted,
        "mean_accepted": counts.mean_accepted,
        "draft_acceptance": counts.draft_acceptance,
        "alpha": counts.alpha,
        "mean_depth": counts.mean_depth,
    }


def _per_depth(counts: StepCounts) -> list[Figures]:
    columns = zip(counts.reached, counts.tested, counts.passed, counts.conditional, counts.per_position, strict=True)
    return [
        {
            "depth": depth,
            "reached": reached,
            "tested": tested,
            "accepted": passed,
            "conditional": conditional,
            "per_position": per_position,
        }
        for depth, (reached, tested, passed, conditional, per_position) in enumerate(columns, start=1)
    ]


def _table(answers: Sequence[Answer], drafter: str, name: Callable[[Answer], str]) -> list[Figures]:
    """Pooled figures of each group of answers, largest acceptance length first."""
    groups: dict[str, list[Answer]] = {}
    for answer in answers:
        groups.setdefault(name(answer), []).append(answer)
    rows = [
        {
            "name": group,
            "answers": len(members),
            "acceptance_length": count_steps(answer.arms[drafter].steps for answer in members).acceptance_length,
            "acceptance_length_interval": _acceptance_interval(members, drafter),
            "speedup": _speedup(members, drafter),
            "speedup_interval": _speedup_interval(members, drafter),
            "plain_tokens_per_second": _pooled_rate([answer.arms[PLAIN] for answer in members]),
            "drafted_tokens_per_second": _pooled_rate([answer.arms[drafter] for answer in members]),
        }
        for group, members in groups.items()
    ]
    return sorted(rows, key=lambda row: -(row["acceptance_length"] or 0))


def _row(answer: Answer, drafter: str) -> Figures:
    """One answer, with the sums that `eval.compare` pairs with those of another report by `prompt`, a hash of what was
    read; `emitted` and `steps` are those of whole steps."""
    plain, drafted = answer.arms[PLAIN], answer.arms[drafter]
    counts = count_steps([drafted.steps])
    return {
        "question": answer.question.question_id,
        "turn": answer.turn + 1,
        "group": answer.group,
        "prompt": sha256(repr(answer.prompt_ids).encode()).hexdigest()[:12],
        "kind": answer.question.kind,
        "prompt_tokens": len(answer.prompt_ids),
        "plain_tokens": len(plain.token_ids),
        "drafted_tokens": len(drafted.token_ids),
        "finish_reason": drafted.finish_reason,
        "first_difference": _difference(answer, drafter),
        "loops": _loops(answer, drafter),
        "emitted": counts.emitted,
        "steps": counts.steps,
        "plain_seconds": plain.seconds,
        "drafted_seconds": drafted.seconds,
        "acceptance_length": counts.acceptance_length,
        "speedup": _speedup([answer], drafter),
    }


def _seconds_per_step(answers: Sequence[Answer], drafter: str) -> Figures:
    """Mean seconds of a step by part, in both arms; `other` is wall time that no step accounts for.

    `break_even_acceptance_length`: seconds of a drafted step / seconds of a plain one. Above it, drafting gains.
    """
    parts: Figures = {}
    for name, arm in (("plain", PLAIN), ("drafted", drafter)):
        timed = [answer.arms[arm] for answer in answers]
        steps = [step for one in timed for step in one.steps]
        sums: Figures = {
            part: sum(getattr(step, f"{part}_seconds") / step.rows for step in steps)
            for part in ("draft", "verify", "host")
        }
        sums["other"] = sum(one.seconds for one in timed) - sum(sums.values())
        count = sum(1 / step.rows for step in steps)
        parts[name] = {part: ratio(seconds, count) for part, seconds in sums.items()}
        parts[name]["all"] = ratio(sum(one.seconds for one in timed), count)
    parts["break_even_acceptance_length"] = _over(parts["drafted"]["all"], parts["plain"]["all"])
    return parts
