"""From the schema's complaints to lines that a person can act on: the place, the dotted key, what was found, what was
expected, and the nearest key that exists."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from typing import Any, get_args

from pydantic import ValidationError

from headstart.heads.configs import Config
from headstart.recipe_yaml import Document, Path, YesOrNo, dotted

# what other trainers call our keys, so that a habit is answered with the right name
_ELSEWHERE = {
    "aux_hidden_state_layer_ids": "layers",
    "dataset": "data",
    "datasets": "data",
    "eagle_aux_hidden_state_layer_ids": "layers",
    "eval_steps": "eval_every",
    "grad_clip": "clip",
    "gradient_accumulation": "accumulation",
    "gradient_accumulation_steps": "accumulation",
    "heads": "num_heads",
    "learning_rate": "lr",
    "lr_scheduler": "schedule",
    "lr_scheduler_type": "schedule",
    "max_grad_norm": "clip",
    "max_seq_length": "max_length",
    "medusa_num_heads": "num_heads",
    "medusa_num_layers": "num_layers",
    "micro_batch_size": "batch_size",
    "model": "target",
    "num_epochs": "epochs",
    "num_hidden_layers": "num_layers",
    "num_key_value_heads": "num_kv_heads",
    "num_train_epochs": "epochs",
    "optim": "optimizer",
    "per_device_train_batch_size": "batch_size",
    "report_to": "trackers",
    "rope_parameters": "rope",
    "rope_scaling": "rope",
    "rope_theta": "rope",
    "save_steps": "save_every",
    "save_total_limit": "keep",
    "sequence_length": "max_length",
    "system_prompt": "system",
    "target_layer_ids": "layers",
    "torch_dtype": "dtype",
    "training": "train",
    "ttt_length": "unrolled_steps",
    "ttt_steps": "unrolled_steps",
    "warmup_ratio": "warmup",
}

_EXPECTED = {
    "int_type": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "text",
    "string_too_short": "some text",
    "list_type": "a list",
    "dict_type": "a mapping",
    "none_required": "null",
    "too_short": "at least one entry",
    "string_pattern_mismatch": "letters, digits, dots, dashes and underscores only",
    "greater_than_equal": "at least {ge:g}",
    "greater_than": "a number above {gt:g}",
    "less_than_equal": "at most {le:g}",
    "less_than": "a number below {lt:g}",
    "multiple_of": "a multiple of {multiple_of:g}",
}


def sections_of(model: type[Config], values: Any = None, path: Path = ()) -> Iterator[tuple[Path, type[Config]]]:
    """Every section below `model` with its path; the entries of a list share the path of the list.

    values: what a recipe says there. Where several kinds of section may stand, as under `head`, it is then the one that
    `type` names (the first, if it names none); without values, all of them.
    """
    yield path, model
    for name, field in model.model_fields.items():
        inner = values.get(name) if isinstance(values, dict) else None
        kinds = list(_kinds_of(field.annotation))
        if values is not None and len(kinds) > 1:
            named = inner.get("type") if isinstance(inner, dict) else None
            kinds = [kind for kind in kinds if kind.model_fields["type"].default == named][:1] or kinds[:1]
        for kind in kinds:
            yield from sections_of(kind, inner if values is None else inner or {}, (*path, name))


def _kinds_of(annotation: Any) -> Iterator[type[Config]]:
    """The sections that a type is made of, however deep: `list[Source]`, `A | B`."""
    if isinstance(annotation, type) and issubclass(annotation, Config):
        yield annotation
    else:
        for part in get_args(annotation):
            yield from _kinds_of(part)


def collect_faults(document: Document, error: ValidationError, model: type[Config]) -> None:
    """Add one fault per place to the document for everything that `error` complains of."""
    sections = dict(sections_of(model, document.values))
    expected: dict[Path, list[str]] = {}
    tried_as_one_of_several: set[Path] = set()
    places: set[Path] = set()
    for complaint in error.errors():
        path, value, of_several = _locate(complaint["loc"], document.values)
        places.add(path)
        if complaint["type"] == "extra_forbidden":
            _unknown_key(document, path, value, sections, model)
        elif complaint["type"] in ("union_tag_not_found", "union_tag_invalid"):
            _no_such_kind(document, path, value, [kind for place, kind in sections_of(model) if place == path])
        elif complaint["type"] == "missing":
            missing = (*path, complaint["loc"][-1])
            document.fault(missing, f"this key is missing ({_purpose(missing, sections)})")
        elif complaint["type"] == "value_error":
            document.fault(path, str(complaint.get("ctx", {}).get("error")))
        else:
            expected.setdefault(path, []).append(_expected(complaint, path, sections))
            tried_as_one_of_several |= {path} if of_several else set()
    for path, wanted in expected.items():
        # a value that could be of two kinds complains for both: the one that looked further in knows better
        if path in tried_as_one_of_several and any(len(p) > len(path) and p[: len(path)] == path for p in places):
            continue
        _, value, _ = _locate(path, document.values)
        kinds = " or ".join(dict.fromkeys(wanted))
        document.fault(path, f"found {_found(value)}, expected {kinds}{_hint(value, wanted)}")


def _locate(loc: tuple[str | int, ...], values: Any) -> tuple[Path, Any, bool]:
    """The path in the data of a complaint's location, which also names the kinds of a union, and the value there."""
    path: Path = ()
    for part in loc:
        if _holds(values, part):
            path, values = (*path, part), values[part]
    return path, values, len(path) < len(loc)


def _holds(values: Any, part: str | int) -> bool:
    return isinstance(part, int) if isinstance(values, list) else isinstance(values, dict) and part in values


