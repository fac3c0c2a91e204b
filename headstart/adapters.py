"""LoRA adapters on a target, through PEFT: trained beside a head (Medusa-2), or merged into a target when it is loaded.

    adapters = Adapters(target, recipe.train.joint)   # injected in place; off, the target is the original to the bit
    with adapters.on():
        features = target.forward(...)
    adapters.save("runs/demo/head/adapter")           # a PEFT folder, which others read too
    merge_adapter(target, "runs/demo/head/adapter")   # into a target without: its weights are then the tuned ones

Adapters lie within the decoder layers alone. Embedding and output head stay as they are, tied or not, since heads
borrow them. LoRA: https://arxiv.org/abs/2106.09685.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model_state_dict, inject_adapter_in_model
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import ModulesToSaveWrapper
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from headstart.errors import TargetError
from headstart.fingerprint import public_name
from headstart.loading import explained
from headstart.recipe import JointSection
from headstart.tensor_files import save_tensors

if TYPE_CHECKING:
    from headstart.target import Target

_PREFIX, _WEIGHTS = "base_model.model.", "adapter_model.safetensors"
_NAME = "default"
"""What PEFT calls the one adapter of a model."""


class Adapters:
    """LoRA adapters in the linear layers of a target's decoder layers, in place; off at first.

    Weights are in float32 whatever the target's dtype. The second factor of each starts at zero, so that the target
    with its adapters on starts as the original. The target's fingerprint stays that of the original.
    """

    def __init__(self, target: Target, settings: JointSection):
        target.fingerprint()  # of the original: from now on weights have other names
        names = _linear_names(target, settings.modules)
        self.target = target
        self.config = LoraConfig(
            r=settings.rank,
            lora_alpha=settings.alpha,  # pyright: ignore[reportArgumentType]  (whole or not, it is a factor)
            lora_dropout=float(settings.dropout),
            target_modules=names,
            task_type="CAUSAL_LM",
            base_model_name_or_path=public_name(target.name),
        )
        model: nn.Module = target.model
        inject_adapter_in_model(self.config, model, adapter_name=_NAME)
        outside = _changed_outside_of_layers(target)
        if outside:
            raise TargetError(
                f"train.joint.modules takes {outside[0]} of {target.name} too, which lies outside of the decoder "
                "layers; name the linear layers within them, such as [q_proj, v_proj]"
            )
        model.requires_grad_(False).eval()
        self._layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
        self.parameters = {
            name: parameter for name, parameter in model.named_parameters() if f".{_NAME}" in name and "lora_" in name
        }
        for parameter in self.parameters.values():
            parameter.data = parameter.data.float()
        self._switch(False, training=False)

    @contextmanager
    def on(self, *, training: bool = False) -> Iterator[None]:
        """The target is the tuned one meanwhile. training: dropout of the adapters' inputs, as in a training step."""
        self._switch(True, training=training)
        try:
            yield
        finally:
            self._switch(False, training=False)

    def _switch(self, on: bool, *, training: bool) -> None:
        for layer in self._layers:
            layer.enable_adapters(on)
            layer.train(training)
        # PEFT freezes what it turns off; what is trained stays so, for the optimiser and for gradients on the way
        for parameter in self.parameters.values():
            parameter.requires_grad_(True)

    def state(self) -> dict[str, Tensor]:
        """A copy of the weights on the CPU, named as in a PEFT file."""
        state = get_peft_model_state_dict(self.target.model, adapter_name=_NAME, save_embedding_layers=False)
        return {f"{_PREFIX}{name}": value.detach().to("cpu", copy=True).contiguous() for name, value in state.items()}

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """The inverse of `state`. Raises TargetError where a name or shape is not that of these adapters."""
        own = {f"{_PREFIX}{name.replace(f'.{_NAME}', '')}": value for name, value in self.parameters.items()}
        wrong = [
            name
            for name in {*own, *state}
            if name not in own or name not in state or own[name].shape != state[name].shape
        ]
        if wrong:
            raise TargetError(f"the saved adapters differ in {min(wrong)}; go on with the train.joint they began with")
        for name, value in own.items():
            value.copy_(state[name])

    def save(self, folder: str | Path) -> None:
        """Writes the folder, which does not exist yet, as PEFT does: adapter_config.json, adapter_model.safetensors."""
        Path(folder).mkdir()
        self.config.inference_mode = True
        self.config.save_pretrained(str(folder))
        save_tensors(self.state(), Path(folder) / _WEIGHTS, metadata={"format": "pt"})

    def fingerprint(self) -> dict[str, Any]:
        """The fingerprint of the target with these adapters merged into it, as `merge_adapter` leaves it."""
        return _with_adapter(self.target.fingerprint(), self.state(), self.config)


