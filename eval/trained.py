"""What `--head RUN` and `--target NAME` stand for: the recipe, the target and the head's folder, checked and loaded."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headstart.data.rendering import ChatRenderer
from headstart.decode.selfcheck import check_target
from headstart.errors import HeadError, RecipeError, warn
from headstart.heads.store import read_description
from headstart.recipe import ChatSection, Recipe, load_recipe, quoted
from headstart.recipe_target import load_recipe_target
from headstart.target import Target

DEFAULT_RECIPE = "quickstart.yaml"
"""Where the settings come from when no run is named."""
HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")
HEAD_FILES = ["*.safetensors", "*.json", "*.yaml"]
"""Of a head's repository: its weights, its configuration and trees, its recipe."""


@dataclass(frozen=True)
class Named:
    """What `--head` and `--target` stand for, found on the disk; no model is loaded yet."""

    recipe: Recipe
    """The run's own, with what the command line changed."""
    run: Path | None
    """The run's folder; None without a head, or where the head's folder alone was given."""
    head: Path | None
    """The head's folder."""
    notes: list[str]
    """What a reader of the report should know: template arguments that differ from those of training."""


@dataclass(frozen=True)
class Trained(Named):
    """A target ready to decode, and what is known of the head that drafts for it."""

    target: Target
    renderer: ChatRenderer


def find_named(head: str | Path | None = None, target: str | None = None, *, overrides: Sequence[str] = ()) -> Named:
    """head: a run folder, the folder of a head alone, or its hub name. target: replaces the one that the head was
    trained for; the head's fingerprint is compared when it is loaded. Raises HeadstartError for what cannot be used.
    """
    run = folder = None
    description: dict[str, Any] = {}
    if head is not None:
        run, folder = find_head(Path(head))
        description = read_description(folder)
    changes = list(overrides)
    name = target
    if run is not None:
        source = str(run / "recipe.yaml")
    else:
        source = DEFAULT_RECIPE
        name = target or (description["target"].get("name") if description else None)
        if name is None:
            raise RecipeError("neither a head nor a target is named; add --head RUN or --target NAME")
    if name is not None:
        changes = [f"target.name={quoted(name)}", "target.architecture=null", *changes]
    if run is None:  # the size that suits the quickstart's head says nothing of others, nor does its chat
        chat = description.get("training", {}).get("chat")
        changes = ["eval.tree=auto", *([f"data.chat={json.dumps(chat)}"] if chat else []), *changes]
    recipe = load_recipe(source, changes)
    return Named(recipe, run, folder, _template_notes(recipe, description))


def load_named(
    named: Named, *, target: Target | None = None, device: str | None = None, dtype: str | None = None
) -> Trained:
    """Loads the target, unless one is given, and makes the self-check; the head itself is not loaded yet."""
    loaded = target or load_recipe_target(named.recipe, device=device, dtype=dtype)[0]
    check_target(loaded)
    for note in named.notes:
        warn(note)
    renderer = ChatRenderer(loaded.tokenizer, named.recipe.data.chat)
    return Trained(named.recipe, named.run, named.head, named.notes, target=loaded, renderer=renderer)


def open_trained(
    head: str | Path | None = None,
    target: str | None = None,
    *,
    overrides: Sequence[str] = (),
    device: str | None = None,
    dtype: str | None = None,
) -> Trained:
    """`find_named` and `load_named`, where nothing is to be checked between them."""
    return load_named(find_named(head, target, overrides=overrides), device=device, dtype=dtype)


def find_head(path: Path) -> tuple[Path | None, Path]:
    """The run folder, if there is one, and the folder of its head; a head of the hub is downloaded."""
    folder = path / "head" if (path / "head").is_dir() else path
    if not folder.is_dir():
        return None, _download(str(path))
    run = folder.parent if folder.name == "head" else path
    return (run if (run / "recipe.yaml").is_file() else None), folder


def _download(name: str) -> Path:
    """The files of a head on the hub, in the hub's own cache. What may be meant as a path is not looked for there."""
    missing = f"there is no run {name}"
    if not HUB_NAME.fullmatch(name) or Path(name).parent.is_dir():
        raise HeadError(f"{missing}; name a folder that training wrote, such as runs/quickstart, or a head on the hub")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=HEAD_FILES))
    except Exception as error:  # the hub's client raises almost any exception
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        raise HeadError(
            f"{missing}, and the hub gave no head of this name ({reason}); name a folder that training wrote, such as "
            "runs/quickstart, or ORG/NAME, after `hf auth login` where it is private"
        ) from None


def _template_notes(recipe: Recipe, description: dict[str, Any]) -> list[str]:
    """One sentence for each difference between the prompts of training and those of this evaluation."""
    stored = description.get("training", {}).get("chat")
    if stored is None:
        return []
    before, now = ChatSection.model_validate(stored), recipe.data.chat
    return [
        f"the head was trained with data.chat.{key}={getattr(before, key)!r}, this evaluation renders with "
        f"{getattr(now, key)!r}: it drafts for another context than it learnt"
        for key in ("arguments", "system")
        if getattr(before, key) != getattr(now, key)
    ]
