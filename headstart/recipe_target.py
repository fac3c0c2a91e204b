"""The target that a recipe names: the real one, or the small random likeness that --smoke puts in its place."""

from __future__ import annotations

import torch
from transformers import PreTrainedTokenizerBase

from headstart import bundled
from headstart.architecture import random_target
from headstart.loading import load_tokenizer, parse_device, parse_dtype
from headstart.quantised_linear import BITS, quantise_layers
from headstart.recipe import Recipe, architecture_path
from headstart.recipe_smoke import RANDOM
from headstart.target import Target, load_target


def settle_dtypes(recipe: Recipe, device: torch.device) -> Recipe:
    """The recipe with what `auto` means on this device in its place."""
    sections = {}
    for name in ("target", "train"):
        section = getattr(recipe, name)
        dtype = str(parse_dtype(section.dtype, device)).removeprefix("torch.")
        sections[name] = section.model_copy(update={"dtype": dtype})
    return recipe.model_copy(update=sections)


def load_recipe_tokenizer(recipe: Recipe) -> PreTrainedTokenizerBase:
    """The tokenizer of a recipe's target, without its weights."""
    section = recipe.target
    if section.name.startswith(RANDOM):
        return load_tokenizer(bundled.NAME)
    return load_tokenizer(section.name, trust_remote_code=section.trust_remote_code, revision=section.revision)


def load_recipe_target(
    recipe: Recipe, *, device: str | torch.device | None = None, dtype: str | torch.dtype | None = None
) -> tuple[Target, list[str]]:
    """The frozen target of a recipe and, for a random one, a sentence for each thing that was replaced.

    device: None is the first GPU, or else the CPU (for a random target always the CPU). dtype: None is the recipe's.
    A random target has the same weights whenever its recipe is the same: they follow from `seed` and the architecture.
    """
    section = recipe.target
    dtype = dtype or section.dtype
    architecture = architecture_path(recipe)
    if not section.name.startswith(RANDOM):
        return load_target(
            section.name,
            dtype=dtype,
            device=device,
            trust_remote_code=section.trust_remote_code,
            revision=section.revision,
            architecture=architecture,
            quantization=section.quantization,
            adapter=section.adapter,
        ), []
    assert architecture is not None, "shrink() gives every random target an architecture"
    target, replaced = random_target(
        architecture, shrink=True, seed=recipe.seed, tokenizer=load_recipe_tokenizer(recipe), dtype=dtype
    )
    if section.adapter is not None:
        from headstart.adapters import merge_adapter  # PEFT takes a second to import

        merge_adapter(target, section.adapter)
    if bits := BITS[section.quantization]:
        quantise_layers(target, bits)
    if device is not None:
        target.model.to(parse_device(device))  # pyright: ignore[reportArgumentType]  (a wrapper without types)
    return target, replaced
