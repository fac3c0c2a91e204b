"""Activation checkpointing: the same losses and gradients, and fewer activations kept."""

from __future__ import annotations

import pytest
import tiny
import torch
import train_cases as cases

from headstart.data.packing import collate
from headstart.heads.store import build_head
from headstart.train.random_state import seed_everything
from headstart.train.train_module import TrainModule

HEADS = {
    "medusa": ("head.num_layers=3", "head.dropout=0"),
    "eagle3": ("head={type: eagle3, unrolled_steps: 3}",),
    "draft": ("head={type: draft, num_layers: 2}",),
}


def step(head_settings: tuple[str, ...], recomputes: bool) -> tuple[float, dict[str, torch.Tensor], int]:
    """Loss, gradients, and the numbers that autograd kept for the backward pass."""
    target = tiny.target()
    seed_everything(0)
    head = build_head(cases.recipe(*head_settings).head, target)
    if recomputes:
        head.recompute_activations()
    module = TrainModule(target, head, torch.float32).train()
    rows, kept = cases.random_rows(4), []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor.numel()) or tensor, lambda t: t):
        loss = module(collate(rows, [[0], [1], [2], [3]])).loss_sum
    loss.backward()
    gradients = {name: one.grad for name, one in head.named_parameters() if one.grad is not None}
    return float(loss.detach()), gradients, sum(kept)


@pytest.mark.parametrize("kind", HEADS)
def test_the_same_gradients_with_less_kept(kind):
    loss, gradients, kept = step(HEADS[kind], False)
    again, twins, fewer = step(HEADS[kind], True)
    assert again == loss and fewer < kept and gradients.keys() == twins.keys()
    for name, gradient in gradients.items():
        assert torch.equal(twins[name], gradient), name


def test_the_recipe_turns_it_on(tmp_path):
    made = cases.recipe("train.max_steps=2", "train.activation_checkpointing=true", "head.dropout=0")
    training = cases.training(tmp_path / "run", made)
    assert all(block.recomputes for block in training.head.get_submodule("blocks").children())
    training.finish()
    plain = cases.training(tmp_path / "plain", cases.recipe("train.max_steps=2", "head.dropout=0"))
    plain.finish()
    assert cases.losses(tmp_path / "run") == cases.losses(tmp_path / "plain")
