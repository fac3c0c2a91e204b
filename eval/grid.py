"""The runs of a sweep: every combination of grid values, for every recipe, checked before anything runs.

    combinations(["smollm2-medusa.yaml"], ["head.num_heads=3,4", "head.loss=soft-ce,lk"])        # four runs
    combinations([medusa, eagle3], ["smollm2-medusa:head.num_heads=3,4", "head.loss=soft-ce,lk"])  # six

A grid value is read, and checked, as `--set` reads it; commas within brackets, braces or quotes divide nothing. With a
recipe's name before it, a key is one of that recipe alone. Free of torch.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import product
from math import prod
from typing import Any

from headstart.errors import RecipeError
from headstart.recipe import Recipe, load_recipe

MOST_RUNS = 200
"""Of one sweep; more are a slip."""
LONGEST_NAME = 100
RECIPE = "recipe"
"""The column of what differs between recipes."""
NOT_MEASURED = ("tree", "identity_prompts")
"""Settings of eval that may differ between runs whose answers are compared."""


@dataclass(frozen=True)
class Grid:
    """One `--grid`. scope: the recipe whose runs it is for; None: all."""

    scope: str | None
    key: str
    values: tuple[str, ...]

    @property
    def option(self) -> str:
        return f"--grid {self.scope + ':' if self.scope else ''}{self.key}={','.join(self.values)}"


@dataclass(frozen=True)
class Combination:
    """One run of a sweep."""

    name: str
    source: str
    """The recipe's file, or the name of a packaged one."""
    settings: tuple[str, ...]
    """What changes it, as `--set` takes it, the grid's values last."""
    differs: dict[str, str]
    """What tells it from the others: dotted keys and values, and the recipe where there are several."""
    recipe: Recipe

    @property
    def budget(self) -> tuple[str, Any]:
        """The key that says how long it trains, and its value."""
        return budget_of(self.recipe)


def budget_of(recipe: Recipe) -> tuple[str, Any]:
    """The key that says how long a recipe trains, and its value."""
    for key in ("max_steps", "cpu_seconds"):
        value = getattr(recipe.train, key)
        if value is not None:
            return f"train.{key}", value
    return "train.epochs", recipe.train.epochs


def combinations(sources: Sequence[str], grids: Sequence[str], settings: Sequence[str] = ()) -> list[Combination]:
    """All runs, in the order of the recipes and of the grids. Raises RecipeError with every fault."""
    bases = {source: load_recipe(source, settings) for source in sources}
    names = [recipe.name for recipe in bases.values()]
    if len(set(names)) < len(sources):
        raise RecipeError("two of the recipes have one name, and a run is named by what differs; rename one of them")
    faults: list[str] = []
    parsed = [grid for text in grids if (grid := _parse(text, names, faults))]
    fitting = {source: _fitting(parsed, recipe.name, faults) for source, recipe in bases.items()}
    count = sum(prod(len(grid.values) for grid in each) for each in fitting.values())
    if count > MOST_RUNS:
        faults.append(f"a sweep of {count} runs; give fewer values, {MOST_RUNS} runs at most")
    _raise(faults)
    found = []
    for source, each in fitting.items():
        for values in product(*(grid.values for grid in each)):
            chosen = dict(zip([grid.key for grid in each], values, strict=True))
            scope = bases[source].name if len(bases) > 1 else None
            made = _combination(source, scope, chosen, each, settings, faults)
            found += [made] if made else []
    _raise(faults)
    _refuse_twins(found)
    _refuse_unequal(list(bases.values()), found, {grid.key for grid in parsed if grid.scope is None})
    return found


def _parse(text: str, names: Sequence[str], faults: list[str]) -> Grid | None:
    key, equals, values = text.partition("=")
    scope, colon, key = key.rpartition(":")
    parts = _split(values)
    if not equals or not all(key.split(".")) or not all(parts):
        faults.append(f"--grid {text}: expected KEY=VALUE,VALUE,.., such as head.num_heads=3,4,5")
    elif colon and scope not in names:
        faults.append(f"--grid {text}: there is no recipe {scope}; the names of yours: {', '.join(names)}")
    elif key == "name":
        faults.append(f"--grid {text}: runs are named by what differs; leave it out")
    elif len(set(parts)) < len(parts):
        faults.append(f"--grid {text}: a value stands there twice; keep one")
    else:
        return Grid(scope if colon else None, key, tuple(parts))
    return None


def _split(text: str) -> list[str]:
    """The values between the commas that stand in no brackets, braces or quotes."""
    parts, depth, quote = [""], 0, ""
    for letter in text:
        if letter == "," and not depth and not quote:
            parts.append("")
            continue
        if letter in "\"'":
            quote = "" if letter == quote else quote or letter
        elif not quote:
            depth += (letter in "[{") - (letter in "]}")
        parts[-1] += letter
    return [part.strip() for part in parts]


