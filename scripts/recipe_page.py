"""Writes docs/recipes.md: the packaged recipes from their headers, and every key of a recipe from the schema.

python scripts/recipe_page.py            # `make docs`; a test holds that the page is fresh
"""

from __future__ import annotations

import re
import textwrap
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml
from pydantic.fields import FieldInfo

from headstart.atomic import write_text
from headstart.heads.configs import Config
from headstart.recipe import PACKAGED, Recipe
from headstart.recipe_faults import sections_of

PAGE = Path(__file__).resolve().parents[1] / "docs" / "recipes.md"
INTRODUCTION = """\
# Recipes

<!-- Written by `make docs` from recipes/*.yaml and headstart/recipe_schema.py; change those. -->

A recipe is one YAML file: what is trained, on what, how, and how it is measured. Take the packaged one that is nearest
to your model, and change what differs, in a copy or on the command line (`--set train.lr=5e-4`, as often as needed).
Whatever is wrong is reported at once, with its line and the nearest right key, before anything is loaded.

```sh
headstart train --recipe llama8b.yaml --smoke                           # small, on any CPU
headstart plan --recipe llama8b.yaml --gpus 8 --memory 80GB             # what it will take
headstart train --recipe my.yaml --set train.lr=5e-4 --name slower      # needs your recipe
```

## Which one for which model
"""
RANGES = {"ge": "at least {}", "gt": "above {}", "le": "at most {}", "lt": "below {}"}
KINDS = {bool: "true or false", int: "whole number", float: "number", str: "text", type(None): "null"}
UNTIL_NEXT = r"(?:\n(?!# [A-Z][a-z]+ {2,}).*)*"


def page() -> str:
    """The whole page, as the recipes and the schema say it now."""
    recipes = sorted(PACKAGED.glob("*.yaml"), key=lambda path: (_target(path), path.name))
    parts = [INTRODUCTION, *(_recipe(path) for path in recipes), "## Every key\n"]
    described: set[type] = set()
    for path, section in sections_of(Recipe):
        if section not in described:
            described.add(section)
            parts.append(_section(path, section))
    return "\n".join(parts)


def _target(path: Path) -> tuple[int, str]:
    """By size of the target, the smallest first."""
    name = str(yaml.safe_load(path.read_text(encoding="utf-8"))["target"]["name"])
    number = re.search(r"(\d+)([MmBb])\b", name)
    assert number, f"{path} names a target without its size"
    return int(number[1]) * (1 if number[2] in "Mm" else 1000), name


def _recipe(path: Path) -> str:
    header = path.read_text(encoding="utf-8").partition("\n\n")[0]
    said = {name: _header(header, name) for name in ("For", "Hardware", "Launch")}
    title = re.split(r"[.,]? *\n", header.removeprefix("# "))[0].rstrip(".")
    command = re.match(r"accelerate launch .*?--recipe \S+\.yaml", said["Launch"])
    assert command, f"{path} has no launch line"
    needs = "" if "--cpu" in command[0] else "   # needs a GPU"
    lines = [f"**`{path.name}`**: {title}. For {said['For']}. Hardware: {said['Hardware']}."]
    return "\n".join(
        [
            *(textwrap.fill(line, 120, break_on_hyphens=False) for line in lines),
            "",
            "```sh",
            command[0] + needs,
            "```",
            "",
        ]
    )


def _header(header: str, name: str) -> str:
    found = re.search(rf"^# {name} +(.*{UNTIL_NEXT})", header, flags=re.MULTILINE)
    assert found, f"a recipe's header lacks {name}"
    return " ".join(re.sub(r"^# *", "", line) for line in found[1].splitlines())


def _section(path: tuple[str | int, ...], section: type[Config]) -> str:
    name = ".".join(map(str, path))
    kind = section.model_fields["type"].default if "type" in section.model_fields else None
    title = f"`{name}`" + (f" of `type: {kind}`" if kind else "") if name else "At the top"
    about = " ".join((section.__doc__ or "").split())
    rows = [f"- `{key}`: {_row(field)}" for key, field in section.model_fields.items()]
    wrapped = [textwrap.fill(row, 120, subsequent_indent="  ", break_on_hyphens=False) for row in rows]
    return "\n".join([f"### {title}\n", textwrap.fill(about, 120) + "\n", *wrapped, ""])


def _row(field: FieldInfo) -> str:
    words = _kind(field.annotation)
    ranges = [RANGES[key].format(limit) for key, limit in _limits(field.metadata)]
    default = "needed" if field.is_required() else f"default {_default(field)}"
    described = " ".join((field.description or "").split())
    return f"{', '.join([words, *ranges, default])}. {described}"


def _kind(annotation: Any) -> str:
    """The type in words, with the limits of what it holds."""
    if annotation in KINDS:
        return KINDS[annotation]
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        limits = [RANGES[key].format(limit) for one in arguments[1:] for key, limit in _limits(_flat(one))]
        return " ".join([_kind(arguments[0]), *limits])
    if origin is Literal:
        return " or ".join(f"`{one}`" for one in arguments)
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(_kind(one) for one in arguments))
    if origin is list:
        return f"list of {_kind(arguments[0])}"
    if origin is dict:
        return f"mapping of {_kind(arguments[0])} to {_kind(arguments[1])}"
    return "section" if isinstance(annotation, type) and issubclass(annotation, Config) else "any value"


def _flat(metadata: Any) -> list[Any]:
    return metadata.metadata if isinstance(metadata, FieldInfo) else [metadata]


def _limits(metadata: list[Any]) -> Iterator[tuple[str, float]]:
    for one in metadata:
        for key in RANGES:
            if (limit := getattr(one, key, None)) is not None:
                yield key, limit


def _default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    if isinstance(value, Config):
        return "as below"
    return f"`{yaml.safe_dump(value, default_flow_style=True).removesuffix('...' + chr(10)).strip()}`"


def main() -> None:
    write_text(PAGE, page())
    print(PAGE)


if __name__ == "__main__":
    main()
