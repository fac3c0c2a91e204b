"""Freed memory is kept by the process."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

SCRIPT = """
import resource, sys
import torch
from headstart.allocator import keep_freed_memory

if sys.argv[1] == "kept":
    keep_freed_memory()
torch.set_num_threads(1)

def fill():
    tensors = [torch.ones(5 << 20, dtype=torch.uint8) for _ in range(4)]

for _ in range(4):
    fill()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(8):
    fill()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(how: str) -> int:
    """Pages that the kernel had to bring while 20 MiB were filled and freed eight times."""
    # glibc's defaults, told to it so that it does not adapt them to what it sees
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}
    command = [sys.executable, "-c", SCRIPT, how]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="a setting of glibc's malloc")
def test_memory_that_was_freed_is_used_again():
    assert faults("kept") < faults("given back") / 10
