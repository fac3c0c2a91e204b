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

from headstart.train.from_recipe import train_from_recipe


def main(arguments: Sequence[str] | None = None) -> None:
    train_from_recipe(__doc__ or "", arguments, "eagle", "eagle3")


if __name__ == "__main__":
    main()
