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

from headstart.train.from_recipe import train_from_recipe


def main(arguments: Sequence[str] | None = None) -> None:
    train_from_recipe(__doc__ or "", arguments, "medusa")


if __name__ == "__main__":
    main()
