"""A target whose matrices are split: the processes of a group compute every layer together, on the same rows.

    split_target(target, accelerator, group_size(recipe, accelerator))       # target.group is that then

What is split how is transformers' own plan (`model.tp_plan`): queries, keys, values and the inner width of an MLP by
columns, what brings them back to the residual stream by rows, with one sum over the group after each. Embedding, norms
and output head stay whole on every process, for heads to borrow. Other groups read other rows.
"""

from __future__ import annotations

import os

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from transformers.distributed.parallel_utils import replace_layer_number_by_wildcard
from transformers.distributed.tensor_parallel import apply_tensor_parallelism, get_kv_heads_per_rank

from headstart.errors import TrainingError
from headstart.recipe import Recipe
from headstart.target import Target

LARGEST_CHANGE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 0.05, torch.float16: 0.02}
"""Of the final states by the split, in their standard deviations: sums in another order round otherwise."""


def group_size(recipe: Recipe, accelerator: Accelerator) -> int:
    """How many processes the recipe splits its target over: so many, or all of a node."""
    return recipe.target.tensor_parallel_size or int(os.environ.get("LOCAL_WORLD_SIZE") or accelerator.num_processes)


def split_target(target: Target, accelerator: Accelerator, size: int) -> None:
    """Splits it over `size` processes in a row, in place, and brings it to this process's device. All ranks call it.

    Raises TrainingError where the processes make no whole groups, where transformers has no plan for this model or its
    heads cannot be shared out, and where the split target computes something else.
    """
    if accelerator.num_processes % size:
        raise TrainingError(
            f"target.tensor_parallel_size: {size} does not divide the {accelerator.num_processes} processes of this "
            "launch; choose a divisor of it"
        )
    plan = _plan(target, size)
    target.fingerprint()  # while its weights are whole
    before = _final_states(target)
    mesh = init_device_mesh(
        accelerator.device.type, (accelerator.num_processes // size, size), mesh_dim_names=("data", "tensor")
    )
    apply_tensor_parallelism(target.model, mesh["tensor"], plan)
    target.model.requires_grad_(False)
    target.model.to(accelerator.device)  # pyright: ignore[reportArgumentType]  (a wrapper without types)
    target.group = size
    change = float((_final_states(target) - before).abs().max() / before.std())
    if not change <= LARGEST_CHANGE[target.dtype]:
        raise TrainingError(
            f"{target.name} computes something else once transformers has split it (its final states move by "
            f"{change:.2g} standard deviations); set target.placement: shard, which splits any model"
        )


def _plan(target: Target, size: int) -> dict[str, str]:
    """transformers' plan for the decoder layers, with the number of each layer: module or parameter -> how."""
    wildcards = dict(getattr(target.model, "tp_plan", None) or {})
    layers = {id(module) for layer in target.layers for module in layer.modules()}
    plan = {}
    for name, module in target.model.named_modules():
        if id(module) not in layers:
            continue
        how = wildcards.get(replace_layer_number_by_wildcard(name))
        for own, _ in module.named_parameters(recurse=False):  # cut before the module that owns them gets its hooks
            own_how = wildcards.get(replace_layer_number_by_wildcard(f"{name}.{own}"), how)
            plan |= {f"{name}.{own}": own_how} if own_how else {}
        plan |= {name: how} if how else {}
    kv_heads = getattr(target.config, "num_key_value_heads", None) or target.config.num_attention_heads
    if not plan or target.config.num_attention_heads % size or get_kv_heads_per_rank(wildcards, kv_heads, size) is None:
        why = "transformers has no plan for it" if not plan else f"it has {kv_heads} key heads"
        raise TrainingError(
            f"{target.name} ({target.config.model_type}) cannot be split over {size} processes: {why}; set another "
            "target.tensor_parallel_size, or target.placement: shard"
        )
    return plan


@torch.no_grad()
def _final_states(target: Target) -> Tensor:
    """Of eight fixed tokens, in float32 on the CPU."""
    vocab = min(target.vocab_size, target.embedding.vocab_size)
    ids = torch.tensor([[(7 + 31 * index) % vocab for index in range(8)]], device=target.device)
    positions = torch.arange(8, device=target.device)[None]
    return target.forward(ids, positions, None).final.float().cpu()
