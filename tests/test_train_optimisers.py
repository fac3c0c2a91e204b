"""Optimisers: Muon for matrices and AdamW for the rest behave as torch's own two do, and as one while saved."""

from __future__ import annotations

import copy

import pytest
import tiny
import torch
import train_cases as cases
from test_train_resume import run_stopped_at, same_bits
from torch import nn

from headstart.heads.configs import MedusaConfig
from headstart.heads.store import build_head
from headstart.recipe import TrainSection
from headstart.train.optimisers import BETAS, MuonAndAdamW, is_inner_matrix, make_optimizer

MUON = TrainSection(optimizer="muon", lr=1e-2, weight_decay=0.1)


class Mixed(nn.Module):
    """One parameter of every kind that heads have: a matrix, a stack of matrices, a gain, a bias, output rows."""

    def __init__(self):
        super().__init__()
        draw = torch.Generator().manual_seed(0)
        self.fc = nn.Linear(8, 6, bias=True)
        self.blocks = nn.Linear(1, 1, bias=False)
        self.blocks.weight = nn.Parameter(torch.randn(3, 6, 6, generator=draw))
        self.norm = nn.LayerNorm(6, bias=False)
        self.output_weight = nn.Parameter(torch.randn(10, 6, generator=draw))
        with torch.no_grad():
            self.fc.weight.copy_(torch.randn(6, 8, generator=draw))
            self.fc.bias.zero_()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        states = self.norm(self.fc(inputs))
        for block in self.blocks.weight:
            states = states + torch.tanh(states @ block.T)
        return states @ self.output_weight.T


def take_steps(module: nn.Module, optimizers: list[torch.optim.Optimizer], count: int, first: int = 0) -> None:
    for step in range(first, first + count):
        inputs = torch.randn(5, 8, generator=torch.Generator().manual_seed(step))
        module.zero_grad()
        module(inputs).pow(2).mean().backward()
        for optimizer in optimizers:
            optimizer.step()


def test_muon_takes_the_matrices_and_adamw_the_rest_each_as_torch_has_it():
    ours, theirs = Mixed(), Mixed()
    take_steps(ours, [make_optimizer(MUON, ours)], 4)
    stack = [nn.Parameter(block.detach().clone()) for block in theirs.blocks.weight]
    muon = torch.optim.Muon([theirs.fc.weight, *stack], lr=1e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    rest = [theirs.fc.bias, theirs.norm.weight, theirs.output_weight]
    adamw = torch.optim.AdamW(rest, lr=1e-2, weight_decay=0.0, betas=BETAS)
    for step in range(4):
        take_steps(theirs, [], 1, first=step)
        assert theirs.blocks.weight.grad is not None
        for number, block in enumerate(stack):
            block.grad = theirs.blocks.weight.grad[number].clone()
        muon.step()
        adamw.step()
        with torch.no_grad():
            theirs.blocks.weight.copy_(torch.stack([*stack]))
    for (name, parameter), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(parameter, other), name


def test_only_matrices_are_decayed():
    for name in ("adamw", "muon"):
        module = Mixed()
        optimizer = make_optimizer(TrainSection(optimizer=name, weight_decay=0.1), module)
        decays = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
        assert len(decays) == len(list(module.parameters())), "every parameter once"
        assert decays[id(module.fc.weight)] == decays[id(module.blocks.weight)] == 0.1
        assert decays[id(module.norm.weight)] == decays[id(module.fc.bias)] == 0.0


def test_the_kinds_of_a_head():
    head = build_head(MedusaConfig(num_heads=2, output="low-rank", rank=4), tiny.target())
    inner = {name for name, parameter in head.named_parameters() if is_inner_matrix(name, parameter)}
    assert inner == {"blocks.0.weight"}, "biases of a stack have two axes and are none"


def test_one_state_goes_on_where_it_was_saved():
    straight = Mixed()
    optimizer = make_optimizer(MUON, straight)
    take_steps(straight, [optimizer], 3)
    stopped, saved = copy.deepcopy(straight), copy.deepcopy(optimizer.state_dict())
    take_steps(straight, [optimizer], 3, first=3)

    again = make_optimizer(MUON, stopped)
    again.load_state_dict(saved)
    take_steps(stopped, [again], 3, first=3)
    for parameter, other in zip(straight.parameters(), stopped.parameters(), strict=True):
        assert torch.equal(parameter, other)
    forgetful = copy.deepcopy(straight)
    take_steps(straight, [optimizer], 1)
    take_steps(forgetful, [make_optimizer(MUON, forgetful)], 1)
    assert not torch.equal(straight.fc.weight, forgetful.fc.weight), "momentum has its part in that"


def test_the_rate_of_the_groups_is_the_rate_of_both():
    module = Mixed()
    optimizer = make_optimizer(MUON, module)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    before = copy.deepcopy(module.state_dict())
    take_steps(module, [optimizer], 2)
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name])


def test_a_parameter_without_gradient_stays_and_has_no_state():
    module = Mixed()
    optimizer = make_optimizer(MUON, module)
    assert isinstance(optimizer, MuonAndAdamW)
    before = module.fc.weight.clone()
    optimizer.step()
    assert torch.equal(module.fc.weight, before) and not optimizer.state


@pytest.mark.parametrize("output", ["shared", "own"])
def test_a_run_with_muon_resumes_to_the_bit(tmp_path, output):
    settings = ("train.optimizer=muon", "train.weight_decay=0.1", f"head.output={output}", "train.save_every=5")
    recipe = cases.recipe(*settings)
    cases.training(tmp_path / "straight", recipe).finish()
    run_stopped_at(tmp_path / "resumed", recipe, 5)
    cases.training(tmp_path / "resumed", recipe, resume=True).finish()
    same_bits(tmp_path / "straight", tmp_path / "resumed")
