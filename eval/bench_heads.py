"""Compares heads that were trained on equal data for equal CPU time: τ at equal trees, acceptance by depth, speedup.

    python -m headstart.eval.bench_heads --output runs/heads
    python -m headstart.eval.bench_heads --recipes mine.yaml,smollm2-eagle3.yaml --seeds 0,1,2 --output runs/mine

The target's states of the data, which must be one and the same in all recipes, are computed once for all heads and are
no part of their training time. Every recipe is trained once per seed (a seed changes weights, order and noise) and
tuned. Then, for two populations of prompts, topics that training never saw of kinds that it did, and kinds that it
never saw:

- τ along the target's own answers, of a chain of 3 and of static trees of 8, 16 and 32 nodes (root included), which is
  what decoding them greedily yields, step by step. Trees are chosen on the held-out topics, crosswise where they are
  scored on the same ones: on the even answers for the odd ones and the other way round.
- speedup over the engine's own plain decoding with the tuned plan and with a chain of 3, all heads interleaved on each
  prompt.

Differences between recipes are paired by prompt: the seeds of a recipe are pooled prompt by prompt, prompts are drawn
anew, and both sides are recomputed from the same ones. Answers that loop are left out. All parts are kept in --output,
and the same line goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from headstart.allocator import keep_freed_memory
from headstart.atomic import write_text
from headstart.data.packing import RowStore
from headstart.data.prepare import prepare
from headstart.data.progress import Progress
from headstart.decode.cost import grow_tree, replay, replay_crosswise
from headstart.decode.decode_copy import make_faster
from headstart.decode.drafters.plans import chain_paths
from headstart.decode.forecast import Recorded, rank_answer, record_rows
from headstart.errors import HeadstartError, RecipeError, refuse_unwritable
from headstart.eval.acceptance import count_steps, loops
from headstart.eval.drafters import plan_drafter
from headstart.eval.intervals import ratio_interval, speedup_interval
from headstart.eval.paired import as_text, columns, figure, pooled, quotient, ratio_difference, speedup_difference
from headstart.eval.prompts import choose, load_questions
from headstart.eval.timing import PLAIN, Answer, Contender, time_arms
from headstart.eval.trained import Trained, find_head, open_trained
from headstart.eval.trees import TREES
from headstart.eval.trials import Trial, headstart, in_parallel, refuse_other_data, threads_each, train, write_features
from headstart.heads.base import Head
from headstart.heads.configs import MedusaConfig
from headstart.heads.store import load_head
from headstart.recipe import load_recipe, override, quoted
from headstart.target import Target
from headstart.train.forecasting import tree_depth
from headstart.train.run_folder import environment

TOPICS, KINDS = "held_out_topics", "held_out_kinds"
CHAIN, SIZES = 3, (8, 16, 32)
ARMS = {"tuned": "head", f"chain {CHAIN}": f"head@chain{CHAIN}"}
"""How each head drafts while speed is measured, as `--drafters` names it."""
AT_A_TIME = 4
"""Prompts that are decoded between two savings."""


# -- training ----------------------------------------------------------------------------------------------------------


def tune(run: Path) -> None:
    """Tunes a head where that was not done."""
    if not (run / "head" / TREES).is_file():
        headstart(run, "tune", "--head", str(run))


# -- acceptance along recorded answers ---------------------------------------------------------------------------------


def measure_acceptance(runs: Sequence[Path], folder: Path) -> list[dict[str, Any]]:
    """Of every run, by population: whether each held-out answer loops, its tokens and steps by plan, and along the
    longest chain of first choices how often each depth was tested and passed.

    Kept in FOLDER/RUN.json; runs that have it are not measured again, and the target reads the answers once for all.
    """
    stored = {run: folder / f"{run.name}.json" for run in runs}
    missing = [run for run in runs if not stored[run].is_file()]
    if missing:
        trained = open_trained(missing[0])
        target = trained.target
        make_faster(target)
        heads = {run: load_head(find_head(run)[1], target).to(target.dtype).eval() for run in missing}
        wants = sorted({layer for head in heads.values() for layer in head.wants})
        texts = {
            population: record_rows(target, held_out_rows(trained, population), wants) for population in (TOPICS, KINDS)
        }
        for run, head in heads.items():
            print(f"acceptance of {run.name} along the held-out answers", flush=True)
            write_text(stored[run], json.dumps(_acceptance(head, target, texts)) + "\n")
    return [json.loads(stored[run].read_text(encoding="utf-8")) for run in runs]


def _acceptance(head: Head, target: Target, texts: dict[str, list[Recorded]]) -> dict[str, Any]:
    depth = tree_depth(head)
    figures, ranked = {}, {}
    for population, recorded in texts.items():
        ranked[population] = answers = [rank_answer(head, target, text, depth=depth) for text in recorded]
        plans = {f"chain {CHAIN}": [replay(answer, chain_paths(CHAIN)) for answer in answers]}
        for size in SIZES:
            if population == TOPICS:
                plans[f"tree {size}"] = replay_crosswise(answers, size)
            else:
                paths = grow_tree(ranked[TOPICS], size)
                plans[f"tree {size}"] = [replay(answer, paths) for answer in answers]
        longest = [replay(answer, chain_paths(depth)) for answer in answers]
        figures[population] = {
            "loops": [loops(text.answer) for text in recorded],
            "plans": {
                plan: [[sum(accepted + 1 for _, accepted in steps), len(steps)] for steps in each]
                for plan, each in plans.items()
            },
            "by_depth": [
                [sum(accepted >= level for _, accepted in steps) for level in range(depth + 1)] for steps in longest
            ],
        }
    return figures


def held_out_rows(trained: Trained, population: str) -> RowStore:
    """The target's own answers to the prompts of one population."""
    source = f'data.held_out.sources=[{{source: "bundled:chats", split: {population}}}]'
    recipe, target = override(trained.recipe, [source]), trained.target
    return prepare(recipe, target.tokenizer, vocab_size=target.vocab_size, max_positions=target.max_positions).held_out


