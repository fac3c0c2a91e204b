"""What a training step really holds on a CPU, beside what a plan foretells for it: bytes of live tensors by part.

    python -m headstart.eval.bench_memory --output memory.json       # 0.3 G parameters; Medusa and EAGLE-3; minutes
    python -m headstart.eval.bench_memory --smoke                     # seconds, on a tiny model

A target of the given dimensions with random weights, its head, TrainModule and the optimiser take two whole steps. In
the second one every block that PyTorch's allocator hands out or takes back is noted (torch.profiler), kernels' own
scratch included. Parameters, gradients and optimiser state are the tensors themselves. Resident memory is the whole
process's highest, with the interpreter and every library in it.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from accelerate import Accelerator
from torch import Tensor
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig

from headstart.errors import HeadstartError
from headstart.eval.figures import refuse_output, write_figures
from headstart.eval.footprint import (
    GRADIENTS,
    STEP,
    bare_head,
    bare_target,
    foretell,
    weight_bytes,
    whole_batch,
)
from headstart.loading import parse_dtype
from headstart.recipe import Recipe
from headstart.rehearsal import Ledger
from headstart.train.optimisers import make_optimizer
from headstart.train.random_state import seed_everything
from headstart.train.run_folder import environment
from headstart.train.stepping import optimiser_step
from headstart.train.train_module import TrainModule
from headstart.train.wrap import wrap

PARTS = ("target", "head", "gradients", "optimizer", "working", "at_once")
DIMENSIONS = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
}
"""317 M parameters."""
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 256,
}
HEADS: dict[str, dict[str, Any]] = {
    "medusa": {"type": "medusa", "num_heads": 4},
    "eagle3": {"type": "eagle3", "unrolled_steps": 3, "fc_norm": True},
}


def example(head: dict[str, Any], *, length: int, draft_vocab: int, **train: Any) -> Recipe:
    """A recipe for a target with random weights, in float32, online."""
    return Recipe.model_validate(
        {
            "name": "memory",
            "target": {"name": "random", "dtype": "float32"},
            "head": {**head, "draft_vocab_size": draft_vocab},
            "data": {"train": [{"source": "none"}], "max_length": length},
            "train": {"batch_size": 1, "dtype": "float32", **train},
        }
    )


def measure(recipe: Recipe, config: LlamaConfig) -> dict[str, int]:
    """Bytes by part of a real step in this process, under the names of a Footprint; and its highest `resident`."""
    seed_everything(0)
    target = bare_target(recipe, config)
    head = bare_head(recipe, target)
    head.set_share(1.0)
    module = TrainModule(target, head, parse_dtype(recipe.train.dtype)).train()
    accelerator = Accelerator(cpu=True, mixed_precision="no")
    optimizer = make_optimizer(recipe.train, head)
    wrapped = wrap(accelerator, module, optimizer)
    batches = [whole_batch(recipe)] * recipe.train.accumulation

    def step() -> None:
        optimiser_step(wrapped, batches, rate=recipe.train.lr, clip=recipe.train.clip, step=1)

    step()
    optimizer.zero_grad(set_to_none=True)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        step()
    gradients = [parameter.grad for parameter in head.parameters() if parameter.grad is not None]
    ledger = _ledger(seen, gradients)
    parts = {
        "target": weight_bytes(target.model),
        "head": weight_bytes(head),
        "gradients": _bytes(gradients),
        "optimizer": _bytes(optimizer.state.values()),
        "working": ledger.most(STEP),
    }
    standing = sum(parts[name] for name in ("target", "head", "optimizer"))
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {**parts, "at_once": standing + ledger.most(STEP, GRADIENTS), "resident": resident}


def _ledger(seen: profile, gradients: Sequence[Tensor]) -> Ledger:
    """The allocator's own events in order; blocks that became gradients under their label."""
    ledger, alive = Ledger(), {}
    for address, size in _allocations(seen):
        if size > 0:
            alive[address] = ledger.take(size, STEP)
        elif address in alive:  # else it was there before
            ledger.free(alive.pop(address), -size)
    for gradient in gradients:
        block = alive.get(gradient.untyped_storage().data_ptr())
        if block is not None:
            ledger.relabel(block, GRADIENTS)
    return ledger


