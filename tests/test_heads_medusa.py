"""Medusa heads: which position learns which token, and that nothing else has a say."""

from __future__ import annotations

import pytest
import torch
from head_cases import collate, features, forward, gradients, head_for, loss_and_gradients, pad, row, tiny, vocab_of

from headstart.data.packing import TokenBatch
from headstart.heads.base import Alignment
from headstart.heads.configs import MedusaConfig
from headstart.heads.losses import reference_loss
from headstart.heads.store import build_head
from headstart.target import Features

F64 = torch.float64


@pytest.fixture(scope="module")
def target():
    return tiny.target("llama", dtype=F64)


def naive(head, target, batch) -> torch.Tensor:
    """The weighted loss, position by position and head by head, straight from the definition."""
    final = features(target, batch).final
    logits = head.draft_logits(final, target.output)
    ids = torch.arange(target.vocab_size) if head.draft_ids is None else head.draft_ids
    known = set(ids.tolist())
    total = final.new_zeros(())
    for line in range(len(batch.input_ids)):
        for position in range(batch.input_ids.shape[1]):
            for depth in range(head.config.num_heads):
                there = position + 2 + depth
                if there >= batch.input_ids.shape[1] or not batch.supervised[line, there]:
                    continue
                token = int(batch.input_ids[line, there])
                if batch.document_ids[line, there] != batch.document_ids[line, position] or token not in known:
                    continue
                teacher = target.output.logits(final[line, there - 1])[ids].log_softmax(-1)[None]
                label = (ids == token).nonzero()[0]
                loss = reference_loss(head.config.loss_weights, logits[line, position, depth][None], teacher, label)
                total = total + head.config.loss_decay**depth * loss[0]
    return total


def packed(*rows) -> TokenBatch:
    """All rows in one sequence."""
    return collate(list(rows), [list(range(len(rows)))])


@pytest.mark.parametrize("output", ["shared", "own", "low-rank"])
@pytest.mark.parametrize("small_vocab", [False, True])
def test_the_loss_is_its_definition(target, output, small_vocab):
    vocab = vocab_of(range(0, 264, 3)) if small_vocab else None
    settings = {"output": output, "rank": 4 if output == "low-rank" else None, "loss": {"soft-ce": 0.7, "lk": 0.3}}
    head = head_for(target, vocab, num_heads=3, num_layers=2, **settings)
    batch = packed(row(11, range(5, 11), seed=1), row(9, [2, 3, 7], seed=2))
    total, _, found = loss_and_gradients(head, target, batch)
    head.zero_grad()
    expected = naive(head, target, batch)
    expected.backward()
    torch.testing.assert_close(total, expected, rtol=1e-10, atol=1e-10)
    for name, parameter in head.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-9, atol=1e-10)


def test_rows_with_gradient_are_those_whose_predicted_token_is_supervised(target):
    """B17: ten tokens, reply at 5..8: head 0 learns at 3..6, head 1 at 2..5, head 2 at 1..4."""
    head = head_for(target, num_heads=3)
    batch = collate([row(10, range(5, 9))], [[0]])
    alignment = Alignment.of(batch, 3)
    pairs = [alignment.positions[alignment.rows[:, depth][alignment.scored[:, depth]]].tolist() for depth in range(3)]
    assert pairs == [[3, 4, 5, 6], [2, 3, 4, 5], [1, 2, 3, 4]]
    assert alignment.tokens.tolist() == [5, 6, 7, 8] and alignment.teachers.tolist() == [4, 5, 6, 7]
    for depth, positions in enumerate(pairs):
        states = Features(features(target, batch).final.requires_grad_(), {})
        only = head_for(target, num_heads=3)
        output = forward(only, target, batch, states)
        output.loss_sum.backward()
        assert states.final.grad is not None
        touched = states.final.grad[0].abs().sum(-1).nonzero().flatten().tolist()
        assert touched == [1, 2, 3, 4, 5, 6]
        assert int(output.scored[depth]) == len(positions)
    assert forward(head, target, batch).scored.tolist() == [4, 4, 4]


def test_alignment_is_labels_at_seen_from_the_token(target):
    batch = collate([row(12, range(4, 12), 1), row(7, [3, 4], 2), row(5, [0, 1, 2], 3)], [[0, 1], [2]])
    alignment = Alignment.of(batch, 4)
    for depth in range(4):
        labels, scored = batch.labels_at(2 + depth)
        kept = alignment.scored[:, depth]
        positions = alignment.positions[alignment.rows[kept, depth]]
        assert positions.tolist() == scored.flatten().nonzero().flatten().tolist()
        assert torch.equal(batch.input_ids.flatten()[alignment.tokens[kept]], labels.flatten()[positions])


