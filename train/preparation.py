"""What the training scripts have in common: command line, processes, target, data, draft vocabulary, run folder."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import Tensor

from headstart.data.agreement import agreement
from headstart.data.feature_cache import refuse_no_cache
from headstart.data.features import feature_folder
from headstart.data.packing import RowStore, TokenBatch, collate
from headstart.data.prepare import Prepared, prepare
from headstart.decode.selfcheck import check_target
from headstart.errors import ANOTHER_IS_GONE, HeadstartError, RecipeError, TrainingError, disk_fault
from headstart.heads.vocab import DraftVocab
from headstart.light_target import load_recipe_light_target
from headstart.recipe import Recipe, load_recipe, quoted, smoke
from headstart.recipe_smoke import RANDOM
from headstart.recipe_target import load_recipe_target, settle_dtypes
from headstart.target import Target
from headstart.train.ceiling import outside
from headstart.train.features import cached_finals, refuse_missing
from headstart.train.feed import plan_batches
from headstart.train.loop import Training
from headstart.train.modes import SHARDED, another_is_gone, mode, on_main
from headstart.train.run_folder import RunFolder, open_run, refuse_existing
from headstart.train.wrapping import full_size

LABELS_LOOKED_AT = 1024
"""How many labels are compared with the target's own choice before training."""


def parse_arguments(description: str, arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options of a training script; `description` is the script's docstring, its first commands included."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", required=True, metavar="FILE", help="a file, or a packaged recipe: quickstart.yaml")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="change a key of the recipe: train.lr=2e-5"
    )
    parser.add_argument("--name", help="name of the run; default: the recipe's")
    parser.add_argument("--output", default="runs", metavar="DIR", help="where runs stand (%(default)s)")
    parser.add_argument("--smoke", action="store_true", help="a few steps on CPU, with everything large replaced")
    parser.add_argument("--resume", action="store_true", help="go on with the run of this name")
    parser.add_argument(
        "--calibrate", action="store_true", help="work out the number of steps, and stop before the first"
    )
    return parser.parse_args(arguments)


@contextmanager
def user_errors() -> Iterator[None]:
    """Ends the process with one sentence, and the error's exit status, where the user can mend what went wrong. What
    all processes have in common is said by the first one."""
    rank = int(os.environ.get("RANK", 0))
    name = f"rank {rank}: " if int(os.environ.get("WORLD_SIZE", 1)) > 1 else ""
    try:
        yield
    except (HeadstartError, OSError) as raised:
        error = disk_fault(raised) if isinstance(raised, OSError) else raised
        if error is None:
            raise
        if not (rank and getattr(raised, "shared", False)):
            print(f"{name}{error}", file=sys.stderr, flush=True)
        raise SystemExit(error.exit_status) from None
    except RuntimeError as raised:
        if not another_is_gone(raised):
            raise
        print(
            f"{name}another process of this launch has ended, or has not answered within train.timeout "
            f"({str(raised).splitlines()[0]}); what is said above or by its launcher tells why. The same command with "
            "--resume goes on from the last checkpoint",
            file=sys.stderr,
            flush=True,
        )
        raise SystemExit(ANOTHER_IS_GONE) from None
    except KeyboardInterrupt:
        print(f"{name}interrupted; the same command with --resume goes on from the last checkpoint", file=sys.stderr)
        raise SystemExit(130) from None


def read_recipe(arguments: argparse.Namespace, *head_types: str) -> tuple[Recipe, list[str]]:
    """The recipe as the command line changes it, and what --smoke replaced. Nothing is loaded yet.

    head_types: what the script trains; a recipe for another head is refused.
    """
    overrides = [*arguments.set, *([f"name={quoted(arguments.name)}"] if arguments.name else [])]
    recipe = load_recipe(arguments.recipe, overrides)
    if recipe.head.type not in head_types:
        raise RecipeError(
            f"{arguments.recipe} has a {recipe.head.type} head, this script trains {' and '.join(head_types)}; "
            f"`headstart train --recipe {arguments.recipe}` finds the right one"
        )
    recipe, replaced = smoke(recipe) if arguments.smoke else (recipe, [])
    if recipe.train.dtype == "float16":
        raise RecipeError("`train.dtype: float16` would need loss scaling; use bfloat16 or float32")
    return recipe, replaced


