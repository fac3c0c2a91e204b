"""How fast an EAGLE-3 head trains here: the share of this machine's matmul peak that a step reaches, on one thread.

    python -m headstart.eval.bench_train --output train_speed.json
    python -m headstart.eval.bench_train --smoke                          # seconds, on a shrunk target

Whole optimiser steps of the one training loop's own code are timed in CPU seconds of this process, with the target's
states in memory beforehand (as offline features give them). It is done twice. With the rows as they are, positions that
predict no supervised token end with their keys: they skip queries, MLP, later steps, output rows and loss, which shows
in the tokens per CPU second (`supervised_share` says how many are supervised). With every token supervised, all
positions go through everything.

FLOPs are counted as they are really executed, a multiplication with its addition as two, per step of T positions, N of
them unrolled (H: hidden size, a and k: widths of all query heads and of all key heads together, I: inner width of the
MLP, m: layers read, K: unrolled steps, V: draft vocabulary, R: predicted tokens, P: pairs of an unrolled position and a
position of its document up to it):

    fusion      2 T (m H) H                 forward; as much for its weights, and for its input where that is normed
    keys        2 (T + N (K - 1)) 2 H 2 k   forward; twice as much backward
    layer       2 N K (3 a H + 3 H I)       forward; twice as much backward
    attention   4 K a P                     forward; 2.5 times as much backward, the scores made anew
    output      2 R K H V                   forward; as much backward for the states, and for own rows
    teacher     2 R H V                     forward only

Left out: what is no product (norms, softmax, the optimiser), the few diagonal keys, and what a kernel computes of the
masked half of the attention and throws away. So the share is a lower bound. The peak is the best of square products of
several sizes, measured between the steps of the same run.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from accelerate import Accelerator

from headstart.allocator import keep_freed_memory
from headstart.data.packing import RowStore, TokenBatch, collate
from headstart.data.prepare import prepare
from headstart.errors import HeadstartError, RecipeError
from headstart.eval.figures import refuse_output, write_figures
from headstart.heads.base import Alignment, Head
from headstart.heads.configs import Eagle3Config
from headstart.heads.draft_layer import dimensions
from headstart.heads.store import build_head
from headstart.heads.unrolled_attention import spans, spans_of_rows, unrolled_rows
from headstart.heads.vocab import DraftVocab
from headstart.loading import parse_dtype
from headstart.recipe import Recipe, load_recipe
from headstart.recipe_target import load_recipe_target
from headstart.target import Target
from headstart.train.features import OnlineFeatures
from headstart.train.feed import plan_batches
from headstart.train.optimisers import make_optimizer
from headstart.train.preparation import count_labels
from headstart.train.random_state import seed_everything
from headstart.train.run_folder import environment
from headstart.train.stepping import optimiser_step
from headstart.train.train_module import Totals, TrainModule
from headstart.train.wrap import wrap
from headstart.train.wrapping import Wrapped

SETTINGS = ("data.max_length=512", "data.packing=true", "train.batch_size=1", "train.accumulation=1")
THREE_STEPS = "head.unrolled_steps=3"
PEAK_SIZES = (512, 768, 1024, 1536)
DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True, kw_only=True)
class StepShape:
    """What the FLOPs of a step depend on."""

    hidden: int
    query_width: int
    key_width: int
    inner: int
    layers_read: int
    unrolled: int
    draft_vocab: int
    normed_input: bool
    own_rows: bool

    @classmethod
    def of(cls, head: Head) -> StepShape:
        config = head.config
        assert isinstance(config, Eagle3Config) and config.layers is not None and config.num_layers == 1
        heads, kv_heads, width, inner = dimensions(config)
        return cls(
            hidden=head.hidden_size,
            query_width=heads * width,
            key_width=kv_heads * width,
            inner=inner,
            layers_read=len(config.layers),
            unrolled=config.most_unrolled_steps,
            draft_vocab=head.draft_vocab_size,
            normed_input=config.fc_norm or config.norm_before_fc,
            own_rows=config.output == "own",
        )


def step_flops(shape: StepShape, positions: int, unrolled: int, pairs: int, predicted: int) -> dict[str, int]:
    """FLOPs of one step by part, forward and backward together; the formulas are those of this module's docstring.

    positions: T, padding included where there is any. unrolled: N. pairs: P. predicted: R, tokens that at least one
    depth predicts.
    """
    dim, steps, vocab = shape.hidden, shape.unrolled, shape.draft_vocab
    fusion = 2 * positions * shape.layers_read * dim * dim
    keys = 2 * (positions + unrolled * (steps - 1)) * 2 * dim * 2 * shape.key_width
    layer = 2 * unrolled * steps * (3 * shape.query_width * dim + 3 * dim * shape.inner)
    attention = 4 * steps * shape.query_width * pairs
    output = 2 * predicted * steps * dim * vocab
    return {
        "fusion": (3 if shape.normed_input else 2) * fusion,
        "keys": 3 * keys,
        "layer": 3 * layer,
        "attention": attention + 5 * attention // 2,
        "output": (3 if shape.own_rows else 2) * output,
        "teacher": 2 * predicted * dim * vocab,
    }


def matmul_peak(dtype: torch.dtype, sizes: Sequence[int] = PEAK_SIZES, repeats: int = 3) -> float:
    """FLOPs per CPU second of the best square product."""
    best = 0.0
    for size in sizes:
        left, right = (torch.randn(size, size).to(dtype) for _ in range(2))
        torch.mm(left, right)
        for _ in range(repeats):
            start = time.process_time()
            torch.mm(left, right)
            best = max(best, 2 * size**3 / max(time.process_time() - start, 1e-9))
    return best


def measure(
    recipe: Recipe, target: Target, rows: RowStore, dtype: str, steps: int, sizes: Sequence[int]
) -> dict[str, Any]:
    """Times `steps` optimiser steps and gives their rates; `dtype` is that of the forward of the head."""
    seed_everything(recipe.seed)
    head = build_head(recipe.head, target, _vocabulary(recipe, target, rows))
    head.set_share(1.0)
    states = OnlineFeatures(target, head.wants, 2**34)
    module = TrainModule(target, head, parse_dtype(dtype), states).train()
    accelerator = Accelerator(cpu=True, mixed_precision="no")
    wrapped = wrap(accelerator, module, make_optimizer(recipe.train, head))
    batches = [collate(rows, batch) for batch in plan_batches(rows, recipe)[: min(steps, 16)]]
    for batch in batches:  # the first pass fills the memory, and allocates
        _take_step(wrapped, batch, recipe)
    shape = StepShape.of(head)
    peak, seconds, flops, tokens, labels = 0.0, [], {}, 0, 0
    for number in range(steps):
        if number % 5 == 0:
            peak = max(peak, matmul_peak(parse_dtype(dtype), sizes))
        batch = batches[number % len(batches)]
        start = time.process_time()
        totals = _take_step(wrapped, batch, recipe)
        seconds.append(time.process_time() - start)
        for part, count in step_flops(shape, batch.input_ids.numel(), *_unrolled(head, batch)).items():
            flops[part] = flops.get(part, 0) + count
        tokens, labels = tokens + int(totals.tokens), labels + int(totals.token_count)
    spent, total = sum(seconds), sum(flops.values())
    return {
        "dtype": dtype,
        "share_of_peak": total / spent / peak,
        "peak_gflops": peak / 1e9,
        "step_gflops": total / spent / 1e9,
        "tokens_per_cpu_second": tokens / spent,
        "cpu_seconds_per_step": spent / steps,
        "median_cpu_seconds_per_step": statistics.median(seconds),
        "tokens_per_step": tokens / steps,
        "supervised_share": labels / tokens,
        "flops_by_part": flops,
    }


def _take_step(wrapped: Wrapped, batch: TokenBatch, recipe: Recipe) -> Totals:
    return optimiser_step(wrapped, [batch], rate=recipe.train.lr, clip=recipe.train.clip, step=0)[0]


def _unrolled(head: Head, batch: TokenBatch) -> tuple[int, int, int]:
    """N, P and R of the module's docstring."""
    alignment = Alignment.of_drafts(batch, head.num_depths)
    rows = unrolled_rows(batch, alignment.positions)
    pairs = 0
    for span in spans_of_rows(spans(batch), rows):
        count = span.stop - span.first
        pairs += count * (span.first - span.start) + count * (count + 1) // 2
    return len(rows), pairs, len(alignment.tokens)


