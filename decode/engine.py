"""The decoder: one loop for plain and drafted decoding of a batch of rows.

A row's prompt but its last token is prefilled; the last token is the root of the first tree. So every emitted token
comes out of a step, prefill stands apart, and plain decoding (`NoDraft`, trees of one node) is the same loop. Rows join
and leave one by one: a finished row makes room for the next request.

End tokens, stop strings and length limits are handled here, once, for every drafter.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import LogitsProcessorList

from headstart.decode.attention import IMPLEMENTATION, prefill_mask, tree_mask
from headstart.decode.cache import KVCache
from headstart.decode.drafters.base import Committed, Drafter, Request, Rows, take
from headstart.decode.processors import Text, text_processors
from headstart.decode.stops import stopped_at
from headstart.decode.tree import TokenTree, VerifyFrom
from headstart.decode.verify import Verified, verify
from headstart.errors import HeadstartError
from headstart.target import Features, Target

WIDTHS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 96, 128)
"""Trees are padded up to one of these, so that a step has few shapes."""


def _padded_width(num_nodes: int) -> int:
    return next((width for width in WIDTHS if width >= num_nodes), num_nodes)


@dataclass(frozen=True)
class StepRecord:
    """One target forward, as seen by one row of the batch; times are those of the whole batch, in seconds."""

    nodes: int
    """Valid nodes of the row's tree, root included."""
    depth: int
    """Depth of the row's tree: the most drafts it could have accepted."""
    accepted: int
    """Drafted tokens among those emitted."""
    emitted: int
    cut: bool
    """Cut short by an end token, a stop or a length limit: left out of acceptance figures."""
    draft_seconds: float
    verify_seconds: float
    host_seconds: float
    context_length: int
    """Tokens in the cache before the step."""
    rows: int
    """Rows of the batch in this step."""
    extra_queries: int = 0
    """Queries of the drafter's own that rode in the forward, per row, padding included."""


@dataclass
class Generation:
    """A finished answer."""

    request: Request
    token_ids: list[int] = field(default_factory=list)
    """The new tokens; an end token is included, nothing after it is."""
    finish_reason: Literal["end", "stop", "length", "positions"] = "length"
    steps: list[StepRecord] = field(default_factory=list)
    prefill_seconds: float = 0.0
    """Seconds of the prefill that the row was part of."""

    @property
    def decode_seconds(self) -> float:
        return sum(step.draft_seconds + step.verify_seconds + step.host_seconds for step in self.steps)

    @property
    def exact(self) -> bool:
        """Whether it was verified exactly; figures of one that was not never stand beside those of one that was."""
        return self.request.settings.exact

    @property
    def cut(self) -> bool:
        """Ended by a limit, not by the target's own end token or a stop string."""
        return self.finish_reason in ("length", "positions")


