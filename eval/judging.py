"""The identity check of a report: which of the measured answers `eval.identity` looks at, and in which precision."""

from __future__ import annotations

from typing import Any

import torch

from headstart.data.progress import Progress
from headstart.decode.decode_copy import in_float32
from headstart.decode.drafters.base import NoDraft
from headstart.eval import identity
from headstart.eval.drafters import DrafterPlan
from headstart.eval.timing import PLAIN, Answer, Measurement
from headstart.eval.trained import Trained


def check_identity(trained: Trained, plan: DrafterPlan, measured: Measurement) -> dict[str, Any] | None:
    """Identity as `eval.identity` defines it, on the first `eval.identity_prompts` questions (None: on all).

    In full precision, where that costs no decoding, on every text that parts as well: none goes unexplained.
    """
    settings, target = trained.recipe.eval, trained.target
    if settings.identity_prompts == 0:
        return None
    half = target.dtype in (torch.bfloat16, torch.float16)
    ids = list(dict.fromkeys(answer.question.question_id for answer in measured.answers))
    chosen = set(ids[: settings.identity_prompts])
    if not half:
        chosen |= {answer.question.question_id for answer in measured.answers if _parts(answer, plan.name)}
    answers = [answer for answer in measured.answers if answer.question.question_id in chosen]
    prompts = [answer.prompt_ids for answer in answers]
    plain, drafted = ([answer.arms[arm].token_ids for answer in answers] for arm in (PLAIN, plan.name))
    limits = (settings.max_new_tokens, plan.budget)
    rounded = None
    if half:
        wide = in_float32(target)
        with Progress("checking identity", 3 * len(prompts), unit="answers") as progress:
            control = identity.decode(target, NoDraft(plan.budget), prompts, *limits, progress.add)
            rounded = identity.check_half_precision(target, wide, prompts, plain, drafted, control)
            plain = identity.decode(wide, NoDraft(), prompts, settings.max_new_tokens, 1, progress.add)
            drafted = identity.decode(wide, plan.make(wide), prompts, *limits, progress.add)
        target = wide
    full = identity.check_full_precision(target, prompts, plain, drafted, plan.budget)
    return {
        "prompts": len(chosen),
        "full_precision": identity.as_dict(full),
        "half_precision": identity.as_dict(rounded) if rounded else None,
        "passed": full.passed and (rounded is None or rounded.passed),
    }


def _parts(answer: Answer, drafter: str) -> bool:
    return answer.arms[PLAIN].token_ids != answer.arms[drafter].token_ids
