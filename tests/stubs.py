"""Drafters whose acceptance is known beforehand, the trees they draft, and plain answers to compare with.

answers = stubs.plain_answers(model, prompts, 24)                  # transformers.generate, greedy, by prompt index
drafter = stubs.stub("mixed", dict(enumerate(answers)), stubs.TREES["sparse25"], vocab_size)
Engine(target, drafter).generate(Request(prompt_ids=prompts[i], request_id=i, ...) for i in ...)
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import tiny
import torch
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from headstart.decode.cache import KVCache
from headstart.decode.drafters.base import NoDraft, Rows
from headstart.decode.tree import Path, TokenTree, Topology
from headstart.target import Target

Guess = Callable[[int, int, int, int], int]
"""(position in the answer, rank among siblings, number of siblings, the target's own token there) -> drafted token."""


def chain(length: int) -> list[Path]:
    return [(0,) * depth for depth in range(1, length + 1)]


def full_tree(branches: int, depth: int) -> list[Path]:
    """Every node down to `depth` has `branches` children; sorted by depth."""
    levels: list[list[Path]] = [[()]]
    for _ in range(depth):
        levels.append([(*path, rank) for path in levels[-1] for rank in range(branches)])
    return [path for level in levels[1:] for path in level]


SPARSE_25: list[Path] = [
    *[(0,), (1,), (2,), (3,)],
    *[(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0), (2, 1), (3, 0)],
    *[(0, 0, 0), (0, 0, 1), (0, 0, 2), (0, 1, 0), (0, 1, 1), (1, 0, 0), (1, 1, 0), (2, 1, 0)],
    *[(0, 0, 0, 0), (0, 1, 1, 0), (1, 1, 0, 0)],
    *[(0, 0, 0, 0, 0), (1, 1, 0, 0, 0)],
]
"""25 nodes below the root, 4, 8, 8, 3 and 2 by depth: the shape of EAGLE-1's tree."""

TREES: dict[str, list[Path]] = {
    "chain1": chain(1),
    "chain4": chain(4),
    "full3x3": full_tree(3, 2),
    "sparse25": SPARSE_25,
    "width1": [(2,), (2, 0), (2, 0, 1), (2, 0, 1, 3), (2, 0, 1, 3, 0)],
}


class StubDrafter(NoDraft):
    """Drafts along a static tree what `guess` says, given what the target will write there (from `answers`).

    Both are looked up by request id; `guess` may be one function for all. Past the end of an answer, its last token
    counts as the target's.
    """

    def __init__(
        self,
        answers: Mapping[Any, Sequence[int]],
        guess: Guess | Mapping[Any, Guess],
        paths: Sequence[Path],
        name: str = "stub",
    ):
        super().__init__()
        self.answers, self.guess, self.paths, self.name = answers, guess, list(paths), name
        self._siblings = Counter(path[:-1] for path in paths)
        seen: Counter[Path] = Counter()
        self._places: list[tuple[int, int, int]] = []
        """Depth, rank among siblings and number of siblings of each node."""
        for path in paths:
            self._places.append((len(path), seen[path[:-1]], self._siblings[path[:-1]]))
            seen[path[:-1]] += 1

    def propose(self, rows: Rows, budget: int) -> TokenTree:
        places = self._places[: budget - 1]
        tokens = []
        for row, request in enumerate(rows.requests):
            answer = self.answers[request.request_id]
            guess = self.guess if callable(self.guess) else self.guess[request.request_id]
            first = rows.num_new(row) - 1
            draft = [0]
            for depth, rank, width in places:
                truth = answer[min(first + depth, len(answer) - 1)]
                draft.append(guess(first + depth, rank, width, truth))
            tokens.append(draft)
        shape = Topology.from_paths(self.paths[: budget - 1])
        return TokenTree(torch.tensor(tokens), shape.expand(len(rows)))


def stub(
    kind: str | Mapping[Any, str], answers: Mapping[Any, Sequence[int]], paths: Sequence[Path], vocab: int
) -> StubDrafter:
    """One of GUESSES, for all requests or by request id."""
    if isinstance(kind, str):
        return StubDrafter(answers, GUESSES[kind](vocab), paths, kind)
    return StubDrafter(answers, {key: GUESSES[one](vocab) for key, one in kind.items()}, paths, "per-request")


def _oracle(vocab: int) -> Guess:
    """The first of the siblings is the target's token, the others are not."""
    return lambda position, rank, width, truth: (truth + rank) % vocab


def _anti_oracle(vocab: int) -> Guess:
    """No sibling is the target's token."""
    return lambda position, rank, width, truth: (truth + 1 + rank) % vocab


def _mixed(vocab: int) -> Guess:
    """Wrong at every third token of the answer; elsewhere one sibling is right, another from token to token."""

    def guess(position: int, rank: int, width: int, truth: int) -> int:
        shift = 1 if position % 3 == 2 else -(position % width)
        return (truth + rank + shift) % vocab

    return guess


def _random(vocab: int) -> Guess:
    """Any token, but the target's rather often, so that paths of all lengths are accepted; siblings may be equal."""
    generator = torch.Generator().manual_seed(0)

    def guess(position: int, rank: int, width: int, truth: int) -> int:
        die, token = torch.randint(0, 3 * vocab, (2,), generator=generator).tolist()
        return truth if die < vocab else token % vocab

    return guess


GUESSES: dict[str, Callable[[int], Guess]] = {
    "oracle": _oracle,
    "anti-oracle": _anti_oracle,
    "mixed": _mixed,
    "random": _random,
}


@torch.no_grad()
def plain_answers(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    end_token_ids: Sequence[int] = (),
    stop: Sequence[str] = (),
    tokenizer: PreTrainedTokenizerBase | None = None,
    processors: Sequence[LogitsProcessor] = (),
    **settings: Any,
) -> list[list[int]]:
    """Greedy answers of transformers.generate, end token included, nothing after it.

    Prompts of one length go in one batch, so that no attention mask is needed; with stop strings, one by one.
    processors, settings: further ones of its own, and keys of its GenerationConfig.
    """
    config = GenerationConfig(
        max_new_tokens=max_new_tokens,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=list(end_token_ids) or None,
        stop_strings=list(stop) or None,
        **settings,
    )
    groups: dict[Any, list[int]] = {}
    for index, prompt in enumerate(prompts):
        groups.setdefault(index if stop else len(prompt), []).append(index)
    answers: list[list[int]] = [[] for _ in prompts]
    for group in groups.values():
        batch = torch.tensor([list(prompts[index]) for index in group])
        out = model.generate(
            batch,
            attention_mask=torch.ones_like(batch),
            generation_config=config,
            logits_processor=LogitsProcessorList(processors),
            **({"tokenizer": tokenizer} if stop else {}),
        )
        for index, answer in zip(group, out[:, batch.shape[1] :].tolist(), strict=True):
            ends = [place for place, token in enumerate(answer) if token in end_token_ids]
            answers[index] = answer[: ends[0] + 1] if ends else answer
    return answers


@functools.lru_cache
def half_right(family: str = "llama") -> Target:
    """A tiny target with some noise in its weights, to draft for it."""
    copy, generator = tiny.target(family, dtype=torch.float64), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in copy.model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter += 0.03 * parameter.std() * noise
    return copy


def prompts_of(lengths: Sequence[int], vocab: int, seed: int = 0) -> list[list[int]]:
    """Random prompts of these lengths."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, vocab, (length,), generator=generator).tolist() for length in lengths]


def assert_all_close(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], tolerance: float) -> None:
    """All pairs in one comparison: each call of `assert_close` takes longer than a step of a tiny model."""
    assert all(one.shape == other.shape for one, other in pairs)
    ours, theirs = (torch.cat([pair[side].flatten() for pair in pairs]) for side in (0, 1))
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def plant_stale_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault that every exactness check must find: at each roll-back, in all layers, the last accepted token's keys
    and values are those of a rejected node."""
    write, compact = KVCache.write, KVCache.compact
    widths: dict[int, int] = {}

    def noting_the_width(self: KVCache, layer: int, keys: torch.Tensor, values: torch.Tensor):
        widths[id(self)] = keys.shape[2]
        return write(self, layer, keys, values)

    def leaving_one_row(self: KVCache, paths: Sequence[Sequence[int]]) -> None:
        compact(self, paths)
        for row, path in enumerate(paths):
            if len(path) < widths[id(self)]:
                for store in self._storage.values():
                    end = self.lengths[row]
                    store[:, row, :, end - 1] = store[:, row, :, end]

    monkeypatch.setattr(KVCache, "write", noting_the_width)
    monkeypatch.setattr(KVCache, "compact", leaving_one_row)
