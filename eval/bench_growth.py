"""How the cost of a trained token grows: with the text's length, the vocabulary, heads, draft layers and processes.

    python -m headstart.eval.bench_growth --output growth.json            # some minutes; goes on where it was stopped
    python -m headstart.eval.bench_growth --only vocabulary --repeats 1

Whole optimiser steps on a small target with random weights, one thread, CPU seconds of the process (of all of them
together where several train), the median of `--repeats` rounds, which take turns through all points of a series so that
a busy machine slows all alike. Beside each series stands its law: what grows is a line in x, cost = fixed + slope * x.
For length and vocabulary that is not obvious. Attention's share of a token's cost grows with the keys that it sees,
half the length on average; logits are made chunk by chunk, so a vocabulary costs its products and no memory.
`world size` counts what the exchange of gradients adds to a token: its bytes do not depend on the number of processes
but for the factor 2 (n - 1) / n.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as processes
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig

from headstart.atomic import write_text
from headstart.errors import HeadstartError, RecipeError
from headstart.eval.acceptance import Number
from headstart.eval.figures import refuse_output
from headstart.eval.footprint import bare_head, bare_target, whole_batch
from headstart.loading import parse_dtype
from headstart.recipe import Recipe, override
from headstart.train.optimisers import make_optimizer
from headstart.train.random_state import seed_everything
from headstart.train.run_folder import environment
from headstart.train.train_module import TrainModule

DIMENSIONS = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "vocab_size": 8192,
}
MEDUSA, EAGLE3 = "{type: medusa, num_heads: 4}", "{type: eagle3, unrolled_steps: 3}"
LENGTH = 256


@dataclass(frozen=True)
class Series:
    """One thing that grows. setting: what sets it in the recipe; None: it is the target's vocabulary, or processes."""

    head: str
    values: tuple[int, ...]
    setting: str | None
    law: str
    factor: Callable[[int], float] = float
    """The x in which the cost is a line."""


SERIES = {
    "sequence length": Series(
        EAGLE3, (64, 256, 1024), "data.max_length", "a line in the length: attention sees half of it on average"
    ),
    "vocabulary": Series(MEDUSA, (2048, 8192, 32768), None, "a line in the output rows, the target's or the draft's"),
    "heads": Series(MEDUSA, (1, 2, 4, 8), "head.num_heads", "a line in the heads: each reads all output rows"),
    "draft layers": Series(EAGLE3, (1, 2, 4), "head.num_layers", "a line in the layers, times the unrolled steps"),
    "world size": Series(
        MEDUSA,
        (1, 2, 4),
        None,
        "a line in 2 (n - 1) / n: the gradients' bytes, once around, whatever the text",
        lambda count: 2 * (count - 1) / count,
    ),
}


def recipe_of(name: str, value: int) -> Recipe:
    """The recipe of one point of a series."""
    series = SERIES[name]
    plain = Recipe.model_validate(
        {
            "name": "growth",
            "target": {"name": "random", "dtype": "float32"},
            "head": {"type": "medusa"},
            "data": {"train": [{"source": "none"}], "max_length": LENGTH},
            "train": {"batch_size": 1, "dtype": "float32"},
        }
    )
    settings = [f"head={series.head}"] + ([f"{series.setting}={value}"] if series.setting else [])
    return override(plain, settings)


class Point:
    """One value of a series, ready to take steps."""

    def __init__(self, name: str, value: int, *, distributed: bool = False):
        recipe = recipe_of(name, value)
        dimensions: dict[str, Any] = {**DIMENSIONS, **({"vocab_size": value} if name == "vocabulary" else {})}
        seed_everything(0)
        target = bare_target(recipe, LlamaConfig(**dimensions))
        head = bare_head(recipe, target)
        head.set_share(1.0)
        module = TrainModule(target, head, parse_dtype(recipe.train.dtype)).train()
        self.module = DistributedDataParallel(module) if distributed else module
        self.optimizer, self.batch = make_optimizer(recipe.train, head), whole_batch(recipe)
        self.batch.input_ids.random_(0, target.vocab_size, generator=torch.Generator().manual_seed(0))

    def seconds_per_token(self, steps: int) -> Number:
        """CPU seconds of this process."""
        begun = time.process_time()
        for _ in range(steps):
            self.optimizer.zero_grad(set_to_none=True)
            self.module(self.batch).loss_sum.backward()
            self.optimizer.step()
        return (time.process_time() - begun) / (steps * self.batch.num_tokens)


