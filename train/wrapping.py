"""The trained module and its optimiser as the mode of the launch has them, behind one set of calls.

    wrapped = wrap(accelerator, TrainModule(target, head, torch.bfloat16), optimizer)
    totals = wrapped.accumulate(batches)              # gradients of all micro-batches, exchanged once
    norm = wrapped.update(scale, rate=1e-3, clip=0.5)
    wrapped.whole_head()                              # to save, to draft with: gathered where it is sharded

What a checkpoint keeps of head and optimiser is laid out alike in all modes: whole tensors under the names of the
head's parameters. Every method is a step of all ranks together.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.distributed.tensor import DTensor, distribute_tensor

from headstart.borrowed import read_weight
from headstart.data.packing import TokenBatch
from headstart.errors import TrainingError
from headstart.heads.base import Head
from headstart.train.modes import DDP, FSDP2, SHARDED, mode
from headstart.train.train_module import Totals, TrainModule

Result = TypeVar("Result")


class Wrapped:
    """One process, DDP and FSDP2, where torch's own optimiser holds the head's parameters, or its shards of them.

    module: what is called. head: as it was built, with shards in the place of parameters where the mode shards it.
    rank, world_size: of those that read different rows. leads: whether this process is the first of its `rank`.
    """

    def __init__(self, accelerator: Accelerator, module: TrainModule, optimizer: torch.optim.Optimizer, group: int = 1):
        """group: how many processes in a row hold one target between them, and so read the same rows."""
        self.accelerator, self.head, self.mode = accelerator, module.head, mode(accelerator)
        self.group, self.rank = group, accelerator.process_index // group
        self.world_size = accelerator.num_processes // group
        self.leads = accelerator.process_index % group == 0
        self.sharded, self.joint = self.mode in SHARDED, module.joint
        self._whole = copy.deepcopy(self.head).cpu().eval() if self.sharded else None
        self.module: Any
        self.optimizer: Any
        self.module, self.optimizer = self._prepare(module, optimizer)

    def _prepare(self, module: TrainModule, optimizer: torch.optim.Optimizer) -> tuple[Any, Any]:
        if self.mode == FSDP2:
            _wrap_layers_of(self.accelerator, module)
        elif self.mode == DDP:  # every process has read the target itself: it need not be sent to all
            # nor adapters, which learn in the second stage only: `_exchange` sees to their gradients
            ignored = [name for name, _ in module.named_parameters() if not name.startswith("head.")]
            nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ignored)
        return self.accelerator.prepare(module, optimizer)

    # -- one step ----------------------------------------------------------------------------------------------------

    def accumulate(self, batches: Sequence[TokenBatch]) -> Totals:
        """Forward and backward of this rank's micro-batches; its own totals. The gradients are the means over ranks of
        the sums over micro-batches, and stay at home until the last one."""
        self.optimizer.zero_grad(set_to_none=True)
        totals = []
        for number, batch in enumerate(batches, 1):
            with nullcontext() if number == len(batches) else self.accelerator.no_sync(self.module):
                output = self.module(batch)
                self.accelerator.backward(output.loss_sum)
            totals.append(Totals.of(output, batch))
        if self.joint is not None and self.joint.active and self.accelerator.num_processes > 1:
            _exchange(self.accelerator, list(self.joint.adapters.parameters.values()))
        return sum(totals[1:], totals[0])

    def update(self, scale: float, *, rate: float, clip: float | None, adapter_rate: float = 0.0) -> float:
        """Scales the gradients, clips and steps. Returns their norm before clipping; where it is not finite, nothing
        has changed. adapter_rate: of the adapters, which a rate of 0 leaves as they are."""
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(scale)
        found: Any = self.accelerator.clip_grad_norm_(parameters, math.inf if clip is None else clip)
        norm = float(_whole(found))
        if math.isfinite(norm):
            for group in self.optimizer.param_groups:
                group["lr"] = adapter_rate if group.get("adapters") else rate
            self.optimizer.step()
        return norm

    def broken_gradients(self) -> list[str]:
        """Names of parameters whose gradient is not finite, as far as this process can tell."""
        return [
            name
            for name, parameter in self._trained().items()
            if parameter.grad is not None and not torch.isfinite(_local(parameter.grad)).all()
        ]

    # -- beside the steps --------------------------------------------------------------------------------------------

    def inside(self, work: Callable[[], Result]) -> Result:
        """`work()` where the target can be run: with sharded weights, within the forward that gathers them. Nothing is
        learnt there."""
        if not self.sharded:
            return work()
        results: list[Result] = []
        with torch.no_grad():
            self.module(lambda: results.append(work()))
        return results[0]

    def whole_head(self) -> Head:
        """The head with its whole weights: itself, or a copy on the CPU where it is sharded."""
        if self._whole is None:
            return self.head
        self._whole.load_state_dict(self.head_state())
        return self._whole

    def head_state(self) -> dict[str, Tensor]:
        """A copy of the head's whole state."""
        if isinstance(self.module, FSDPModule):
            self.module.reshard()  # after an evaluation the root's parameters are still gathered
        return {name: _whole(value.detach()).clone() for name, value in self.head.state_dict().items()}

    @torch.no_grad()
    def load_head_state(self, state: dict[str, Tensor]) -> None:
        """The inverse of `head_state`."""
        if isinstance(self.module, FSDPModule):
            self.module.reshard()
        for name, value in self.head.state_dict().items():
            value.copy_(_laid_out_like(value, state[name]))

    def adapter_state(self) -> dict[str, Tensor]:
        """A copy of the adapters' weights, as PEFT names them; empty where the target is frozen."""
        return {} if self.joint is None else self.joint.adapters.state()

    def load_adapter_state(self, state: dict[str, Tensor]) -> None:
        """The inverse of `adapter_state`."""
        if self.joint is not None:
            self.joint.adapters.load_state(state)

    def _trained(self) -> dict[str, nn.Parameter]:
        """All that the optimiser holds, by name."""
        adapters = {} if self.joint is None else self.joint.adapters.parameters
        return {**dict(self.head.named_parameters()), **{f"adapter.{name}": value for name, value in adapters.items()}}

    def optimizer_tensors(self) -> dict[str, Tensor]:
        """The optimiser's whole state as `{state/parameter: tensor}`; every value of torch's optimisers is a tensor."""
        if isinstance(self.module, FSDPModule):
            self.module.reshard()
        names = {parameter: name for name, parameter in self._trained().items()}
        return {
            f"{key}/{names[parameter]}": _whole(value.detach()).clone().contiguous()
            for parameter, values in self.optimizer.state.items()
            for key, value in values.items()
        }

    def load_optimizer_tensors(self, tensors: dict[str, Tensor]) -> None:
        """The inverse of `optimizer_tensors`; the optimiser holds its parameters in the order it was given them."""
        if isinstance(self.module, FSDPModule):
            self.module.reshard()
        names = {parameter: name for name, parameter in self._trained().items()}
        ordered = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        places = {names[parameter]: place for place, parameter in enumerate(ordered)}
        state: dict[int, dict[str, Tensor]] = {}
        for name, values in by_parameter(tensors, places).items():
            like = ordered[places[name]]
            state[places[name]] = {
                key: _laid_out_like(like, value) if value.shape == like.shape else value
                for key, value in values.items()
            }
        self.optimizer.load_state_dict({"state": state, "param_groups": self.optimizer.state_dict()["param_groups"]})


