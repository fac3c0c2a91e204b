"""`transformers.generate` as everyone calls it: the same weights under its own attention, cache and plain linears."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from transformers import GenerationConfig
from transformers.generation import BaseStreamer

from headstart.decode.decode_copy import untouched
from headstart.decode.drafters.base import Request
from headstart.target import Target


class TransformersArm:
    """Answers one request at a time; no weights are copied."""

    def __init__(self, target: Target):
        self._target = untouched(target)
        self._target.model.generation_config = GenerationConfig()  # none of the model's own defaults, penalties say

    @torch.no_grad()
    def time(self, request: Request, clock: Callable[[], float]) -> tuple[int, float]:
        """Tokens after the first, and the seconds from the first token to the last: the prefill stands apart."""
        settings, target = request.settings, self._target
        sampling = (
            {"do_sample": False}
            if settings.greedy
            else {
                "do_sample": True,
                "temperature": settings.temperature,
                "top_k": settings.top_k,
                "top_p": settings.top_p,
                "min_p": settings.min_p or None,
            }
        )
        room = target.max_positions - len(request.prompt_ids)
        config = GenerationConfig(
            max_new_tokens=min(request.max_new_tokens, room),
            eos_token_id=list(target.end_token_ids) or None,
            pad_token_id=target.end_token_ids[0] if target.end_token_ids else 0,
            **sampling,
        )
        times = _TokenTimes(clock, target.device)
        ids = torch.tensor([list(request.prompt_ids)], device=target.device)
        model = cast(Any, target.model)  # its methods are mixed in where type checkers do not see them
        model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config, streamer=times)
        return len(times.seen) - 1, times.seen[-1] - times.seen[0]


class _TokenTimes(BaseStreamer):
    """The time of each new token; generate's first `put` is the prompt."""

    def __init__(self, clock: Callable[[], float], device: torch.device):
        self._clock, self._prompt_came = clock, False
        self.seen: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        if self._prompt_came:
            self.seen.append(self._clock())
        self._prompt_came = True

    def end(self) -> None: ...
