"""Faults to plant in the decoder, so that a check can be shown to find them."""

from __future__ import annotations

from headstart.decode.cache import KVCache
from headstart.decode.drafters.base import Drafter


def leave_a_stale_row(monkeypatch, drafter: Drafter) -> None:
    """From now on, whenever drafts of `drafter` are rejected, one of their rows stays in the cache: in every layer, the
    last committed slot holds the keys and values of the first node that was rolled back.

    Plain decoding and other drafters are left alone.
    """
    start, propose, compact = drafter.start, drafter.propose, KVCache.compact
    caches: list[KVCache] = []
    nodes: list[list[int]] = [[]]

    def start_and_note(rows, first):
        caches.append(rows.cache)
        start(rows, first)

    def propose_and_count(rows, budget):
        tree = propose(rows, budget)
        nodes[0] = tree.topology.valid.sum(1).tolist()
        return tree

    def faulty_compact(cache, paths):
        stale = []
        if any(cache is one for one in caches):
            for row, (path, count) in enumerate(zip(paths, nodes[0], strict=True)):
                rejected = sorted(set(range(count)) - set(path))
                if rejected:
                    kept = [
                        store[:, row, :, cache.lengths[row] + rejected[0]].clone() for store in cache._storage.values()
                    ]
                    stale.append((row, cache.lengths[row] + len(path) - 1, kept))
        compact(cache, paths)
        for row, slot, kept in stale:
            for store, states in zip(cache._storage.values(), kept, strict=True):
                store[:, row, :, slot] = states

    monkeypatch.setattr(drafter, "start", start_and_note)
    monkeypatch.setattr(drafter, "propose", propose_and_count)
    monkeypatch.setattr(KVCache, "compact", faulty_compact)