def measure(name: str, *, repeats: int, steps: int) -> dict[int, Number]:
    """Median CPU seconds per token at every value of a series."""
    values = SERIES[name].values
    if name == "world size":
        return {value: _of_processes(value, repeats, steps) for value in values}
    points = {value: Point(name, value) for value in values}
    for point in points.values():
        point.seconds_per_token(1)
    rounds = [{value: point.seconds_per_token(steps) for value, point in points.items()} for _ in range(repeats)]
    return {value: statistics.median(found[value] for found in rounds) for value in values}


def _of_processes(count: int, repeats: int, steps: int) -> Number:
    """The same where `count` processes train together: the mean over them."""
    with tempfile.TemporaryDirectory() as folder:
        processes.spawn(_one_of, (count, folder, repeats, steps), nprocs=count)
        found = [float(path.read_text(encoding="utf-8")) for path in Path(folder).glob("rank-*")]
    return statistics.mean(found)


def _one_of(rank: int, count: int, folder: str, repeats: int, steps: int) -> None:
    torch.set_num_threads(1)
    place = f"file://{Path(folder).resolve()}/meeting"
    torch.distributed.init_process_group("gloo", init_method=place, rank=rank, world_size=count)
    point = Point("world size", count, distributed=count > 1)
    point.seconds_per_token(1)
    seconds = statistics.median(point.seconds_per_token(steps) for _ in range(repeats))
    write_text(Path(folder) / f"rank-{rank}", str(seconds))
    torch.distributed.destroy_process_group()


def fit(series: Series, seconds: dict[int, Number]) -> dict[str, Number]:
    """The line through the points: cost = fixed + slope * x, and the largest share by which a point is off it."""
    x, y = [series.factor(value) for value in seconds], list(seconds.values())
    slope, fixed = statistics.linear_regression(x, y)
    off = max(abs(fixed + slope * place - cost) / cost for place, cost in zip(x, y, strict=True))
    return {"fixed": fixed, "slope": slope, "largest_error": off}


def show(name: str, seconds: dict[int, Number], line: Mapping[str, Any]) -> str:
    """The costs of a series in microseconds a token, its law, and how well it holds."""
    costs = ", ".join(f"{value}: {1e6 * cost:.0f}" for value, cost in seconds.items())
    return (
        f"{name}: {costs} us a token\n  law: {SERIES[name].law}; fixed {1e6 * line['fixed']:.0f} us + "
        f"{1e6 * line['slope']:.3g} us * x, off by {line['largest_error']:.0%} at most"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="NAME", help=f"one of: {', '.join(SERIES)}")
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="rounds (%(default)s)")
    parser.add_argument("--steps", type=int, default=3, metavar="N", help="optimiser steps in each (%(default)s)")
    parser.add_argument("--output", metavar="FILE", help="where the figures go (.json); what it has is kept")
    options = parser.parse_args(arguments)
    try:
        if options.only not in (None, *SERIES):
            raise RecipeError(f"--only is {options.only}, expected one of {', '.join(SERIES)}")
        refuse_output(options.output)
        report = _read(options.output)
    except HeadstartError as error:
        print(error, file=sys.stderr)
        return error.exit_status
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"  # of the processes that are started
    for name in [options.only] if options.only else SERIES:
        if name not in report["series"]:
            seconds = measure(name, repeats=options.repeats, steps=options.steps)
            line = fit(SERIES[name], seconds)
            report["series"][name] = {"seconds_per_token": seconds, "law": SERIES[name].law, **line}
            if options.output:  # after each series, so that a stopped run goes on
                write_text(Path(options.output), json.dumps(report, indent=1) + "\n")
        found = report["series"][name]
        print(show(name, {int(value): cost for value, cost in found["seconds_per_token"].items()}, found), flush=True)
    return 0


def _read(output: str | None) -> dict[str, Any]:
    """What an earlier run has measured, or a new report."""
    if output is None or not Path(output).exists():
        return {"environment": {**environment(()), "threads": 1}, "dimensions": DIMENSIONS, "series": {}}
    try:
        report = json.loads(Path(output).read_text(encoding="utf-8"))
        assert isinstance(report["series"], dict)
        return report
    except (ValueError, KeyError, TypeError, AssertionError):
        raise HeadstartError(f"{output} holds no figures of this benchmark; name another --output") from None


if __name__ == "__main__":
    raise SystemExit(main())
