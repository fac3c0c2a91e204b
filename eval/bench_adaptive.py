"""Adaptive draft length beside every constant one and transformers' heuristic, replayed along the target's own answers.

    python -m headstart.eval.bench_adaptive --head runs/smollm2-eagle3 --output adaptive.json

The target answers prompts of several kinds and prompts of random words, greedily and without drafts. At every token the
head tells how many drafts of a long chain would have been accepted there, and the costs of a step of every depth are
measured on this device. So the seconds that any policy would take follow, all over the same texts and the same costs:
no clock and no other job touches the comparison.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from typing import Any

import torch

from headstart.allocator import keep_freed_memory
from headstart.data.progress import Progress
from headstart.data.rendering import Row
from headstart.decode.cost import accepted_at
from headstart.decode.decode_copy import make_faster
from headstart.decode.draft_length import (
    AdaptiveLength,
    ConstantLength,
    HeuristicLength,
    LengthPolicy,
    StepCosts,
    replay_lengths,
)
from headstart.decode.drafters.base import NoDraft
from headstart.decode.drafters.heads import head_drafter
from headstart.decode.drafters.plans import chain_paths
from headstart.decode.forecast import measure_depths, rank_answer, record_rows
from headstart.errors import HeadstartError
from headstart.eval import identity
from headstart.eval.figures import refuse_output, write_figures
from headstart.eval.prompts import Question, load_questions
from headstart.eval.trained import Trained, open_trained
from headstart.heads.medusa import MedusaHead
from headstart.heads.store import load_head
from headstart.recipe import override
from headstart.train.run_folder import environment

KINDS = ("summarise", "code", "translate", "story")
RANDOM, WORDS = "random words", 40
LONGEST = 8
"""Drafts of a chain at most."""


def prompts_by_kind(trained: Trained, each: int) -> dict[str, list[list[int]]]:
    """Prompts of held-out topics by kind, and some of words in no order."""
    source = 'eval.prompts=[{source: "bundled:chats", split: held_out_topics}]'
    questions = load_questions(override(trained.recipe, [source]), trained.target.tokenizer)
    found = {kind: [one for one in questions if one.kind == kind][:each] for kind in KINDS}
    prompts = {kind: [one.prompt_ids(trained.renderer) for one in some] for kind, some in found.items()}
    words, dice = sorted(set(_words(questions))), random.Random(0)
    asked = [" ".join(dice.sample(words, WORDS)) for _ in range(each)]
    prompts[RANDOM] = [trained.renderer.prompt([{"role": "user", "content": text}]) for text in asked]
    return prompts


def _words(questions: Sequence[Question]) -> list[str]:
    return [word for one in questions for turn in one.turns for message in turn for word in message["content"].split()]


@torch.no_grad()
def acceptances(trained: Trained, each: int) -> tuple[dict[str, list[list[int]]], StepCosts]:
    """By kind and text, the drafts accepted at every token of the answer; and the costs of a step by its depth."""
    target = trained.target
    assert trained.head is not None
    make_faster(target)
    head = load_head(trained.head, target).to(target.dtype).eval()
    depth = min(LONGEST, head.num_depths) if isinstance(head, MedusaHead) else LONGEST
    prompts, found = prompts_by_kind(trained, each), {}
    with Progress("decoding", sum(map(len, prompts.values())), unit="answers") as progress:
        for kind, some in prompts.items():
            new = trained.recipe.eval.max_new_tokens
            answers = identity.decode(target, NoDraft(), some, new, 1, lambda: progress.add(1))
            rows = [
                Row(f"{kind} {number}", [*prompt, *answer], [False] * len(prompt) + [True] * len(answer))
                for number, (prompt, answer) in enumerate(zip(some, answers, strict=True))
            ]
            texts = record_rows(target, rows, head.wants)
            ranked = [rank_answer(head, target, text, depth=depth) for text in texts]
            found[kind] = [accepted_at(answer, chain_paths(depth)) for answer in ranked]
    drafter = head_drafter(head, target, chain_paths(depth))
    return found, measure_depths(drafter, target, range(1, depth + 2))


def compare(accepted: Sequence[Sequence[int]], costs: StepCosts) -> dict[str, Any]:
    """Seconds over all texts of one kind by policy; every policy learns from the first text on."""

    def seconds(policy: LengthPolicy) -> float:
        return sum(replay_lengths(policy, text, costs) for text in accepted)

    constant = [seconds(ConstantLength(length)) for length in range(costs.longest + 1)]
    adaptive, heuristic = seconds(AdaptiveLength(costs)), seconds(HeuristicLength(costs.longest))
    best = min(range(len(constant)), key=lambda length: constant[length])
    return {
        "texts": len(accepted),
        "tokens": sum(map(len, accepted)),
        "constant_speedup": [constant[0] / one for one in constant],
        "best_constant": best,
        "adaptive_speedup": constant[0] / adaptive,
        "heuristic_speedup": constant[0] / heuristic,
        "adaptive_over_best_constant": constant[best] / adaptive,
    }


def run(trained: Trained, each: int) -> dict[str, Any]:
    """The comparison for every kind."""
    accepted, costs = acceptances(trained, each)
    return {
        "environment": environment(()),
        "step_seconds": list(costs.seconds),
        "kinds": {kind: compare(texts, costs) for kind, texts in accepted.items()},
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head", required=True, metavar="RUN", help="run folder, or the folder of a head")
    parser.add_argument("--each", type=int, default=12, metavar="N", help="prompts of every kind (%(default)s)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change a key of the recipe")
    parser.add_argument("--output", metavar="FILE", help="where the figures go (.json)")
    options = parser.parse_args(arguments)
    keep_freed_memory()
    try:
        refuse_output(options.output)
        report = run(open_trained(options.head, overrides=options.set), options.each)
    except HeadstartError as error:
        print(error, file=sys.stderr)
        return error.exit_status
    for kind, one in report["kinds"].items():
        lengths = " ".join(f"{speedup:.2f}" for speedup in one["constant_speedup"])
        print(
            f"{kind}: adaptive {one['adaptive_speedup']:.3f}, {one['adaptive_over_best_constant']:.3f} of the best "
            f"constant ({one['best_constant']} drafts); heuristic {one['heuristic_speedup']:.3f}; "
            f"constant 0, 1, ..: {lengths}"
        )
    write_figures(report, options.output)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
