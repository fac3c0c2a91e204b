"""Lets a process keep the memory that it frees: on a CPU, fresh pages cost more than much of what fills them."""

from __future__ import annotations

import ctypes

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of glibc's malloc.h
_LARGEST = 32 << 20  # what glibc takes from its heap at most; anything larger is mapped and given back each time


def keep_freed_memory() -> None:
    """From now on blocks of up to 32 MiB come from the heap, and the heap does not shrink. Without it every logits
    tensor of a training step is mapped, zeroed by the kernel and unmapped again, a tenth of a step.

    For programs, not for libraries: it is the whole process's setting. Nothing happens where libc is not glibc.
    Source: mallopt(3).
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, _LARGEST)
        mallopt(_TRIM_THRESHOLD, 2**31 - 1)