def merge_adapter(target: Target, source: str | Path) -> None:
    """Merges a PEFT adapter, a folder or a hub id, into the target's weights; its fingerprint then names both.

    Raises TargetError for one that does not fit, that cannot be merged, or that would change an output head and the
    embedding tied to it by different amounts.
    """
    original = target.fingerprint()
    model: Any = target.model
    with explained(str(source), check="target.adapter"):
        if Path(source).exists() and not (Path(source) / "adapter_config.json").is_file():
            raise TargetError(f"{source} holds no adapter_config.json; give a folder that PEFT's save_pretrained wrote")
        tuned = PeftModel.from_pretrained(model, str(source))
        _refuse_half_of_a_tie(target, source)
        state = get_peft_model_state_dict(tuned, save_embedding_layers=False)
        config = tuned.peft_config[_NAME]
        merged = tuned.merge_and_unload(safe_merge=True)
    if merged is not model:
        raise TargetError(f"{source} wraps {target.name} instead of changing its weights; give a LoRA adapter")
    model.requires_grad_(False).eval()
    target._fingerprint = _with_adapter(original, state, config)


def _with_adapter(original: Mapping[str, Any], state: Mapping[str, Tensor], config: Any) -> dict[str, Any]:
    """weights: SHA-256 over names and values in float32. scale: what the product of the two factors is multiplied by,
    for those kinds of adapter that have one."""
    digest = hashlib.sha256()
    for name in sorted(state, key=lambda name: name.removeprefix(_PREFIX)):
        digest.update(name.removeprefix(_PREFIX).encode())
        digest.update(state[name].detach().cpu().float().contiguous().numpy().tobytes())
    alpha, rank = getattr(config, "lora_alpha", None), getattr(config, "r", None)
    return {**original, "adapter": {"weights": digest.hexdigest()[:32], "scale": alpha / rank if alpha and rank else 1}}


def _linear_names(target: Target, modules: str | Sequence[str]) -> list[str]:
    """The last parts of the names of the linear layers that are adapted, ascending."""
    found = {
        name.rpartition(".")[2]
        for layer in target.layers
        for name, module in layer.named_modules()
        if isinstance(module, nn.Linear | Conv1D)
    }
    if modules == "all-linear":
        wanted = sorted(found)
    else:
        wanted = sorted(set(modules))
    unknown = [name for name in wanted if name not in found]
    if unknown or not wanted:
        there = ", ".join(sorted(found)) or "none"
        raise TargetError(
            f"train.joint.modules names {', '.join(unknown) or 'nothing'}; the linear layers within the decoder layers "
            f"of {target.name} are {there}"
        )
    return wanted


def _changed_outside_of_layers(target: Target) -> list[str]:
    """Names of modules with an adapter that are in no decoder layer."""
    within = {id(module) for layer in target.layers for module in layer.modules()}
    return [
        name
        for name, module in target.model.named_modules()
        if isinstance(module, BaseTunerLayer | ModulesToSaveWrapper) and id(module) not in within
    ]


def _refuse_half_of_a_tie(target: Target, source: str | Path) -> None:
    outside = _changed_outside_of_layers(target)
    if outside and getattr(target.config, "tie_word_embeddings", False):
        raise TargetError(
            f"{source} changes {outside[0]}, and {target.name} has its embedding and output head tied: one would "
            "change with the other; merge it into a model with the two untied, and name that as target.name"
        )
