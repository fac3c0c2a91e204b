"""How several processes train together: the mode of a launch by its name, what it must fit, and what is refused.

| mode | target | head's optimiser | launched by recipes/accelerate/ |
| --- | --- | --- | --- |
| one process | whole | whole | one-gpu.yaml |
| DDP | whole, or split by tensor parallelism | whole | eight-gpu.yaml, two-nodes.yaml, two-cpu.yaml |
| ZeRO-2 | whole | sharded | zero2.yaml, zero2-cpu.yaml |
| ZeRO-3 | sharded | sharded, like the head | zero3.yaml, zero3-cpu.yaml |
| FSDP2 | sharded | sharded, like the head | fsdp2.yaml |

Accelerate falls back silently where a launch does not fit: to one process, to two that know nothing of each other, to
plain data parallelism. So what the launch asked for, in the variables that `accelerate launch` sets, is compared with
what came of it.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, InitProcessGroupKwargs, broadcast_object_list
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from headstart.errors import HeadstartError, TrainingError
from headstart.recipe import Recipe

ONE_PROCESS, DDP, ZERO_2, ZERO_3, FSDP2 = "one process", "DDP", "ZeRO-2", "ZeRO-3", "FSDP2"
SHARDED = (ZERO_3, FSDP2)
"""Modes in which a process holds only a part of the target and of the head."""
MODES = {
    "replicate": (ONE_PROCESS, DDP, ZERO_2),
    "shard": SHARDED,
    "tensor_parallel": (DDP,),
}
"""The modes that can do what `target.placement` asks for."""
_LAUNCH_FILES = {
    "replicate": "one-gpu.yaml, eight-gpu.yaml or zero2.yaml",
    "shard": "zero3.yaml or fsdp2.yaml",
    "tensor_parallel": "eight-gpu.yaml",
}


def start_processes(recipe: Recipe, *, smoke: bool = False) -> Accelerator:
    """The accelerator of this launch. Raises TrainingError for a launch that did not become what it asked for, and for
    another mode or number of processes than the recipe names. smoke: on the CPU, in whatever mode was launched."""
    asked = asked_mode(os.environ)
    zero = asked in (ZERO_2, ZERO_3)
    if zero:
        _ready_deepspeed()
    handlers: list = [DistributedDataParallelKwargs(broadcast_buffers=False)]
    waiting = timedelta(seconds=recipe.train.timeout)
    if zero and not torch.cuda.is_available():  # without the backend's name every process would be alone
        handlers.append(InitProcessGroupKwargs(backend="gloo", timeout=waiting))
    else:
        handlers.append(InitProcessGroupKwargs(timeout=waiting))
    accelerator = Accelerator(
        cpu=smoke and asked in (None, DDP),  # told to use the CPU, accelerate drops ZeRO and FSDP without a word
        mixed_precision="no",  # the recipe's dtype decides, not the launch configuration
        kwargs_handlers=handlers,
    )
    unset_hf_deepspeed_config()  # or transformers would cut the target while loading it, before it is looked at
    refuse_other_launch(os.environ, mode(accelerator), accelerator.num_processes)
    if not smoke:
        refuse_other_mode(recipe, mode(accelerator))
    refuse_other_world_size(recipe, mode(accelerator), accelerator.num_processes)
    return accelerator


def on_main(accelerator: Accelerator, work: Callable[[], Any]) -> Any:
    """The result of `work` from the main process, on every rank; a HeadstartError or OSError there is raised on all,
    and said by the main process alone."""
    box: list[Any] = [None, None]
    if accelerator.is_main_process:
        try:
            box[0] = work()
        except (HeadstartError, OSError) as error:
            box[1] = error
    broadcast_object_list(box)
    fault: Any = box[1]
    if fault is not None:
        fault.shared = True
        raise fault
    return box[0]


def another_is_gone(error: RuntimeError) -> bool:
    """Whether it comes of another process of the launch, which has ended or does not answer."""
    if isinstance(error, torch.distributed.DistError):
        return True
    text = str(error)  # gloo's errors have no type of their own
    return "gloo" in text or "Timed out waiting" in text or "by peer" in text


def mode(accelerator: Accelerator) -> str:
    """What the processes of this launch really do, by its usual name."""
    kind = accelerator.distributed_type.value
    if kind == "NO":
        return ONE_PROCESS
    if kind == "DEEPSPEED":
        return f"ZeRO-{accelerator.state.deepspeed_plugin.zero_stage}"  # pyright: ignore[reportOptionalMemberAccess]
    if kind == "FSDP":
        return f"FSDP{accelerator.state.fsdp_plugin.fsdp_version}"  # pyright: ignore[reportOptionalMemberAccess]
    return DDP if kind.startswith("MULTI_") else kind


def asked_mode(environment: Mapping[str, str]) -> str | None:
    """The mode that the variables of `accelerate launch` ask for; None: no launcher, or one process."""
    if _is_true(environment, "ACCELERATE_USE_DEEPSPEED"):
        return f"ZeRO-{environment.get('ACCELERATE_DEEPSPEED_ZERO_STAGE', '2')}"
    if _is_true(environment, "ACCELERATE_USE_FSDP"):
        return f"FSDP{environment.get('FSDP_VERSION', '1')}"
    by_accelerate = "ACCELERATE_MIXED_PRECISION" in environment  # which gives a single process an address for nothing
    several = int(environment.get("WORLD_SIZE", 1)) > 1 or (by_accelerate and "MASTER_ADDR" in environment)
    return DDP if several else None


def refuse_other_launch(environment: Mapping[str, str], real: str, world_size: int) -> None:
    """Raises TrainingError where a launch asked for another mode, or for more processes, than it got."""
    asked = asked_mode(environment)
    if asked in (ZERO_2, ZERO_3, FSDP2) and real != asked:
        because = ""
        if _is_true(environment, "ACCELERATE_USE_CPU"):
            because = "; ACCELERATE_USE_CPU is set, with which accelerate drops it: unset it"
        elif asked == FSDP2 and not torch.cuda.is_available():
            because = "; accelerate starts FSDP2 on GPUs only: launch zero3-cpu.yaml instead"
        raise TrainingError(f"this launch asks for {asked} and became {_processes(world_size)} in {real} mode{because}")
    processes = int(environment.get("WORLD_SIZE", 1))
    if (asked == DDP and world_size == 1) or processes != world_size:
        count = "several processes" if processes == 1 else f"{processes} processes"
        raise TrainingError(
            f"this launch asks for {count}, and this one would train alone; on CPUs, launch "
            "`ACCELERATE_USE_CPU=true accelerate launch --config_file recipes/accelerate/two-cpu.yaml ...`"
        )


def refuse_other_mode(recipe: Recipe, real: str) -> None:
    """Raises TrainingError where the mode does not do what `target.placement` says."""
    placement = recipe.target.placement
    if real in MODES[placement]:
        return
    fitting = next((other for other, modes in MODES.items() if real in modes), None)
    other = f", or --set target.placement={fitting}" if fitting else ""
    raise TrainingError(
        f"this launch is in mode {real}, recipe {recipe.name} has target.placement: {placement}, which takes "
        f"{' or '.join(MODES[placement])}; launch {_LAUNCH_FILES[placement]} of recipes/accelerate{other}"
    )


def refuse_other_world_size(recipe: Recipe, real: str, world_size: int) -> None:
    wanted = recipe.train.world_size
    if wanted not in ("any", world_size):
        raise TrainingError(
            f"this launch has world size {world_size} (mode {real}), the recipe is meant for {wanted}; "
            f"launch {wanted} processes (accelerate launch --config_file ...), or --set train.world_size=any"
        )


def _ready_deepspeed() -> None:
    """Raises TrainingError where DeepSpeed is not installed. On CPUs its own kernels, which it would compile now, in
    minutes, are left alone: gloo carries the data."""
    try:
        import deepspeed  # pyright: ignore[reportMissingImports]  (an extra)

        if not torch.cuda.is_available():
            deepspeed.ops.__compatible_ops__ = defaultdict(bool)  # pyright: ignore[reportAttributeAccessIssue]
    except ImportError:
        raise TrainingError(
            "ZeRO needs DeepSpeed, which is not installed: pip install 'headstart[deepspeed]'"
        ) from None


def placed_as_launched(recipe: Recipe, real: str) -> tuple[Recipe, list[str]]:
    """A --smoke recipe with the placement that its launch has, and what to say where it is another. real: its mode."""
    placement = recipe.target.placement
    if real in MODES[placement]:
        return recipe, []
    fitting = next((other for other, modes in MODES.items() if real in modes), None)
    if fitting is None:
        raise TrainingError(f"this launch is in mode {real}, which headstart does not know; launch one of {_known()}")
    said = [f"target.placement: {fitting} instead of {placement}, as this launch is in mode {real}"]
    sections = {"target": {"placement": fitting}, "train": {}}
    if fitting == "shard" and recipe.target.quantization != "none":
        sections["target"]["quantization"] = "none"
        said.append(f"target.quantization: none instead of {recipe.target.quantization}, which cannot be sharded")
    if fitting == "shard" and recipe.train.feature_memory:
        sections["train"]["feature_memory"] = 0.0
        said.append(f"train.feature_memory: 0 instead of {recipe.train.feature_memory:g}, which shards cannot serve")
    copies = {name: getattr(recipe, name).model_copy(update=changes) for name, changes in sections.items()}
    return recipe.model_copy(update=copies), said


def _known() -> str:
    return ", ".join(dict.fromkeys(name for modes in MODES.values() for name in modes))


def _processes(count: int) -> str:
    return "one process" if count == 1 else f"{count} processes"


def _is_true(environment: Mapping[str, str], name: str) -> bool:
    return environment.get(name, "false").lower() in ("true", "1", "yes")
