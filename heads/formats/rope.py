"""Rotary parameters in both spellings: `rope_parameters` (transformers 5), `rope_theta` + `rope_scaling` (before).

A head keeps the rotary base that IT was trained with, whatever its target has: a published EAGLE-3 head whose
config.json says nothing was trained with 10000, and to give it the target's base would make its drafts worse.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headstart.errors import HeadError

DEFAULT_THETA = 10000.0
"""What every implementation falls back to where a configuration says nothing."""
CACHE_ONLY = ("default", "linear", "llama3", "proportional")
"""Types whose frequencies do not depend on the number of positions: more of them only need a longer table."""


def read_rope(config: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The rotary parameters of a configuration, as `rope_parameters`; both spellings must agree where both are."""
    old, new = _old_spelling(config), _new_spelling(config)
    if old is not None and new is not None and old != new:
        raise HeadError(
            f"{folder / 'config.json'}: rope_parameters say {new}, rope_theta and rope_scaling say {old}; keep the one "
            "that the head was trained with"
        )
    return new or old or {"rope_type": "default", "rope_theta": DEFAULT_THETA}


def both_spellings(rope: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a configuration that tell every reader the same."""
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    return {
        "rope_parameters": dict(rope),
        "rope_theta": rope["rope_theta"],
        "rope_scaling": None if scaling.get("rope_type", "default") == "default" else scaling,
    }


def _new_spelling(config: Mapping[str, Any]) -> dict[str, Any] | None:
    values = config.get("rope_parameters")
    return _normalised(values, config.get("rope_theta", DEFAULT_THETA)) if isinstance(values, Mapping) else None


def _old_spelling(config: Mapping[str, Any]) -> dict[str, Any] | None:
    scaling = config.get("rope_scaling")
    if "rope_theta" not in config and not isinstance(scaling, Mapping):
        return None
    scaling = scaling if isinstance(scaling, Mapping) else {}
    return _normalised(scaling, config.get("rope_theta", DEFAULT_THETA))


def _normalised(values: Mapping[str, Any], theta: float) -> dict[str, Any]:
    """`type`, the oldest name, is `rope_type`."""
    kind = values.get("rope_type", values.get("type", "default"))
    rest = {key: value for key, value in values.items() if key not in ("type", "rope_type", "rope_theta")}
    return {"rope_type": kind, "rope_theta": float(values.get("rope_theta", theta)), **rest}
