"""The search for blocks to leave out: its agreement is that of the drafter step by step, its choice the best."""

from __future__ import annotations

import functools
import itertools

import pytest
import stubs
import tiny
import torch
from test_decode_skip import SOME, tuned

from headstart.data.rendering import Row
from headstart.decode.drafters.base import Request
from headstart.decode.drafters.layer_skip import SkippingDrafter
from headstart.decode.engine import Engine
from headstart.decode.skip_search import SkipCosts, forecast, measure_skip_costs, search_skips
from headstart.decode.skips import Skips
from headstart.errors import HeadstartError
from headstart.target import Target

COSTS = SkipCosts(draft=1.0, attention=0.1, mlp=0.14, verify=(1.0, 1.05, 1.1, 1.2, 1.4))


@functools.lru_cache
def target_of(family: str) -> Target:
    return tuned(family)


def rows_of(family: str, num_rows: int = 4, length: int = 22) -> list[Row]:
    """Greedy answers behind prompts of two tokens and more."""
    prompts = stubs.prompts_of(range(2, 2 + num_rows), 256)
    answers = stubs.plain_answers(tuned(family).model, prompts, length)
    return [
        Row(str(number), prompt + answer, [False] * len(prompt) + [True] * len(answer))
        for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
    ]


class Told(Engine):
    """Forgets what was drafted of all steps but for the first drafts, and goes on by one token."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.drafts: list[int] = []

    def _fit(self, tree):
        self.drafts.append(int(tree.tokens[0, 1]))
        return super()._fit(tree)

    def _end(self, row, verdict):
        verdict.tokens[1:], verdict.path[1:] = [], []
        return super()._end(row, verdict)


@pytest.mark.parametrize("family", ["llama", "hyb", "gpt2"])
def test_agreement_is_that_of_the_drafter_at_every_position(family):
    """The drafter itself proposes behind every prefix of the answer. One row: it is judged on what it is found on."""
    target, (row, *_) = target_of(family), rows_of(family, 1)
    found = search_skips(target, [row], COSTS, tries=1)
    assert found.skips == Skips(attention=(0,)) and found.tries == 1 and found.positions == 22
    engine = Told(target, SkippingDrafter(target, found.skips, 1))
    (answer,) = engine.generate([Request(prompt_ids=row.input_ids[:2], max_new_tokens=22, ignore_end=True)])
    assert answer.token_ids == row.input_ids[2:] and len(engine.drafts) == 22
    right = sum(draft == token for draft, token in zip(engine.drafts, answer.token_ids, strict=True))
    assert found.agreement == pytest.approx(right / 22)


def test_the_best_set_of_all_is_found():
    """Two layers: sixteen sets, all of which can be looked at."""
    target = tiny.target("llama", dtype=torch.float64, num_hidden_layers=2)
    with torch.no_grad():
        target.layers[1].mlp.down_proj.weight.mul_(0.02)  # says next to nothing
    rows = [
        Row(str(number), prompt, [False] + [True] * 11) for number, prompt in enumerate(stubs.prompts_of([12] * 4, 256))
    ]
    seen = []
    found = search_skips(target, rows, COSTS, tries=16, progress=lambda: seen.append(1))
    assert found == search_skips(target, rows, COSTS, tries=16) and len(seen) == found.tries <= 16
    assert 1 in found.skips.mlp
    worths = {}
    subsets = [(), (0,), (1,), (0, 1)]
    for attention, mlp in itertools.product(subsets, subsets):
        skips = Skips(attention, mlp)
        share = one_by_one(target, rows[::2], skips)
        lengths = range(1, 5)
        worths[skips] = max(
            sum(share**depth for depth in range(k + 1)) / (COSTS.verify[k] + k * COSTS.of_draft(skips)) for k in lengths
        )
    assert worths[found.skips] == pytest.approx(max(worths.values()))
    assert found.agreement == pytest.approx(one_by_one(target, rows[1::2], found.skips))
    assert (found.length, found.speedup) == forecast(found.skips, found.agreement, COSTS)


def one_by_one(target: Target, rows: list[Row], skips: Skips) -> float:
    """The share of right first drafts, prefix by prefix: the text before the root read in full, the root in part."""
    drafter, right, total = SkippingDrafter(target, skips, 1), 0, 0
    for row in rows:
        for length in range(1, len(row.input_ids)):
            engine = Engine(target, drafter)
            engine._join([Request(prompt_ids=row.input_ids[:length], max_new_tokens=1)])
            with torch.no_grad():
                draft = int(drafter.propose(engine.rows, 2).tokens[0, 1])
                logits = target.model(torch.tensor([row.input_ids[:length]]), use_cache=False).logits
            right += draft == int(logits[0, -1].argmax())
            total += 1
    return right / total


def test_the_forecast_is_the_closed_form():
    for share in (0.0, 0.5, 0.9, 1.0):
        draft = 1 - 2 * COSTS.attention - 2 * COSTS.mlp
        by_length = {k: sum(share**depth for depth in range(k + 1)) / (COSTS.verify[k] + k * draft) for k in range(5)}
        length, speedup = forecast(SOME, share, COSTS)
        assert speedup == pytest.approx(max(by_length.values())) and by_length[length] == pytest.approx(speedup)
    assert forecast(SOME, 0.0, COSTS) == (0, 1.0)


def test_costs_are_measured_in_plain_steps():
    costs = measure_skip_costs(tiny.target("llama"), length=2, steps=4)
    assert costs.verify[0] == 1.0 and len(costs.verify) == 9 and costs.draft > 0
    assert costs.attention >= 0 and costs.mlp >= 0 and costs.of_draft(Skips((0, 1, 2, 3), (0, 1, 2, 3))) >= 0


def test_rows_without_labels_are_refused():
    target = target_of("llama")
    with pytest.raises(HeadstartError, match="the rows have no label; give others"):
        search_skips(target, [Row("0", [1, 2, 3], [False] * 3), Row("1", [1], [True])], COSTS)
    with pytest.raises(HeadstartError, match="a search of 0 tries"):
        search_skips(target, rows_of("llama", 1), COSTS, tries=0)
