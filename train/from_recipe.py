"""A run from the recipe to the head: what every training script does.

Everything goes to runs/NAME: the recipe as it was run, metrics.jsonl, checkpoints, and head/, which is what you ship.
"""

from __future__ import annotations

from collections.abc import Sequence

from headstart.allocator import keep_freed_memory
from headstart.errors import show_warnings_plainly
from headstart.heads.configs import UnrolledConfig
from headstart.heads.formats import load_foreign
from headstart.heads.store import build_head, refuse_misfit
from headstart.stopping import Stopped
from headstart.train.curriculum import describe_curriculum
from headstart.train.loop import Training
from headstart.train.modes import mode, placed_as_launched, start_processes
from headstart.train.preparation import (
    describe,
    draft_vocab,
    open_data,
    open_target,
    parse_arguments,
    place_target,
    read_recipe,
    run_path,
    settle_dtypes,
    take_folder,
    user_errors,
)
from headstart.train.random_state import seed_everything
from headstart.train.run_folder import refuse_other_recipe


def train_from_recipe(description: str, arguments: Sequence[str] | None, *head_types: str) -> None:
    """Trains the head of the recipe that the command line names.

    description: the script's docstring. arguments: None for those of the process. head_types: what the script trains.
    Ends the process with one sentence where the user can mend what went wrong.
    """
    options = parse_arguments(description, arguments)
    show_warnings_plainly()
    keep_freed_memory()
    with user_errors():
        recipe, replaced = read_recipe(options, *head_types)
        path = run_path(recipe, options)
        accelerator = start_processes(recipe, smoke=options.smoke)
        if options.smoke:
            recipe, placed = placed_as_launched(recipe, mode(accelerator))
            replaced += placed

        refuse_other_recipe(path, settle_dtypes(recipe, accelerator.device))

        target = open_target(recipe, accelerator, replaced)
        refuse_misfit(recipe.head, target, read_foreign=load_foreign)
        data = open_data(recipe, target, accelerator)

        seed_everything(recipe.seed)
        vocab = draft_vocab(recipe, target, data, accelerator)
        head = build_head(recipe.head, target, vocab, read_foreign=load_foreign)
        place_target(target, recipe, accelerator)

        run, recipe = take_folder(path, recipe, options, accelerator)
        training = Training(recipe, run, accelerator, target, head, data.train, data.held_out)
        accelerator.print(describe(training))
        if isinstance(head.config, UnrolledConfig):
            accelerator.print(describe_curriculum(head.config, training.schedule.total_steps))
        if options.calibrate:
            training.metrics.close()
            training.features.close()
            accelerator.end_training()
            return  # the recipe in its folder says how many they are; --resume goes on from there
        try:
            training.finish()
        except Stopped:
            accelerator.end_training()
            raise
        accelerator.print(f"the head is in {run.head}; measure it:\n  headstart eval --head {run.path}")
        accelerator.end_training()
