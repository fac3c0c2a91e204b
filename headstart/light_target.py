"""A target whose layers stay on the disk: what training needs where features come from a cache.

    target = load_light_target("Qwen/Qwen3-8B", dtype="bfloat16")
    target.embedding, target.output           # in memory, with the final norm
    target.layers[-1]                         # read from its file, and let go again
    target.forward(...)                       # works, layer after layer, each read when it is come to: slow

It is a `Target` in everything else: same fingerprint, same logits, same features to the bit. Only the files that hold
what is asked for are opened, as memory maps.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.utils import cached_file

from headstart.architecture import compare_architecture
from headstart.borrowed import input_module, output_module
from headstart.errors import TargetError
from headstart.loading import explained, load_tokenizer, locate, parse_device, parse_dtype
from headstart.recipe import Recipe, architecture_path
from headstart.target import Target

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


class LightTarget(Target):
    """Made by `load_light_target`. `layers` reads a layer when one is taken; the model has stand-ins in their place."""

    layers: Sequence[nn.Module]  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(self, model: PreTrainedModel, tokenizer: Any, *, name: str):
        super().__init__(model, tokenizer, name=name)
        self._selects_states = False  # its layers are stand-ins, which transformers' own recorder does not know
        self.checked = True  # by whoever wrote the features that are read instead of running it


def load_light_target(
    name: str,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device | None = None,
    trust_remote_code: bool = False,
    revision: str | None = None,
    architecture: str | Path | None = None,
) -> LightTarget:
    """Like `load_target`, without the layers. Raises TargetError where the parts can't be read by themselves."""
    found_device = parse_device(device)
    found_dtype = parse_dtype(dtype, found_device)
    source, options = locate(name)
    options |= {"trust_remote_code": trust_remote_code, "revision": revision}
    tokenizer = load_tokenizer(name, trust_remote_code=trust_remote_code, revision=revision)
    with explained(name):
        config = AutoConfig.from_pretrained(source, **options)
        if "gguf_file" in options or getattr(config, "quantization_config", None) is not None:
            raise _in_parts(name, "its weights are packed")
        files = WeightFiles(name, source, revision, found_dtype)
        with init_empty_weights(include_buffers=False):
            model: Any = AutoModelForCausalLM.from_config(
                config, dtype=found_dtype, trust_remote_code=trust_remote_code
            )
        try:
            model.generation_config = GenerationConfig.from_pretrained(source, revision=revision or "main")
        except OSError:  # a model that comes without; then it follows from the configuration, as it does when loaded
            pass
        target = LightTarget(model, tokenizer, name=name)
        _leave_layers(target, files)
        _fill(model, files)
        model.to(found_device)
    if architecture is not None:
        compare_architecture(architecture, target)
    return target


def load_recipe_light_target(recipe: Recipe, *, device: str | torch.device | None = None) -> LightTarget:
    """The target of a recipe without its layers."""
    section = recipe.target
    return load_light_target(
        section.name,
        dtype=section.dtype,
        device=device,
        trust_remote_code=section.trust_remote_code,
        revision=section.revision,
        architecture=architecture_path(recipe),
    )