# -- speed of all heads on the same prompts ----------------------------------------------------------------------------


def measure_speed(runs: Sequence[Path], questions_each: int, stored: Path) -> list[dict[str, Any]]:
    """One record for every prompt: tokens and seconds of plain decoding and of each head by each of ARMS.

    Records are appended to `stored` (JSON lines), and those that stand there are not measured again.
    """
    records = _read_lines(stored)
    trained = open_trained(runs[0])
    target = trained.target
    make_faster(target)
    questions = []
    for population in (TOPICS, KINDS):
        source = f'eval.prompts=[{{source: "bundled:chats", split: {population}}}]'
        found = load_questions(override(trained.recipe, [source]), target.tokenizer)
        questions += [(population, question) for question in choose(found, questions_each)]
    contenders = {}
    for run in runs:
        for arm, drafter in ARMS.items():
            plan = plan_drafter(f"{drafter}:{run}", None, trained.recipe.eval.tree)
            contenders[f"{run.name}, {arm}"] = Contender(plan.make(target), plan.budget)
    done = {record["question"] for record in records}
    coming = [pair for pair in questions if pair[1].question_id not in done]
    with Progress("decoding", len(coming), unit="prompts", extra="tokens") as progress:
        for first in range(0, len(coming), AT_A_TIME):
            some = coming[first : first + AT_A_TIME]
            measured = time_arms(
                target,
                contenders,
                [question for _, question in some],
                trained.renderer,
                max_new_tokens=trained.recipe.eval.max_new_tokens,
                progress=lambda tokens: progress.add(1, tokens),
            )
            populations = {question.question_id: population for population, question in some}
            new = [_speed_record(answer, populations) for answer in measured.answers]
            with stored.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(record) + "\n" for record in new)
            records += new
    return records


def _read_lines(path: Path) -> list[dict[str, Any]]:
    """The records of a file, a last line that was cut off while it was written left out."""
    if not path.is_file():
        return []
    whole = path.read_text(encoding="utf-8").rpartition("\n")[0]
    write_text(path, whole + "\n" if whole else "")
    return [json.loads(line) for line in whole.splitlines()]


def _speed_record(answer: Answer, populations: dict[str, str]) -> dict[str, Any]:
    plain = answer.arms[PLAIN]
    return {
        "question": answer.question.question_id,
        "population": populations[answer.question.question_id],
        "loops": loops(plain.token_ids),
        "plain": [len(plain.token_ids), plain.seconds],
        "arms": {
            name: [len(timed.token_ids), timed.seconds, counts.emitted, counts.steps]
            for name, timed in answer.arms.items()
            if name != PLAIN
            for counts in [count_steps([timed.steps])]
        },
    }


