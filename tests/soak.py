"""Random drafters, batches, prompts, lengths, processors and stops for as long as is wanted: every text must be the
target's own, token by token, in float64, and memory must stay flat.

    python tests/soak.py --minutes 30 --seed 0 --output runs/soak.json

The reference is `transformers.generate` on a second instance of the model, under the same processors; stop strings cut
its text by a rule that knows nothing of trees. A round follows from the seed and its number alone, so a mismatch can be
run again (`--only N`), and a soak that was stopped goes on with the next round.
"""

from __future__ import annotations

import argparse
import functools
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import eagle_cases
import head_cases
import numpy as np
import psutil
import stubs
import tiny
import torch

from headstart.data.datastore import Datastore, suffix_array
from headstart.data.progress import Progress
from headstart.decode.draft_length import StepCosts
from headstart.decode.drafters.adaptive import AdaptiveDrafter
from headstart.decode.drafters.base import Drafter, NoDraft, Request
from headstart.decode.drafters.heads import head_drafter
from headstart.decode.drafters.layer_skip import EarlyExitDrafter, SkippingDrafter
from headstart.decode.drafters.lookahead import LookaheadDrafter
from headstart.decode.drafters.model import ModelDrafter
from headstart.decode.drafters.ngram import NgramDrafter
from headstart.decode.drafters.plans import DynamicTree, SampledChain, SampledTree
from headstart.decode.drafters.quantised import QuantisedDrafter
from headstart.decode.drafters.retrieval import RetrievalDrafter
from headstart.decode.drafters.union import UnionDrafter
from headstart.decode.engine import Engine
from headstart.decode.processors import text_processors
from headstart.decode.sampling import SamplingSettings
from headstart.decode.skips import Skips
from headstart.target import Target

FLAT = 64 << 20
"""Bytes that the process may have grown by in the second half."""

Answers = list[list[int]]
Maker = Callable[[random.Random, str, Answers], Drafter]
"""(random numbers, family, the target's own answers) -> a drafter."""


@functools.lru_cache
def target_of(family: str) -> Target:
    return tiny.target(family, dtype=torch.float64)


@functools.lru_cache
def ends_of(family: str) -> tuple[int, ...]:
    """The model's own end tokens; a round may add others."""
    return tiny.target(family).end_token_ids


@functools.lru_cache
def reference_of(family: str) -> Any:
    return tiny.model(family, dtype=torch.float64)


@functools.lru_cache
def medusa(family: str) -> Any:
    return head_cases.head_for(target_of(family), num_heads=3)


def some_tree(rng: random.Random) -> list:
    return stubs.TREES[rng.choice(sorted(stubs.TREES))]


def eagle_plan(rng: random.Random) -> Any:
    trees = [stubs.chain(rng.randint(1, 5)), stubs.SPARSE_25, DynamicTree(depth=3, width=3, num_nodes=9)]
    return rng.choice([*trees, SampledChain(length=3), SampledTree(paths=stubs.full_tree(2, 2))])


def a_stub(rng: random.Random, family: str, answers: Answers) -> Drafter:
    kind = rng.choice(sorted(stubs.GUESSES))
    return stubs.stub(kind, dict(enumerate(answers)), some_tree(rng), target_of(family).vocab_size)


def a_union(rng: random.Random, family: str, answers: Answers) -> Drafter:
    return UnionDrafter([NgramDrafter(rng.randint(1, 6)), a_stub(rng, family, answers), a_lookahead(rng)])


def a_lookahead(rng: random.Random) -> LookaheadDrafter:
    return LookaheadDrafter(rng.randint(1, 8), rng.randint(3, 5), rng.randint(1, 6), from_text=rng.random() < 0.5)


def some_ngrams(rng: random.Random) -> NgramDrafter:
    take = rng.choice(["latest", "frequent", "tree"])
    return NgramDrafter(rng.randint(1, 10), rng.randint(1, 4), take=take, num_nodes=rng.randint(2, 20))


def a_part(rng: random.Random, family: str, answers: Answers) -> Drafter:
    target, length = target_of(family), rng.randint(0, 5)
    if rng.random() < 0.5:
        return EarlyExitDrafter(target, rng.randint(1, target.num_layers - 1), length)
    layers = range(target.num_layers)
    chosen = [tuple(sorted(rng.sample(layers, rng.randint(0, target.num_layers)))) for _ in range(2)]
    return SkippingDrafter(target, Skips(*chosen), length)


