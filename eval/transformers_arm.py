"""`transformers.generate` as everyone calls it: the same weights under its own attention, cache and plain linears."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from transformers import GenerationConfig
from transformers.generation import BaseStreamer

from headstart.decode.decode_copy import make_faster, untouched
from headstart.decode.drafters.base import Request
from headstart.target import Target


@dataclass(frozen=True)
class Generated:
    """One answer of transformers'."""

    token_ids: list[int]
    tokens: int
    """Those after the first emission, which is one token, or what one assisted step brings."""
    seconds: float
    """From the first emission to the last: the prefill stands apart."""


class TransformersArm:
    """Answers one request at a time; no weights are copied.

    faster: under the linear layers that our own decoding found faster on this machine.
    """

    def __init__(self, target: Target, *, faster: bool = False):
        self.target = untouched(target)
        self.target.model.generation_config = GenerationConfig()  # none of the model's own defaults, penalties say
        if faster:
            make_faster(self.target)

    @torch.no_grad()
    def generate(
        self, request: Request, clock: Callable[[], float], *, assistant: Target | None = None, **settings: Any
    ) -> Generated:
        """assistant: the draft model of assisted generation, with the settings in its own generation_config. settings:
        further ones of GenerationConfig, such as prompt_lookup_num_tokens."""
        target, room = self.target, self.target.max_positions - len(request.prompt_ids)
        config = GenerationConfig(
            max_new_tokens=min(request.max_new_tokens, room),
            eos_token_id=None if request.ignore_end else list(target.end_token_ids) or None,
            pad_token_id=target.end_token_ids[0] if target.end_token_ids else 0,
            **_sampling(request),
            **settings,
        )
        times = _Emissions(clock, target.device)
        ids = torch.tensor([list(request.prompt_ids)], device=target.device)
        model = cast(Any, target.model)  # its methods are mixed in where type checkers do not see them
        written = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            generation_config=config,
            streamer=times,
            assistant_model=None if assistant is None else assistant.model,
        )
        answer = written[0, len(request.prompt_ids) :].tolist()
        return Generated(answer, len(answer) - times.first, times.seen[-1] - times.seen[0])


def _sampling(request: Request) -> dict[str, Any]:
    settings = request.settings
    if settings.greedy:
        return {"do_sample": False}
    return {
        "do_sample": True,
        "temperature": settings.temperature,
        "top_k": settings.top_k,
        "top_p": settings.top_p,
        "min_p": settings.min_p or None,
    }


class _Emissions(BaseStreamer):
    """The time of each emission, and how many tokens the first one had; generate's first `put` is the prompt."""

    def __init__(self, clock: Callable[[], float], device: torch.device):
        self._clock, self._prompt_came = clock, False
        self.seen: list[float] = []
        self.first = 0

    def put(self, value: torch.Tensor) -> None:
        if self._prompt_came:
            self.seen.append(self._clock())
            self.first = self.first or value.numel()
        self._prompt_came = True

    def end(self) -> None: ...