# -- the comparison ----------------------------------------------------------------------------------------------------


def compare_acceptance(found: dict[str, list[dict[str, Any]]], population: str) -> dict[str, Any]:
    """τ of every recipe by plan, and paired differences. found: by recipe, `measure_acceptance` of its seeds."""
    first = next(iter(found.values()))[0][population]
    kept = [number for number, looping in enumerate(first["loops"]) if not looping]
    plans = list(first["plans"])
    table = {
        recipe: {plan: [[seed[population]["plans"][plan][n] for n in kept] for seed in seeds] for plan in plans}
        for recipe, seeds in found.items()
    }
    sums = {recipe: {plan: pooled(each) for plan, each in by_plan.items()} for recipe, by_plan in table.items()}
    return {
        "answers": len(kept),
        "looping": len(first["loops"]) - len(kept),
        "acceptance_length": {
            recipe: {
                plan: {
                    **figure(quotient(sums[recipe][plan]), ratio_interval(*columns(sums[recipe][plan]))),
                    "seeds": [quotient(seed) for seed in table[recipe][plan]],
                }
                for plan in plans
            }
            for recipe in table
        },
        "differences": {
            f"{one} - {other}": {plan: ratio_difference(sums[one][plan], sums[other][plan]) for plan in plans}
            for other, one in combinations(table, 2)
        },
        "by_depth": {
            recipe: _conditional([seed[population]["by_depth"][n] for seed in seeds for n in kept])
            for recipe, seeds in found.items()
        },
    }


def compare_speed(records: Sequence[dict[str, Any]], recipes: dict[str, list[Path]], population: str) -> dict[str, Any]:
    """Speedup and τ as decoded of every recipe by arm, and paired differences of the speedups.

    records: of `measure_speed`. recipes: the runs by recipe.
    """
    kept = [record for record in records if record["population"] == population and not record["loops"]]
    plain = [record["plain"] for record in kept]
    timed, steps = {}, {}
    for recipe, runs in recipes.items():
        for arm in ARMS:
            sums = pooled([[record["arms"][f"{run.name}, {arm}"] for record in kept] for run in runs])
            timed[recipe, arm], steps[recipe, arm] = [row[:2] for row in sums], [row[2:] for row in sums]
    return {
        "answers": len(kept),
        "looping": sum(record["loops"] for record in records if record["population"] == population),
        "arms": {
            f"{recipe}, {arm}": {
                "speedup": quotient(timed[recipe, arm]) / quotient(plain),
                "speedup_interval": speedup_interval(*columns(timed[recipe, arm]), *columns(plain)),
                "acceptance_length": quotient(steps[recipe, arm]),
                "acceptance_length_interval": ratio_interval(*columns(steps[recipe, arm])),
            }
            for recipe, arm in timed
        },
        "differences": {
            f"{one} - {other}, {arm}": speedup_difference(timed[one, arm], timed[other, arm], plain, plain)
            for arm in ARMS
            for other, one in combinations(recipes, 2)
        },
    }


def _conditional(rows: Sequence[Sequence[int]]) -> list[float]:
    """Per depth: of the steps that accepted all drafts before it, the share that accepted its own."""
    steps = np.sum(rows, axis=0)
    return [float(after / max(before, 1)) for before, after in zip(steps, steps[1:], strict=False)]


# -- the command -------------------------------------------------------------------------------------------------------


