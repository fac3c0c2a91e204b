"""What a head would draft along a text that the target wrote: the ranks from which trees are tuned and acceptance is
forecast, without decoding anything.

At every base of the answer the head reads the same feature, and chooses from the same widened draft vocabulary, as its
drafter would there; so `decode.cost.replay` of these ranks is, step by step, what the engine records with that tree.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Iterable, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from headstart.borrowed import OutputHead
from headstart.data.rendering import Row, label_runs
from headstart.decode.attention import prefill_mask
from headstart.decode.cost import RankedAnswer
from headstart.decode.drafters.base import Request
from headstart.decode.drafters.medusa import MedusaDrafter
from headstart.decode.engine import Engine
from headstart.decode.tree import Path
from headstart.heads.medusa import MedusaHead
from headstart.target import Target

_CHUNK_ELEMENTS = 1 << 22
"""Draft logits that are made at a time."""


@torch.no_grad()
def rank_rows(head: MedusaHead, target: Target, rows: Iterable[Row], *, widen: bool = True) -> list[RankedAnswer]:
    """The ranks along the last answer of every row; rows without one are passed over.

    The head is copied to the target's dtype, in which it drafts. One forward of the target per row.
    """
    drafting = copy.deepcopy(head).to(target.device, target.dtype).eval()
    ranked = []
    for row in rows:
        runs = label_runs(row)
        if not runs or runs[-1][1] < 2:
            continue
        start, end = max(runs[-1][0], 1), runs[-1][1]  # the first token of all is never drafted
        tokens = torch.tensor([row.input_ids[:end]], device=target.device)
        allowed, distance, positions = prefill_mask(0, end, 1, torch.device(target.device))
        final = target.forward(tokens, positions, target.masks(allowed, distance)).final[0]
        ranked.append(rank_answer(drafting, target.output, final, row.input_ids[:end], start, widen=widen))
    return ranked


def measure_drafting(head: MedusaHead, target: Target, paths: Sequence[Path], steps: int = 16) -> float:
    """Median seconds that drafting adds to a step: proposing a tree and taking in what was accepted."""
    engine = Engine(target, MedusaDrafter(head, target, paths), budget=len(paths) + 1)
    prompt = [(7 + 31 * index) % min(target.vocab_size, target.embedding.vocab_size) for index in range(64)]
    longest = min(64, target.max_positions // 2)
    request = Request(prompt_ids=prompt[:longest], max_new_tokens=4 * steps, ignore_end=True)
    (generation,) = engine.generate([request])
    return statistics.median(record.draft_seconds for record in generation.steps[1:] or generation.steps)


@torch.no_grad()
def rank_answer(
    head: MedusaHead,
    output: OutputHead,
    final: Float[Tensor, "tokens dim"],
    token_ids: Sequence[int],
    prompt_length: int,
    *,
    widen: bool = True,
) -> RankedAnswer:
    """The ranks that the heads gave to the tokens of one answer.

    final: the target's final features of the text `token_ids` (prompt and answer; the last one's is not needed). The
    head must be in the dtype in which it drafts (the target's), in evaluation mode. widen: as its drafter does.
    """
    text = torch.tensor(list(token_ids), device=final.device)
    answer = text[prompt_length:]
    depth = head.config.num_heads
    ids = torch.arange(head.vocab_size, device=final.device) if head.vocab is None else head.vocab.ids
    widen = widen and head.vocab is not None and head.output_weight is None
    extra = _extra_ids(text, head) if widen else text[:0]
    ids = torch.cat([ids, extra])
    column = torch.full((head.vocab_size,), -1, dtype=torch.long, device=final.device)
    column[ids] = torch.arange(len(ids), device=final.device)
    rows = output.select(ids if head.vocab is not None else None) if head.output_weight is None else None
    # an extra id can be drafted from the step on whose root is its first occurrence
    first_seen = torch.tensor([int((text == token).nonzero()[0]) for token in extra], device=final.device)

    ranks = torch.full((len(answer), depth), -1, dtype=torch.long, device=final.device)
    first_base = 0 if prompt_length > 1 else 1  # a prompt of one token has no feature before its root
    size = max(1, _CHUNK_ELEMENTS // (depth * len(ids)))
    for start in range(first_base, len(answer), size):
        bases = torch.arange(start, min(start + size, len(answer)), device=final.device)
        root = prompt_length - 1 + bases
        logits = head.logits(head.draft_hidden(final[root - 1]), rows)
        if len(extra):
            unseen = first_seen > root[:, None]
            logits[..., len(ids) - len(extra) :].masked_fill_(unseen[:, None], -torch.inf)
        at = bases[:, None] + torch.arange(depth, device=final.device)
        labels = column[answer[at.clamp(max=len(answer) - 1)]]
        ranks[bases] = _ranks(logits, labels.where(at < len(answer), -1))
    return RankedAnswer(ranks.cpu())


def _extra_ids(text: Int[Tensor, "tokens"], head: MedusaHead) -> Int[Tensor, "extra"]:
    assert head.vocab is not None
    distinct = text.unique()
    return distinct[head.vocab.index_of(distinct) < 0]


def _ranks(
    logits: Float[Tensor, "bases depth vocab"], labels: Int[Tensor, "bases depth"]
) -> Int[Tensor, "bases depth"]:
    """How many choices stand before each label; -1 where it cannot be chosen. Equal logits: the lower column first."""
    at = labels.clamp(min=0)[..., None]
    own = logits.gather(-1, at)
    columns = torch.arange(logits.shape[-1], device=logits.device)
    before = ((logits > own) | ((logits == own) & (columns < at))).sum(-1)
    return before.where((labels >= 0) & (own.squeeze(-1) > -torch.inf), -1)
