"""EAGLE heads that half know a tiny target's answers by heart, and references for what they draft.

target, asked, plain = case()                       # float64 target, requests, its own answers
head = learnt("eagle3")                             # a head, trained a little on them
steps = unroll_text(head, target, ids, 4)           # teacher-forced logits of four steps, by the training code
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from head_cases import collate, forward, row, tiny, vocab_of

from headstart.data.packing import TokenBatch
from headstart.decode.drafters.base import NoDraft, Request
from headstart.decode.engine import Engine, Generation
from headstart.heads.base import Head
from headstart.heads.configs import Eagle3Config, EagleConfig
from headstart.heads.store import build_head
from headstart.heads.unrolled import UnrolledHead
from headstart.target import Features, Target

KINDS = ("eagle", "eagle3")
PROMPT_LENGTHS = (3, 1, 14, 7, 2)
NEW_TOKENS = 18


@functools.lru_cache
def target_of(family: str = "llama") -> Target:
    return tiny.target(family, dtype=torch.float64)


def requests(new: int = NEW_TOKENS, lengths: Sequence[int] = PROMPT_LENGTHS, **settings) -> list[Request]:
    return [
        Request(prompt_ids=row(length, [], seed=length).input_ids, max_new_tokens=new, request_id=length, **settings)
        for length in lengths
    ]


def decode(target: Target, drafter, asked: Sequence[Request], *, engine=Engine, **settings) -> list[Generation]:
    """In the order of the requests."""
    order = [request.request_id for request in asked]
    found = engine(target, drafter, **settings).generate(asked)
    return sorted(found, key=lambda generation: order.index(generation.request.request_id))


def texts(generations: Sequence[Generation]) -> list[list[int]]:
    return [generation.token_ids for generation in generations]


@functools.lru_cache
def plain(family: str = "llama") -> list[list[int]]:
    return texts(decode(target_of(family), NoDraft(), requests()))


def config_of(kind: str, **settings):
    settings = {"unrolled_steps": 3, "loss": "hard-ce", **settings}
    if kind == "eagle":
        return EagleConfig(token_loss=1.0, feature_loss=0.0, noise=0.0, **settings)
    return Eagle3Config(**settings)


@torch.no_grad()
def features_of(head: Head, target: Target, batch: TokenBatch) -> Features:
    return target.forward(batch.input_ids, batch.position_ids, target.masks(*batch.attention()), layers=head.wants)


def text_batch(ids: Sequence[int]) -> TokenBatch:
    batch = collate([row(len(ids), [])], [[0]])
    batch.input_ids[0] = torch.tensor(list(ids))
    return batch


def answers_batch(family: str) -> TokenBatch:
    """The target's own answers, each behind its prompt."""
    rows = []
    for request, answer in zip(requests(), plain(family), strict=True):
        each = row(len(request.prompt_ids) + len(answer), range(len(request.prompt_ids), 99))
        each.input_ids[:] = [*request.prompt_ids, *answer]
        rows.append(each)
    return collate(rows, [[number] for number in range(len(rows))])


def learn_by_heart(head: Any, family: str = "llama", rounds: int = 8) -> Any:
    """Trains any head a little on the target's answers."""
    target, batch = target_of(family), answers_batch(family)
    states = features_of(head, target, batch)
    optimizer = torch.optim.Adam(head.parameters(), lr=1e-2)
    for _ in range(rounds):
        optimizer.zero_grad()
        forward(head, target, batch, states).loss_sum.backward()
        optimizer.step()
    return head.eval()


@functools.lru_cache
def learnt(kind: str, family: str = "llama", *, small: bool = False, rounds: int = 8, **settings) -> UnrolledHead:
    """In float64. small: a draft vocabulary of 40 ids, each of which occurs once in the answers."""
    target, batch = target_of(family), answers_batch(family)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        head = learn_by_heart(build_head(config_of(kind, **settings), target).double(), family, rounds)
        if small:
            once = (torch.bincount(batch.input_ids[batch.supervised]) == 1).nonzero().flatten()[:40]
            narrow = build_head(
                config_of(kind, draft_vocab_size=40, **settings), target, vocab_of(once.tolist(), target.vocab_size)
            ).double()
            own = {name: value for name, value in head.state_dict().items() if name != "output_weight"}
            narrow.load_state_dict(own, strict=False)
            head = narrow
    return head.eval()


@torch.no_grad()
def unroll_text(head: UnrolledHead, target: Target, ids: Sequence[int], steps: int) -> torch.Tensor:
    """Logits [index, step, draft] of the training code, teacher-forced along the text."""
    batch = text_batch(ids)
    unrolled = head.unroll(features_of(head, target, batch), batch, target.embedding, steps)
    rows = target.output.select(head.draft_ids) if head.output_weight is None else None
    return torch.stack([head.logits(step.output, rows)[0] for step in unrolled], dim=1)
