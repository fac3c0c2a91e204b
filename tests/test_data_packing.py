"""Batches: isolation, labels, order. What is packed or padded must be, for the loss, what it is alone."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch

from headstart.data.packing import RowStore, TokenBatch, batches, collate, spread
from headstart.data.rendering import Row
from tests import tiny


def row(number: int, length: int, first_label: int | None = None, last_label: int | None = None) -> Row:
    draw = random.Random(number)
    first_label = length // 2 if first_label is None else first_label
    labels = range(first_label, length if last_label is None else last_label + 1)
    ids = [draw.randrange(256) for _ in range(length)]
    return Row(row_id=str(number), input_ids=ids, supervised=[position in labels for position in range(length)])


def some_rows(count: int, seed: int = 0) -> list[Row]:
    draw = random.Random(seed)
    return [row(number, draw.randint(2, 60)) for number in range(count)]


def flat(plan: Sequence[Sequence[Sequence[int]]]) -> list[int]:
    return [number for batch in plan for sequence in batch for number in sequence]


def scored_pairs(tokens: TokenBatch, shift: int) -> list[tuple[int, int, int]]:
    """(token, its place in its document, label) of everything scored, in no order."""
    labels, scored = tokens.labels_at(shift)
    found = zip(tokens.input_ids[scored], tokens.position_ids[scored], labels[scored], strict=True)
    return sorted((int(token), int(position), int(label)) for token, position, label in found)


@pytest.mark.parametrize(
    ("there", "asked", "taken"), [(10, 4, [0, 2, 5, 7]), (3, 5, [0, 1, 2]), (0, 5, []), (5, 0, [])]
)
def test_a_few_rows_come_from_everywhere(there, asked, taken):
    """The first few of rows that stand kind by kind would be of one kind."""
    store = RowStore(some_rows(there))
    assert [each.row_id for each in spread(store, asked)] == [str(number) for number in taken]


def test_padding_is_told_by_position_never_by_value():
    """B21: pad = end = 257. The end at 9 is a label, 10 and 11 are not."""
    short = Row("a", [*range(9), tiny.END], [False] * 5 + [True] * 5)
    tokens = collate([short, row(1, 12)], [[0], [1]])
    assert tokens.supervised[0].tolist() == [False] * 5 + [True] * 5 + [False] * 2
    tokens.input_ids[0, 10:] = tiny.END
    assert int((tokens.supervised & (tokens.input_ids == tiny.END)).sum()) == 1
    labels, scored = tokens.labels_at(1)
    assert scored[0].nonzero().flatten().tolist() == [4, 5, 6, 7, 8] and labels[0, 8] == tiny.END


def test_labels_are_scored_by_the_token_that_is_predicted():
    """B17: ten tokens, reply at 5..8. Medusa's head k reads position p and predicts p + 1 + k."""
    tokens = collate([row(0, 10, 5, 8)], [[0]])
    for shift, expected in ((1, [4, 5, 6, 7]), (2, [3, 4, 5, 6]), (3, [2, 3, 4, 5])):
        labels, scored = tokens.labels_at(shift)
        assert scored[0].nonzero().flatten().tolist() == expected
        assert labels[0, scored[0]].tolist() == tokens.input_ids[0, 5:9].tolist()


def test_nothing_is_scored_past_the_end():
    """Six labels of six tokens: 5, 4, 3 are scored at shifts 1, 2, 3, and none beyond the length."""
    tokens = collate([row(0, 6, 0)], [[0]])
    assert [int(tokens.labels_at(shift)[1].sum()) for shift in (1, 2, 3, 5, 6, 7, 100)] == [5, 4, 3, 1, 0, 0, 0]


@pytest.mark.parametrize("shift", [1, 2, 5])
def test_packed_or_padded_or_alone_the_same_is_scored(shift):
    rows = some_rows(12)
    alone = sorted(pair for number in range(12) for pair in scored_pairs(collate(rows, [[number]]), shift))
    padded = collate(rows, [[number] for number in range(12)])
    packed = collate(rows, [[0, 1, 2, 3], [4, 5], [6, 7, 8, 9, 10], [11]])
    assert scored_pairs(padded, shift) == scored_pairs(packed, shift) == alone
    assert padded.num_tokens == packed.num_tokens == sum(len(one.input_ids) for one in rows)


def test_attention_is_causal_within_the_document():
    """Against a brute-force walk; padding sees itself and nobody sees padding."""
    rows = some_rows(5)
    tokens = collate(rows, [[0, 1, 2], [3], [4]])
    allowed, distance = tokens.attention()
    for line, sequence in enumerate([[0, 1, 2], [3], [4]]):
        places = [
            (document, position)
            for document, number in enumerate(sequence)
            for position in range(len(rows[number].input_ids))
        ]
        places += [(-1, -1)] * (tokens.input_ids.shape[1] - len(places))
        for query, (document, position) in enumerate(places):
            for key, (other, earlier) in enumerate(places):
                real = document >= 0 and document == other and earlier <= position
                assert bool(allowed[line, query, key]) == (real or query == key)
                if real:
                    assert distance[line, query, key] == position - earlier


