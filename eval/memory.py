"""What each arm holds in memory beside the target's weights: counted bytes, and on a GPU the allocator's peak."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from headstart.decode.engine import Engine


class MemoryWatch:
    """Watches engines while they decode, inside `arm(name)`."""

    def __init__(self, engines: Mapping[str, Engine]):
        self._engines = engines
        self._drafter_bytes = dict.fromkeys(engines, 0)
        self._gpu_peak: dict[str, int | None] = dict.fromkeys(engines)

    @contextmanager
    def arm(self, name: str) -> Iterator[None]:
        """Counts while `name` decodes. A drafter's tables are largest when rows are about to leave: looked at there."""
        engine = self._engines[name]
        drafter, on_gpu = engine.drafter, torch.device(engine.target.device).type == "cuda"
        select = drafter.select

        def count_and_select(keep: torch.Tensor) -> None:
            self._drafter_bytes[name] = max(self._drafter_bytes[name], drafter.num_bytes())
            select(keep)

        vars(drafter)["select"] = count_and_select
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(engine.target.device)
        try:
            yield
        finally:
            del vars(drafter)["select"]
            if on_gpu:
                peak = torch.cuda.max_memory_allocated(engine.target.device)
                self._gpu_peak[name] = max(self._gpu_peak[name] or 0, peak)

    def report(self) -> dict[str, dict[str, int | None]]:
        """Per arm: `cache_bytes`, `mask_bytes` (the largest mask), `drafter_bytes`, `total_bytes` of these three, and
        `gpu_peak_bytes`, which holds the target's weights and all arms' caches too (None without a GPU)."""
        report: dict[str, dict[str, int | None]] = {}
        for name, engine in self._engines.items():
            counted = {
                "cache_bytes": engine.cache.num_bytes(),
                "mask_bytes": engine.mask_bytes,
                "drafter_bytes": self._drafter_bytes[name],
            }
            report[name] = {**counted, "total_bytes": sum(counted.values()), "gpu_peak_bytes": self._gpu_peak[name]}
        return report