def an_adaptive(rng: random.Random, family: str, answers: Answers) -> Drafter:
    """Costs under which every depth pays now and then, and plain decoding too."""
    costs = StepCosts(seconds=(1.0, *(1.0 + rng.random() * depth for depth in range(1, 6))), budgets=tuple(range(1, 7)))
    inner = rng.choice(["ngram", "model", "skip"])
    if inner == "ngram":
        return AdaptiveDrafter(NgramDrafter(5), costs)
    model = ModelDrafter(stubs.half_right(family), target_of(family), 5)
    return AdaptiveDrafter(model if inner == "model" else EarlyExitDrafter(target_of(family), 2, 5), costs)


@functools.lru_cache
def store_of(family: str) -> Datastore:
    """What the target writes behind a few prompts."""
    prompts = stubs.prompts_of([4, 9, 20], target_of(family).vocab_size, seed=9)
    texts = [prompt + _plain(family, prompt, 40, SamplingSettings(), ends_of(family)) for prompt in prompts]
    separator = target_of(family).vocab_size
    tokens = np.array([token for text in texts for token in (*text, separator)], np.uint32)
    return Datastore(tokens, suffix_array(tokens), separator)


MAKERS: dict[str, Maker] = {
    "none": lambda rng, family, answers: NoDraft(rng.choice([1, 1, 2])),
    "stub": a_stub,
    "ngram": lambda rng, family, answers: some_ngrams(rng),
    "lookahead": lambda rng, family, answers: a_lookahead(rng),
    "layer-skip": a_part,
    "adaptive": an_adaptive,
    "retrieval": lambda rng, family, answers: RetrievalDrafter(
        store_of(family), target_of(family).end_token_ids, num_nodes=rng.randint(2, 20), length=rng.randint(1, 9)
    ),
    "quantised": lambda rng, family, answers: QuantisedDrafter(
        target_of(family), rng.choice([8, 4]), rng.randint(0, 4)
    ),
    "model": lambda rng, family, answers: ModelDrafter(stubs.half_right(family), target_of(family), rng.randint(0, 6)),
    "medusa": lambda rng, family, answers: head_drafter(
        medusa(family), target_of(family), [path for path in some_tree(rng) if len(path) <= 3]
    ),
    "eagle": lambda rng, family, answers: head_drafter(
        eagle_cases.learnt(rng.choice(eagle_cases.KINDS), family), target_of(family), eagle_plan(rng)
    ),
    "union": a_union,
}


def processors_of(rng: random.Random, vocab: int) -> dict[str, Any]:
    """Settings of SamplingSettings; in half of the rounds none."""
    if rng.random() < 0.5:
        return {}
    some = {
        "repetition_penalty": rng.choice([0.8, 1.3]),
        "frequency_penalty": rng.choice([0.4, -0.2]),
        "presence_penalty": 0.5,
        "no_repeat_ngram_size": rng.randint(1, 3),
        "min_new_tokens": rng.randint(1, 12),
        "bad_words_ids": tuple((rng.randrange(vocab), rng.randrange(vocab)) for _ in range(3)),
        "suppress_tokens": tuple(rng.randrange(vocab) for _ in range(8)),
        "force_end": True,
    }
    return {name: some[name] for name in rng.sample(sorted(some), rng.randint(1, 3))}


def play(seed: int, number: int) -> tuple[str, dict[str, Any] | None]:
    """One round: the drafter's name, and None where all texts are the target's own, else what was asked and came."""
    rng = random.Random(f"{seed}/{number}")
    family, name = rng.choice(tiny.TREE_FAMILIES), rng.choice(sorted(MAKERS))
    target, new = target_of(family), rng.randint(1, 40)
    prompts = stubs.prompts_of([rng.randint(1, 45) for _ in range(rng.randint(1, 7))], target.vocab_size, number)
    prompts = [prompt * rng.choice([1, 1, 2]) for prompt in prompts]  # some with what n-grams find
    prompts = [prompt[: target.max_positions - 1] for prompt in prompts]
    settings = SamplingSettings(**processors_of(rng, target.vocab_size))
    own_ends = ends_of(family)
    free = [_plain(family, prompt, new, settings, own_ends) for prompt in prompts]
    written = [token for answer in free for token in answer]
    ends = tuple(sorted({*own_ends, *(rng.choice(written) for _ in range(rng.choice([0, 1, 2])))}))
    target.end_token_ids = ends
    expected = [_plain(family, prompt, new, settings, ends) for prompt in prompts]
    stop = _some_stop(rng, target, expected)
    expected = [_stopped(target, answer, stop) for answer in expected]
    with torch.random.fork_rng():
        torch.manual_seed(number)
        drafter = MAKERS[name](rng, family, free)
    batch_size, budget = rng.randint(1, 5), rng.choice([2, 4, 9, 26, 64])
    engine = Engine(target, drafter, batch_size=batch_size, budget=budget, prefill_chunk=rng.choice([3, 16, 512]))
    requests = [
        Request(prompt_ids=prompt, max_new_tokens=new, settings=settings, stop=stop, request_id=index)
        for index, prompt in enumerate(prompts)
    ]
    done = sorted(engine.generate(requests), key=lambda one: one.request.request_id)
    given = [one.token_ids for one in done]
    if given == expected:
        return name, None
    asked = {"family": family, "drafter": name, "batch_size": batch_size, "budget": budget, "stop": stop, "ends": ends}
    return name, {"round": number, **asked, "settings": repr(settings), "expected": expected, "given": given}


