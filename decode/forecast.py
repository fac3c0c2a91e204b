"""What a head would draft along a text that the target wrote: the ranks from which trees are tuned and acceptance is
forecast, without decoding anything.

At every base of the answer the head reads the same features, and chooses from the same widened draft vocabulary, as its
drafter would there; so `decode.cost.replay` of these ranks is, step by step, what the engine records with that tree.
Dynamic trees are grown at every base in the same way (`grow_rows`), and `replay_drafts` lets any drafter propose along
the text.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from headstart.data.packing import TokenBatch, collate
from headstart.data.rendering import Row, label_runs
from headstart.decode.attention import prefill_mask
from headstart.decode.cache import KVCache
from headstart.decode.cost import DraftCosts, GrownAnswer, RankedAnswer, measure_costs
from headstart.decode.draft_length import StepCosts
from headstart.decode.drafters.base import Committed, Drafter, Request, Rows, take
from headstart.decode.drafters.eagle import EagleDrafter
from headstart.decode.drafters.heads import head_drafter
from headstart.decode.drafters.plans import DynamicTree, Plan, as_plan, chain_paths
from headstart.decode.engine import Engine
from headstart.decode.tree import Path
from headstart.decode.verify import follow
from headstart.heads.base import Head
from headstart.heads.draft import DraftHead
from headstart.heads.medusa import MedusaHead
from headstart.heads.unrolled import UnrolledHead
from headstart.target import Features, Target

_CHUNK_ELEMENTS = 1 << 22
"""Draft logits that are made at a time."""


@dataclass(frozen=True)
class Recorded:
    """A text of the target's, with its features: what a forecast needs of the target."""

    token_ids: list[int]
    """Prompt and answer."""
    prompt_length: int
    features: Features
    """[1, tokens, dim]; those of the last token are not needed."""

    @property
    def answer(self) -> list[int]:
        return self.token_ids[self.prompt_length :]


@torch.no_grad()
def record_rows(target: Target, rows: Iterable[Row], wants: Sequence[int]) -> list[Recorded]:
    """The last answer of every row with its prompt; rows without one are passed over. One forward per row."""
    recorded = []
    for row in rows:
        runs = label_runs(row)
        if not runs or runs[-1][1] < 2:
            continue
        start, end = max(runs[-1][0], 1), runs[-1][1]  # the first token of all is never drafted
        tokens = torch.tensor([row.input_ids[:end]], device=target.device)
        allowed, distance, positions = prefill_mask(0, end, 1, torch.device(target.device))
        features = target.forward(tokens, positions, target.masks(allowed, distance), layers=wants)
        recorded.append(Recorded(row.input_ids[:end], start, features))
    return recorded


# -- ranks, for static trees -------------------------------------------------------------------------------------------


@torch.no_grad()
def rank_rows(
    head: Head, target: Target, rows: Iterable[Row], *, depth: int | None = None, widen: bool = True
) -> list[RankedAnswer]:
    """The ranks along the last answer of every row; rows without one are passed over.

    The head is copied to the target's dtype, in which it drafts. One forward of the target per row.
    """
    drafting = copy.deepcopy(head).to(target.device, target.dtype).eval()
    texts = record_rows(target, rows, head.wants)
    return [rank_answer(drafting, target, text, depth=depth, widen=widen) for text in texts]