def run(
    recipes: Sequence[str], seeds: Sequence[int], folder: Path, settings: Sequence[str], *, questions: int, jobs: int
) -> dict[str, Any]:
    """Trains, measures and compares; what stands in `folder` already is not done again."""
    loaded = [load_recipe(recipe, settings) for recipe in recipes]
    names = {one.name: recipe for one, recipe in zip(loaded, recipes, strict=True)}
    if len(names) < len(recipes):
        raise RecipeError("two of the recipes have one name; give one of them another")
    refuse_other_data(loaded)
    for one in loaded:
        if isinstance(one.head, MedusaConfig) and one.head.num_heads < CHAIN:
            raise RecipeError(f"{one.name}: head.num_heads is {one.head.num_heads}; chains of {CHAIN} are compared")
    runs = {name: [folder / f"{name}-seed{seed}" for seed in seeds] for name in names}
    cache = folder / "features"
    write_features(loaded, recipes[0], cache, settings)
    shared = [*settings, "data.features=offline", f"data.feature_cache={quoted(str(cache))}"]
    # seed by seed, so that what was done when it is stopped has all recipes
    trials = [
        Trial(names[name], runs[name][place], (*shared, f"seed={seed}"))
        for place, seed in enumerate(seeds)
        for name in names
    ]
    in_parallel(lambda trial: train(trial, threads=threads_each(jobs)), trials, jobs)
    order = [trial.run for trial in trials]
    in_parallel(tune, order, 1)
    found = {name: measure_acceptance(each, folder) for name, each in runs.items()}
    records = measure_speed(order, questions, folder / "speed.jsonl")
    report = {
        "environment": environment(()),
        "recipes": {
            name: load_recipe(str(each[0] / "recipe.yaml")).model_dump(mode="json") for name, each in runs.items()
        },
        "seeds": list(seeds),
        "acceptance": {population: compare_acceptance(found, population) for population in (TOPICS, KINDS)},
        "speed": {population: compare_speed(records, runs, population) for population in (TOPICS, KINDS)},
    }
    write_text(folder / "heads.json", json.dumps(report, indent=1) + "\n")
    return report


def as_markdown(report: dict[str, Any]) -> str:
    """The tables of docs/benchmarks.md."""
    lines = []
    for population in (TOPICS, KINDS):
        acceptance, speed = report["acceptance"][population], report["speed"][population]
        plans = list(next(iter(acceptance["acceptance_length"].values())))
        lines += [f"### {population.replace('_', ' ').replace('held out', 'held-out')}", ""]
        lines += [f"τ along {acceptance['answers']} answers ({acceptance['looping']} that loop left out):", ""]
        lines += ["| | " + " | ".join(plans) + " | by depth |", "| --- |" + " --- |" * (len(plans) + 1)]
        for recipe, by_plan in acceptance["acceptance_length"].items():
            depths = " ".join(f"{share:.2f}".lstrip("0") for share in acceptance["by_depth"][recipe])
            lines.append(f"| {recipe} | " + " | ".join(as_text(by_plan[plan]) for plan in plans) + f" | {depths} |")
        for pair, by_plan in acceptance["differences"].items():
            lines.append(f"| {pair} | " + " | ".join(as_text(by_plan[plan]) for plan in plans) + " | |")
        lines += ["", f"Decoded, {speed['answers']} prompts ({speed['looping']} that loop left out):", ""]
        lines += ["| | speedup | τ |", "| --- | --- | --- |"]
        for arm, one in speed["arms"].items():
            cells = [as_text(figure(one[key], one[f"{key}_interval"])) for key in ("speedup", "acceptance_length")]
            lines.append(f"| {arm} | " + " | ".join(cells) + " |")
        for pair, one in speed["differences"].items():
            lines.append(f"| {pair} | {as_text(one)} | |")
        lines.append("")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--recipes", default="smollm2-medusa.yaml,smollm2-eagle.yaml,smollm2-eagle3.yaml", metavar="A,B"
    )
    parser.add_argument("--seeds", default="0,1,2", metavar="A,B")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change a key of every recipe")
    parser.add_argument(
        "--questions", type=int, default=24, metavar="N", help="prompts of each population whose speed is measured"
    )
    parser.add_argument(
        "--jobs", type=int, default=1, metavar="N", help="heads trained at a time, each on its share of the cores"
    )
    parser.add_argument("--output", default="runs/heads", metavar="DIR", help="where everything goes (%(default)s)")
    options = parser.parse_args(arguments)
    folder = Path(options.output)
    keep_freed_memory()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        refuse_unwritable(folder)
        seeds = [int(seed) for seed in options.seeds.split(",")]
        recipes = options.recipes.split(",")
        report = run(recipes, seeds, folder, options.set, questions=options.questions, jobs=max(1, options.jobs))
    except HeadstartError as error:
        print(error, file=sys.stderr)
        return error.exit_status
    print(as_markdown(report))
    print(folder / "heads.json")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