def _allocations(seen: profile) -> list[tuple[int, int]]:
    """(address, bytes) of every block that was handed out, or taken back (negative), in order of time."""
    assert seen.profiler is not None and seen.profiler.kineto_results is not None
    pending, found = list(seen.profiler.kineto_results.experimental_event_tree()), []
    while pending:
        event = pending.pop()
        pending += event.children
        if event.tag == _EventType.Allocation:
            block: Any = event.extra_fields
            found.append((event.start_time_ns, block.ptr, block.alloc_size))
    return [(address, size) for _, address, size in sorted(found, key=lambda one: one[0])]


def _bytes(values: Iterable[Any]) -> int:
    return sum(leaf.nbytes for leaf in tree_leaves(list(values)) if isinstance(leaf, Tensor))


def compare(recipe: Recipe, config: LlamaConfig) -> dict[str, Any]:
    """What was foretold and what was measured, and by which share they differ."""
    footprint, measured = foretell(recipe, config, kind="cpu"), measure(recipe, config)
    parts = {}
    for name in PARTS:
        foretold = footprint.target.weights if name == "target" else getattr(footprint, name)
        parts[name] = {
            "foretold": foretold,
            "measured": measured[name],
            "off_by": foretold / measured[name] - 1,
        }
    parameters = footprint.target.parameters
    return {"target_parameters": parameters, "parts": parts, "resident": measured["resident"]}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", default=",".join(HEADS), metavar="A,B")
    parser.add_argument("--length", type=int, default=256, metavar="N", help="tokens of the sequence (%(default)s)")
    parser.add_argument("--output", metavar="FILE", help="where the figures go (.json)")
    parser.add_argument("--smoke", action="store_true", help="a tiny target")
    options = parser.parse_args(arguments)
    try:
        refuse_output(options.output)
        heads = options.heads.split(",")
        if unknown := [name for name in heads if name not in HEADS]:
            raise HeadstartError(f"--heads names {unknown[0]}, expected {' or '.join(HEADS)}")
    except HeadstartError as error:
        print(error, file=sys.stderr)
        return error.exit_status
    results = {name: _in_a_process(name, options.length, options.smoke) for name in heads}
    for name, result in results.items():
        millions = result["target_parameters"] / 1e6
        print(f"{name}, target of {millions:.0f} M parameters, {options.length} tokens, float32")
        for part, figures in result["parts"].items():
            foretold, measured = (figures[key] / 1e6 for key in ("foretold", "measured"))
            print(f"  {part:10} {foretold:9.1f} MB foretold {measured:9.1f} MB measured  {figures['off_by']:+.1%}")
        print(f"  resident   {result['resident'] / 1e6:9.1f} MB, the whole process at its highest")
    write_figures({"environment": environment(()), "length": options.length, "results": results}, options.output)
    return 0


def _in_a_process(name: str, length: int, smoke: bool) -> dict[str, Any]:
    """`compare` in a process of its own, whose resident memory is no one else's."""
    words = [sys.executable, "-c", _ONE, name, str(length), json.dumps(SMALL if smoke else DIMENSIONS)]
    done = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


_ONE = """
import json, sys
import torch
from transformers import LlamaConfig
from headstart.eval.bench_memory import HEADS, compare, example
torch.set_num_threads(1)
dimensions = json.loads(sys.argv[3])
recipe = example(HEADS[sys.argv[1]], length=int(sys.argv[2]), draft_vocab=dimensions["vocab_size"] // 4)
print(json.dumps(compare(recipe, LlamaConfig(**dimensions))))
"""


if __name__ == "__main__":
    raise SystemExit(main())
