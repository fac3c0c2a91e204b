"""Against transformers' own assisted generation and prompt lookup: the same target, drafter and settings, in one run.

    python -m headstart.eval.bench_assisted --draft runs/smollm2-draft --output assisted.json
    python -m headstart.eval.bench_assisted --output assisted.json             # prompt lookup alone

Both sides draft chains of the same constant length with the same model (`num_assistant_tokens`) or by the same n-grams
(`prompt_lookup_num_tokens`). Two questions are asked:

- In float32: are our greedy texts those of `transformers.generate`, by the rule of `eval.identity`?
- In the recipe's dtype: tokens per second from the first emission to the last, over the very same text. Ours is forced
  by a logits processor at the target, theirs by a hook on the target's logits, since a processor would force their
  draft model too. The text is plain greedy decoding's, so drafts are accepted as they are while decoding freely. Theirs
  runs twice, with the linear layers that our side decodes with, and with plain ones.

Arms take turns on every prompt, and intervals are paired by prompt.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import LogitsProcessor

from headstart.allocator import keep_freed_memory
from headstart.data.progress import Progress
from headstart.decode.decode_copy import in_float32, make_faster
from headstart.decode.drafters.base import Drafter, NoDraft, Request
from headstart.decode.drafters.model import ModelDrafter
from headstart.decode.drafters.ngram import NgramDrafter
from headstart.decode.engine import Engine
from headstart.decode.sampling import SamplingSettings
from headstart.errors import HeadstartError
from headstart.eval import identity
from headstart.eval.drafters import open_draft_model
from headstart.eval.figures import refuse_output, write_figures
from headstart.eval.intervals import speedup_interval
from headstart.eval.prompts import choose, load_questions
from headstart.eval.trained import Trained, open_trained
from headstart.eval.transformers_arm import TransformersArm
from headstart.target import Target
from headstart.train.run_folder import environment

LOOKUP_NGRAM = 2
"""The longest n-gram that is looked up: transformers' own default."""


class ForcedText(LogitsProcessor):
    """Makes the target write one text, whatever it would have said."""

    def __init__(self, token_ids: Sequence[int]):
        """token_ids: prompt and answer."""
        self.token_ids = token_ids

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        place = input_ids.shape[1]
        if place < len(self.token_ids):
            scores[:, self.token_ids[place]] = torch.inf
        return scores


@contextmanager
def forcing(model: Any, token_ids: Sequence[int]) -> Iterator[None]:
    """The same at the logits of a transformers model: those of every token that it reads, by its place in the cache."""

    def force(module: Any, arguments: Any, output: Any) -> Any:
        end, count = output.past_key_values.get_seq_length(), output.logits.shape[1]
        for row, place in enumerate(range(end - count + 1, end + 1)):
            if place < len(token_ids):
                output.logits[:, row, token_ids[place]] = torch.inf
        return output

    handle = model.register_forward_hook(force)
    try:
        yield
    finally:
        handle.remove()


@dataclass(frozen=True)
class Rival:
    """One way of drafting, as we and as transformers do it."""

    make: Callable[[Target], Drafter]
    """Our drafter for a target."""
    theirs: Mapping[str, Any]
    """Arguments of `TransformersArm.generate` beside the request."""


def rivals(length: int, draft: Target | None, *, faster: bool) -> dict[str, Rival]:
    """By name; the draft model decodes with the linear layers of its side."""
    found = {
        "prompt lookup": Rival(
            lambda target: NgramDrafter(length, max_ngram=LOOKUP_NGRAM),
            {"prompt_lookup_num_tokens": length, "max_matching_ngram_size": LOOKUP_NGRAM},
        )
    }
    if draft is None:
        return found
    assistant = TransformersArm(draft, faster=faster).target
    settings = assistant.model.generation_config
    settings.num_assistant_tokens, settings.num_assistant_tokens_schedule = length, "constant"
    settings.assistant_confidence_threshold = 0.0
    return found | {"draft model": Rival(lambda target: ModelDrafter(draft, target, length), {"assistant": assistant})}


def check_texts(trained: Trained, draft: Target | None, prompts: Sequence[list[int]], length: int) -> dict[str, Any]:
    """Our greedy texts in float32 beside those of transformers' assisted generation."""
    wide = in_float32(trained.target)
    draft = None if draft is None else in_float32(draft)
    arm, limit, found = TransformersArm(wide), trained.recipe.eval.max_new_tokens, {}
    for name, rival in rivals(length, draft, faster=False).items():
        ours = identity.decode(wide, rival.make(wide), prompts, limit, length + 1)
        theirs = [
            arm.generate(Request(prompt_ids=prompt, max_new_tokens=limit), time.perf_counter, **rival.theirs).token_ids
            for prompt in prompts
        ]
        found[name] = identity.as_dict(identity.check_full_precision(wide, prompts, theirs, ours, length + 1))
    return found


