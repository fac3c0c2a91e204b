"""The trained module under DeepSpeed: ZeRO-2 shards the head's gradients and optimiser, ZeRO-3 all weights as well.

DeepSpeed keeps flat vectors of its own in the place of the optimiser's parameters; `deepspeed.utils.safe_*` find in
them what belongs to a parameter. Of its engine only the parts are used in which its step is the loop's step: gradients
are exchanged once a step, clipped and divided by what the loop counted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.nn import functional

from headstart.data.packing import TokenBatch
from headstart.train.train_module import Totals, TrainModule
from headstart.train.wrapping import Wrapped, by_parameter

MOMENTS = ("exp_avg", "exp_avg_sq")
"""AdamW's states that have a number for every weight; the third, `step`, is one number for all."""


class ZeroWrapped(Wrapped):
    """As `Wrapped`; `module` is DeepSpeed's engine, which has the optimiser inside."""

    def _prepare(self, module: TrainModule, optimizer: torch.optim.Optimizer) -> tuple[Any, Any]:
        _configure(self.accelerator, sum(parameter.numel() for parameter in module.head.parameters()))
        if self.sharded:
            _shard(self.accelerator, module)
        prepared = self.accelerator.prepare(module, optimizer)
        self.zero: Any = prepared[0].optimizer
        self.base: torch.optim.Optimizer = self.zero.optimizer
        return prepared

    def accumulate(self, batches: Sequence[TokenBatch]) -> Totals:
        totals = []
        with self.module.coalesce_grad_reduction():
            for batch in batches:
                output = self.module(batch)
                self.module.backward(output.loss_sum)
                totals.append(Totals.of(output, batch))
        return sum(totals[1:], totals[0])

    def update(self, scale: float, *, rate: float, clip: float | None, adapter_rate: float = 0.0) -> float:
        assert self.joint is None and not adapter_rate, "refused by wrap"
        for group in self.base.param_groups:
            group["lr"] = rate
        self.zero.clip_grad = clip or 0.0
        self.zero.loss_scale = 1 / scale  # what DeepSpeed divides the gradients by, before it clips
        try:
            self.module.step()
        finally:
            self.zero.loss_scale = 1.0
        return math.inf if self.zero.overflow else float(self.module.get_global_grad_norm())

    def head_state(self) -> dict[str, Tensor]:
        from deepspeed.utils import safe_get_full_fp32_param  # pyright: ignore[reportMissingImports]

        gather: Any = safe_get_full_fp32_param
        whole = {name: gather(parameter).clone() for name, parameter in self.head.named_parameters()}
        return {**self.head.state_dict(), **whole}

    @torch.no_grad()
    def load_head_state(self, state: dict[str, Tensor]) -> None:
        from deepspeed.utils import (  # pyright: ignore[reportMissingImports]
            safe_set_full_fp32_param,
            safe_set_local_fp32_param,
        )

        for name, parameter in self.head.named_parameters():
            value = state[name].to(self.accelerator.device)
            if self.sharded:
                own = self._own_part(parameter, value)
                parameter.ds_tensor.copy_(own)  # pyright: ignore[reportAttributeAccessIssue]
                safe_set_local_fp32_param(parameter, own)
            else:
                parameter.copy_(value)
                safe_set_full_fp32_param(parameter, value)

    def optimizer_tensors(self) -> dict[str, Tensor]:
        from deepspeed.utils import safe_get_full_optimizer_state  # pyright: ignore[reportMissingImports]

        if not self.base.state:  # no step has been taken
            return {}
        gather: Any = safe_get_full_optimizer_state
        self._link_states()
        step = next(iter(self.base.state.values()))["step"]
        tensors = {f"step/{name}": step.detach().clone() for name, _ in self.head.named_parameters()}
        for key in MOMENTS:
            for name, parameter in self.head.named_parameters():
                tensors[f"{key}/{name}"] = gather(parameter, key).clone()
        return tensors

    @torch.no_grad()
    def load_optimizer_tensors(self, tensors: dict[str, Tensor]) -> None:
        from deepspeed.utils import (  # pyright: ignore[reportMissingImports]
            safe_set_full_optimizer_state,
            safe_set_local_optimizer_state,
        )

        parameters = dict(self.head.named_parameters())
        found = by_parameter(tensors, parameters)
        self._make_states(next(iter(found.values()))["step"] if found else None)
        for name, states in found.items():
            for key in MOMENTS:
                value = states[key].to(self.accelerator.device)
                if self.sharded:
                    own = self._own_part(parameters[name], value)
                    safe_set_local_optimizer_state(parameters[name], own, key)
                else:
                    safe_set_full_optimizer_state(parameters[name], value, key)

    def _make_states(self, step: Tensor | None) -> None:
        """AdamW's states of DeepSpeed's flat vectors, as its first step makes them; none for None."""
        self.base.state.clear()
        if step is not None:
            sharded, whole = "fp32_partitioned_groups_flat", "single_partition_of_fp32_groups"
            for flat in getattr(self.zero, sharded if self.sharded else whole):
                moments = {key: torch.zeros_like(flat) for key in MOMENTS}
                self.base.state[flat] = {"step": step.clone().to(flat.device), **moments}
            self._link_states()

    def _link_states(self) -> None:
        """Tells each parameter where its states stand. ZeRO-2 does so once, in its first step, when the vector of
        the second group of parameters has none yet."""
        if not self.sharded:
            self.zero._hp_optimizer_states_linked = False
            self.zero._lazy_init_hp_params_optimizer_state()

    def _own_part(self, parameter: Any, value: Tensor) -> Tensor:
        """What this process holds of a parameter of ZeRO-3: an equal share of the flattened values, zeros behind the
        last one."""
        size, rank = parameter.ds_tensor.numel(), self.accelerator.process_index
        flat = functional.pad(value.flatten(), (0, size * self.accelerator.num_processes - value.numel()))
        return flat[rank * size : (rank + 1) * size].to(parameter.ds_tensor.dtype)


MOST_IN_BUCKET = 500_000_000
"""Gradients that are exchanged together: DeepSpeed's own number, which it makes room for however few there are."""


def _configure(accelerator: Accelerator, trained: int) -> None:
    """What the loop does itself is taken from DeepSpeed; every weight is sharded, however small. trained: numbers that
    have a gradient."""
    plugin = accelerator.state.deepspeed_plugin
    assert plugin is not None
    config = plugin.deepspeed_config
    config.update(gradient_accumulation_steps=1, gradient_clipping=0.0, steps_per_print=2**31)
    config.update(train_micro_batch_size_per_gpu=1, train_batch_size=accelerator.num_processes)
    config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    config["zero_optimization"]["reduce_bucket_size"] = min(MOST_IN_BUCKET, trained)
    config["zero_optimization"]["memory_efficient_linear"] = False  # it would replace PyTorch's linear for everyone


def _shard(accelerator: Accelerator, module: TrainModule) -> None:
    """Cuts the weights one by one, so that no device ever holds the whole target."""
    import deepspeed  # pyright: ignore[reportMissingImports]

    plugin = accelerator.state.deepspeed_plugin
    assert plugin is not None
    deepspeed.zero.Init(module=module, config_dict_or_path=plugin.deepspeed_config)
    for buffer in module.buffers():
        buffer.data = buffer.data.to(accelerator.device)
