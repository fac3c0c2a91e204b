"""What `--head RUN` and `--target NAME` stand for: the recipe, the target and the head's folder, checked and loaded."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headstart.data.rendering import ChatRenderer
from headstart.decode.selfcheck import check_target
from headstart.errors import HeadError, RecipeError, warn
from headstart.heads.published import HubName, fetch_head, hub_name
from headstart.heads.store import ADAPTER, read_description
from headstart.recipe import ChatSection, Recipe, load_recipe, quoted
from headstart.recipe_target import load_recipe_target
from headstart.target import Target

DEFAULT_RECIPE = "quickstart.yaml"
"""Where the settings come from when no run is named."""


@dataclass(frozen=True)
class Named:
    """What `--head` and `--target` stand for, found on the disk; no model is loaded yet."""

    recipe: Recipe
    """The run's own, with what the command line changed."""
    run: Path | None
    """The run's folder; None without a head, or where the head's folder alone was given."""
    head: Path | None
    """The head's folder."""
    published: HubName | None
    """Where the head came from, if it was fetched from the hub: then nothing is written into its folder."""
    notes: list[str]
    """What a reader of the report should know: template arguments that differ from those of training."""


@dataclass(frozen=True)
class Trained(Named):
    """A target ready to decode, and what is known of the head that drafts for it."""

    target: Target
    renderer: ChatRenderer


def find_named(
    head: str | Path | None = None,
    target: str | None = None,
    *,
    overrides: Sequence[str] = (),
    others: Sequence[Path] = (),
) -> Named:
    """head: a run folder, the folder of a head alone, or a published head, `ORG/NAME` or `ORG/NAME@REVISION`. target:
    replaces the one that the head was trained for; the head's fingerprint is compared when it is loaded. others:
    folders of further heads that will draft.

    Prompts are rendered as in the head's training, without `head` as in that of the first of the others; where one
    learnt otherwise, or an override says otherwise, a note does. Raises HeadstartError for what cannot be used.
    """
    run = folder = published = None
    descriptions: dict[str, dict[str, Any]] = {}
    name = target
    if head is not None:
        published = hub_name(str(head))
        run, folder = find_head(Path(head))
        descriptions["the head"] = read_description(folder)
        name = target or (None if run else descriptions["the head"]["target"].get("name"))
    descriptions |= {f"head:{_run_name(other)}": read_description(other) for other in others if other != folder}
    changes = list(overrides)
    source = str(run / "recipe.yaml") if run else DEFAULT_RECIPE
    if run is None and name is None:
        raise RecipeError("neither a head nor a target is named; add --head RUN or --target NAME")
    if run is None:
        chats = [chat for one in descriptions.values() if (chat := _chat(one)) is not None]
        changes = [*(f"data.chat={json.dumps(chat, ensure_ascii=False)}" for chat in chats[:1]), *changes]
    if name is not None:
        changes = [f"target.name={quoted(name)}", "target.architecture=null", *changes]
    if folder is not None and (folder / ADAPTER).is_dir():  # the target learnt with it
        changes = [f"target.adapter={quoted(str(folder / ADAPTER))}", "train.joint=null", *changes]
    if run is None:  # the size that suits the quickstart's head says nothing of others
        changes = ["eval.tree=auto", *changes]
    if published:  # somebody else's recipe does not decide that code runs here
        changes = ["target.trust_remote_code=false", *changes]
    recipe = load_recipe(source, changes)
    notes = [note for who, one in descriptions.items() for note in _template_notes(recipe, who, one)]
    return Named(recipe, run, folder, published, [*notes, *_joint_notes(descriptions.get("the head", {}))])


def load_named(
    named: Named, *, target: Target | None = None, device: str | None = None, dtype: str | None = None
) -> Trained:
    """Loads the target, unless one is given, and makes the self-check; the head itself is not loaded yet."""
    loaded = target or load_recipe_target(named.recipe, device=device, dtype=dtype)[0]
    check_target(loaded)
    for note in named.notes:
        warn(note)
    renderer = ChatRenderer(loaded.tokenizer, named.recipe.data.chat)
    return Trained(named.recipe, named.run, named.head, named.published, named.notes, target=loaded, renderer=renderer)


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
    """The run folder, if there is one, and the folder of its head; of a published head, where it was fetched to."""
    if name := hub_name(str(path)):
        path = fetch_head(name)
    folder = path / "head" if (path / "head").is_dir() else path
    if not folder.is_dir():
        raise HeadError(f"there is no run {path}; name a folder that training wrote, such as runs/quickstart")
    run = folder.parent if folder.name == "head" else path
    return (run if (run / "recipe.yaml").is_file() else None), folder


def _joint_notes(description: dict[str, Any]) -> list[str]:
    """What the target became by learning with the head."""
    stored = description.get("training", {})
    if "joint" not in stored:
        return []
    said = "the target learnt with its head (train.joint), and texts are those of the tuned target"
    if "target_kl" not in stored:
        return [said]
    return [
        f"{said}: on held-out text its KL to the original is {stored['target_kl']:.4f} nats a token, its perplexity "
        f"{stored['target_perplexity']:.3f}, that of the original {stored['target_original_perplexity']:.3f}"
    ]


def _chat(description: dict[str, Any]) -> dict[str, Any] | None:
    """How a head's training rendered its prompts, where its record says so."""
    return description.get("training", {}).get("chat")


def _run_name(folder: Path) -> str:
    return (folder.parent if folder.name == "head" else folder).name


def _template_notes(recipe: Recipe, who: str, description: dict[str, Any]) -> list[str]:
    """One sentence for each difference between the prompts of training and those of this evaluation."""
    stored = _chat(description)
    if stored is None:
        return []
    before, now = ChatSection.model_validate(stored), recipe.data.chat
    return [
        f"{who} was trained with data.chat.{key}={getattr(before, key)!r}, this evaluation renders with "
        f"{getattr(now, key)!r}: it drafts for another context than it learnt"
        for key in ("arguments", "system")
        if getattr(before, key) != getattr(now, key)
    ]
