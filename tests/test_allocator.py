"""Freed memory is kept by the process."""

from __future__ import annotations

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
    done = subprocess.run([sys.executable, "-c", SCRIPT, how], capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="a setting of glibc's malloc")
def test_memory_that_was_freed_is_used_again():
    assert faults("kept") < faults("given back") / 10
