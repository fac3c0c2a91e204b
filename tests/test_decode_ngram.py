"""Prompt lookup against a search through the whole text."""

from __future__ import annotations

import torch

from headstart.decode.drafters.base import Request, Rows
from headstart.decode.drafters.ngram import NgramDrafter


def searched(ids: list[int], length: int, sizes: range) -> list[int]:
    """What followed the latest earlier occurrence of the longest n-gram that ends the text and occurs before."""
    for size in sorted(sizes, reverse=True):
        for end in range(len(ids) - 1, size - 1, -1):
            if ids[end - size : end] == ids[-size:]:
                return ids[end : end + length]
    return []


def drafts(drafter: NgramDrafter, rows: Rows, budget: int) -> list[list[int]]:
    tree = drafter.propose(rows, budget)
    assert tree.num_nodes <= budget
    counts = (tree.topology.valid.sum(1) - 1).tolist()
    assert tree.topology.parents[0].tolist() == list(range(-1, tree.num_nodes - 1))
    return [tree.tokens[row, 1 : 1 + count].tolist() for row, count in enumerate(counts)]


def test_lookup_equals_a_search_while_texts_grow_and_rows_leave():
    generator = torch.Generator().manual_seed(0)

    def text(length: int) -> list[int]:
        return torch.randint(0, 4, (length,), generator=generator).tolist()

    drafter = NgramDrafter(length=5, max_ngram=3, min_ngram=1)
    rows = Rows(requests=[], ids=[])
    found = 0
    for turn in range(40):
        if turn % 5 == 0:
            prompts = [text(1), text(9)]
            rows.requests += [Request(prompt_ids=prompt, max_new_tokens=9) for prompt in prompts]
            rows.ids += prompts
            drafter.start(rows, len(rows) - 2)
        ours = drafts(drafter, rows, budget=9)
        assert ours == [searched(ids, 5, range(1, 4)) for ids in rows.ids]
        assert drafts(drafter, rows, budget=3) == [draft[:2] for draft in ours]
        assert drafts(drafter, rows, budget=1) == [[] for _ in ours]
        found += sum(map(len, ours))
        for ids in rows.ids:
            ids += text(int(torch.randint(1, 4, (1,), generator=generator)))
        if turn % 7 == 6:
            keep = [row for row in range(len(rows)) if row % 3 != 1][::-1]
            drafter.select(torch.tensor(keep))
            rows.requests, rows.ids = [rows.requests[row] for row in keep], [rows.ids[row] for row in keep]
    assert found > 100


def test_a_match_near_the_end_is_used_as_far_as_it_goes():
    drafter = NgramDrafter(length=8)
    rows = Rows(requests=[Request(prompt_ids=[5, 6, 5], max_new_tokens=1)], ids=[[5, 6, 5]])
    drafter.start(rows, 0)
    assert drafts(drafter, rows, 16) == [[6, 5]]


def test_no_match_is_plain_decoding():
    drafter = NgramDrafter(min_ngram=2)
    rows = Rows(requests=[Request(prompt_ids=[5, 6, 5], max_new_tokens=1)], ids=[[5, 6, 5]])
    drafter.start(rows, 0)
    assert drafter.propose(rows, 16).num_nodes == 1
