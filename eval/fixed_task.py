"""Trains a head on a fixed set of chats with a budget of CPU seconds, and measures τ along fixed held-out answers.

    python -m headstart.eval.fixed_task --recipe smollm2-eagle3.yaml --task FOLDER --seeds 0,1,2 --output task.json

For comparing recipes, and trainers, on equal data and equal time. FOLDER holds `train.jsonl` and `held_out.jsonl`, one
chat a line: `input_ids` (rendered), `prompt_tokens` (where the answer begins; all behind it is learnt). The answers of
`held_out.jsonl` are the target's own greedy ones.

The protocol. Training takes `train.cpu_seconds` of one thread; the target's states are computed before and are not
counted, nor is anything else that is not a step. The draft vocabulary holds the most frequent answer tokens of the
training chats, and is not widened while drafting (τ with the widened one stands beside). Drafts are replayed along the
answers from the last prompt token's state on: at a base the head drafts, the drafts that equal the answer are counted,
and the next base lies that many and one further on; τ = tokens / steps, the bonus token counted, steps that the
answer's end cuts short left out. Static trees of the best N nodes (ranks below 10, five levels at most) are chosen on
one half of the answers and scored on the other, both ways; N counts the root (`tree`) or does not (`tree_drafts`).
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from headstart.allocator import keep_freed_memory
from headstart.data.packing import RowStore
from headstart.data.rendering import Row
from headstart.decode.cost import RankedAnswer, mean_tokens, replay, replay_crosswise
from headstart.decode.drafters.plans import chain_paths
from headstart.decode.forecast import Recorded, rank_answer, record_rows
from headstart.errors import DataError, HeadstartError
from headstart.eval.figures import refuse_output, write_figures
from headstart.heads.base import Head
from headstart.heads.store import build_head, load_head
from headstart.recipe import Recipe, load_recipe, override
from headstart.target import Target
from headstart.train.features import OnlineFeatures
from headstart.train.loop import Training
from headstart.train.preparation import draft_vocab_of, open_target, recipe_batches
from headstart.train.random_state import seed_everything
from headstart.train.run_folder import environment, open_run

CPU_SECONDS = 460
RANKS, DEPTH = 10, 5
CHAINS, TREES = (1, 3, 5), (8, 16, 32, 64)


def read_rows(path: Path) -> RowStore:
    """The chats of a file; DataError names the line that is none."""
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            record = json.loads(line)
            ids, begin = list(record["input_ids"]), int(record["prompt_tokens"])
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{path}:{number} has no `input_ids` and `prompt_tokens` ({error!r}); mend it") from None
        rows.append(Row(f"{path.stem}-{number}", ids, [place >= begin for place in range(len(ids))]))
    return RowStore(rows)


def train_head(recipe: Recipe, target: Target, rows: RowStore, output: Path) -> tuple[Head, dict[str, Any]]:
    """A head trained on these rows for `train.cpu_seconds`, and what it took. The run goes to `output`/NAME."""
    accelerator = Accelerator(cpu=True, mixed_precision="no")
    seed_everything(recipe.seed)
    head = build_head(recipe.head, target, draft_vocab_of(recipe, target, rows))
    states = OnlineFeatures(target, head.wants, 2**36)
    with torch.no_grad():
        for batch in recipe_batches(rows, recipe):
            states(batch)
    run, recipe = open_run(output / recipe.name, recipe, resume=False, command=sys.argv)
    training = Training(recipe, run, accelerator, target, head, rows, RowStore(), features=states)
    start = time.process_time()
    progress = training.finish()
    record = {
        "steps": progress.step,
        "epochs": progress.epoch,
        "tokens": progress.tokens,
        "cpu_seconds": time.process_time() - start,
        "parameters": sum(parameter.numel() for parameter in head.parameters()),
    }
    return load_head(run.head, target), record


def measure(head: Head, target: Target, texts: Sequence[Recorded]) -> dict[str, Any]:
    """τ of chains and trees, and the chances of acceptance along a chain by depth."""
    drafting = copy.deepcopy(head).to(target.device, target.dtype).eval()
    figures: dict[str, Any] = {}
    for name, widen in (("static", False), ("widened", True)):
        if widen and head.vocab is None:
            continue
        answers = [from_second_token(rank_answer(drafting, target, text, depth=DEPTH, widen=widen)) for text in texts]
        chains = {length: [replay(answer, chain_paths(length)) for answer in answers] for length in CHAINS}
        figures[name] = {
            "chain": {length: mean_tokens(runs) for length, runs in chains.items()},
            "chain_by_depth": by_depth(chains[DEPTH]),
            "tree": {size: crosswise(answers, size) for size in TREES},
            "tree_drafts": {size: crosswise(answers, size + 1) for size in TREES},
        }
    return figures


def from_second_token(answer: RankedAnswer) -> RankedAnswer:
    """The answer as the protocol replays it: the target gives the first token, from the last prompt token's state."""
    ranks = answer.ranks[1:]
    return RankedAnswer(ranks.where(ranks < RANKS, -1))