class WeightFiles(Mapping[str, Tensor]):
    """The tensors of a checkpoint by name, each read when it is asked for."""

    def __init__(self, name: str, source: str, revision: str | None, dtype: torch.dtype):
        self.name, self.dtype = name, dtype
        self._locate = lambda file: cached_file(
            source, file, revision=revision, _raise_exceptions_for_missing_entries=False
        )
        index = self._locate(INDEX)
        if index is not None:
            self._file_of = dict(json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"])
            return
        if self._locate(WEIGHTS) is None:
            raise _in_parts(name, f"it has no {WEIGHTS}")
        with safe_open(self._locate(WEIGHTS), framework="pt") as file:
            self._file_of = dict.fromkeys(file.keys(), WEIGHTS)

    def __getitem__(self, key: str) -> Tensor:
        path = self._locate(self._file_of[key])
        if path is None:
            raise _in_parts(self.name, f"{self._file_of[key]} is missing")
        with safe_open(path, framework="pt") as file:
            tensor = file.get_tensor(key)
        return tensor.to(self.dtype) if tensor.is_floating_point() else tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

    def __len__(self) -> int:
        return len(self._file_of)

    def under(self, name: str, base: str) -> str | None:
        """The key of the model's parameter `name`, with or without the prefix of its base model; None: not there."""
        candidates = (name, f"{base}.{name}", name.removeprefix(f"{base}."))
        return next((key for key in candidates if key in self._file_of), None)


class _StoredLayer(nn.Module):
    """Stands in the place of a layer, which is read for each forward and let go after it. It has no parameters."""

    def __init__(self, skeleton: nn.Module, prefix: str, base: str, files: WeightFiles):
        super().__init__()
        self._skeleton = (skeleton,)  # in a tuple, so that its empty parameters are none of this module's
        self._origin = (prefix, base, files)
        self.register_buffer("place", torch.zeros(()), persistent=False)

    def read(self) -> nn.Module:
        """The layer with its weights, on the device of the model."""
        prefix, base, files = self._origin
        layer = copy.deepcopy(self._skeleton[0])
        _fill(layer, files, prefix, base)
        assert isinstance(self.place, Tensor)
        return layer.to(self.place.device).eval()

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return self.read()(*inputs, **named)

    def __getattr__(self, name: str) -> Any:
        """What a decoder asks of its layers beside their forward, such as their kind of attention."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self._skeleton[0], name)


class _ReadLayers(Sequence[nn.Module]):
    """The layers of a light target for those who look into them: taking one reads it."""

    def __init__(self, stored: nn.ModuleList):
        self._stored = stored

    def __len__(self) -> int:
        return len(self._stored)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[number] for number in range(len(self))[index]]
        layer = self._stored[index]
        assert isinstance(layer, _StoredLayer)
        return layer.read()


def _leave_layers(target: LightTarget, files: WeightFiles) -> None:
    """Puts stand-ins in the place of the target's layers."""
    model, layers = target.model, target.layers
    path = next(name for name, module in model.named_modules() if module is layers)
    owner, _, name = path.rpartition(".")
    stored = nn.ModuleList(
        _StoredLayer(layer, f"{path}.{number}.", model.base_model_prefix, files) for number, layer in enumerate(layers)
    )
    setattr(model.get_submodule(owner), name, stored)
    target._run_layers, target.layers = stored, _ReadLayers(stored)


def _fill(module: nn.Module, files: WeightFiles, prefix: str = "", base: str | None = None) -> None:
    """Gives every empty parameter its values. prefix: the module's name in the model; base: the base model's prefix."""
    base = str(getattr(module, "base_model_prefix", "")) if base is None else base
    tied = isinstance(module, PreTrainedModel) and bool(
        getattr(module.config.get_text_config(), "tie_word_embeddings", False)
    )
    late = []
    for owner_name, owner in module.named_modules():
        for name, parameter in list(owner.named_parameters(recurse=False)):
            if not parameter.is_meta:
                continue
            full = f"{prefix}{owner_name}{'.' if owner_name else ''}{name}"
            key = files.under(full, base)
            if key is not None:
                values = files[key]
                if values.shape != parameter.shape:
                    raise _in_parts(files.name, f"{key} is {list(values.shape)}, the model's {list(parameter.shape)}")
                setattr(owner, name, nn.Parameter(values, requires_grad=False))
            elif tied and owner is output_module(module) and name == "weight":  # pyright: ignore[reportArgumentType]
                late.append(owner)
            else:
                raise _in_parts(files.name, f"its files hold no {full}")
    for owner in late:
        owner.weight = input_module(module).weight  # pyright: ignore[reportArgumentType]


def _in_parts(name: str, why: str) -> TargetError:
    return TargetError(
        f"{name} cannot be read in parts, as data.features: offline does ({why}); set data.features: hybrid, which "
        "loads the whole target, or save it as safetensors with save_pretrained"
    )
