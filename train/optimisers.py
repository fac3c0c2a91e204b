"""What turns gradients into steps: AdamW, or Muon for the matrices with AdamW for the rest.

    optimizer = make_optimizer(recipe.train, head)

Either way the loop holds one optimiser: one list of groups whose rate it sets, one state that a checkpoint keeps.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from headstart.recipe import TrainSection

BETAS = (0.9, 0.95)
"""As the published heads have it: runs are short, and gradients shrink a lot in their first steps."""
MOMENTUM = "momentum_buffer"
"""What torch's Muon calls its one state."""


def make_optimizer(
    settings: TrainSection, head: nn.Module, adapters: Iterable[nn.Parameter] = ()
) -> torch.optim.Optimizer:
    """The optimiser that the recipe names, over the head's parameters, of which only matrices are decayed, and over
    those of the adapters (AdamW only), in a group marked `adapters` that has a rate of its own."""
    named = list(head.named_parameters())
    if settings.optimizer == "adamw":
        decayed = [parameter for name, parameter in named if parameter.dim() > 1 and not name.endswith("bias")]
        groups = _two_groups(named, decayed, settings.weight_decay)
        if of_adapters := list(adapters):
            groups.append({"params": of_adapters, "weight_decay": 0.0, "adapters": True})
        return torch.optim.AdamW(groups, lr=settings.lr, betas=BETAS, fused=True)
    matrices = [parameter for name, parameter in named if is_inner_matrix(name, parameter)]
    first, rest = _two_groups(named, matrices, settings.weight_decay)
    return MuonAndAdamW(first["params"], rest["params"], lr=settings.lr, weight_decay=settings.weight_decay)


def is_inner_matrix(name: str, parameter: Tensor) -> bool:
    """Whether a parameter is a matrix between states, or a stack of such: what Muon is for. Output rows belong to
    tokens, each with its own scale, and are left to AdamW, as are gains and biases."""
    return parameter.dim() >= 2 and name.rpartition(".")[2] == "weight"


class MuonAndAdamW(torch.optim.Optimizer):
    """torch's own Muon (https://kellerjordan.github.io/posts/muon/; in torch since 2.9) for `matrices`, AdamW for the
    others, as one optimiser.

    Muon's update is scaled to the size of AdamW's (0.2 * sqrt(longest side), https://arxiv.org/abs/2502.16982), so one
    rate serves both. A stack of matrices [n, rows, columns] is n matrices, each orthogonalised by itself. State per
    parameter: Muon's `momentum_buffer`, or AdamW's three. Newton-Schulz costs about 20 products of the matrix with
    itself a step, whatever the batch: with small batches on a CPU that is as much as the step itself.
    """

    def __init__(self, matrices: Sequence[Tensor], others: Sequence[Tensor], *, lr: float, weight_decay: float):
        # the defaults of every key that either of the two looks for in its groups
        muon = torch.optim.Muon([torch.zeros(1, 1)], lr=lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw")
        self._muon = muon
        self._adamw = torch.optim.AdamW([torch.zeros(1)], lr=lr, weight_decay=0.0, betas=BETAS, fused=True)
        groups = [
            {**muon.defaults, "params": list(matrices), "method": "muon"},
            {**self._adamw.defaults, "params": list(others), "method": "adamw"},
        ]
        super().__init__([group for group in groups if group["params"]], {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """One update of every parameter that has a gradient."""
        assert closure is None, "the loop has run its forwards before"
        for group in self.param_groups:
            if group["method"] == "muon":
                self._muon_step(group)
            else:
                self._adamw.param_groups, self._adamw.state = [group], self.state
                self._adamw.step()

    def _muon_step(self, group: dict[str, Any]) -> None:
        """torch's Muon takes matrices alone, so it is handed views: of the weight, of its gradient and of the momentum
        that this optimiser keeps. Made anew each time, since a module may move its weights after it was built."""
        views = []
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            state = self.state[parameter]
            if MOMENTUM not in state:
                state[MOMENTUM] = torch.zeros_like(parameter)
            together = zip(*map(_matrices, (parameter.detach(), parameter.grad, state[MOMENTUM])), strict=True)
            for view, gradient, momentum in together:
                view.grad = gradient
                self._muon.state[view] = {MOMENTUM: momentum}
                views.append(view)
        self._muon.param_groups = [{**group, "params": views}]
        self._muon.step()
        # else the views would keep this step's gradients through the next one
        self._muon.state.clear()
        self._muon.param_groups = []


def _two_groups(named: Sequence[tuple[str, Tensor]], first: Sequence[Tensor], decay: float) -> list[dict[str, Any]]:
    chosen = {id(parameter) for parameter in first}
    rest = [parameter for _, parameter in named if id(parameter) not in chosen]
    return [{"params": list(first), "weight_decay": decay}, {"params": rest, "weight_decay": 0.0}]


def _matrices(tensor: Tensor) -> Iterator[Tensor]:
    """The matrices of a stack, as views."""
    yield from tensor.flatten(0, -3) if tensor.dim() > 2 else [tensor]