def _plain(family: str, prompt: list[int], new: int, settings: SamplingSettings, ends: tuple[int, ...]) -> list[int]:
    room = target_of(family).max_positions - len(prompt)
    processors = text_processors(settings, prompt_length=len(prompt), max_new_tokens=new, end_token_ids=list(ends))
    return stubs.plain_answers(
        reference_of(family), [prompt], min(new, room), end_token_ids=ends, processors=processors
    )[0]


def _some_stop(rng: random.Random, target: Target, answers: Answers) -> tuple[str, ...]:
    """Now and then a piece of what will be written."""
    text = str(target.tokenizer.decode(rng.choice(answers), skip_special_tokens=False))
    if rng.random() < 0.7 or not text:
        return ()
    start = rng.randrange(len(text))
    return (text[start : start + rng.randint(1, 3)],)


def _stopped(target: Target, answer: list[int], stop: tuple[str, ...]) -> list[int]:
    """Up to the first token with which the answer's text holds a stop string."""
    for count in range(1, len(answer) + 1):
        text = str(target.tokenizer.decode(answer[:count], skip_special_tokens=False))
        if any(one in text for one in stop):
            return answer[:count]
    return answer


def soak(seed: int, minutes: float, output: Path) -> dict[str, Any]:
    """Plays rounds until the minutes are used up, those of an earlier, stopped soak of this seed counted."""
    state = {"seed": seed, "rounds": 0, "seconds": 0.0, "by_drafter": {}, "mismatches": [], "memory": []}
    if output.is_file():
        stored = json.loads(output.read_text())
        state = stored if stored["seed"] == seed else state
    process, drafters = psutil.Process(), Counter(state["by_drafter"])
    with Progress("soaking", int(minutes * 60), unit="s") as progress:
        while state["seconds"] < 60 * minutes:
            started = time.monotonic()
            number = state["rounds"]
            name, fault = play(seed, number)
            if fault is not None:
                print(f"round {number}: {fault['drafter']} on {fault['family']} wrote another text", flush=True)
                state["mismatches"].append(fault)
            drafters[name] += 1
            spent = time.monotonic() - started
            before, state["seconds"] = state["seconds"], state["seconds"] + spent
            state["rounds"] += 1
            progress.add(int(state["seconds"]) - int(before))
            if int(before) // 10 != int(state["seconds"]) // 10:
                state["memory"].append(process.memory_info().rss)
                state["by_drafter"] = dict(drafters)
                output.write_text(json.dumps(state, indent=1) + "\n")
    return state


def flat(memory: list[int]) -> bool:
    """Whether the second half needed no more than the first one's end, give or take FLAT."""
    half = len(memory) // 2
    return not half or max(memory[half:]) <= max(memory[:half]) + FLAT


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30, metavar="N")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument("--only", type=int, metavar="N", help="play this round alone and show what is wrong")
    parser.add_argument("--output", type=Path, default=Path("runs/soak.json"), metavar="FILE")
    options = parser.parse_args()
    if options.only is not None:
        _, fault = play(options.seed, options.only)
        print("all texts are the target's own" if fault is None else json.dumps(fault, indent=1))
        return fault is not None
    options.output.parent.mkdir(parents=True, exist_ok=True)
    state = soak(options.seed, options.minutes, options.output)
    steady = flat(state["memory"])
    print(
        f"{state['rounds']} rounds in {state['seconds'] / 60:.1f} minutes, seed {options.seed}: "
        f"{len(state['mismatches'])} mismatches; memory {'flat' if steady else 'GREW'}"
    )
    return bool(state["mismatches"]) or not steady


if __name__ == "__main__":
    sys.exit(main())
