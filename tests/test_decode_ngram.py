"""Prompt lookup against a search through the whole text."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from test_decode_model import decode, plain, target

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


# -- several matches ---------------------------------------------------------------------------------------------------


def occurrences(ids: list[int], length: int, size: int) -> list[list[int]]:
    """What followed the text's last n-gram wherever it occurs earlier, the latest first."""
    return [
        ids[end : end + length] for end in range(len(ids) - 1, size - 1, -1) if ids[end - size : end] == ids[-size:]
    ]


def rows_of(*texts: list[int]) -> Rows:
    return Rows(requests=[Request(prompt_ids=ids, max_new_tokens=9) for ids in texts], ids=[list(ids) for ids in texts])


def test_the_most_frequent_continuation_is_taken_token_by_token():
    generator, several = torch.Generator().manual_seed(1), 0
    drafter = NgramDrafter(length=5, take="frequent")
    for _ in range(200):
        ids = torch.randint(0, 3, (24,), generator=generator).tolist()
        rows = rows_of(ids)
        drafter.start(rows, 0)
        (ours,) = drafts(drafter, rows, 16)
        found = next((found for size in (3, 2, 1) if (found := occurrences(ids, 5, size))), [])
        for depth in range(6):
            through = [one for one in found if one[:depth] == ours[:depth] and len(one) > depth]
            if depth == len(ours):
                assert not through
                break
            counts = Counter(one[depth] for one in through)
            assert counts[ours[depth]] == max(counts.values())
            latest = next(one[depth] for one in through if counts[one[depth]] == max(counts.values()))
            assert ours[depth] == latest, "of equals the latest"
            several += len(counts) > 1
        drafter.select(torch.tensor([], dtype=torch.long))
    assert several > 50


def tree_of(drafter: NgramDrafter, ids: list[int], budget: int = 64) -> list[tuple[int, ...]]:
    rows = rows_of(ids)
    drafter.start(rows, 0)
    tree = drafter.propose(rows, budget)
    drafter.select(torch.tensor([], dtype=torch.long))
    branches: list[tuple[int, ...]] = [()]
    for token, parent in zip(tree.tokens[0, 1:].tolist(), tree.topology.parents[0, 1:].tolist(), strict=True):
        branches.append((*branches[parent], token))
    assert tree.topology.valid.all() and len(set(branches)) == len(branches) <= budget
    return branches[1:]


def test_a_tree_holds_all_matches_and_the_heaviest_where_not_all_fit():
    ids = [1, 2, 7, 8, 0, 1, 2, 7, 9, 0, 2, 5, 6, 0, 1, 2]
    #      1 2 is followed by 7 9 and 7 8, 2 alone by 5 6 as well
    everything = tree_of(NgramDrafter(length=2, max_ngram=2, take="tree"), ids)
    assert everything == [(7,), (5,), (7, 9), (7, 8), (5, 6)]
    assert tree_of(NgramDrafter(length=2, max_ngram=2, take="tree", num_nodes=3), ids) == [(7,), (7, 9)]
    assert tree_of(NgramDrafter(length=2, max_ngram=2, take="tree"), ids, budget=4) == [(7,), (7, 9), (7, 8)]
    assert tree_of(NgramDrafter(length=2, max_ngram=2, take="tree"), ids, budget=1) == []
    assert tree_of(NgramDrafter(length=2, max_ngram=2, min_ngram=2, take="tree"), ids) == [(7,), (7, 9), (7, 8)]


def test_nothing_is_drafted_behind_an_end_token():
    ids = [5, 6, 99, 1, 2, 5]
    for take in ("latest", "frequent", "tree"):
        assert tree_of(NgramDrafter(take=take, end_token_ids=[99]), ids)[-1] == (6, 99)
        assert tree_of(NgramDrafter(take=take), ids)[-1] == (6, 99, 1, 2, 5)


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("take", ["frequent", "tree"])
def test_the_text_is_the_targets_own(take, batch_size):
    done = decode(NgramDrafter(take=take, end_token_ids=target().end_token_ids), batch_size)
    assert [one.token_ids for one in done] == plain()