def run_path(recipe: Recipe, arguments: argparse.Namespace) -> Path:
    """Where the run goes; refused at once if a run is there and --resume was not given."""
    path = Path(arguments.output) / recipe.name
    if not refuse_existing(path, arguments.resume) and arguments.resume and int(os.environ.get("RANK", 0)) == 0:
        print(f"warning: there is no run {path} to go on with; it starts from the first step", file=sys.stderr)
    return path


def open_target(recipe: Recipe, accelerator: Accelerator, replaced: Sequence[str]) -> Target:
    """The frozen target, after its self-check; says what --smoke replaced (`replaced`: in the recipe). Where features
    come from a cache, its layers stay on the disk, and whoever wrote the cache has checked it."""
    if recipe.data.features == "offline":
        refuse_no_cache(feature_folder(recipe))
        return load_recipe_light_target(recipe, device=accelerator.device)
    placement, quantization = recipe.target.placement, recipe.target.quantization
    if quantization != "none" and placement != "replicate":
        raise TrainingError(
            f"target.quantization: {quantization} is held whole by every process, and target.placement: {placement} "
            "would cut it; choose one of the two"
        )
    # one that is to be cut is looked at on the CPU, whole, and each part goes to its device afterwards
    device = accelerator.device if placement == "replicate" else "cpu"
    target, in_target = load_recipe_target(recipe, device=device)
    for sentence in [*replaced, *in_target]:
        accelerator.print(f"--smoke: {sentence}")
    check_target(target)
    return target


def open_data(recipe: Recipe, target: Target, accelerator: Accelerator) -> Prepared:
    """The rows to train and to look at, with their summary, and a warning where the target did not write them (of a
    random one that goes without saying)."""
    data = prepare(recipe, target.tokenizer, vocab_size=target.vocab_size, max_positions=target.max_positions)
    accelerator.print(data.summary())
    if recipe.data.features == "offline":
        refuse_missing(recipe, target, (data.train, data.held_out))
    if not recipe.target.name.startswith(RANDOM) and (warning := foreign_answers(target, data.train, recipe)):
        accelerator.print(f"warning: {warning}")
    return data


def place_target(target: Target, recipe: Recipe, accelerator: Accelerator) -> None:
    """Splits the target where the recipe asks for tensor parallelism and there are layers; else the wrapper does it
    all."""
    if recipe.target.placement == "tensor_parallel" and recipe.data.features != "offline":
        from headstart.train.tensor_parallel import group_size, split_target

        split_target(target, accelerator, group_size(recipe, accelerator))


def take_folder(
    path: Path, recipe: Recipe, arguments: argparse.Namespace, accelerator: Accelerator
) -> tuple[RunFolder, Recipe]:
    """The run folder and the recipe to train, the same on every rank; made only now that everything has been loaded."""
    recipe = settle_dtypes(recipe, accelerator.device)
    return on_main(accelerator, lambda: open_run(path, recipe, resume=arguments.resume, command=sys.argv))


def count_labels(rows: RowStore, vocab_size: int) -> torch.Tensor:
    """How often each target id is a label in these rows, [vocab_size]."""
    counts = torch.zeros(vocab_size, dtype=torch.long)
    for row in rows:
        labels = torch.tensor(row.input_ids)[torch.tensor(row.supervised)]
        counts += torch.bincount(labels, minlength=vocab_size)
    return counts


