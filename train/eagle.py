"""Trains an EAGLE-1 or EAGLE-3 head for a frozen model.

    python train/eagle.py --recipe smollm2-eagle3.yaml --smoke              # any CPU, about a minute
    accelerate launch train/eagle.py --recipe smollm2-eagle3.yaml
    accelerate launch train/eagle.py --recipe smollm2-eagle3.yaml --resume  # after a kill
    accelerate launch --config_file recipes/accelerate/eight-gpu.yaml train/eagle.py --recipe llama8b-eagle3.yaml
    accelerate launch -m headstart.train.eagle --recipe smollm2-eagle.yaml --set head.unrolled_steps=3 --name hass

Everything goes to runs/NAME: the recipe as it was run, metrics.jsonl, checkpoints, and head/, which is what you ship.
"""

from __future__ import annotations

from collections.abc import Sequence

from headstart.heads.formats import load_foreign
from headstart.heads.store import build_head
from headstart.train.curriculum import describe_curriculum
from headstart.train.loop import Training
from headstart.train.preparation import (
    describe,
    draft_vocab,
    open_data,
    open_target,
    parse_arguments,
    read_recipe,
    run_path,
    start_processes,
    take_folder,
    user_errors,
)
from headstart.train.random_state import seed_everything


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse_arguments(__doc__ or "", arguments)
    with user_errors():
        recipe, replaced = read_recipe(options, "eagle", "eagle3")
        path = run_path(recipe, options)
        accelerator = start_processes(recipe, cpu=options.smoke)

        target = open_target(recipe, accelerator, replaced)
        data = open_data(recipe, target, accelerator)

        seed_everything(recipe.seed)
        vocab = draft_vocab(recipe, target, data, accelerator)
        head = build_head(recipe.head, target, vocab, read_foreign=load_foreign)

        run, recipe = take_folder(path, recipe, options, accelerator)
        training = Training(recipe, run, accelerator, target, head, data.train, data.held_out)
        accelerator.print(describe(training))
        accelerator.print(describe_curriculum(head.config, training.schedule.total_steps))
        training.finish()
        accelerator.print(f"the head is in {run.head}; measure it:\n  headstart eval --head {run.path}")
        accelerator.end_training()


if __name__ == "__main__":
    main()
