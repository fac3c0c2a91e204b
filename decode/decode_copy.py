"""The target as decoding runs it, and back: the same weights under faster modules, and copies without them.

`make_faster` swaps what is faster on this machine, checks the whole model's logits on the spot, and leaves alone what
is absent, wrong or no faster, with one warning where something should have worked. Comparisons need the model as
transformers runs it (`untouched`: the `transformers.generate` arm) or in float32 (`in_float32`: the identity checks).
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from headstart.decode.norms import one_kernel_norms
from headstart.decode.prepack import LeanLinear, PackedLinear, packed_linears, pass_seconds, plain_linears
from headstart.decode.swapped import LARGEST_CHANGE, Swapped, put, swap
from headstart.errors import warn
from headstart.target import Target

ROWS = (1, 8)
"""Numbers of tokens for which layers must be faster in sum: a plain step and a small tree."""


def make_faster(target: Target) -> frozenset[str]:
    """Makes decoding on a CPU faster, in place; returns what was swapped: "linears", "norms" (`target.swapped`).

    Does nothing on other devices, for other dtypes than bfloat16 and float32, and the second time.
    """
    if target.swapped or torch.device(target.device).type != "cpu" or target.dtype not in LARGEST_CHANGE:
        return target.swapped
    swapped = set()
    if norms := one_kernel_norms(target.model):
        swapped |= _swapped(target, "norms", norms)
    if linears := _faster_linears(target):
        swapped |= _swapped(target, "linears", linears)
    target.swapped = frozenset(swapped)
    return target.swapped


def _swapped(target: Target, what: str, modules: Mapping[str, nn.Module]) -> set[str]:
    change = swap(target, modules)
    if change <= LARGEST_CHANGE[target.dtype]:
        return {what}
    warn(f"faster {what} changed the logits by {change:.2g}; decoding uses the plain ones")
    return set()


def _faster_linears(target: Target) -> dict[str, nn.Module]:
    """Prepacked linear layers where a pass through them is faster, else lean ones."""
    plain = plain_linears(target.model)
    lean = {name: LeanLinear(linear) for name, linear in plain.items()}
    try:
        packed = packed_linears(plain)
        arms = {"lean": [*lean.values()], "packed": [*packed.values()]}
        seconds = [pass_seconds(arms, rows, target.dtype) for rows in ROWS] if packed else []
    except (AttributeError, RuntimeError, NotImplementedError) as error:
        reason = str(error).partition("\n")[0]
        warn(f"prepacked linears are not available ({reason}); decoding uses the plain ones")
        return {**lean}
    return {**packed} if sum(arms["packed"] - arms["lean"] for arms in seconds) < 0 else {**lean}


def make_head_faster(head: nn.Module, target: Target) -> None:
    """Gives a head that drafts for this target the kinds of modules that were found faster for the target."""
    if "norms" in target.swapped:
        put(head, one_kernel_norms(head))
    if "linears" in target.swapped:
        plain = plain_linears(head)
        packs = any(isinstance(module, PackedLinear) for module in target.model.modules())
        put(head, packed_linears(plain) if packs else {name: LeanLinear(one) for name, one in plain.items()})


def shared_copy(target: Target) -> Target:
    """A target of its own over the same weights: what is swapped or switched in one does not show in the other."""
    return Target(_over_shared_weights(target, {}), target.tokenizer, name=target.name)


def plainly_linear(target: Target) -> Target:
    """The same, with the model's own linear layers where others were swapped in; what else was swapped stays."""
    plain: dict[int, nn.Module] = {
        id(one): one.plain() for one in target.model.modules() if isinstance(one, LeanLinear)
    }
    return Target(_over_shared_weights(target, plain), target.tokenizer, name=target.name)


def untouched(target: Target) -> Target:
    """The same weights, not copied, under the model's own modules and transformers' sdpa attention (eager where it has
    none)."""
    plain = {id(module): module.plain() for module in target.model.modules() if isinstance(module, Swapped)}
    model = _over_shared_weights(target, plain)
    try:
        model.set_attn_implementation("sdpa")
    except (ValueError, ImportError):
        model.set_attn_implementation("eager")
    return Target(model, target.tokenizer, name=target.name)


def in_float32(target: Target) -> Target:
    """The target with its weights widened to float32: exactly the same numbers, so only the arithmetic is finer."""
    return _in_dtype(target, torch.float32)


def _in_dtype(target: Target, dtype: torch.dtype) -> Target:
    """A copy of the weights under the model's own modules."""
    model: Any = copy.deepcopy(untouched(target).model)  # a wrapper without types
    model.to(dtype)
    return Target(model, target.tokenizer, name=target.name)


def _over_shared_weights(target: Target, instead: dict[int, nn.Module]) -> Any:
    """A copy of the model's modules over its own tensors; `instead` names what takes the place of a module, by id."""
    shared: dict[int, object] = {id(tensor): tensor for tensor in [*target.model.parameters(), *target.model.buffers()]}
    return copy.deepcopy(target.model, shared | instead)


def linear_seconds(target: Target, widths: tuple[int, ...]) -> dict[torch.dtype, dict[int, float]]:
    """Seconds that all linear layers take for a forward of so many tokens, in bfloat16 and in float32, each dtype with
    the faster kind of layer: tells which dtype to decode in.

    Without instructions for bf16 a CPU may well be faster in float32 for several tokens, although it reads twice the
    bytes, and slower for one. Only for a model on a CPU; the weights are copied, one dtype at a time.
    """
    seconds = {}
    for dtype in (torch.bfloat16, torch.float32):
        trial = _in_dtype(target, dtype)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            make_faster(trial)
        layers = [one for one in trial.model.modules() if isinstance(one, LeanLinear)]
        seconds[dtype] = {rows: pass_seconds({"": layers}, rows, dtype, repeats=2)[""] for rows in widths}
    return seconds
