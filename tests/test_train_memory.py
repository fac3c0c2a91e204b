"""States kept in memory: the same training as without, to the bit, and fewer forwards of the target."""

from __future__ import annotations

import pytest
import tiny
import torch
import train_cases as cases
from accelerate import Accelerator

from headstart.data.packing import TokenBatch
from headstart.heads.store import build_head
from headstart.train.calibrate import Phase, seconds_of, steps_for, steps_within
from headstart.train.features import OnlineFeatures
from headstart.train.train_module import TrainModule
from headstart.train.wrap import wrap
from headstart.train.wrapping import Wrapped

SETTINGS = ("train.max_steps=20", "train.save_every=7", "train.eval_every=null", "data.packing=false")


def batch(*lengths: int, width: int = 12) -> TokenBatch:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 250, (len(lengths), width), generator=generator)
    places = torch.arange(width).expand(len(lengths), width)
    inside = places < torch.tensor(lengths)[:, None]
    return TokenBatch(ids * inside, inside, places * inside, torch.where(inside, 0, -1))


def test_states_are_those_of_a_plain_forward_and_padding_is_zero():
    target = tiny.target("llama", dtype=torch.float64)
    padded = batch(12, 5)
    memory = OnlineFeatures(target, (2,), 1 << 30)
    for features in (memory(padded), memory(padded)):  # fresh, then remembered
        plain = target.forward(padded.input_ids, padded.position_ids, target.masks(*padded.attention()), layers=(2,))
        for ours, theirs in [(features.final, plain.final), (features.taps[2], plain.taps[2])]:
            torch.testing.assert_close(ours[0], theirs[0])
            torch.testing.assert_close(ours[1, :5], theirs[1, :5])
            assert not ours[1, 5:].any()


def test_a_sequence_seen_again_costs_no_forward_until_memory_is_full(monkeypatch):
    target = tiny.target("llama")
    calls = []
    forward = target.forward
    monkeypatch.setattr(target, "forward", lambda *words, **named: calls.append(1) or forward(*words, **named))
    memory = OnlineFeatures(target, (), max_bytes=12 * 64 * 4)  # one sequence of 12 tokens of 64 numbers in fp32
    for _ in range(3):
        memory(batch(12, 7))
    assert len(calls) == 1 + 3 and memory.num_bytes == memory.max_bytes


def test_training_with_memory_resumes_to_the_bit_and_remembers_nothing_wrong(tmp_path):
    recipe = cases.recipe(*SETTINGS, "train.feature_memory=1")
    cases.training(tmp_path / "straight", recipe).finish()
    few = cases.recipe(*SETTINGS, "train.feature_memory=0.0000001")  # no room for a single sequence
    cases.training(tmp_path / "forgetful", few).finish()
    assert cases.losses(tmp_path / "straight") == cases.losses(tmp_path / "forgetful")
    for name, value in cases.weights(tmp_path / "straight/head").items():
        assert torch.equal(value, cases.weights(tmp_path / "forgetful/head")[name])


def nothing_to_put_back() -> Wrapped:
    """A module that the trial steps, which do nothing, leave as it is."""
    target = tiny.target()
    head = build_head(cases.recipe().head, target)
    module = TrainModule(target, head, torch.float32)
    return wrap(Accelerator(cpu=True, mixed_precision="no"), module, torch.optim.AdamW(head.parameters()))


def test_a_budget_counts_later_epochs_by_what_they_cost():
    # 19 timed steps of 1 s fresh, then 19 of 0.25 s
    ticks = iter([0.0, 19.0, 100.0, 100.0 + 19 * 0.25])
    steps = steps_within(
        40.0, lambda share: lambda: None, wrapped=nothing_to_put_back(),
        epoch_steps=30, remembered=1.0, clock=lambda: next(ticks),
    )  # fmt: skip
    assert steps == 30 + 40


def test_a_budget_counts_every_phase_of_a_curriculum_by_what_it_costs():
    shared = {"wrapped": nothing_to_put_back()}
    begun = []

    def trial(share: float):
        begun.append(share)
        return lambda: None

    # 19 timed steps of 1 s in the first quarter, then 19 of 3 s
    ticks = iter([0.0, 19.0, 100.0, 100.0 + 19 * 3])
    steps = steps_within(100.0, trial, **shared, phases=(0.25, 1.0), clock=lambda: next(ticks))
    assert steps == 40 and begun == [0.0, 0.25]  # 10 steps of 1 s and 30 of 3 s

    # with memory: first 1.5 s, the target's half second included, then 1 s and 3 s without it
    ticks = iter([0.0, 19 * 1.5, 0.0, 19.0, 0.0, 19 * 3.0])
    steps = steps_within(
        105.0, trial, **shared, phases=(0.25, 1.0), epoch_steps=10, remembered=1.0, clock=lambda: next(ticks)
    )
    assert steps == 40 and begun[2:] == [0.0, 0.0, 0.25]


@pytest.mark.parametrize("epoch_steps", [0, 7, 30, 1000])
@pytest.mark.parametrize("phases", [[(1.0, 2.0, 1.0)], [(0.3, 2.0, 1.0), (0.5, 4.0, 3.0), (1.0, 8.0, 7.0)]])
def test_the_whole_cost_is_a_sum_over_steps(epoch_steps, phases):
    made = [Phase(*values) for values in phases]
    for steps in (10, 50, 400):
        by_step = 0.0
        for step in range(steps):
            phase = next(phase for phase in made if step < phase.until * steps)
            by_step += phase.fresh if step < epoch_steps else phase.later
        assert seconds_of(float(steps), made, epoch_steps) == pytest.approx(by_step)
        assert steps_for(by_step, made, epoch_steps) == steps
