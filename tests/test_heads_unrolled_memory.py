"""Memory of a training step of the EAGLE heads: it does not grow with vocabulary times text."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

VOCAB, DIM = 151_936, 32

STEP = """
import json, resource, sys
sys.path.insert(0, {tests!r})
import torch
import tiny
from headstart.data.packing import TokenBatch
from headstart.heads.configs import HEADS
from headstart.heads.store import build_head
from headstart.target import Features

torch.set_num_threads(1)
kind, length = sys.argv[1], int(sys.argv[2])
target = tiny.target("llama", vocab_size={vocab}, hidden_size={dim}, num_attention_heads=2, num_key_value_heads=2)
head = build_head(HEADS[kind](unrolled_steps=3), target).train()
ids = torch.randint(0, {vocab}, (1, length))
places = torch.arange(length)[None]
batch = TokenBatch(ids, torch.ones_like(ids, dtype=torch.bool), places, torch.zeros_like(ids))
final = torch.randn(1, length, {dim})
features = Features(final, {{k: torch.randn(1, length, {dim}) for k in head.wants}})
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
output = head(features, batch, target.embedding, target.output)
output.loss_sum.backward()
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(json.dumps({{"bytes": (after - before) * 1024, "scored": output.scored.tolist()}}))
"""


def peak(kind: str, length: int) -> int:
    """Bytes that one forward and backward add to the process."""
    script = STEP.format(tests=str(Path(__file__).parent), vocab=VOCAB, dim=DIM)
    done = subprocess.run([sys.executable, "-c", script, kind, str(length)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["scored"] == [length - 1, length - 2, length - 3]
    return found["bytes"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_a_step_over_many_tokens_and_a_large_vocabulary_needs_little_memory(kind):
    """4096 x 151 936 logits are 2.3 GiB in fp32 for a single unrolled step; the chunk has 16 x 3 of these rows."""
    short, long = peak(kind, 256), peak(kind, 4096)
    chunk = 16 * 3 * VOCAB * 4
    assert long < 14 * chunk
    assert long - short < 3840 * 400 * DIM * 4, "what grows with the text is some hundred states of a token"
