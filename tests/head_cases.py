"""Small batches and forwards for the tests of heads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tiny
import torch

from headstart.data.packing import TokenBatch, collate
from headstart.data.rendering import Row
from headstart.heads.base import Head, HeadOutput
from headstart.heads.configs import HEADS
from headstart.heads.store import build_head, save_head
from headstart.heads.vocab import DraftVocab
from headstart.recipe import load_recipe
from headstart.target import Features, Target


def row(length: int, reply: range | list[int], seed: int = 0, vocab: int = 256) -> Row:
    """Random text in which the positions in `reply` are supervised."""
    ids = torch.randint(0, vocab, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
    return Row(f"row-{seed}", ids, [position in reply for position in range(length)])


def pad(batch: TokenBatch, length: int) -> TokenBatch:
    """The same documents in sequences of `length`."""
    extra = (0, length - batch.input_ids.shape[1])
    return TokenBatch(
        torch.nn.functional.pad(batch.input_ids, extra, value=7),
        torch.nn.functional.pad(batch.supervised, extra),
        torch.nn.functional.pad(batch.position_ids, extra),
        torch.nn.functional.pad(batch.document_ids, extra, value=-1),
    )


@torch.no_grad()
def features(target: Target, batch: TokenBatch, layers=()) -> Features:
    return target.forward(batch.input_ids, batch.position_ids, target.masks(*batch.attention()), layers=layers)


def vocab_of(ids, rows: int = 264) -> DraftVocab:
    return DraftVocab(torch.as_tensor(sorted(ids)), rows)


def head_for(
    target: Target, vocab: DraftVocab | None = None, *, kind: str = "medusa", shake: float = 0.1, **settings
) -> Any:
    """A head whose parameters have moved a little from their start, in the target's dtype."""
    if vocab is not None:
        settings["draft_vocab_size"] = len(vocab)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        head = build_head(HEADS[kind](**settings), target, vocab).to(target.dtype)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter += shake * torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
    return head


def untrained_run(run: Path, target_folder: Path) -> Path:
    """A run for `tiny.save(target_folder, "llama")`, with an untrained head of two levels and a tuned tree."""
    target = tiny.target("llama")
    chat = {"arguments": {}, "system": None, "supervise": "all"}
    head = head_for(target, num_heads=2)
    save_head(head, run / "head", fingerprint=target.fingerprint(), training_record={"chat": chat})
    trees = {"choices": {"2": [[0]], "4": [[0], [1], [0, 0]]}, "best": 4, "device": "cpu", "dtype": "float32"}
    trees["forecast"] = {"acceptance_length": 1.25, "speedup": 1.1}
    (run / "head" / "trees.json").write_text(json.dumps(trees))
    changes = [f"target.name={target_folder}", "target.architecture=null", "target.dtype=float32", "name=demo"]
    (run / "recipe.yaml").write_text(load_recipe("quickstart.yaml", changes).to_yaml())
    return run


def forward(head: Head, target: Target, batch: TokenBatch, states: Features | None = None) -> HeadOutput:
    return head(
        features(target, batch, head.wants) if states is None else states, batch, target.embedding, target.output
    )


def gradients(head: Head) -> dict[str, torch.Tensor]:
    return {name: parameter.grad.clone() for name, parameter in head.named_parameters() if parameter.grad is not None}


def loss_and_gradients(head: Head, target: Target, *batches: TokenBatch):
    """Summed over the batches: (loss_sum, token_count, gradients), as accumulation does."""
    head.zero_grad()
    outputs = [forward(head, target, batch) for batch in batches]
    total = torch.stack([output.loss_sum for output in outputs]).sum()
    total.backward()
    return total.detach(), sum(int(output.token_count) for output in outputs), gradients(head)


__all__ = [
    "collate",
    "features",
    "forward",
    "head_for",
    "loss_and_gradients",
    "pad",
    "row",
    "tiny",
    "untrained_run",
    "vocab_of",
]
