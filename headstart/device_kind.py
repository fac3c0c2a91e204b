"""What kind of device code chooses its kernels and chunk sizes for; a plan asks for a kind that is not there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

_pretended: ContextVar[str | None] = ContextVar("pretended", default=None)


def device_kind(device: torch.device) -> str:
    """`cpu`, `cuda`, ..: that of the device, or the one that is pretended."""
    return _pretended.get() or device.type


@contextmanager
def pretend(kind: str) -> Iterator[None]:
    """Inside, code takes the ways that it would take on this kind of device, wherever its tensors are."""
    token = _pretended.set(kind)
    try:
        yield
    finally:
        _pretended.reset(token)
