"""Trains Medusa heads for a frozen model.

    python train/medusa.py --recipe quickstart.yaml --smoke                 # any CPU, under a minute
    accelerate launch train/medusa.py --recipe quickstart.yaml
    accelerate launch train/medusa.py --recipe quickstart.yaml --resume     # after a kill
    accelerate launch --config_file recipes/accelerate/eight-gpu.yaml train/medusa.py --recipe llama8b.yaml
    accelerate launch -m headstart.train.medusa --recipe qwen3-8b-medusa.yaml --set train.lr=5e-4 --name slower

Everything goes to runs/NAME: the recipe as it was run, metrics.jsonl, checkpoints, and head/, which is what you ship.
"""

from __future__ import annotations

from collections.abc import Sequence

from headstart.heads.store import build_head
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
        recipe, replaced = read_recipe(options, "medusa")
        path = run_path(recipe, options)
        accelerator = start_processes(recipe, cpu=options.smoke)

        target = open_target(recipe, accelerator, replaced)
        data = open_data(recipe, target, accelerator)

        seed_everything(recipe.seed)
        vocab = draft_vocab(recipe, target, data, accelerator)
        head = build_head(recipe.head, target, vocab)

        run, recipe = take_folder(path, recipe, options, accelerator)
        training = Training(recipe, run, accelerator, target, head, data.train, data.held_out)
        accelerator.print(describe(training))
        training.finish()
        accelerator.print(f"the head is in {run.head}; measure it:\n  headstart eval --head {run.path}")
        accelerator.end_training()


if __name__ == "__main__":
    main()
