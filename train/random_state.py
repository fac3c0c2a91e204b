"""Every random generator that training may draw from, as tensors: to save, to restore, to look without moving."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy
import torch
from torch import Tensor


def random_state() -> dict[str, Tensor]:
    """States of Python's, numpy's and torch's generators (CUDA's of the current device too), on CPU."""
    version, words, gauss = random.getstate()
    numpys = numpy.random.get_state(legacy=False)
    assert isinstance(numpys, dict)
    state = {
        "python": torch.tensor([version, *words], dtype=torch.int64),
        "python_gauss": torch.tensor([] if gauss is None else [gauss], dtype=torch.float64),
        "numpy": torch.tensor([*numpys["state"]["key"].tolist(), numpys["state"]["pos"], numpys["has_gauss"]]),
        "numpy_gauss": torch.tensor([numpys["gauss"]], dtype=torch.float64),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: dict[str, Tensor]) -> None:
    """Puts all generators where `random_state` found them."""
    version, *words = state["python"].tolist()
    gauss = state["python_gauss"].tolist()
    random.setstate((version, tuple(words), gauss[0] if gauss else None))
    *keys, position, has_gauss = state["numpy"].tolist()
    cached = state["numpy_gauss"].item()
    numpy.random.set_state(("MT19937", numpy.array(keys, dtype=numpy.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


@contextmanager
def unmoved_random_state() -> Iterator[None]:
    """Whatever is drawn inside, training draws the same afterwards."""
    state = random_state()
    try:
        yield
    finally:
        set_random_state(state)


def seed_everything(seed: int, rank: int = 0) -> None:
    """Seeds all generators, each rank differently, so that dropout differs between ranks."""
    seed = (seed + 1_000_003 * rank) % 2**32
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)