def test_no_position_sees_what_it_may_not(target):
    """A state of another document, of padding, or of no scored pair has no influence; nor has the text's future."""
    head = head_for(target, num_heads=2, loss="soft-ce")
    batch = pad(packed(row(10, range(5, 9), 1), row(6, range(3, 6), 2)), 20)
    states = features(target, batch)
    before = forward(head, target, batch, states)
    # pairs: document one at 2..6 and its teachers 4..7; document two (from 10 on) at 10..13, its teachers 12..14
    used = {*range(2, 8), *range(10, 15)}
    for position in range(20):
        moved = Features(states.final.clone(), {})
        moved.final[0, position] += 1.0
        after = forward(head, target, batch, moved)
        assert torch.equal(before.loss_sum, after.loss_sum) == (position not in used), position
    changed = TokenBatch(batch.input_ids.clone(), batch.supervised, batch.position_ids, batch.document_ids)
    changed.input_ids[0, 12] = (changed.input_ids[0, 12] + 1) % 256
    drafts = head.draft_logits(features(target, batch).final, target.output)
    again = head.draft_logits(features(target, changed).final, target.output)
    assert torch.equal(drafts[0, :12], again[0, :12]) and not torch.equal(drafts[0, 12], again[0, 12])


def test_padding_packing_and_accumulation_do_not_matter(target):
    """B19, B54: sums over tokens, so that only tokens count."""
    head = head_for(target, vocab_of(range(0, 200)), num_heads=3, num_layers=2)
    rows = [row(20, range(15, 20), 1), row(30, range(10, 25), 2), row(8, range(4, 6), 3)]
    alone = [collate(rows, [[number]]) for number in range(3)]
    one_by_one = loss_and_gradients(head, target, *alone)
    ways = {
        "padded": [pad(batch, 40) for batch in alone],
        "one batch": [collate(rows, [[0], [1], [2]])],
        "packed": [collate(rows, [[0, 1], [2]])],
        "packed otherwise": [collate(rows, [[2, 1, 0]])],
        "accumulated": [collate(rows, [[0], [2]]), collate(rows, [[1]])],
    }
    assert one_by_one[1] == 5 + 15 + 2
    for way, batches in ways.items():
        loss, count, found = loss_and_gradients(head, target, *batches)
        assert count == one_by_one[1], way
        torch.testing.assert_close(loss, one_by_one[0], rtol=1e-9, atol=1e-9, msg=way)
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, one_by_one[2][name], rtol=1e-9, atol=1e-9, msg=f"{way} {name}")


def test_a_token_weighs_the_same_in_every_batch(target):
    """B54: mean losses 2.0 over 10 tokens and 1.0 over 100 make 120/110, not 1.5."""
    sums, counts = torch.tensor([20.0, 100.0]), torch.tensor([10, 100])
    assert float(sums.sum() / counts.sum()) == pytest.approx(1.0909, abs=1e-4)
    head = head_for(target, num_heads=1)
    rows = [row(20, range(9, 19), 1), row(110, range(9, 109), 2)]
    parts = [forward(head, target, collate(rows, [[number]])) for number in range(2)]
    whole = forward(head, target, collate(rows, [[0], [1]]))
    assert [int(part.token_count) for part in parts] == [10, 100]
    torch.testing.assert_close(whole.loss_sum, parts[0].loss_sum + parts[1].loss_sum, rtol=1e-9, atol=0)
    assert torch.equal(whole.hits, parts[0].hits + parts[1].hits)


@pytest.mark.parametrize("output", ["shared", "own", "low-rank"])
def test_nothing_to_learn_is_a_loss_of_zero_with_a_gradient_of_zero(target, output):
    """B50: no supervised token in the batch, or none that a late head can reach."""
    head = head_for(target, num_heads=4, output=output, rank=2 if output == "low-rank" else None)
    empty = collate([row(8, []), row(3, [], 2)], [[0], [1]])
    for batch in (empty, collate([], [])):
        loss, count, found = loss_and_gradients(head, target, batch)
        assert loss == 0 and count == 0
        assert set(found) == {name for name, _ in head.named_parameters()}
        assert all((gradient == 0).all() for gradient in found.values())
    short = forward(head, target, collate([row(4, [2, 3])], [[0]]))  # head 3 would need a position before the text
    assert short.scored.tolist() == [2, 1, 0, 0]
    assert short.accuracy(top=1)[2:] == [None, None] and short.accuracy(top=10)[0] is not None
    assert short.loss[2:].tolist() == [0.0, 0.0]


def test_nothing_spoils_a_batch_in_which_another_row_has_no_label(target):
    head = head_for(target, num_heads=2)
    one = loss_and_gradients(head, target, collate([row(9, range(5, 9))], [[0]]))
    two = loss_and_gradients(head, target, collate([row(9, range(5, 9)), row(6, [], 2)], [[0], [1]]))
    torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-9)


def test_a_real_nan_shows_in_the_loss_of_its_head_alone(target):
    head = head_for(target, num_heads=3)
    with torch.no_grad():
        head.get_parameter("blocks.0.weight")[1] = torch.inf
    output = forward(head, target, collate([row(9, range(5, 9))], [[0]]))
    assert torch.isnan(output.loss).tolist() == [False, True, False]
    assert torch.isnan(output.loss_sum)


