"""EAGLE heads in the decoder: exact whatever they draft, drafting what they were trained to, from true pairs alone."""

from __future__ import annotations

import pytest
import torch
from eagle_cases import (
    KINDS,
    PROMPT_LENGTHS,
    decode,
    features_of,
    learnt,
    plain,
    requests,
    target_of,
    text_batch,
    texts,
    unroll_text,
)
from head_cases import vocab_of
from stubs import assert_all_close, chain, full_tree

from headstart.decode.drafters.base import NoDraft, Rows, take
from headstart.decode.drafters.eagle import EagleDrafter
from headstart.decode.drafters.heads import head_drafter
from headstart.decode.drafters.medusa import MedusaDrafter
from headstart.decode.drafters.plans import DynamicTree, SampledChain, StaticTree
from headstart.decode.engine import Engine
from headstart.errors import HeadstartError
from headstart.eval.acceptance import count_steps
from headstart.heads.configs import Eagle3Config, MedusaConfig
from headstart.heads.store import build_head

SPARSE = [(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (2, 3), (0, 0, 0, 1)]
PLANS = {
    "chain": chain(4),
    "full": full_tree(3, 3),
    "sparse": SPARSE,
    "empty": [],
    "stopping": StaticTree(paths=SPARSE, stop_below=0.3),
    "dynamic": DynamicTree(depth=4, width=3, num_nodes=12),
    "dynamic-stopping": DynamicTree(depth=5, width=3, num_nodes=20, stop_below=0.2),
    "drawn": SampledChain(length=4),
    "drawn-stopping": SampledChain(length=6, stop_below=0.4),
}


class WatchedEngine(Engine):
    """After every step, compares the drafter's cache and states with those of a drafter that reads the text anew."""

    watched = 0

    def _step(self):
        finished = super()._step()
        drafter = self.drafter
        assert isinstance(drafter, EagleDrafter)
        pairs = drafter._pairs
        assert pairs.cache.lengths == [len(ids) - 1 for ids in self.rows.ids]
        same = []
        for row, ids in enumerate(self.rows.ids):
            fresh = drafter._new_pairs()
            fresh.join(1, 1, len(ids))
            features = features_of(drafter.head, self.target, text_batch(ids))
            fresh.append(0, [ids], [len(ids) - 1], take(features, slice(None), slice(len(ids) - 1)))
            for layer in range(drafter.head.num_layers):
                same += zip(pairs.cache.read(layer, row), fresh.cache.read(layer, 0), strict=True)
            same += [(pairs.output[row], fresh.output[0]), (pairs.carried[row], fresh.carried[0])]
            self.watched += 1
        if same:
            assert_all_close(same, 1e-9)
        return finished


@pytest.mark.parametrize(
    ("kind", "plan"),
    [("eagle3", plan) for plan in PLANS] + [("eagle", plan) for plan in ("chain", "sparse", "dynamic", "drawn")],
)
def test_the_text_is_the_targets_own_and_rows_draft_the_same_in_any_batch(kind, plan):
    """Prompts of 1 to 14 tokens, rows that leave and make room; acceptance is the row's own as well as the text."""
    target = target_of()
    alone, together = (
        decode(target, EagleDrafter(learnt(kind, small=True), target, PLANS[plan]), requests(), batch_size=size)
        for size in (1, 3)
    )
    assert texts(alone) == texts(together) == plain()
    for one, other in zip(alone, together, strict=True):
        assert [(step.accepted, step.nodes) for step in one.steps] == [
            (step.accepted, step.nodes) for step in other.steps
        ]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("plan", ["sparse", "dynamic", "drawn"])
def test_the_cache_holds_true_pairs_of_the_accepted_prefix(kind, plan):
    """B60, B63: after each step, in a batch whose rows accept different numbers, with prompts read in chunks of 5."""
    target = target_of()
    engine = WatchedEngine(target, EagleDrafter(learnt(kind), target, PLANS[plan]), batch_size=3, prefill_chunk=5)
    out = sorted(engine.generate(requests()), key=lambda one: PROMPT_LENGTHS.index(one.request.request_id))
    assert texts(out) == plain() and engine.watched > 20
    assert sum(step.accepted for one in out for step in one.steps) > 10


def test_a_head_of_two_layers_is_exact_too():
    target = target_of()
    head = learnt("eagle3", num_layers=2)
    for plan in ("sparse", "dynamic"):
        engine = WatchedEngine(target, EagleDrafter(head, target, PLANS[plan]), batch_size=3)
        out = sorted(engine.generate(requests()), key=lambda one: PROMPT_LENGTHS.index(one.request.request_id))
        assert texts(out) == plain()


def test_own_output_rows_are_drafted_from():
    target = target_of()
    head = learnt("eagle3", output="own")
    out = decode(target, EagleDrafter(head, target, SPARSE), requests(), batch_size=3)
    assert texts(out) == plain() and sum(step.accepted for one in out for step in one.steps) > 10


@pytest.mark.parametrize("kind", KINDS)
def test_the_kth_draft_has_the_distribution_of_the_kth_unrolled_step_of_training(kind):
    target, head = target_of(), learnt(kind, small=True)
    seen: list[tuple[int, list[int], list[torch.Tensor]]] = []

    class Noting(EagleDrafter):
        def propose(self, rows: Rows, budget: int):
            self.noted: list[torch.Tensor] = []
            tree = super().propose(rows, budget)
            for row, ids in enumerate(rows.ids):
                logits = [one[row, 0, :40] for one in self.noted]
                seen.append((len(ids), ids + tree.tokens[row, 1:].tolist(), logits))
            return tree

        def _logits(self, output):
            logits = super()._logits(output)
            self.noted.append(logits.clone())
            return logits

    decode(target, Noting(head, target, chain(4)), requests(8, lengths=(2, 7, 14)), batch_size=3)
    assert len(seen) > 8
    for length, ids, logits in seen:
        expected = unroll_text(head, target, ids, 4)[length - 2]
        torch.testing.assert_close(torch.stack(logits), expected, rtol=1e-9, atol=1e-9)


class Prophet(EagleDrafter):
    """Drafts the target's own next tokens, or never one of them."""

    right = True

    def propose(self, rows: Rows, budget: int):
        self._asked, self._depth = rows, 0
        return super().propose(rows, budget)

    def _logits(self, output):
        logits = torch.zeros(*output.shape[:2], 264, dtype=torch.float64)
        answers = dict(zip(PROMPT_LENGTHS, plain(), strict=True))
        for row, request in enumerate(self._asked.requests):
            answer = answers[request.request_id]
            coming = answer[min(self._asked.num_new(row) + self._depth, len(answer) - 1)]
            logits[row, :, coming if self.right else (coming + 1) % 264] = 9.0
        self._depth += 1
        return logits


@pytest.mark.parametrize(
    ("plan", "depth"),
    [(chain(3), 3), (DynamicTree(depth=3, width=2, num_nodes=5), 3), (SampledChain(length=2), 2)],
)
def test_a_prophet_and_a_fool_bound_the_acceptance_length(plan, depth):
    target = target_of()
    asked = requests(lengths=(3, 14, 7))
    for right in (True, False):
        drafter = Prophet(learnt("eagle3"), target, plan)
        drafter.right = right
        if not right and isinstance(plan, DynamicTree):
            continue  # its second choices are every token in turn
        out = decode(target, drafter, asked, batch_size=3)
        assert count_steps(one.steps for one in out).acceptance_length == (depth + 1 if right else 1)


@pytest.mark.parametrize("kind", KINDS)
def test_drafting_goes_on_beyond_the_declared_positions(kind):
    """B39: 32 positions declared, a prompt of 40 tokens and 20 new ones; the drafts are those of a head without it."""
    target, asked = target_of(), requests(20, lengths=(40,))
    short, long = (head_drafter(learnt(kind, max_positions=count), target, SPARSE) for count in (32, None))
    assert short.head.config.max_positions == 32 and long.head.config.max_positions == 128
    drafted, other = (decode(target, drafter, asked) for drafter in (short, long))
    assert texts(drafted) == texts(other) == texts(decode(target, NoDraft(), asked))
    steps = [[step.accepted for step in each[0].steps] for each in (drafted, other)]
    assert steps[0] == steps[1]


def test_limits_ends_and_stops_are_kept():
    target, drafter = target_of(), PLANS["dynamic"]
    for new in (1, 2, 5):
        out = decode(target, EagleDrafter(learnt("eagle3"), target, drafter), requests(new), batch_size=2)
        assert texts(out) == [answer[:new] for answer in plain()]
        assert all(len(one.token_ids) <= new for one in out)
    stop = target.tokenizer.decode(plain()[0][6:8])
    asked = requests(stop=(stop,))
    ours = decode(target, EagleDrafter(learnt("eagle3"), target, drafter), asked, batch_size=5)
    theirs = decode(target, head_drafter(learnt("eagle3"), target, []), asked, batch_size=5)
    assert texts(ours) == texts(theirs) and [one.finish_reason for one in ours] == [one.finish_reason for one in theirs]
    assert ours[0].finish_reason == "stop"


def test_a_small_budget_takes_the_beginning_of_every_plan():
    target = target_of()
    for plan in ("sparse", "dynamic", "drawn"):
        for budget in (1, 2, 4):
            out = decode(target, EagleDrafter(learnt("eagle3"), target, PLANS[plan]), requests(), budget=budget)
            assert texts(out) == plain()
            assert max(step.nodes for one in out for step in one.steps) == budget


def test_the_widened_vocabulary_is_used_and_helps():
    target, counts = target_of(), {}
    for widen in (True, False):
        drafter = EagleDrafter(learnt("eagle", small=True), target, full_tree(3, 2), widen=widen)
        steps = [step for one in decode(target, drafter, requests()) for step in one.steps]
        counts[widen] = sum(step.accepted for step in steps)
    assert counts[True] > counts[False] > 0


def test_plans_that_cannot_be_drafted_are_refused_in_a_sentence():
    target = target_of()
    head = build_head(Eagle3Config(draft_vocab_size=8), target, vocab_of(range(8)))
    for paths, message in [
        ([(0,), (8,)], r"\[8\].*0 to 7"),
        ([(0,), (1, 0)], r"\[1, 0\] has no parent \[1\]"),
        ([(0,), (0,)], r"\[0\] stands twice"),
    ]:
        with pytest.raises(HeadstartError, match=message):
            EagleDrafter(head, target, paths)
    with pytest.raises(HeadstartError, match="width 0"):
        DynamicTree(depth=3, width=0, num_nodes=8)
    with pytest.raises(HeadstartError, match="stop_below=1.5"):
        SampledChain(length=3, stop_below=1.5)
    medusa = build_head(MedusaConfig(num_heads=2), target)
    assert isinstance(head_drafter(medusa, target, [(0,)]), MedusaDrafter)
    with pytest.raises(HeadstartError, match="static or a sampled tree"):
        head_drafter(medusa, target, DynamicTree(depth=2, width=2, num_nodes=4))


def test_the_head_in_training_is_not_touched():
    target = target_of()
    head = build_head(Eagle3Config(), target).train()
    drafter = EagleDrafter(head, target, SPARSE)
    assert head.training and next(head.parameters()).dtype == torch.float32
    assert next(drafter.head.parameters()).dtype == torch.float64 and not drafter.head.training
    assert drafter.num_parameters() == sum(parameter.numel() for parameter in head.parameters())
    before = drafter.num_bytes()
    decode(target, drafter, requests(4))
    assert drafter.num_bytes() > before >= 8 * drafter.num_parameters()
