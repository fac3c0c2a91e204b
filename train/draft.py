"""Trains a student for a frozen model: a draft model of a few of its layers.

    python train/draft.py --recipe smollm2-draft.yaml --smoke               # any CPU, about a minute
    accelerate launch train/draft.py --recipe smollm2-draft.yaml
    accelerate launch train/draft.py --recipe smollm2-draft.yaml --resume   # after a kill
    accelerate launch -m headstart.train.draft --recipe smollm2-draft.yaml --set head.num_layers=4 --name four-layers

Everything goes to runs/NAME: the recipe as it was run, metrics.jsonl, checkpoints, and head/, which is what you ship.
"""

from __future__ import annotations

from collections.abc import Sequence

from headstart.train.from_recipe import train_from_recipe


def main(arguments: Sequence[str] | None = None) -> None:
    train_from_recipe(__doc__ or "", arguments, "draft")


if __name__ == "__main__":
    main()