def test_heads_start_as_the_targets_own_output_head(target):
    """Exactly, whatever the output and the number of blocks: the blocks start as the identity."""
    final = features(target, collate([row(6, [])], [[0]])).final
    expected = target.output.logits(final)
    for output, rank in [("shared", None), ("own", None), ("low-rank", 3)]:
        head = build_head(MedusaConfig(num_heads=2, num_layers=2, output=output, rank=rank), target).double()
        drafts = head.draft_logits(final, target.output)
        for depth in range(2):
            torch.testing.assert_close(drafts[:, :, depth], expected, rtol=1e-12, atol=1e-12)


def test_every_block_of_every_head_has_weights_of_its_own(target):
    head = build_head(MedusaConfig(num_heads=3, num_layers=2), target)
    pointers = {parameter.data_ptr() for parameter in head.parameters()}
    assert len(pointers) == 4 and sum(parameter.numel() for parameter in head.parameters()) == 2 * 3 * (64 * 64 + 64)
    output = forward(head.double(), target, collate([row(9, range(5, 9))], [[0]]))
    output.loss_sum.backward()
    found = gradients(head)
    by_head = [found[f"blocks.{layer}.weight"][depth] for layer in range(2) for depth in range(3)]
    assert all(gradient.abs().sum() > 0 for gradient in by_head)
    assert not any(torch.equal(by_head[a], by_head[b]) for a in range(3) for b in range(a))


def test_nothing_borrowed_is_owned(target):
    head = head_for(target, vocab_of(range(64)))
    assert {name.split(".")[0] for name in head.state_dict()} == {"blocks", "vocab"}
    before = {name: parameter.clone() for name, parameter in target.model.named_parameters()}
    forward(head, target, collate([row(9, range(5, 9))], [[0]])).loss_sum.backward()
    for name, parameter in target.model.named_parameters():
        assert parameter.grad is None and torch.equal(parameter, before[name])


@pytest.mark.parametrize("family", ["llama", "tied", "padded", "gemma2", "granite", "cohere", "phi"])
def test_training_and_drafting_have_one_distribution(family):
    """Scales, soft-caps, biases and padded rows included: the loss of training, from the logits of drafting."""
    target = tiny.target(family, dtype=F64)
    vocab = vocab_of(range(1, 257, 2), target.vocab_size)
    head = head_for(target, vocab, num_heads=2, loss="hard-ce", loss_decay=1.0)
    batch = collate([row(9, range(4, 9))], [[0]])
    output = forward(head, target, batch)
    torch.testing.assert_close(output.loss_sum, naive(head, target, batch), rtol=1e-10, atol=1e-10)


def test_labels_outside_the_draft_vocabulary_are_scored_and_missed(target):
    batch = collate([row(12, range(4, 12))], [[0]])
    tokens = batch.input_ids[0, 4:].tolist()
    head = head_for(target, vocab_of({*range(0, 264, 7)} - set(tokens)), num_heads=2)
    output = forward(head, target, batch)
    assert output.scored.tolist() == [8, 8] and int(output.hits.sum()) == 0 and output.loss_sum == 0


def test_hits_are_the_ranks_of_the_text(target):
    head = head_for(target, num_heads=2, shake=0.3)
    batch = collate([row(40, range(4, 40))], [[0]])
    output = forward(head, target, batch)
    drafts = head.draft_logits(features(target, batch).final, target.output)
    order = drafts.argsort(-1, descending=True)[..., :10]
    for depth in range(2):
        labels, scored = batch.labels_at(2 + depth)
        expected = (order[:, :, depth] == labels[..., None])[scored].sum(0)
        assert torch.equal(output.hits[depth], expected)


def test_dropout_acts_while_training_only(target):
    head = head_for(target, num_heads=2, dropout=0.5)
    batch = collate([row(9, range(4, 9))], [[0]])
    head.train()
    assert forward(head, target, batch).loss_sum != forward(head, target, batch).loss_sum
    head.eval()
    assert forward(head, target, batch).loss_sum == forward(head, target, batch).loss_sum


@pytest.mark.parametrize("settings", [{}, {"output": "own"}, {"loss": "hard-ce"}, {"num_layers": 2}], ids=str)
def test_a_counting_text_is_learnt_by_every_head(settings):
    """Token t + 1 is token t plus one, modulo 48: every head must say so for its own distance, nearly always."""
    target = tiny.target("llama")
    count = 48
    rows = [row(50, range(2, 50), seed) for seed in range(8)]
    for seed, each in enumerate(rows):
        each.input_ids[:] = [(5 * seed + step) % count for step in range(50)]
    batch = collate(rows, [[number] for number in range(8)])
    settings = {"loss": {"hard-ce": 1.0}, **settings}
    head = build_head(MedusaConfig(num_heads=4, draft_vocab_size=64, **settings), target, vocab_of(range(64)))
    states = features(target, batch)
    optimizer = torch.optim.Adam(head.parameters(), lr=5e-3)
    for _ in range(150):
        output = forward(head, target, batch, states)
        optimizer.zero_grad()
        (output.loss_sum / output.token_count).backward()
        optimizer.step()
    accuracy = forward(head.eval(), target, batch, states).accuracy(top=1)
    assert all(share and share > 0.99 for share in accuracy), accuracy
