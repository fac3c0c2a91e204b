"""Recipes as YAML: read strictly, with the line of every key, and written so that reading gives the same values back.

Numbers and words are read by YAML 1.2's core schema. YAML 1.1, which most Python programs read, makes text of `2e-5`,
1000 of `1_000`, 8 of `010`, 60 of `1:00` and `true` of `yes`, so that a slip changes a run in silence. Here `2e-5` is a
number and the others stay text, which the schema refuses by name wherever a number or a truth value is wanted.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import yaml

Path = tuple[str | int, ...]
"""Where a value stands: keys and list indices from the root."""

_SCALARS = {
    "tag:yaml.org,2002:null": (r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    "tag:yaml.org,2002:bool": (r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    "tag:yaml.org,2002:int": (r"[-+]?(0|[1-9][0-9]{0,17})", list("-+0123456789")),
    "tag:yaml.org,2002:float": (
        r"[-+]?([0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
    "tag:headstart,yes-or-no": (r"(?i:yes|no|on|off)", list("yYnNoO")),
}


class YesOrNo(str):
    """An unquoted yes, no, on or off: text to YAML 1.2 and a truth value to YAML 1.1, so never a value to trust."""


_CONSTRUCT: dict[str, Callable[[str], Any]] = {
    "tag:yaml.org,2002:null": lambda text: None,
    "tag:yaml.org,2002:bool": lambda text: text.lower() == "true",
    "tag:yaml.org,2002:int": int,
    "tag:yaml.org,2002:float": lambda text: float(re.sub(r"\.(?=inf|nan)", "", text.lower())),
    "tag:yaml.org,2002:str": str,
    "tag:headstart,yes-or-no": YesOrNo,
}


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[Any, Any] = {}

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()
        if getattr(event, "anchor", None) or getattr(event, "tag", None):
            problem = "anchors, aliases and tags (&, *, !) are not used in recipes: write the plain value"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)
        return super().compose_node(parent, index)


class _Dumper(yaml.SafeDumper):
    yaml_implicit_resolvers: dict[Any, Any] = {}

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, indentless=False)  # list items stand under their key, indented


for _tag, (_pattern, _first) in _SCALARS.items():
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(_tag, re.compile(rf"(?:{_pattern})\Z"), _first)
_Dumper.add_representer(YesOrNo, yaml.SafeDumper.represent_str)


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong: where it was written, its dotted key, and what was found and expected."""

    place: str
    path: Path
    message: str

    def __str__(self) -> str:
        return ": ".join(part for part in (self.place, dotted(self.path), self.message) if part)


@dataclass
class Document:
    """The plain values of a recipe, the place (`file:line` or `--set key=value`) of each, and the faults met so far."""

    values: dict[str, Any] = field(default_factory=dict)
    places: dict[Path, str] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)

    def place(self, path: Path) -> str:
        """Where `path` was written; for what is missing, where the section that lacks it was."""
        while path and path not in self.places:
            path = path[:-1]
        return self.places.get(path, "")

    def fault(self, path: Path, message: str, place: str | None = None) -> None:
        self.faults.append(Fault(self.place(path) if place is None else place, path, message))


def dotted(path: Path) -> str:
    """`("data", "train", 0, "split")` as `data.train.0.split`, the spelling that `--set` takes."""
    return ".".join(str(part) for part in path)


def read_yaml(text: str, name: str) -> Document:
    """Read `text`; `name` stands before the line numbers. Faults are collected in the document, never raised."""
    document = Document(places={(): name})
    try:
        node = yaml.compose(text, Loader=_Loader)
    except (yaml.YAMLError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        document.fault((), _unreadable(error), f"{name}:{mark.line + 1}" if mark else name)
        return document
    if not isinstance(node, yaml.MappingNode):
        found = "nothing" if node is None else "a single value or a list"
        document.fault((), f"found {found}, expected sections such as `target:` and `data:`")
        return document
    document.values = _plain(node, (), document, name)
    return document


def set_value(document: Document, override: str) -> None:
    """Apply one `--set a.b=value`: the value is read as YAML and checked later with everything else."""
    place = f"--set {override}"
    key, equals, text = override.partition("=")
    if not equals or not all(key.split(".")):
        document.fault((), "expected KEY=VALUE, such as train.lr=2e-5", place)
        return
    path: Path = tuple(int(part) if part.isdecimal() else part for part in key.strip().split("."))
    try:
        node = yaml.compose(text, Loader=_Loader)
    except (yaml.YAMLError, RecursionError) as error:
        document.fault(path, _unreadable(error), place)
        return
    parent = _parent(path, document, place)
    if parent is not None:
        # what the file said below this key is gone
        document.places = {old: line for old, line in document.places.items() if old[: len(path)] != path}
        document.places[path] = place
        parent[path[-1]] = None if node is None else _plain(node, path, document, None)


def write_yaml(values: dict[str, Any]) -> str:
    """`values` as YAML in their own order; `read_yaml` gives the same values back."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def _parent(path: Path, document: Document, place: str) -> Any:
    """The mapping or list that holds the last part of `path`, its sections made where the file has none; else None."""
    parent: Any = document.values
    for depth, part in enumerate(path):
        fits = isinstance(parent, list) if isinstance(part, int) else isinstance(parent, dict)
        if not fits:
            document.fault(path, f"`{dotted(path[:depth])}` has no key `{part}`", place)
            return None
        if isinstance(part, int) and part >= len(parent):
            document.fault(path[: depth + 1], f"found index {part}, but the list has {len(parent)} entries", place)
            return None
        if depth == len(path) - 1:
            break
        if isinstance(part, str) and parent.get(part) is None:
            parent[part] = {}
            document.places[path[: depth + 1]] = place
        parent = parent[part]
    return parent


def _unreadable(error: Exception) -> str:
    problem = getattr(error, "problem", None) or str(error)
    return f"not readable as YAML: {problem.splitlines()[0]}"


def _plain(node: yaml.Node, path: Path, document: Document, name: str | None) -> Any:
    if isinstance(node, yaml.MappingNode):
        return dict(_entries(node, path, document, name))
    if isinstance(node, yaml.SequenceNode):
        items = []
        for index, item in enumerate(node.value):
            _note(item, (*path, index), document, name)
            items.append(_plain(item, (*path, index), document, name))
        return items
    return _CONSTRUCT[node.tag](node.value)


def _entries(node: yaml.MappingNode, path: Path, document: Document, name: str | None) -> Iterator[tuple[str, Any]]:
    lines: dict[str, int] = {}
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        if not isinstance(key_node, yaml.ScalarNode):
            document.fault(path, "a key is a single word, not a list or a mapping", name and f"{name}:{line}")
            continue
        key = str(key_node.value)
        inner = (*path, key)
        if key in lines:
            first = f"first on line {lines[key]}" if name else "first in the same value"
            document.fault(inner, f"the key `{key}` stands here twice ({first}); keep one", name and f"{name}:{line}")
            continue
        lines[key] = line
        _note(key_node, inner, document, name)
        yield key, _plain(value_node, inner, document, name)


def _note(node: yaml.Node, path: Path, document: Document, name: str | None) -> None:
    if name is not None:
        document.places[path] = f"{name}:{node.start_mark.line + 1}"
