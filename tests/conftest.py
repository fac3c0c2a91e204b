"""Shared by all tests: the option that checks every jaxtyping shape at run time, and one thread per worker."""

from __future__ import annotations

import gc
import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def pytest_addoption(parser):
    parser.addoption("--typecheck-shapes", action="store_true", help="check jaxtyping shapes of headstart at run time")


def pytest_configure(config):
    if config.getoption("--typecheck-shapes"):
        import shape_checks

        shape_checks.install()
    import torch

    torch.set_num_threads(1)


def pytest_collection_modifyitems(items):
    """Installing the wheel is one test of minutes: it comes first, or the other workers wait for it in the end."""
    items.sort(key=lambda item: item.get_closest_marker("network") is None)


def pytest_collection_finish(session):
    """What is imported by now stays: the garbage collector need not walk over all of torch and transformers again."""
    gc.collect()
    gc.freeze()
