"""Recipes: find them, read them strictly, change them from the command line, shrink them for --smoke.

    >>> recipe = load_recipe("quickstart.yaml", ["train.lr=5e-4"])
    >>> recipe.train.lr, recipe.head.type

Everything that is wrong with a recipe is reported at once, with file and line, before anything heavy is imported.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import NoReturn

from pydantic import ValidationError

from headstart.errors import RecipeError
from headstart.recipe_faults import collect_faults
from headstart.recipe_schema import (
    ChatSection,
    DataSection,
    DistillSection,
    EvalSection,
    ExportSection,
    HeldOutSection,
    JointSection,
    LoggingSection,
    Recipe,
    Source,
    TargetSection,
    TrainSection,
)
from headstart.recipe_smoke import shrink
from headstart.recipe_yaml import Document, Fault, read_yaml, set_value

__all__ = [
    "ChatSection",
    "DataSection",
    "DistillSection",
    "EvalSection",
    "ExportSection",
    "HeldOutSection",
    "JointSection",
    "LoggingSection",
    "Recipe",
    "Source",
    "TargetSection",
    "TrainSection",
    "architecture_path",
    "find_packaged",
    "find_recipe",
    "load_recipe",
    "override",
    "quoted",
    "smoke",
]

PACKAGED = Path(str(resources.files("headstart.recipes")))
"""The recipes that come with headstart: `*.yaml`, `architectures/*.json`, `accelerate/*.yaml`."""


def load_recipe(path_or_name: str | os.PathLike[str], overrides: Sequence[str] = (), smoke: bool = False) -> Recipe:
    """Read and check a recipe.

    path_or_name: a file, or the name of a packaged recipe. overrides: `a.b=value`, as `--set` takes them, checked like
    the file. smoke: give the recipe shrunk for a few steps on CPU (see `smoke`). Raises RecipeError with every fault.
    """
    path = find_recipe(path_or_name)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = "not text in UTF-8" if isinstance(error, UnicodeDecodeError) else error.strerror
        raise RecipeError(f"The recipe {path} cannot be read ({reason}); give a YAML file.") from None
    document = read_yaml(text, _shown(path))
    if not document.values and document.faults:  # no YAML, so nothing more can be said about it
        _raise_faults(document)
    recipe = _checked(document, overrides, path.parent)
    return shrink(recipe)[0] if smoke else recipe


def override(recipe: Recipe, overrides: Sequence[str]) -> Recipe:
    """The recipe with `a.b=value` settings applied and checked."""
    return _checked(Document(values=recipe.model_dump()), overrides, None)


def quoted(text: str) -> str:
    """`text` as the value of an override that stays text, whatever YAML would make of it: a name like `7` or `on`."""
    return json.dumps(text, ensure_ascii=False)


def smoke(recipe: Recipe) -> tuple[Recipe, list[str]]:
    """The recipe as it stands, but for a few steps on any CPU, and one sentence for each thing that was replaced."""
    return shrink(recipe)


def find_recipe(path_or_name: str | os.PathLike[str]) -> Path:
    """The file that `--recipe` means: a path that exists, else a packaged recipe of that name, `.yaml` or not."""
    return _find(path_or_name, "recipe", "", ".yaml")


def find_packaged(path_or_name: str | os.PathLike[str], kind: str) -> Path:
    """Like `find_recipe`, for the other packaged files; kind: `accelerate` (launch files) or `architectures`."""
    return _find(path_or_name, f"file for {kind}", kind, ".json" if kind == "architectures" else ".yaml")


def architecture_path(recipe: Recipe) -> Path | None:
    """The file that `target.architecture` names, None where the recipe names none."""
    name = recipe.target.architecture
    path = _architecture_file(name, None) if name else None
    if name and path is None:
        raise RecipeError(f"`target.architecture`: no file {name} here or among the packaged ones; give its path.")
    return path


def _checked(document: Document, overrides: Sequence[str], folder: Path | None) -> Recipe:
    for text in overrides:
        set_value(document, text)
    recipe = None
    try:
        recipe = Recipe.model_validate(document.values)
    except ValidationError as error:
        collect_faults(document, error, Recipe)
    target = document.values.get("target")
    architecture = target.get("architecture") if isinstance(target, dict) else None
    if isinstance(architecture, str):
        path = _architecture_file(architecture, folder)
        if path is None:
            known = ", ".join(f"architectures/{path.name}" for path in sorted(PACKAGED.glob("architectures/*.json")))
            document.fault(("target", "architecture"), f"no file {architecture}; packaged: {known}")
        elif recipe and path != PACKAGED / architecture:
            # the effective recipe is read again from its run folder, where the path of the original means nothing
            target_section = recipe.target.model_copy(update={"architecture": _shown(path)})
            recipe = recipe.model_copy(update={"target": target_section})
    if document.faults or recipe is None:
        _raise_faults(document)
    return recipe


def _raise_faults(document: Document) -> NoReturn:
    def order(fault: Fault) -> tuple[bool, int]:
        if fault.place.startswith("--set"):
            return True, 0
        line = fault.place.rpartition(":")[2]
        return False, int(line) if line.isdecimal() else 0

    faults = list(dict.fromkeys(sorted(document.faults, key=order)))
    if len(faults) == 1:
        raise RecipeError(str(faults[0]))
    raise RecipeError(f"{len(faults)} faults in the recipe:\n" + "\n".join(f"  {fault}" for fault in faults))


def _architecture_file(name: str, folder: Path | None) -> Path | None:
    candidates = [base / name for base in (folder, Path(), PACKAGED) if base is not None]
    return next((path for path in candidates if path.is_file()), None)


def _find(path_or_name: str | os.PathLike[str], what: str, room: str, suffix: str) -> Path:
    path = Path(path_or_name)
    if path.is_file():
        return path
    for name in (path.name, path.name + suffix):
        if path.parent == Path() and (PACKAGED / room / name).is_file():
            return PACKAGED / room / name
    names = sorted(file.name for file in (PACKAGED / room).glob("*" + suffix))
    near = difflib.get_close_matches(path.name, names + [n.removesuffix(suffix) for n in names], n=1, cutoff=0.6)
    found = "a folder" if path.is_dir() else "no file"
    advice = f"did you mean {near[0]}?" if near else f"packaged: {', '.join(names)}."
    raise RecipeError(f"Found {found} at {path}, expected a {what} ({suffix}); {advice}")


def _shown(path: Path) -> str:
    """The path as short as it goes from here."""
    relative = os.path.relpath(path)
    return relative if not relative.startswith("..") or len(relative) < len(str(path)) else str(path)