class Engine:
    """Decodes requests with one target and one drafter.

    `batch_size` rows at a time; trees of at most `budget` nodes, root included. `prefill_chunk` bounds the tokens of a
    prompt that one forward reads. The target's attention is switched to ours, for good.
    """

    def __init__(
        self, target: Target, drafter: Drafter, *, batch_size: int = 1, budget: int = 64, prefill_chunk: int = 512
    ):
        self.target, self.drafter = target, drafter
        self.batch_size, self.budget, self.prefill_chunk = batch_size, budget, prefill_chunk
        target.model.set_attn_implementation(IMPLEMENTATION)
        self.cache = KVCache(target.num_layers, slots=0, capacity=0)
        self.rows = Rows(cache=self.cache, device=torch.device(target.device), max_positions=target.max_positions)
        self._done: list[Generation] = []
        """The generations under way, in row order."""
        self._limits: list[int] = []
        """Per row: the number of tokens, prompt included, at which it ends."""
        self._uniforms: list[list[float]] = []
        """Per row: its random numbers, one for each new token that it may have; none for a greedy row."""
        self._processors: list[LogitsProcessorList] = []
        """Per row: what changes its logits by its text; mostly empty."""
        self._most_queries = 0
        """Extra queries per row that the cache has room for: the most that a step has had."""
        self.mask_bytes = 0
        """Size of the largest attention mask so far."""

    # -- the public way in -------------------------------------------------------------------------------------------

    def generate(self, requests: Iterable[Request]) -> Iterator[Generation]:
        """Answers the requests and yields each as it finishes; raises HeadstartError for a prompt it cannot decode."""
        for finished, _ in self._run(requests):
            yield from finished

    def stream(self, request: Request) -> Generator[tuple[list[int], Generation], None, None]:
        """One request; yields the new tokens of each step with the generation as it stands."""
        generation = Generation(request)
        for finished, running in self._run([request]):
            before = len(generation.token_ids)
            generation = (finished or running)[0]
            if len(generation.token_ids) > before or finished:
                yield generation.token_ids[before:], generation
            generation = Generation(request, list(generation.token_ids))

    def _run(self, requests: Iterable[Request]) -> Iterator[tuple[list[Generation], list[Generation]]]:
        """After every step: the generations it finished, and those still under way."""
        source = iter(requests)
        more = True
        try:
            while True:
                joining: list[Request] = []
                while more and len(self.rows) + len(joining) < self.batch_size:
                    request = next(source, None)
                    if request is None:
                        more = False
                    elif request.max_new_tokens <= 0 or self._limit(request) <= len(request.prompt_ids):
                        reason = "length" if request.max_new_tokens <= 0 else "positions"
                        yield [Generation(request, finish_reason=reason)], self._done
                    else:
                        joining.append(request)
                if joining:
                    self._join(joining)
                if not len(self.rows):
                    return
                yield self._step(), self._done
        finally:
            # A caller may stop listening in the middle; the next call finds an empty batch.
            self._select([])

    # -- joining and leaving -----------------------------------------------------------------------------------------

    def _limit(self, request: Request) -> int:
        return min(len(request.prompt_ids) + request.max_new_tokens, self.target.max_positions)

    def _check(self, request: Request) -> None:
        ids, known = request.prompt_ids, self.target.embedding.vocab_size
        if not len(ids):
            raise HeadstartError("a prompt has no tokens; give it at least the begin token")
        if min(ids) < 0 or max(ids) >= known:
            wrong = next(token for token in ids if not 0 <= token < known)
            raise HeadstartError(
                f"a prompt has token id {wrong}, but {self.target.name} has ids 0 to {known - 1}; encode prompts with "
                "this target's tokenizer"
            )
        if "" in request.stop:
            raise HeadstartError("a stop string is empty, and would end every answer at once; remove it")

    @torch.no_grad()
    def _join(self, requests: list[Request]) -> None:
        for request in requests:
            self._check(request)
        first = len(self.rows)
        self.rows.requests += requests
        self.rows.ids += [list(request.prompt_ids) for request in requests]
        self._done += [Generation(request) for request in requests]
        self._limits += [self._limit(request) for request in requests]
        for request, limit in zip(requests, self._limits[first:], strict=True):
            count = 0 if request.settings.greedy else limit - len(request.prompt_ids)
            self._uniforms.append(request.settings.uniforms(count).tolist())
            self.rows.streams.append(request.settings.draft_stream())
            self._processors.append(
                text_processors(
                    request.settings,
                    prompt_length=len(request.prompt_ids),
                    max_new_tokens=request.max_new_tokens,
                    end_token_ids=sorted(self.target.end_token_ids),
                )
            )
        self._make_room(min(self.batch_size, max(len(self.rows), self.cache.slots)))
        self.cache.join(len(requests))
        self.drafter.start(self.rows, first)
        started = self._now()
        self._prefill(first)
        seconds = self._now() - started
        for generation in self._done[first:]:
            generation.prefill_seconds = seconds

    def _make_room(self, slots: int) -> None:
        """For the longest row's text, and for the widest step behind it."""
        self.cache.grow(slots, max(self._limits) + _padded_width(self.budget) + self._most_queries)

    def _prefill(self, first: int) -> None:
        """Reads the prompts of rows first.. but for their last tokens, in chunks, right-padded."""
        prompts = [ids[:-1] for ids in self.rows.ids[first:]]
        longest = max(map(len, prompts))
        for offset in range(0, longest, self.prefill_chunk):
            width = min(self.prefill_chunk, longest - offset)
            chunks = [prompt[offset : offset + width] for prompt in prompts]
            counts = [len(chunk) for chunk in chunks]
            tokens = torch.tensor([chunk + [0] * (width - len(chunk)) for chunk in chunks], device=self.rows.device)
            # Rows that end before this chunk are written at their own length like the rest, which is never read.
            lengths = self.cache.lengths[first:]
            self.cache.lengths[first:] = [offset] * len(prompts)
            self.cache.begin(first, len(prompts))
            features = self._forward(tokens, *prefill_mask(offset, width, len(prompts), self.rows.device))
            self.cache.lengths[first:] = [length + count for length, count in zip(lengths, counts, strict=True)]
            self.drafter.commit(self.rows, first, Committed(tokens, counts, features))

    def _select(self, keep: list[int]) -> None:
        index = torch.tensor(keep, dtype=torch.long, device=self.rows.device)
        self.cache.select(index)
        self.drafter.select(index)
        rows = self.rows
        rows.requests = [rows.requests[row] for row in keep]
        rows.ids = [rows.ids[row] for row in keep]
        rows.streams = [rows.streams[row] for row in keep]
        self._done = [self._done[row] for row in keep]
        self._limits = [self._limits[row] for row in keep]
        self._uniforms = [self._uniforms[row] for row in keep]
        self._processors = [self._processors[row] for row in keep]

    # -- one step ----------------------------------------------------------------------------------------------------

    def _forward(
        self,
        tokens: Int[Tensor, "batch nodes"],
        allowed: Tensor,
        distance: Tensor,
        positions: Tensor,
        done: VerifyFrom | None = None,
    ) -> Features:
        mask = self.target.masks(allowed, distance)
        for one in mask.values() if isinstance(mask, dict) else [mask]:
            self.mask_bytes = max(self.mask_bytes, one.numel() * one.element_size())
        # Padding, nodes past the limit and extra queries may stand past the last position that the model knows; what
        # comes out there is never emitted.
        positions = positions.clamp(max=self.target.max_positions - 1)
        start = None if done is None else (done.layer, done.states)
        cache, wants = self.cache.as_transformers, self.drafter.wants
        return self.target.forward(tokens, positions, mask, cache=cache, layers=wants, start=start)

    @torch.no_grad()
    def _step(self) -> list[Generation]:
        """Drafts, verifies and commits for every row; returns the generations that are finished by it."""
        rows, cache = self.rows, self.cache
        started = self._now()
        tree = self._fit(self.drafter.propose(rows, self.budget))
        drafted = self._now()

        sent = tree.with_queries()
        num_queries = sent.num_nodes - tree.num_nodes
        if num_queries > self._most_queries:
            self._most_queries = num_queries
            self._make_room(cache.slots)
        lengths = torch.tensor(cache.lengths, device=rows.device)
        cache.begin(0, len(rows))
        mask = tree_mask(sent.topology, lengths, cache.key_length(sent.num_nodes))
        features = self._forward(sent.tokens, *mask, tree.verify_from)
        logits, extra_logits = self._logits(tree, features)
        settings = [request.settings for request in rows.requests]
        numbers = self._next_uniforms(tree), *self._next_trials(tree)
        verdicts = verify(tree, logits, settings, *numbers, texts=self._texts())
        verified = self._now()

        context = list(cache.lengths)
        finished = []
        nodes = tree.topology.valid.sum(1).tolist()
        depths = (tree.topology.depth * tree.topology.valid).amax(1).tolist()
        outcomes = []
        for row, verdict in enumerate(verdicts):
            emitted, reason = self._end(row, verdict)
            outcomes.append((emitted, reason))
            rows.ids[row] += emitted
            self._done[row].token_ids += emitted
        cache.compact([verdict.path for verdict in verdicts])
        committed_at = self._now()
        self.drafter.commit(rows, 0, self._committed(tree, verdicts, features, extra_logits))
        drafted_again = self._now()

        staying = []
        draft_seconds = drafted - started + drafted_again - committed_at
        verify_seconds, host_seconds = verified - drafted, committed_at - verified
        for row, (verdict, (emitted, reason)) in enumerate(zip(verdicts, outcomes, strict=True)):
            accepted, cut = min(verdict.accepted, len(emitted)), len(emitted) < len(verdict.tokens)
            generation = self._done[row]
            generation.steps.append(
                StepRecord(
                    nodes[row],
                    depths[row],
                    accepted,
                    len(emitted),
                    cut,
                    draft_seconds,
                    verify_seconds,
                    host_seconds,
                    context[row],
                    len(verdicts),
                    num_queries,
                )
            )
            if reason is None:
                staying.append(row)
            else:
                generation.finish_reason = reason
                finished.append(generation)
        if finished:
            self._select(_fill_holes(staying))
        return finished

    def _fit(self, tree: TokenTree) -> TokenTree:
        """The tree with its root in place, padded to one of the widths.

        Near a limit it stays as deep as it is: `_end` cuts what it emits, and the step is known to have been cut.
        """
        assert tree.num_nodes <= self.budget, (self.drafter.name, tree.num_nodes, self.budget)
        tokens = tree.tokens.clone()
        tokens[:, 0] = self.rows.roots()
        return replace(tree, tokens=tokens).padded(_padded_width(tree.num_nodes))

    def _logits(
        self, tree: TokenTree, features: Features
    ) -> tuple[Float[Tensor, "batch nodes vocab"], Float[Tensor, "batch wanted vocab"] | None]:
        """Of the tree's nodes, and of the extra queries that the drafter wants; the output head is read once."""
        if tree.extra is None:
            return self.target.output.logits(features.final), None
        nodes, rows = tree.num_nodes, torch.arange(len(self.rows), device=self.rows.device)[:, None]
        wanted = features.final[rows, nodes + tree.extra.wanted]
        logits = self.target.output.logits(torch.cat([features.final[:, :nodes], wanted], dim=1))
        return logits[:, :nodes], logits[:, nodes:]

    def _next_uniforms(self, tree: TokenTree) -> Float[Tensor, "batch levels"]:
        """Each row's random numbers for the tokens it may emit in this step, indexed by depth."""
        if all(request.settings.greedy for request in self.rows.requests):
            return torch.empty(len(self.rows), 0, dtype=torch.float64)
        levels = tree.topology.max_depth + 1
        numbers = []
        for row, stream in enumerate(self._uniforms):
            start = self.rows.num_new(row)
            part = stream[start : start + levels]
            numbers.append(part + [0.0] * (levels - len(part)))
        return torch.tensor(numbers, dtype=torch.float64, device=self.rows.device)

    def _texts(self) -> list[Text]:
        """The rows' texts, where any row has processors; else nothing."""
        if not any(map(len, self._processors)):
            return []
        return [Text(ids, one) for ids, one in zip(self.rows.ids, self._processors, strict=True)]

    def _next_trials(self, tree: TokenTree) -> list[Float[Tensor, "batch drafts"]]:
        """For drawn trees, one more number for each draft, from the row's second stream: does it stay? Else nothing."""
        if tree.drawn is None:
            return []
        tried = tree.topology.valid[:, 1:].cpu() & torch.tensor(tree.drawn.sampled)[:, None]
        trials = torch.zeros(tried.shape, dtype=torch.float64)
        counts = zip(self.rows.streams, tried.sum(1).tolist(), strict=True)
        numbers = [stream.random(count) for stream, count in counts if count]
        if numbers:
            trials[tried] = torch.from_numpy(np.concatenate(numbers))
        return [trials.to(self.rows.device)]

    def _end(
        self, row: int, verdict: Verified
    ) -> tuple[list[int], Literal["end", "stop", "length", "positions"] | None]:
        """The verdict's tokens up to where the row ends, and the reason if it does."""
        request, before = self.rows.requests[row], self._done[row].token_ids
        emitted = verdict.tokens[: self._limits[row] - len(self.rows.ids[row])]
        if not request.ignore_end:
            for index, token in enumerate(emitted):
                if token in self.target.end_token_ids:
                    emitted = emitted[: index + 1]
                    break
        if request.stop:
            cut = stopped_at(self._text, before, emitted, request.stop)
            if cut is not None:
                return emitted[:cut], "stop"
        if not request.ignore_end and emitted[-1] in self.target.end_token_ids:
            return emitted, "end"
        if len(self.rows.ids[row]) + len(emitted) < self._limits[row]:
            return emitted, None
        return emitted, "length" if len(before) + len(emitted) == request.max_new_tokens else "positions"

    def _text(self, token_ids: list[int]) -> str:
        return str(self.target.tokenizer.decode(token_ids, skip_special_tokens=False))

    def _committed(
        self, tree: TokenTree, verdicts: list[Verified], features: Features, extra_logits: Tensor | None
    ) -> Committed:
        """Tokens and features of the accepted paths, and what the drafter asked for."""
        counts = [len(verdict.path) for verdict in verdicts]
        most = max(counts)
        paths = torch.tensor([verdict.path + [0] * (most - len(verdict.path)) for verdict in verdicts])
        paths = paths.to(self.rows.device)
        rows = torch.arange(len(verdicts), device=paths.device)[:, None]
        return Committed(tree.tokens[rows, paths], counts, take(features, rows, paths), extra_logits)

    def _now(self) -> float:
        if self.rows.device.type == "cuda":
            torch.cuda.synchronize(self.rows.device)
        return time.perf_counter()


def _fill_holes(staying: list[int]) -> list[int]:
    """The same rows, in an order in which few change their slot: the last ones move to where rows have left."""
    keep = set(staying)
    tail = [row for row in staying if row >= len(staying)]
    return [row if row in keep else tail.pop() for row in range(len(staying))]