def time_rivals(
    target: Target, draft: Target | None, texts: Sequence[tuple[list[int], list[int]]], length: int
) -> dict[str, dict[str, list[tuple[int, float]]]]:
    """By rival and arm ("ours", "theirs", "theirs, plain linears"): (tokens, seconds) on every text after the first
    emission. texts: prompt and the answer that is forced."""
    arms = {"theirs": TransformersArm(target, faster=True), "theirs, plain linears": TransformersArm(target)}
    known = {name: rivals(length, draft, faster=name == "theirs") for name in arms}
    engines = {name: Engine(target, rival.make(target), budget=length + 1) for name, rival in known["theirs"].items()}
    found = {name: {arm: [] for arm in ("ours", *arms)} for name in engines}

    def run(name: str, arm: str, prompt: list[int], answer: list[int]) -> tuple[int, float]:
        forced = SamplingSettings(processors=(ForcedText(prompt + answer),))
        request = Request(prompt_ids=prompt, max_new_tokens=len(answer), settings=forced, ignore_end=True)
        if arm == "ours":
            return _stream(engines[name], request)
        plain = Request(prompt_ids=prompt, max_new_tokens=len(answer), ignore_end=True)
        with forcing(arms[arm].target.model, prompt + answer):
            written = arms[arm].generate(plain, time.perf_counter, **known[arm][name].theirs)
        assert written.token_ids == answer, "the forced text was not written"
        return written.tokens, written.seconds

    order = [(name, arm) for name in found for arm in found[name]]
    for pair in order:  # thrown away: the first calls pay for what later ones find
        run(*pair, *texts[0])
    with Progress("decoding", len(texts), unit="texts", extra="tokens") as progress:
        for turn, text in enumerate(texts):
            first = turn % len(order)
            for name, arm in order[first:] + order[:first]:
                found[name][arm].append(run(name, arm, *text))
            progress.add(1, len(text[1]))
    return found


def _stream(engine: Engine, request: Request) -> tuple[int, float]:
    """Tokens after the first emission, and the seconds that they took."""
    seen, counts = [], []
    for tokens, _ in engine.stream(request):
        seen.append(time.perf_counter())
        counts.append(len(tokens))
    return sum(counts[1:]), seen[-1] - seen[0]


def plain_texts(trained: Trained, questions: int) -> list[tuple[list[int], list[int]]]:
    """(prompt, greedy answer of plain decoding) of as many questions; answers too short to be timed are left out."""
    target, settings = trained.target, trained.recipe.eval
    chosen = choose(load_questions(trained.recipe, target.tokenizer), questions)
    prompts = [question.prompt_ids(trained.renderer) for question in chosen]
    answers = identity.decode(target, NoDraft(), prompts, settings.max_new_tokens, 1)
    return [(prompt, list(answer)) for prompt, answer in zip(prompts, answers, strict=True) if len(answer) > 8]


def run(trained: Trained, draft: Target | None, *, questions: int, identity_questions: int, length: int) -> dict:
    """The whole report."""
    make_faster(trained.target)
    if draft is not None:
        make_faster(draft)
    texts = plain_texts(trained, questions)
    timed = time_rivals(trained.target, draft, texts, length)
    rates = {}
    for name, by_arm in timed.items():
        our_tokens, our_seconds = zip(*by_arm["ours"], strict=True)
        rates[name] = {}
        for arm, pairs in by_arm.items():
            tokens, seconds = zip(*pairs, strict=True)
            rates[name][arm] = {"tokens_per_second": sum(tokens) / sum(seconds)}
            if arm != "ours":
                interval = speedup_interval(our_tokens, our_seconds, tokens, seconds)
                our_rate = sum(our_tokens) / sum(our_seconds)
                rates[name][arm]["ours_over_it"] = our_rate / (sum(tokens) / sum(seconds))
                rates[name][arm]["interval"] = interval
    return {
        "environment": environment(()),
        "target": Path(trained.target.name).name,
        "draft": None if draft is None else Path(draft.name).name,
        "dtype": str(trained.target.dtype).removeprefix("torch."),
        "length": length,
        "texts": len(texts),
        "rates": rates,
        "identity": check_texts(trained, draft, [prompt for prompt, _ in texts[:identity_questions]], length),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="bundled:smollm2-135m", metavar="NAME")
    parser.add_argument("--draft", metavar="MODEL", help="a draft model: hub id, folder, or a run of train/draft.py")
    parser.add_argument("--length", type=int, default=4, metavar="K", help="drafts of a step (%(default)s)")
    parser.add_argument("--questions", type=int, default=24, metavar="N", help="prompts that are timed (%(default)s)")
    parser.add_argument(
        "--identity-questions", type=int, default=8, metavar="N", help="prompts compared in float32 (%(default)s)"
    )
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change a key of the recipe")
    parser.add_argument("--output", metavar="FILE", help="where the figures go (.json)")
    options = parser.parse_args(arguments)
    keep_freed_memory()
    try:
        refuse_output(options.output)
        trained = open_trained(None, options.target, overrides=options.set)
        draft = open_draft_model(options.draft, trained.target) if options.draft else None
        report = run(
            trained,
            draft,
            questions=options.questions,
            identity_questions=options.identity_questions,
            length=options.length,
        )
    except HeadstartError as error:
        print(error, file=sys.stderr)
        return error.exit_status
    for name, by_arm in report["rates"].items():
        print(f"{name}: ours {by_arm['ours']['tokens_per_second']:.1f} tokens/s")
        for arm, one in by_arm.items():
            if arm != "ours":
                low, high = one["interval"] or (float("nan"),) * 2
                print(
                    f"  {arm} {one['tokens_per_second']:.1f} tokens/s; ours over it {one['ours_over_it']:.2f} "
                    f"[{low:.2f}, {high:.2f}]"
                )
        outcome = report["identity"][name]
        print(f"  float32: {outcome['identical']} of {outcome['compared']} texts identical, passed {outcome['passed']}")
    write_figures(report, options.output)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
