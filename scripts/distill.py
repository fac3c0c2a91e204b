"""`headstart data distill`: the target answers the prompts of a recipe through the engine, batched, without a drafter.

    headstart data distill --recipe smollm2-medusa.yaml --output distilled/smollm2.jsonl
    headstart data distill --recipe smollm2-eagle3.yaml --output distilled/smollm2.jsonl --features features/smollm2
    headstart data distill --recipe llama8b.yaml --output distilled/llama8b.jsonl --server http://localhost:8000

Needs the target whole on one device, or a server that has it. Killed and started again with the same words, it goes on
where it stopped.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from headstart.data import distill
from headstart.data.capture import Capture
from headstart.data.distill import Answer, Generate, Question
from headstart.data.feature_cache import FeatureWriter
from headstart.data.feature_codec import FINAL, state_name
from headstart.data.feature_key import cache_key
from headstart.data.prepare import published_config
from headstart.data.rendering import ChatRenderer
from headstart.data.server import Server
from headstart.data.sources import SkipReport
from headstart.decode.decode_copy import make_faster
from headstart.decode.drafters.base import Committed, NoDraft, Request, Rows
from headstart.decode.engine import Engine, Generation
from headstart.decode.sampling import SamplingSettings
from headstart.decode.selfcheck import check_target
from headstart.errors import DataError
from headstart.recipe import Recipe
from headstart.recipe_target import load_recipe_target, load_recipe_tokenizer
from headstart.scripts.features import wanted_layers
from headstart.target import Target


def run(
    recipe: Recipe,
    output: str | Path,
    *,
    limit: int | None = None,
    device: str | None = None,
    dtype: str | None = None,
    features: str | Path | None = None,
) -> SkipReport:
    """Load the target and let it answer; limit: the first so many prompts of each source. Prints the counts.

    features: the folder of a cache that keeps the target's states of what it answers, for the recipe's head.
    """
    target, _ = load_recipe_target(recipe, device=device, dtype=dtype)
    settings = recipe.data.distill
    if settings.max_new_tokens >= target.max_positions:
        raise _no_room(settings.max_new_tokens, target.max_positions, target.name)
    check_target(target)
    with ExitStack() as opened:
        drafter, capture = NoDraft(), None
        if features is not None:
            key = cache_key(target, recipe, wanted_layers(recipe, target), None)
            cache = opened.enter_context(FeatureWriter(features, key))
            capture = Capture(cache, ChatRenderer(target.tokenizer, recipe.data.chat), recipe.data.max_length)
            drafter = Recording(cache.layers)
        make_faster(target)
        report = distill.run(
            recipe,
            output,
            tokenizer=target.tokenizer,
            generate=answer_with(
                target, settings.max_new_tokens, settings.temperature, settings.batch_size, drafter=drafter
            ),
            limit=limit,
            max_prompt_tokens=target.max_positions - settings.max_new_tokens,
            finished=capture,
        )
    if capture is not None:
        print(f"features in {features}: {capture.summary()}")
    return report


def run_on_server(
    recipe: Recipe, output: str | Path, url: str, *, model: str | None = None, timeout: float, limit: int | None = None
) -> SkipReport:
    """Let a server with the OpenAI protocol answer, `data.distill.batch_size` questions at once; only the tokenizer of
    the target is loaded here. model: its name there; None: the one that it serves. timeout: seconds for one answer."""
    section, settings = recipe.target, recipe.data.distill
    server = Server(
        url,
        model,
        concurrency=settings.batch_size,
        max_new_tokens=settings.max_new_tokens,
        temperature=settings.temperature,
        template_arguments=recipe.data.chat.arguments,
        timeout=timeout,
    )
    served = server.connect()
    print(f"{server.model} at {server.url} answers, {server.concurrency} questions at once")
    tokenizer = load_recipe_tokenizer(recipe)
    config = published_config(tokenizer, section.trust_remote_code)
    lengths = [length for length in (served, getattr(config, "max_position_embeddings", None)) if length]
    if lengths and settings.max_new_tokens >= min(lengths):
        raise _no_room(settings.max_new_tokens, min(lengths), server.model or url)
    report = distill.run(
        recipe,
        output,
        tokenizer=tokenizer,
        generate=server.answer,
        limit=limit,
        max_prompt_tokens=min(lengths) - settings.max_new_tokens if lengths else None,
        served_as=server.model,
    )
    if sentence := server.summary():
        print(sentence)
    return report


def _no_room(max_new_tokens: int, positions: int, name: str) -> DataError:
    return DataError(
        f"answers of data.distill.max_new_tokens {max_new_tokens} leave no room for a prompt in the {positions} "
        f"positions of {name}; set it to {max(1, positions // 2)} or so"
    )


class Recording(NoDraft):
    """Plain decoding that keeps the target's states of every row, for whoever takes them once the row has left."""

    def __init__(self, layers: Sequence[int]):
        super().__init__()
        self.wants = tuple(layers)
        self._rows: Rows | None = None
        self._parts: list[list[dict[str, Tensor]]] = []
        self._left: dict[Any, dict[str, Tensor]] = {}

    def start(self, rows: Rows, first: int) -> None:
        self._rows = rows
        self._parts += [[] for _ in range(len(rows) - first)]

    def commit(self, rows: Rows, first: int, committed: Committed) -> None:
        features = committed.features
        states = {FINAL: features.final, **{state_name(k): features.taps[k] for k in self.wants}}
        for row, count in enumerate(committed.counts):
            if count:
                part = {name: state[row, :count].to("cpu", copy=True) for name, state in states.items()}
                self._parts[first + row].append(part)

    def select(self, keep: Tensor) -> None:
        kept = keep.tolist()
        for row in set(range(len(self._parts))) - set(kept):
            assert self._rows is not None
            parts = self._parts[row]
            if parts:
                request = self._rows.requests[row].request_id
                self._left[request] = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        self._parts = [self._parts[row] for row in kept]

    def take(self, request_id: Any) -> dict[str, Tensor] | None:
        """The states of a row that has left: of its prompt and its answer, all but the last token."""
        return self._left.pop(request_id, None)


def answer_with(
    target: Target, max_new_tokens: int, temperature: float, batch_size: int, *, drafter: NoDraft | None = None
) -> Generate:
    """What `data/distill.py` calls to have questions answered: the engine, plain, finished rows making room.

    drafter: one that records, whose states go with the answers.
    """
    drafter = drafter or NoDraft()
    engine = Engine(target, drafter, batch_size=batch_size)

    def generate(questions: Iterator[Question]) -> Iterable[Answer]:
        requests = (
            Request(
                prompt_ids=question.prompt_ids,
                max_new_tokens=max_new_tokens,
                settings=SamplingSettings(temperature=temperature, seed=question.seed),
                request_id=question.request_id,
            )
            for question in questions
        )
        for generation in engine.generate(requests):
            text = answer_text(generation, target.tokenizer)
            request = generation.request
            yield Answer(
                request.request_id,
                text,
                generation.cut,
                len(generation.token_ids),
                token_ids=[*request.prompt_ids, *generation.token_ids],
                states=drafter.take(request.request_id) if isinstance(drafter, Recording) else None,
            )

    return generate


def answer_text(generation: Generation, tokenizer: PreTrainedTokenizerBase) -> str:
    """The answer without its end token. Other special tokens stay: they are the target's words, such as `<think>`."""
    token_ids = generation.token_ids[:-1] if generation.finish_reason == "end" else generation.token_ids
    text = str(tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
    return text.rstrip("\ufffd") if generation.cut else text  # a cut can fall inside a character