def draft_vocab(recipe: Recipe, target: Target, data: Prepared, accelerator: Accelerator) -> DraftVocab | None:
    """The draft vocabulary that the recipe asks for; None for all tokens. Says what it holds, and the ceiling on
    acceptance that what it leaves out is."""
    vocab = draft_vocab_of(recipe, target, data.train)
    if vocab is None:
        return None
    shares = [vocab.coverage(count_labels(rows, target.vocab_size)) for rows in (data.train, data.held_out)]
    accelerator.print(
        f"draft vocabulary: {len(vocab)} of {target.vocab_size} tokens, {shares[0]:.1%} of the training labels "
        f"and {shares[1]:.1%} of the held-out ones"
    )
    if ceiling := outside(target, vocab, recipe_batches(data.held_out, recipe), final=known_states(recipe, target)):
        accelerator.print(f"  {ceiling}")
    return vocab


def draft_vocab_of(recipe: Recipe, target: Target, rows: RowStore) -> DraftVocab | None:
    """The draft vocabulary of the recipe's size from the labels of these rows; None for all tokens."""
    size = recipe.head.draft_vocab_size
    if size is None:
        return None
    tokenizer = target.tokenizer
    special = {*target.end_token_ids, *tokenizer.all_special_ids}
    counts = count_labels(rows, target.vocab_size)
    return DraftVocab.build(counts, size, special_ids=special, tokenizer_size=len(tokenizer))


def recipe_batches(rows: RowStore, recipe: Recipe) -> Iterator[TokenBatch]:
    """These rows in the batches that the recipe makes of them."""
    return (collate(rows, batch) for batch in plan_batches(rows, recipe))


def foreign_answers(target: Target, rows: RowStore, recipe: Recipe) -> str | None:
    """A warning where the target itself would have written something else than the data say."""
    final = known_states(recipe, target)
    return agreement(target, recipe_batches(rows, recipe), max_tokens=LABELS_LOOKED_AT, final=final).warning()


def known_states(recipe: Recipe, target: Target) -> Callable[[TokenBatch], Tensor] | None:
    """With offline features, what gives a batch's final states without the target; else None."""
    if recipe.data.features != "offline":
        return None
    source = cached_finals(recipe, target)
    return lambda batch: source(batch, keep=False).final


def describe(training: Training) -> str:
    """What is about to happen: processes, device, dtypes, parameters, data, length, and who reads what."""
    accelerator, recipe, target = training.accelerator, training.recipe, training.target
    trainable = sum(full_size(parameter) for parameter in training.head.parameters() if parameter.requires_grad)
    held_by_target = sum(full_size(parameter) for parameter in target.model.parameters())
    frozen = f"{target.name} is frozen"
    if training.joint is not None:
        adapters = sum(parameter.numel() for parameter in training.joint.adapters.parameters.values())
        trainable, held_by_target = trainable + adapters, held_by_target - adapters
        first = training.joint.begins_at(training.schedule.total_steps)
        frozen = f"{adapters:,} of them adapters on {target.name}, which learn from step {first + 1} on"
    world = training.wrapped.world_size
    sharded = mode(accelerator) in SHARDED
    held = f"1/{accelerator.num_processes} on each process" if sharded else "whole on every process"
    if target.group > 1:
        held = f"split over groups of {target.group} processes"
    lines = [
        f"run: {training.run.path}",
        f"processes: world size {accelerator.num_processes}, mode {mode(accelerator)}, device {accelerator.device}",
        f"precision: target {str(target.dtype).removeprefix('torch.')}, forward of the head {recipe.train.dtype}, "
        "weights of the head and optimiser float32",
        f"parameters: {trainable:,} trainable of {trainable + held_by_target:,} ({frozen}, {held})",
        f"one step: {recipe.train.batch_size} sequences x {recipe.train.accumulation} micro-batches "
        f"x {world} processes; {training.schedule.total_steps} steps",
    ]
    lines += [f"rank {rank} begins with rows: {', '.join(training.feed.first_rows(rank))}" for rank in range(world)]
    return "\n".join(lines)