@torch.no_grad()
def rank_answer(
    head: Head, target: Target, text: Recorded, *, depth: int | None = None, widen: bool = True
) -> RankedAnswer:
    """The ranks that the head gave to the tokens of one answer, `depth` tokens ahead (None: as many as it was trained).

    The head must be in the dtype in which it drafts (the target's), in evaluation mode. widen: as its drafter does.
    """
    assert isinstance(head, MedusaHead | UnrolledHead | DraftHead)
    depth = depth or head.num_depths
    states = draft_states(head, target, text, depth)
    ids_of_text = torch.tensor(text.token_ids, device=states.device)
    answer, prompt_length = ids_of_text[text.prompt_length :], text.prompt_length
    ids = torch.arange(head.vocab_size, device=states.device) if head.vocab is None else head.vocab.ids
    borrows = head.output_weight is None
    extra = _extra_ids(ids_of_text, head) if widen and borrows and head.vocab is not None else ids_of_text[:0]
    ids = torch.cat([ids, extra])
    column = torch.full((head.vocab_size,), -1, dtype=torch.long, device=states.device)
    column[ids] = torch.arange(len(ids), device=states.device)
    rows = target.output.select(ids if head.vocab is not None else None) if borrows else None
    # an extra id can be drafted from the step on whose root is its first occurrence
    first_seen = torch.tensor([int((ids_of_text == token).nonzero()[0]) for token in extra], device=states.device)

    ranks = torch.full((len(answer), depth), -1, dtype=torch.long, device=states.device)
    # a prompt of one token has no feature before its root, which a student does not need
    first_base = 0 if prompt_length > 1 or isinstance(head, DraftHead) else 1
    size = max(1, _CHUNK_ELEMENTS // (depth * len(ids)))
    for start in range(first_base, len(answer), size):
        bases = torch.arange(start, min(start + size, len(answer)), device=states.device)
        logits = head.logits(states[bases], rows)
        if len(extra):
            unseen = first_seen > prompt_length - 1 + bases[:, None]
            logits[..., len(ids) - len(extra) :].masked_fill_(unseen[:, None], -torch.inf)
        at = bases[:, None] + torch.arange(depth, device=states.device)
        labels = column[answer[at.clamp(max=len(answer) - 1)]]
        ranks[bases] = _ranks(logits, labels.where(at < len(answer), -1))
    # widened, a row has more choices than that, but no static tree may ask for them (`sort_paths`)
    return RankedAnswer(ranks.masked_fill(ranks >= head.draft_vocab_size, -1).cpu(), text.answer)


def draft_states(
    head: MedusaHead | UnrolledHead | DraftHead, target: Target, text: Recorded, depth: int
) -> Float[Tensor, "bases depth dim"]:
    """What the output rows read to draft token b + d at base b, every draft before it being right.

    At a base without a feature before its root, whatever stands there.
    """
    length = len(text.token_ids)
    read = torch.arange(text.prompt_length - 2, length - 2, device=text.features.final.device).clamp(min=0)
    if isinstance(head, MedusaHead):
        return head.draft_hidden(text.features.final[0, read], depth)
    if isinstance(head, DraftHead):  # it reads the drafts themselves, which are the text
        states = head.states(_as_batch(text, target.device), target.embedding)[0]
        bases = torch.arange(text.prompt_length - 1, length - 1, device=read.device)
        return states[(bases[:, None] + torch.arange(depth, device=read.device)).clamp(max=length - 1)]
    unrolled = head.unroll(text.features, _as_batch(text, target.device), target.embedding, depth)
    return torch.stack([step.output[0, read] for step in unrolled], dim=1)


def _as_batch(text: Recorded, device: torch.device) -> TokenBatch:
    row = Row("", text.token_ids, [False] * len(text.token_ids))
    return collate([row], [[0]]).to(device)


def _extra_ids(text: Int[Tensor, "tokens"], head: Head) -> Int[Tensor, "extra"]:
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


# -- dynamic trees -----------------------------------------------------------------------------------------------------


@torch.no_grad()
def grow_rows(
    head: UnrolledHead, target: Target, texts: Iterable[Recorded], *, depth: int, width: int, widen: bool = True
) -> list[GrownAnswer]:
    """Dynamic trees of one width at every base of every answer: what all depths up to `depth` and all budgets yield.

    texts: from `record_rows`, with the layers that the head wants.
    """
    drafter = EagleDrafter(head, target, DynamicTree(depth=depth, width=width, num_nodes=2), widen=widen)
    grown = []
    for text in texts:
        first, length = text.prompt_length - 1, len(text.token_ids)
        before = torch.full((len(text.answer), depth, depth), -1, dtype=torch.long)
        coming = torch.tensor(text.token_ids + [-1] * depth, device=target.device).unfold(0, depth, 1)
        base = 0 if first > 0 else 1  # a prompt of one token has no feature before its root
        for growth in drafter.grow_along(text.token_ids, text.features, range(first, length - 1)):
            found = growth.before(coming[first + base + 1 : first + base + 1 + growth.num_rows])
            before[base : base + growth.num_rows] = found.cpu()
            base += growth.num_rows
        grown.append(GrownAnswer(width, before))
    return grown


# -- any drafter -------------------------------------------------------------------------------------------------------


@torch.no_grad()
def replay_drafts(
    drafter: Drafter, texts: Sequence[Recorded], *, budget: int, batch_size: int = 16
) -> list[list[tuple[int, int]]]:
    """(base, drafts accepted) of each step that the engine would take along every text with this drafter.

    The drafter proposes and takes in what was accepted as it does while decoding greedily; only the target's forward is
    replaced by what was recorded. Steps that the end of a text cuts short are left out, as in `decode.cost.replay`.
    """
    runs: list[list[tuple[int, int]]] = [[] for _ in texts]
    for start in range(0, len(texts), batch_size):
        _replay_batch(drafter, texts[start : start + batch_size], runs[start : start + batch_size], budget)
    return runs


def _replay_batch(drafter: Drafter, texts: Sequence[Recorded], runs: list[list[tuple[int, int]]], budget: int) -> None:
    longest = max(len(text.token_ids) for text in texts)
    device = texts[0].features.final.device
    rows = Rows(
        requests=[
            Request(prompt_ids=text.token_ids[: text.prompt_length], max_new_tokens=len(text.answer)) for text in texts
        ],
        ids=[text.token_ids[: text.prompt_length] for text in texts],
        streams=[Request(prompt_ids=[0], max_new_tokens=1).settings.draft_stream() for _ in texts],
        cache=KVCache(0, slots=len(texts), capacity=longest + budget),
        device=device,
    )
    going = list(range(len(texts)))
    drafter.start(rows, 0)
    _commit(drafter, rows, [(texts[row], 0, texts[row].prompt_length - 1) for row in going])
    while going:
        tree = drafter.propose(rows, budget)
        paths = follow(tree, [texts[row].token_ids[len(ids) :] for row, ids in zip(going, rows.ids, strict=True)])
        news, staying = [], []
        for place, (row, path) in enumerate(zip(going, paths, strict=True)):
            text, ids, accepted = texts[row], rows.ids[place], len(path) - 1
            root = len(ids) - 1
            if root + accepted + 1 < len(text.token_ids):
                runs[row].append((root + 1 - text.prompt_length, accepted))
            rows.ids[place] = text.token_ids[: root + accepted + 2]
            news.append((text, root, root + accepted + 1))
            if len(rows.ids[place]) < len(text.token_ids):
                staying.append(place)
        _commit(drafter, rows, news)
        if len(staying) < len(going):
            drafter.select(torch.tensor(staying, dtype=torch.long, device=device))
            rows.requests = [rows.requests[place] for place in staying]
            rows.ids = [rows.ids[place] for place in staying]
            rows.streams = [rows.streams[place] for place in staying]
            going = [going[place] for place in staying]


def _commit(drafter: Drafter, rows: Rows, parts: list[tuple[Recorded, int, int]]) -> None:
    """Tells the drafter of the positions start..end-1 of every row's text."""
    counts = [end - start for _, start, end in parts]
    most = max(counts)
    if most == 0:
        return
    taken, tokens = [], []
    for text, start, _ in parts:
        at = torch.arange(start, start + most, device=rows.device).clamp(max=len(text.token_ids) - 1)
        taken.append(take(text.features, slice(None), at))
        tokens.append(torch.tensor(text.token_ids, device=rows.device)[at])
    features = Features(
        torch.cat([one.final for one in taken]),
        {k: torch.cat([one.taps[k] for one in taken]) for k in taken[0].taps},
    )
    drafter.commit(rows, 0, Committed(torch.stack(tokens), counts, features))


# -- what drafting costs -----------------------------------------------------------------------------------------------


def measure_drafting(head: Head, target: Target, plan: Plan | Sequence[Path], steps: int = 16, rows: int = 1) -> float:
    """Median seconds that drafting with this head adds to a step of `rows` rows: proposing trees, taking in what was
    accepted."""
    return drafting_seconds(head_drafter(head, target, plan), target, as_plan(plan).num_nodes, steps, rows)


def drafting_seconds(drafter: Drafter, target: Target, budget: int, steps: int = 16, rows: int = 1) -> float:
    """The same for any drafter, with trees of `budget` nodes at most."""
    engine = Engine(target, drafter, batch_size=rows, budget=budget)
    prompt = [(7 + 31 * index) % min(target.vocab_size, target.embedding.vocab_size) for index in range(64)]
    longest = min(64, target.max_positions // 2)
    request = Request(prompt_ids=prompt[:longest], max_new_tokens=4 * steps, ignore_end=True)
    generation, *_ = engine.generate([request] * rows)
    return statistics.median(record.draft_seconds for record in generation.steps[1:] or generation.steps)


def measure_depths(
    drafter: Drafter,
    target: Target,
    budgets: Sequence[int],
    *,
    context_length: int = 128,
    rows: int = 1,
    steps: int = 16,
) -> StepCosts:
    """What a step costs on this device by the depth that is drafted: drafting and verifying.

    budgets: as in `StepCosts`, for every depth from 0, plain decoding, on.
    """
    drafting = {nodes: drafting_seconds(drafter, target, nodes, steps) for nodes in sorted(set(budgets)) if nodes > 1}
    widths = sorted({max(nodes, 1) for nodes in budgets})
    curve = measure_costs(target, widths=widths, context_length=context_length, rows=rows, repeats=steps)
    return StepCosts.measured(curve, lambda depth: drafting[budgets[depth]], budgets=budgets)


def measure_levels(
    head: UnrolledHead,
    target: Target,
    *,
    widths: Sequence[int] = (1, 2, 4, 8),
    depth: int = 5,
    steps: int = 16,
    rows: int = 1,
) -> DraftCosts:
    """What one level of a tree adds to drafting, by the nodes expanded in it, for static and for dynamic trees."""
    first = measure_drafting(head, target, [(0,)], steps, rows)

    def of_level(plan: Plan | Sequence[Path]) -> float:
        """Never below zero, whatever a busy machine makes of two medians."""
        return max(0.0, (measure_drafting(head, target, plan, steps, rows) - first) / (depth - 1))

    static, dynamic = {}, {}
    for width in widths:
        paths = [(rank,) + (0,) * below for below in range(depth) for rank in range(width)]
        static[width] = of_level(paths)
        dynamic[width] = of_level(DynamicTree(depth=depth, width=width, num_nodes=depth * width + 1))
    return DraftCosts(first=first, static_level=static, dynamic_level=dynamic)


def measure_chain(head: DraftHead, target: Target, *, depth: int, steps: int = 16, rows: int = 1) -> DraftCosts:
    """What a student's first draft of a step costs, which reads what was accepted, and each further one."""
    first, all_of_them = (measure_drafting(head, target, chain_paths(length), steps, rows) for length in (1, depth))
    level = max(0.0, (all_of_them - first) / (depth - 1))
    return DraftCosts(first=first, static_level={1: level}, dynamic_level={})