def by_parameter(tensors: dict[str, Tensor], known: Any) -> dict[str, dict[str, Tensor]]:
    """`{state/parameter: tensor}` as parameter -> state -> tensor. Raises TrainingError for an unknown parameter."""
    sorted_out: dict[str, dict[str, Tensor]] = {}
    for key_and_name, value in tensors.items():
        key, name = key_and_name.split("/", 1)
        if name not in known:
            raise TrainingError(f"the checkpoint's optimiser knows a parameter {name} that this head has not")
        sorted_out.setdefault(name, {})[key] = value
    return sorted_out


def _exchange(accelerator: Accelerator, parameters: list[nn.Parameter]) -> None:
    """Replaces the gradients by their means over ranks, in one transfer."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    flat: Any = accelerator.reduce(torch.cat([gradient.flatten() for gradient in gradients]), reduction="mean")
    for gradient, part in zip(gradients, flat.split([gradient.numel() for gradient in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))


def full_size(parameter: Tensor) -> int:
    """Numbers in a parameter, those of other processes too."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def _wrap_layers_of(accelerator: Accelerator, module: TrainModule) -> None:
    """FSDP2 gathers decoder layer by decoder layer, whatever the architecture calls them; with offline features there
    are none, and all is one unit."""
    plugin = accelerator.state.fsdp_plugin
    assert plugin is not None
    plugin.transformer_cls_names_to_wrap = sorted(
        {type(layer).__name__ for layer in module.decoder_layers() if next(layer.parameters(), None) is not None}
    )
    plugin.auto_wrap_policy = transformer_auto_wrap_policy if plugin.transformer_cls_names_to_wrap else None


def _whole(tensor: Tensor) -> Tensor:
    return read_weight(tensor) if isinstance(tensor, DTensor) else tensor


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _laid_out_like(like: Tensor, value: Tensor) -> Tensor:
    """A whole tensor, cut as `like` is."""
    if not isinstance(like, DTensor):
        return value
    return distribute_tensor(value.to(like.device, like.dtype), like.device_mesh, like.placements)