def _fitting(grids: Sequence[Grid], name: str, faults: list[str]) -> list[Grid]:
    """Those for the recipe of this name."""
    fitting = [grid for grid in grids if grid.scope in (None, name)]
    keys = [grid.key for grid in fitting]
    for key in sorted({key for key in keys if keys.count(key) > 1}):
        twice = f"--grid {key}: given twice for {name}; give all its values in one"
        faults += [twice] * (twice not in faults)
    return fitting


def _combination(
    source: str,
    scope: str | None,
    chosen: dict[str, str],
    grids: Sequence[Grid],
    settings: Sequence[str],
    faults: list[str],
) -> Combination | None:
    """scope: the recipe's name where there are several."""
    given = [f"{key}={value}" for key, value in chosen.items()]
    varying = {grid.key: chosen[grid.key] for grid in grids if len(grid.values) > 1}
    try:
        recipe = load_recipe(source, [*settings, *given])
    except RecipeError as error:
        for line in _lines(error):
            for setting in given:
                line = line.replace(f"--set {setting}:", f"--grid {setting}:")
            if scope:
                other_head = "; or give it to one recipe alone, as NAME:KEY=.." * (", not of `type: " in line)
                line = f"{scope}: {line}{other_head}"
            faults += [line] * (line not in faults)
        return None
    name = _run_name(recipe.name, scope, varying)
    differs = {RECIPE: scope, **varying} if scope else varying
    return Combination(name, source, (*settings, *given), differs, recipe.model_copy(update={"name": name}))


def _raise(faults: Sequence[str]) -> None:
    if len(faults) == 1:
        raise RecipeError(faults[0])
    if faults:
        raise RecipeError(f"{len(faults)} faults in the sweep:\n" + "\n".join(f"  {fault}" for fault in faults))


def _lines(error: RecipeError) -> list[str]:
    first, *more = str(error).split("\n")
    return [line.strip() for line in more] or [first]


def _run_name(recipe: str, scope: str | None, varying: dict[str, str]) -> str:
    """What differs, in letters that a folder may have: `smollm2-medusa_num_heads-3_loss-lk`."""
    last = [key.rpartition(".")[2] for key in varying]
    short = [word if last.count(word) == 1 else key for word, key in zip(last, varying, strict=True)]
    values = [re.sub(r"[^A-Za-z0-9.]+", "-", value).strip("-") for value in varying.values()]
    words = [*([scope] if scope else []), *(f"{key}-{value}" for key, value in zip(short, values, strict=True))]
    name = "_".join(words) or recipe
    if len(name) > LONGEST_NAME:
        name = f"{name[: LONGEST_NAME - 9]}-{sha256(name.encode()).hexdigest()[:8]}"
    return name


def _refuse_twins(found: Sequence[Combination]) -> None:
    """RecipeError where two runs would be one and the same, or would have one name."""
    seen: dict[str, Combination] = {}
    for one in found:
        other = seen.setdefault(one.name, one)
        if other is not one:
            raise RecipeError(f"{_told(other)} and {_told(one)} would both be called {one.name}; keep one of them")
    made: dict[str, Combination] = {}
    for one in found:
        content = one.recipe.model_copy(update={"name": "same"}).model_dump_json()
        other = made.setdefault(content, one)
        if other is not one:
            raise RecipeError(f"{_told(other)} and {_told(one)} are one and the same run; keep one of them")


def _told(one: Combination) -> str:
    return ", ".join(f"{key}={value}" for key, value in one.differs.items()) or one.name


def _refuse_unequal(bases: Sequence[Recipe], found: Sequence[Combination], asked: set[str]) -> None:
    """RecipeError where recipes differ in target, data, prompts or budget: they could not be compared. asked: the keys
    that grids vary in all of them."""
    first, *others = bases
    for other in others:
        for key in _unlike(first, other):
            if key not in asked:
                raise RecipeError(
                    f"{first.name} and {other.name} differ in {key}, and runs of a sweep are compared on equal terms; "
                    f"make them equal: --set {key}=..."
                )
    budgets = {one.budget: one for one in found}
    if len(budgets) > 1 and not asked & {"train.max_steps", "train.cpu_seconds", "train.epochs"}:
        (key, value), (other_key, other), *_ = budgets
        raise RecipeError(
            f"runs would train for {key}={value} and for {other_key}={other}; give them one budget: --set {key}=.."
        )


def _unlike(one: Recipe, other: Recipe) -> list[str]:
    """Keys that must be equal and are not."""
    found = []
    for section, free in (("target", ()), ("data", ("features", "feature_cache")), ("eval", NOT_MEASURED)):
        ours, theirs = (getattr(recipe, section).model_dump() for recipe in (one, other))
        found += [f"{section}.{key}" for key in ours if key not in free and ours[key] != theirs[key]]
    return found