def crosswise(answers: Sequence[RankedAnswer], nodes: int) -> float:
    """τ of trees of `nodes` nodes, root included, each half of the answers scored with the tree of the other."""
    return mean_tokens(replay_crosswise(answers, nodes))


def by_depth(runs: Sequence[Sequence[tuple[int, int]]]) -> list[float]:
    """Of the steps whose first d drafts were accepted, the share whose next was too, d = 0, 1, .."""
    accepted = [count for run in runs for _, count in run]
    reached = [sum(count >= depth for count in accepted) for depth in range(DEPTH + 1)]
    return [after / max(before, 1) for before, after in zip(reached, reached[1:], strict=False)]


def summary(results: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Mean and standard deviation over the seeds (0 for one) of every τ with the static vocabulary."""
    names = [(kind, size) for kind in ("chain", "tree", "tree_drafts") for size in results[0]["static"][kind]]
    out = {}
    for kind, size in names:
        values = [result["static"][kind][size] for result in results]
        out[f"{kind} {size}"] = {
            "mean": statistics.mean(values),
            "deviation": statistics.stdev(values) if len(values) > 1 else 0.0,
        }
    return out


def run(recipe: Recipe, task: Path, seeds: Sequence[int], output: Path) -> dict[str, Any]:
    """Trains and measures once per seed."""
    torch.set_num_threads(1)
    keep_freed_memory()
    rows, held_out = (read_rows(task / name) for name in ("train.jsonl", "held_out.jsonl"))
    target = open_target(recipe, Accelerator(cpu=True, mixed_precision="no"), ())
    texts, results = None, []
    for seed in seeds:
        one = override(recipe, [f"seed={seed}", f"name={recipe.name}-seed{seed}"])
        head, record = train_head(one, target, rows, output)
        texts = texts or record_rows(target, held_out, head.wants)
        results.append({"seed": seed, **record, **measure(head, target, texts)})
        chains = " / ".join(f"{tau:.3f}" for tau in results[-1]["static"]["chain"].values())
        trees = " / ".join(f"{tau:.3f}" for tau in results[-1]["static"]["tree"].values())
        print(f"seed {seed}: chain {chains}, tree {trees}, {record['cpu_seconds']:.0f} CPU seconds", flush=True)
    return {
        "environment": environment(()),
        "recipe": recipe.model_dump(mode="json"),
        "answers": len(held_out),
        "results": results,
        "summary": summary(results),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="smollm2-eagle3.yaml", metavar="FILE")
    parser.add_argument("--task", required=True, metavar="FOLDER", help="where train.jsonl and held_out.jsonl stand")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change a key of the recipe")
    parser.add_argument("--seeds", default="0", metavar="A,B")
    parser.add_argument("--runs", default="runs", metavar="DIR", help="where the trained heads go (%(default)s)")
    parser.add_argument("--output", metavar="FILE", help="where the figures go (.json)")
    options = parser.parse_args(arguments)
    fixed = [f"train.cpu_seconds={CPU_SECONDS}", "train.eval_every=null", "train.save_every=null"]
    try:
        refuse_output(options.output)
        recipe = load_recipe(options.recipe, [*fixed, *options.set])
        seeds = [int(seed) for seed in options.seeds.split(",")]
        report = run(recipe, Path(options.task), seeds, Path(options.runs))
    except HeadstartError as error:
        print(error, file=sys.stderr)
        return error.exit_status
    for name, value in report["summary"].items():
        print(f"{name}: {value['mean']:.3f} (deviation {value['deviation']:.3f} over {len(seeds)} seeds)")
    write_figures(report, options.output)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
