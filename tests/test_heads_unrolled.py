"""Heads that read their own output: what a step may see, which pairs are scored, and training equal to drafting."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from head_cases import collate, features, forward, gradients, head_for, loss_and_gradients, pad, row, tiny, vocab_of
from torch.nn import functional

from headstart.data.packing import TokenBatch
from headstart.heads import unrolled
from headstart.heads.base import Alignment
from headstart.heads.unrolled_attention import UnrolledAttention, unrolled_rows
from headstart.target import Features

F64 = torch.float64
KINDS = ["eagle", "eagle3"]
STEPS = 3
NUM_STEPS = 150


@pytest.fixture(scope="module")
def target():
    return tiny.target("llama", dtype=F64)


def packed() -> TokenBatch:
    """Two documents and padding, and one document that fills its sequence."""
    rows = [row(9, range(4, 9), 1), row(6, [2, 3, 5], 2), row(17, range(8, 15), 3)]
    return pad(collate(rows, [[0, 1], [2]]), 17)


def outputs(head, target, batch, states: Features | None = None, steps: int = STEPS) -> torch.Tensor:
    """What the output rows read, [batch, seq, step, dim]."""
    head.eval()
    given = features(target, batch, head.wants) if states is None else states
    with torch.no_grad():
        unrolled = head.unroll(given, batch, target.embedding, steps)
    return torch.stack([step.output for step in unrolled], dim=2)


class PlainKeys:
    """Drafting in its plainest form: a list of keys, one index at a time, one softmax over all of them."""

    def __init__(self, earlier: dict | None = None):
        self.keys = {layer: list(entries) for layer, entries in (earlier or {}).items()}

    def __call__(self, layer, query, key, value):
        assert query.shape[2] == 1, "one index at a time"
        entries = self.keys.setdefault(layer, [])
        entries.append((key, value))
        group = query.shape[1] // key.shape[1]
        keys, values = (torch.cat(part, dim=2).repeat_interleave(group, dim=1) for part in zip(*entries, strict=True))
        scores = (query * keys).sum(-1) / query.shape[-1] ** 0.5
        return (scores.softmax(-1)[..., None] * values).sum(2, keepdim=True)


@torch.no_grad()
def drafted(head, target, ids: torch.Tensor, given: Features, index: int, steps: int) -> list[torch.Tensor]:
    """Logits of a chain of drafts that starts from the pair at `index` and is told that every draft was right."""
    states = head.fuse(given)
    rows = target.output.select(head.draft_ids) if head.output_weight is None else None
    cache = PlainKeys()
    for place in range(index + 1):
        embeds = target.embedding.embed(ids[None, place + 1 : place + 2])
        state = head.step(embeds, states[:, place : place + 1], torch.tensor([[place]]), cache)
    logits = [head.logits(state.output, rows)]
    for step in range(1, steps):
        embeds = target.embedding.embed(ids[None, index + 1 + step : index + 2 + step])
        state = head.step(embeds, state.carried, torch.tensor([[index + step]]), cache)
        logits.append(head.logits(state.output, rows))
    return [values[0, 0] for values in logits]


VARIANTS = [
    ("eagle", {}),
    ("eagle", {"num_layers": 2, "fc_bias": True, "attention_bias": True}),
    ("eagle", {"output": "own"}),
    ("eagle3", {}),
    ("eagle3", {"fc_norm": True, "norm_output": True}),
    ("eagle3", {"norm_before_fc": True, "norm_before_residual": True, "output": "own"}),
    ("eagle3", {"num_layers": 2, "fc_norm": True, "norm_before_residual": True, "attention_bias": True}),
    ("eagle3", {"num_layers": 3, "layers": [0, 4], "num_attention_heads": 6, "num_kv_heads": 3, "head_dim": 10}),
]


@pytest.mark.parametrize("kind,settings", VARIANTS, ids=str)
@pytest.mark.parametrize("dtype,tolerance", [(torch.float32, 1e-5), (F64, 1e-10)], ids=["fp32", "fp64"])
@pytest.mark.filterwarnings("ignore:head.init")
def test_the_kth_step_of_training_is_the_kth_drafted_token(kind, settings, dtype, tolerance):
    """Every index of two packed documents, against a loop that knows neither packing nor unrolling."""
    target = tiny.target("headdim" if kind == "eagle" else "llama", dtype=dtype)
    head = head_for(target, vocab_of(range(0, 264, 2)), kind=kind, shake=0.03, unrolled_steps=STEPS, **settings).eval()
    lengths = [9, 7]
    batch = collate([row(length, [], seed) for seed, length in enumerate(lengths)], [[0, 1]])
    rows = target.output.select(head.draft_ids) if head.output_weight is None else None
    trained = head.logits(outputs(head, target, batch), rows)[0]
    given = features(target, batch, head.wants)
    for start, length in [(0, 9), (9, 7)]:
        place = slice(start, start + length)
        own = Features(given.final[:, place], {k: tap[:, place] for k, tap in given.taps.items()})
        ids = batch.input_ids[0, place]
        for index in range(length - 1):
            steps = min(STEPS, length - 1 - index)
            for step, expected in enumerate(drafted(head, target, ids, own, index, steps)):
                found = trained[start + index, step]
                torch.testing.assert_close(found.softmax(-1), expected.softmax(-1), rtol=0, atol=tolerance)
                torch.testing.assert_close(found, expected, rtol=0, atol=tolerance * float(expected.abs().max()))
                assert expected.std() > 0.01


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layers", [1, 2])
def test_features_and_tokens_ahead_or_elsewhere_do_not_move_a_draft(target, kind, layers):
    """Not by a bit: feature p has a say at indices from p of its document, token p where step k reads that far."""
    head = head_for(target, kind=kind, num_layers=layers)
    batch = packed()
    given = features(target, batch, head.wants)
    before = outputs(head, target, batch, given)
    document = batch.document_ids
    for line, place in [(0, 0), (0, 4), (0, 8), (0, 9), (0, 12), (0, 16), (1, 7), (1, 16)]:
        moved = Features(given.final.clone(), {k: tap.clone() for k, tap in given.taps.items()})
        for tensor in (moved.final, *moved.taps.values()):
            tensor[line, place] += 1.0
        changed = (outputs(head, target, batch, moved) != before).any(-1)
        seen = (document == document[line, place]) & (torch.arange(17) >= place)
        seen[[other for other in range(2) if other != line]] = False
        if document[line, place] >= 0:
            assert torch.equal(changed, seen[..., None].expand_as(changed))
        else:
            assert not changed[document >= 0].any()
        ids = batch.input_ids.clone()
        ids[line, place] += 1
        changed = (outputs(head, target, replace(batch, input_ids=ids), given) != before).any(-1)
        for step in range(STEPS):
            unread = torch.arange(17) + 1 + step < place
            assert not changed[line, unread, step].any() and not changed[1 - line, :, step].any()
            assert not changed[line, document[line] != document[line, place], step][..., None].any() or step or place
            if place >= 1 + step and document[line, place] == document[line, place - 1 - step] >= 0:
                assert changed[line, place - 1 - step, step]


def rows_with_gradient(head, target, batch) -> list[list[int]]:
    """Per step the places of the only sequence whose output has a gradient."""
    states = []
    rows = unrolled_rows(batch, Alignment.of_drafts(batch, head.num_depths).positions)
    plain = head.step

    def recording(*arguments):
        given = plain(*arguments)
        given.output.retain_grad()
        states.append(given.output)
        # what later steps read is cut off, so that a step's gradient is its own loss's
        return replace(given, carried=given.carried.detach())

    head.step = recording
    forward(head, target, batch).loss_sum.backward()
    del head.step
    return [rows[state.grad[0].abs().sum(-1) > 0].tolist() for state in states]


@pytest.mark.parametrize("kind", KINDS)
def test_rows_with_gradient_are_those_that_a_decoder_can_meet(target, kind):
    """B17: ten tokens, reply at 5..8. Row p reads token p + 1 and is scored on p + 2 at step 0, on p + 3 at step 1."""
    head = head_for(target, kind=kind, unrolled_steps=3)
    batch = collate([row(10, range(5, 9))], [[0]])
    # row 3 would draft the reply's first token, which the target itself gives; row 7 what follows the turn's end
    assert rows_with_gradient(head, target, batch) == [[4, 5, 6], [4, 5], [4]]
    assert forward(head, target, batch).scored.tolist() == [3, 2, 1]


@pytest.mark.parametrize("kind", KINDS)
def test_the_last_row_is_not_scored_and_what_fills_it_has_no_say(target, kind, monkeypatch):
    """B18: six supervised tokens: 5, 4, 3 rows; where the text stops the target is known, a label is not."""
    head = head_for(target, kind=kind, unrolled_steps=3).eval()
    batch = collate([row(6, range(6))], [[0]])
    assert rows_with_gradient(head, target, batch) == [[0, 1, 2, 3, 4], [0, 1, 2, 3], [0, 1, 2]]
    before = forward(head, target, batch)
    assert before.scored.tolist() == [5, 4, 3] and int(before.token_count) == 5
    plain = type(head).first_states

    def filled(self, given, tokens):
        states = plain(self, given, tokens).clone()
        states[:, -1] = torch.randn(states.shape[-1], dtype=states.dtype)
        return states

    monkeypatch.setattr(type(head), "first_states", filled)
    assert torch.equal(forward(head, target, batch).loss_sum, before.loss_sum)


@pytest.mark.parametrize("kind", KINDS)
def test_where_the_text_stops_the_targets_own_choice_is_the_label(target, kind):
    head = head_for(target, kind=kind, unrolled_steps=1, loss="hard-ce", shake=0.0).eval()
    batch = collate([row(6, range(6))], [[0]])
    alignment = Alignment.of_drafts(batch, 1)
    assert alignment.tokens.tolist() == [2, 3, 4, 5, 6] and alignment.has_label(batch).tolist() == [True] * 4 + [False]
    given = features(target, batch, head.wants)
    choice = target.output.logits(given.final[0, 5]).argmax()
    rows = target.output.select(head.draft_ids)
    logits = head.logits(outputs(head, target, batch, given, 1)[0, :, 0], rows)
    labels = torch.cat([batch.input_ids[0, 2:], choice[None]])
    hits = (logits[:5].argmax(-1) == labels).sum()
    found = forward(head, target, batch, given)
    assert int(found.hits[0, 0]) == int(hits)
    if kind == "eagle3":
        torch.testing.assert_close(found.loss[0], functional.cross_entropy(logits[:5], labels, reduction="sum"))


def brute_pairs(batch: TokenBatch, depths: int) -> set[tuple[int, int, int]]:
    """(line, index, depth) from the definition."""
    found = set()
    length = batch.input_ids.shape[1]
    for line in range(len(batch.input_ids)):
        document, supervised = batch.document_ids[line].tolist(), batch.supervised[line].tolist()

        def inside(index, place, document=document):
            return place < length and document[place] == document[index]

        for index in range(length):
            for depth in range(depths):
                read, label = index + 1 + depth, index + 2 + depth
                if not inside(index, read) or not supervised[read] or not supervised[index + 1]:
                    continue
                if not inside(index, label) or supervised[label]:
                    found.add((line, index, depth))
    return found


@pytest.mark.parametrize("seed", range(6))
def test_scored_pairs_are_their_definition(seed):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 9, (6,), generator=generator).tolist()
    rows = [row(n, torch.randint(0, n, (n,), generator=generator).tolist(), seed + i) for i, n in enumerate(lengths)]
    batch = collate(rows, [[0, 1, 2], [3, 4], [5]])
    alignment = Alignment.of_drafts(batch, 4)
    length = batch.input_ids.shape[1]
    found = set()
    for token, rows_of, scored in zip(alignment.tokens, alignment.rows, alignment.scored, strict=True):
        for depth in scored.nonzero().flatten().tolist():
            position = int(alignment.positions[rows_of[depth]])
            assert position + 2 + depth == int(token)
            found.add((position // length, position % length, depth))
    assert found == brute_pairs(batch, 4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layers", [1, 2])
def test_packed_padded_and_alone_are_the_same(target, kind, layers):
    """B51 and B19: loss, counts and gradients are those of each document by itself; two layers are finite."""
    head = head_for(target, kind=kind, num_layers=layers, unrolled_steps=3).eval()
    rows = [row(9, range(4, 9), 1), row(6, [2, 3, 5], 2), row(12, range(6, 10), 3)]
    alone = loss_and_gradients(head, target, *(collate(rows, [[[0], [1], [2]][i]]) for i in range(3)))
    for together in (collate(rows, [[0, 1, 2]]), collate(rows, [[0], [1], [2]]), pad(collate(rows, [[2, 0], [1]]), 40)):
        found = loss_and_gradients(head, target, together)
        assert found[1] == alone[1]
        torch.testing.assert_close(found[0], alone[0], rtol=1e-10, atol=0)
        for name, gradient in alone[2].items():
            assert torch.isfinite(gradient).all()
            torch.testing.assert_close(found[2][name], gradient, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layers", [1, 2])
def test_unrolling_what_is_scored_alone_changes_nothing(target, kind, layers, monkeypatch):
    head = head_for(target, kind=kind, num_layers=layers, unrolled_steps=3).eval()
    batch = packed()
    narrow = loss_and_gradients(head, target, batch)
    everywhere = torch.arange(batch.input_ids.numel())
    assert len(unrolled_rows(batch, Alignment.of_drafts(batch, 3).positions)) < len(everywhere)
    monkeypatch.setattr(unrolled, "unrolled_rows", lambda batch, positions: everywhere)
    wide = loss_and_gradients(head, target, batch)
    torch.testing.assert_close(narrow[0], wide[0], rtol=1e-12, atol=0)
    for name, gradient in wide[2].items():
        torch.testing.assert_close(narrow[2][name], gradient, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("kind", KINDS)
def test_eager_and_fused_attention_train_alike(target, kind, monkeypatch):
    head = head_for(target, kind=kind, num_layers=2, unrolled_steps=3).eval()
    fast = loss_and_gradients(head, target, packed())
    monkeypatch.setattr(unrolled, "UnrolledAttention", lambda batch, rows: UnrolledAttention(batch, rows, eager=True))
    eager = loss_and_gradients(head, target, packed())
    torch.testing.assert_close(fast[0], eager[0], rtol=1e-12, atol=0)
    for name, gradient in eager[2].items():
        torch.testing.assert_close(fast[2][name], gradient, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_the_gradient_is_that_of_finite_differences(target, kind):
    head = head_for(target, kind=kind, unrolled_steps=3, loss={"soft-ce": 0.5, "lk": 0.5}).eval()
    batch = packed()
    given = features(target, batch, head.wants)
    _, _, found = loss_and_gradients(head, target, batch)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in head.named_parameters():
        direction = torch.randn(parameter.shape, generator=generator, dtype=F64)
        values = []
        for sign in (1, -1):
            with torch.no_grad():
                parameter += sign * 1e-6 * direction
                values.append(float(forward(head, target, batch, given).loss_sum))
                parameter -= sign * 1e-6 * direction
        slope = (values[0] - values[1]) / 2e-6
        assert slope == pytest.approx(float((found[name] * direction).sum()), rel=1e-4, abs=1e-5), name


@pytest.mark.parametrize("kind", KINDS)
def test_dropout_acts_while_training_only(target, kind):
    """And anew in every step; EAGLE-3 drops features too. Without it, training and evaluation say the same."""
    batch, plain = packed(), head_for(target, kind=kind, num_layers=2)
    dropping = head_for(target, kind=kind, num_layers=2, dropout=0.5)
    dropping.load_state_dict(plain.state_dict())
    given = features(target, batch, plain.wants)

    def unrolled(head, mode: bool) -> torch.Tensor:
        head.train(mode)
        steps = head.unroll(given, batch, target.embedding, STEPS)
        return torch.stack([step.output for step in steps], dim=2)

    assert torch.equal(unrolled(dropping, False), unrolled(plain, False))
    torch.manual_seed(0)
    first, second = unrolled(dropping, True), unrolled(dropping, True)
    for step in range(STEPS):
        assert not torch.equal(first[:, :, step], second[:, :, step])
    if kind == "eagle3":
        dropping.train()
        assert not torch.equal(dropping.fuse(given), dropping.fuse(given))
        assert torch.equal(unrolled(plain, True), unrolled(plain, False))


@pytest.mark.parametrize("kind", KINDS)
def test_only_the_head_learns(target, kind):
    """Every parameter of the head gets a gradient; embedding and output rows are in no list and get none."""
    head = head_for(target, vocab_of(range(200)), kind=kind, num_layers=2, unrolled_steps=2, output="own")
    forward(head, target, packed()).loss_sum.backward()
    assert gradients(head).keys() == dict(head.named_parameters()).keys()
    assert all(gradient.abs().sum() > 0 for gradient in gradients(head).values())
    assert all(parameter.grad is None and not parameter.requires_grad for parameter in target.model.parameters())
    borrowed = {parameter.data_ptr() for parameter in target.model.parameters()}
    assert not borrowed & {tensor.data_ptr() for tensor in head.state_dict().values()}


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_without_a_scored_pair_costs_nothing(target, kind):
    head = head_for(target, kind=kind, unrolled_steps=2)
    for batch in (collate([], []), collate([row(5, [])], [[0]]), collate([row(1, [0])], [[0]])):
        output = forward(head, target, batch)
        assert output.scored.tolist() == [0, 0] and float(output.loss_sum.detach()) == 0
        assert output.accuracy(1) == [None, None]
        head.zero_grad()
        if output.loss_sum.requires_grad:
            output.loss_sum.backward()
        assert all(not gradient.any() for gradient in gradients(head).values())


@pytest.mark.parametrize("kind", KINDS)
def test_a_curriculum_unrolls_more_as_training_goes_on(target, kind):
    stages = [{"until": 0.25, "steps": 1}, {"until": 0.5, "steps": 2}, {"until": 1.0, "steps": 4}]
    head = head_for(target, kind=kind, unrolled_steps=stages).train()
    assert head.num_depths == 4
    batch = packed()
    whole = forward(head.eval(), target, batch).scored.tolist()
    assert whole[3] > 0, "outside of training every depth is measured"
    head.train()
    for share, steps in [(0.0, 1), (0.24, 1), (0.25, 2), (0.6, 4), (1.0, 4)]:
        head.set_share(share)
        output = forward(head, target, batch)
        assert output.scored.tolist() == whole[:steps] + [0] * (4 - steps)
        assert output.hits.shape == (4, 10) and output.loss.shape == (4,)
        assert not output.loss[steps:].any()
        assert output.accuracy(1)[steps:] == [None] * (4 - steps)


@pytest.mark.parametrize("kind", KINDS)
def test_a_later_step_weighs_less(target, kind):
    batch = packed()
    half, even = (
        forward(head_for(target, kind=kind, unrolled_steps=3, loss_decay=decay).eval(), target, batch)
        for decay in (0.5, 1.0)
    )
    torch.testing.assert_close(half.loss, even.loss)
    torch.testing.assert_close(half.loss_sum, half.loss[0] + half.loss[1] / 2 + half.loss[2] / 4)


def counting(starts: torch.Tensor) -> TokenBatch:
    """Texts of 16 tokens that count on from `starts`, modulo 24; the last token is no label."""
    text = (starts[:, None] + torch.arange(16)) % 24
    places = torch.arange(16).expand_as(text)
    return TokenBatch(text, places < 15, places, torch.zeros_like(text))


@pytest.mark.parametrize(
    "kind,settings",
    [
        ("eagle", {"feature_loss": 0.0, "token_loss": 1.0, "noise": 0.0}),
        ("eagle3", {"fc_norm": True, "norm_before_residual": True}),
        ("eagle3", {"norm_before_fc": True, "norm_output": True, "output": "own"}),
    ],
    ids=str,
)
def test_a_corpus_that_counts_is_learnt_at_every_depth(kind, settings):
    """Token t + 1 follows token t: whoever reads one place too far or too short stays at chance."""
    target = tiny.target("llama")
    common = {"unrolled_steps": 3, "loss": "hard-ce", "loss_decay": 1.0, "shake": 0.0}
    head = head_for(target, vocab_of(range(24)), kind=kind, **common, **settings).train()
    optimizer = torch.optim.AdamW(head.parameters(), lr=3e-3, weight_decay=0.0)
    starts = torch.randperm(24, generator=torch.Generator().manual_seed(0))
    for step in range(NUM_STEPS):
        optimizer.param_groups[0]["lr"] = 4e-3 * (1 - step / NUM_STEPS)
        output = forward(head, target, counting(starts.roll(6 * step)[:6]))
        optimizer.zero_grad()
        (output.loss_sum / output.token_count).backward()
        optimizer.step()
    found = forward(head.eval(), target, counting(torch.arange(24)))
    assert found.scored.tolist() == [24 * 13, 24 * 12, 24 * 11]
    assert (found.hits[:, 0] >= 0.99 * found.scored).all(), found.accuracy(1)