def _section_path(path: Path) -> Path:
    return tuple(part for part in path if isinstance(part, str))


def _purpose(path: Path, sections: Mapping[Path, type[Config]]) -> str:
    *section, key = _section_path(path)
    description = sections[tuple(section)].model_fields[str(key)].description or ""
    return re.split(r"(?<=[a-z`])[.;:] ", " ".join(description.split()))[0].rstrip(".")


def _no_such_kind(document: Document, path: Path, value: Any, kinds: list[type[Config]]) -> None:
    """A section of several kinds whose `type` is missing or is none of theirs."""
    names = [kind.model_fields["type"].default for kind in kinds]
    place = (*path, "type")
    if "type" in value:
        document.fault(place, f"found {_found(value['type'])}, expected {_one_of(names, value['type'])}")
    else:
        purpose = (kinds[0].model_fields["type"].description or "").rstrip(".")
        document.fault(place, f"this key is missing ({purpose}); expected {_one_of(names, None)}")


def _unknown_key(
    document: Document, path: Path, value: Any, sections: Mapping[Path, type[Config]], model: type[Config]
) -> None:
    section, key = _section_path(path[:-1]), str(path[-1])
    kinds = [kind for place, kind in sections_of(model) if place == section and key in kind.model_fields]
    if kinds:  # the section is of another kind than the one that has this key
        owners = " or ".join(f"`type: {kind.model_fields['type'].default}`" for kind in kinds)
        document.fault(
            path, f"a key of {owners}, not of `type: {sections[section].model_fields['type'].default}`; remove it"
        )
        return
    near = nearest_keys(key, section, sections)
    known = sorted(sections[section].model_fields)
    where = f"in `{dotted(path[:-1])}`" if path[:-1] else "at the top level"
    advice = "did you mean " + " or ".join(f"`{dotted(p)}`" for p in near) if near else f"known: {', '.join(known)}"
    document.fault(path, f"unknown key {where}; {advice}{'?' if near else ''}")
    if isinstance(value, dict) and near and near[0] in sections:
        for key in value.keys() - sections[near[0]].model_fields.keys():
            inner = nearest_keys(key, near[0], sections)
            meant = f"; did you mean {' or '.join(f'`{dotted(p)}`' for p in inner)}?" if inner else ""
            document.fault((*path, key), f"unknown key in `{dotted(near[0])}`{meant}")


def nearest_keys(key: str, section: Path, sections: Mapping[Path, type[Config]]) -> list[Path]:
    """The keys that `key`, found in `section`, was most likely meant for, at most three, nearest first.

    Looked for in this order: the same name (dashes, capitals and other trainers' names forgiven) here, then elsewhere;
    a similar name here, then elsewhere.
    """
    name = key.lower().replace("-", "_")
    name = _ELSEWHERE.get(name, name)
    here = [path for path in sections if path == section]
    others = [path for path in sections if path != section]
    for places in (here, others):
        exact = [(*path, name) for path in places if name in sections[path].model_fields]
        if exact:
            return exact[:3]
    for places in (here, others):
        names = {field: field for path in places for field in sections[path].model_fields}
        names |= {foreign: ours for foreign, ours in _ELSEWHERE.items() if ours in names}
        for close in difflib.get_close_matches(name, names, n=1, cutoff=0.7):
            return [(*path, names[close]) for path in places if names[close] in sections[path].model_fields][:3]
    return []


def _expected(complaint: Any, path: Path, sections: Mapping[Path, type[Config]]) -> str:
    kind, context = complaint["type"], complaint.get("ctx", {})
    if kind == "literal_error":
        return _one_of(re.findall(r"'([^']*)'", context["expected"]), complaint["input"])
    if kind in ("model_type", "model_attributes_type"):
        keys = list(sections[_section_path(path)].model_fields)[:4]
        return "a section with keys such as " + ", ".join(f"`{key}`" for key in keys)
    return _EXPECTED[kind].format(**context) if kind in _EXPECTED else complaint["msg"]


def _one_of(names: list[str], found: Any) -> str:
    """`a, b or c`, and the one that was probably meant."""
    near = difflib.get_close_matches(str(found).lower().replace("_", "-"), names, n=1, cutoff=0.7)
    nearest = f" (`{near[0]}`?)" if near and len(names) > 1 else ""
    return ", ".join(names[:-1]) + " or " * (len(names) > 1) + names[-1] + nearest


def _found(value: Any) -> str:
    match value:
        case None:
            return "nothing (null)"
        case bool():
            return str(value).lower()
        case str():
            return f"the text '{value}'"
        case dict():
            return "a section"
        case list():
            return "a list" if value else "an empty list"
    return str(value)


def _hint(value: Any, expected: list[str]) -> str:
    """What to type instead, where that is plain."""
    wants_number = any("number" in kind for kind in expected)
    if "true or false" in expected and isinstance(value, str):
        truth = {"true": "true", "yes": "true", "on": "true", "false": "false", "no": "false", "off": "false"}
        return f"; write {truth[value.lower()]} without quotes" if value.lower() in truth else ""
    if wants_number and isinstance(value, str) and not isinstance(value, YesOrNo):
        plain = value.replace("_", "").replace(",", "")
        return f"; write {plain} without quotes" if re.fullmatch(r"[-+]?\d+", plain) else ""
    if "a whole number" in expected and isinstance(value, float) and value.is_integer():
        return f"; write {int(value)}"
    if expected == ["text"] and isinstance(value, bool | int | float):
        return "; put it in quotes"
    return ""