@pytest.mark.parametrize("family", ["llama", "hyb", "gpt2"])
def test_a_packed_document_has_the_states_it_has_alone(family):
    """The target reads each document as if it stood alone, windows and positions included."""
    target = tiny.target(family, dtype=torch.float64)
    rows = some_rows(4, seed=5)

    def states(tokens: TokenBatch) -> torch.Tensor:
        masks = target.masks(*tokens.attention())
        return target.forward(tokens.input_ids, tokens.position_ids, masks).final

    with torch.no_grad():
        padded = states(collate(rows, [[0], [1], [2], [3]]))
        packed_tokens = collate(rows, [[2, 0], [3, 1]])
        packed = states(packed_tokens)
        for line, sequence in enumerate([[2, 0], [3, 1]]):
            for document, number in enumerate(sequence):
                alone = states(collate(rows, [[number]]))[0]
                here = packed[line, packed_tokens.document_ids[line] == document]
                torch.testing.assert_close(here, alone, rtol=0, atol=1e-9)
                torch.testing.assert_close(padded[number, : len(alone)], alone, rtol=0, atol=1e-9)
        assert padded.isfinite().all() and packed.isfinite().all()


def test_no_position_sees_another_document():
    """Perturbation: a changed token moves later states of its own document and nothing else."""
    target = tiny.target("llama", dtype=torch.float64)
    rows = some_rows(3, seed=6)
    tokens = collate(rows, [[0, 1], [2]])

    def states() -> torch.Tensor:
        return target.forward(tokens.input_ids, tokens.position_ids, target.masks(*tokens.attention())).final

    with torch.no_grad():
        before = states()
        place = len(rows[0].input_ids) // 2
        tokens.input_ids[0, place] = (tokens.input_ids[0, place] + 1) % 256
        moved = (states() != before).any(-1)
    own = torch.zeros_like(moved)
    own[0, place : len(rows[0].input_ids)] = True
    assert torch.equal(moved, own)


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("count", [1, 7, 50, 1500])
@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_no_row_is_lost_or_doubled_for_any_number_of_ranks(packing, count, world_size):
    rows = RowStore(some_rows(count))
    options = {"batch_size": 2, "max_length": 64, "packing": packing, "seed": 0, "epoch": 1}
    plans = [batches(rows, **options, rank=rank, world_size=world_size) for rank in range(world_size)]
    assert len({len(plan) for plan in plans}) == 1
    assert sorted(number for plan in plans for number in flat(plan)) == list(range(count))
    assert all(len(batch) <= 2 for plan in plans for batch in plan)
    assert all(
        sum(rows.lengths()[number] for number in sequence) <= 64
        for plan in plans
        for batch in plan
        for sequence in batch
    )


@pytest.mark.parametrize("packing", [True, False])
def test_a_step_holds_the_same_rows_however_it_is_dealt(packing):
    """One rank of four sequences, two of two, four of one; and micro-batches of two accumulated."""
    rows = some_rows(101)
    options = {"max_length": 64, "packing": packing, "seed": 3, "epoch": 0}
    one = batches(rows, batch_size=4, **options)
    for world_size in (2, 4):
        ranks = [
            batches(rows, batch_size=4 // world_size, **options, rank=rank, world_size=world_size)
            for rank in range(world_size)
        ]
        dealt = [[sequence for rank in ranks for sequence in rank[step]] for step in range(len(one))]
        assert dealt == one
    halves = batches(rows, batch_size=2, **options)
    assert [sequence for batch in halves for sequence in batch] == [sequence for batch in one for sequence in batch]


def test_the_order_follows_from_seed_and_epoch_alone():
    rows = some_rows(300)
    options = {"batch_size": 2, "max_length": 64, "packing": True}
    first = batches(rows, **options, seed=0, epoch=0)
    assert first == batches(RowStore(rows), **options, seed=0, epoch=0)
    others = [batches(rows, **options, seed=0, epoch=1), batches(rows, **options, seed=1, epoch=0)]
    assert all(other != first and sorted(flat(other)) == sorted(flat(first)) for other in others)
    state = torch.get_rng_state()
    batches(rows, **options, seed=0, epoch=0)
    assert torch.equal(torch.get_rng_state(), state)


def test_packing_is_tight_and_padding_is_among_like_lengths():
    rows = some_rows(2000)
    total = sum(len(one.input_ids) for one in rows)
    packed = batches(rows, batch_size=1, max_length=128, packing=True, seed=0, epoch=0)
    assert total / (128 * len(packed)) > 0.95
    padded = [
        collate(rows, batch) for batch in batches(rows, batch_size=4, max_length=128, packing=False, seed=0, epoch=0)
    ]
    assert total / sum(tokens.input_ids.numel() for tokens in padded) > 0.9


def test_an_empty_batch_scores_nothing():
    tokens = collate([], [])
    assert tokens.input_ids.shape == (1, 1) and tokens.num_tokens == 0
    assert not tokens.labels_at(1)[1].any()
    allowed, _ = tokens.attention()
    assert allowed.tolist() == [[[True]]]


def test_a_row_store_is_a_sequence_of_rows():
    rows = some_rows(5)
    store = RowStore(rows)
    assert list(store) == rows and store[1:3] == rows[1:3] and store[-1] == rows[-1]
    assert len(store) == 5 and store.lengths() == [len(one.input_ids) for one in rows]
    taken = store.take([3, 0])
    assert list(taken) == [rows[3], rows[0]] and taken.lengths() == [store.lengths()[3], store.lengths()[0]]
    with pytest.raises(IndexError):
        store[5]