def _vocabulary(recipe: Recipe, target: Target, rows: RowStore) -> DraftVocab | None:
    size = recipe.head.draft_vocab_size
    if size is None:
        return None
    counts = count_labels(rows, target.vocab_size)
    return DraftVocab.build(counts, size, special_ids=target.end_token_ids, tokenizer_size=len(target.tokenizer))


def run(
    recipe: Recipe, *, dtypes: Sequence[str] = DTYPES, steps: int = 40, sizes: Sequence[int] = PEAK_SIZES
) -> dict[str, Any]:
    """The figures of every dtype, with the answers supervised and with everything, and what they were measured on."""
    if not isinstance(recipe.head, Eagle3Config):
        raise RecipeError(f"{recipe.name} has a {recipe.head.type} head, this measures eagle3; name another recipe")
    torch.set_num_threads(1)
    keep_freed_memory()
    results, rows, whole = [], RowStore(), RowStore()
    for dtype in dtypes:
        target, _ = load_recipe_target(recipe, device="cpu", dtype=dtype)
        if not len(rows):
            data = prepare(recipe, target.tokenizer, vocab_size=target.vocab_size, max_positions=target.max_positions)
            rows = data.train
            whole = RowStore([replace(row, supervised=[True] * len(row.input_ids)) for row in rows])
        for supervised, chosen in (("answers", rows), ("everything", whole)):
            results.append({"supervised": supervised, **measure(recipe, target, chosen, dtype, steps, sizes)})
    return {
        "environment": {**environment(()), "threads": 1},
        "recipe": recipe.name,
        "sequence_length": recipe.data.max_length,
        "draft_vocab_size": recipe.head.draft_vocab_size,
        "unrolled_steps": recipe.head.most_unrolled_steps,
        "steps": steps,
        "results": results,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="smollm2-eagle3.yaml", metavar="FILE")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change a key of the recipe")
    parser.add_argument("--dtypes", default=",".join(DTYPES), metavar="A,B")
    parser.add_argument(
        "--steps", type=int, default=40, metavar="N", help="optimiser steps that are timed (%(default)s)"
    )
    parser.add_argument("--output", metavar="FILE", help="where the figures go (.json)")
    parser.add_argument("--smoke", action="store_true", help="a shrunk target with random weights, and few steps")
    options = parser.parse_args(arguments)
    try:
        recipe = load_recipe(options.recipe, [*SETTINGS, THREE_STEPS, *options.set], options.smoke)
        refuse_output(options.output)
        sizes = (64,) if options.smoke else PEAK_SIZES
        steps = min(options.steps, 4) if options.smoke else options.steps
        report = run(recipe, dtypes=options.dtypes.split(","), steps=steps, sizes=sizes)
    except HeadstartError as error:
        print(error, file=sys.stderr)
        return error.exit_status
    for result in report["results"]:
        print(
            f"{result['dtype']}, {result['supervised']} supervised ({result['supervised_share']:.0%}): "
            f"{result['share_of_peak']:.1%} of the matmul peak ({result['step_gflops']:.0f} of "
            f"{result['peak_gflops']:.0f} GFLOP/s), {result['tokens_per_cpu_second']:.0f} tokens per CPU second"
        )
    write_figures(report, options.output)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
