"""What the states in a cache depend on. Every ingredient is kept by name, and a cache made from others is refused.

The rows themselves are no part of the key: each is found by a hash of its ids and its mask (`row_hash`), so a cache can
grow, and a row that has changed is simply not in it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from headstart.errors import DataError
from headstart.recipe import Recipe
from headstart.target import Target

_MEND = {
    "target": "give the target that it was made with (target.name, target.revision)",
    "target dtype": "--set target.dtype={stored}",
    "target.adapter": "name the adapter that it was made with (target.adapter; null for none)",
    "target.quantization": "--set target.quantization={stored}",
    "tokenizer": "give the tokenizer that it was made with (target.name, target.revision)",
    "chat template": "give the tokenizer that it was made with (target.name, target.revision)",
    "data.chat.arguments": "--set 'data.chat.arguments={stored}'",
    "data.chat.system": "--set 'data.chat.system={stored}'",
    "data.chat.supervise": "--set data.chat.supervise={stored}",
    "data.max_length": "--set data.max_length={stored}",
    "layers": "choose layers of the head among those",
    "dtype": "--dtype {stored}",
}
"""What to type to be served by this cache after all, by ingredient."""


def row_hash(input_ids: np.ndarray, supervised: np.ndarray) -> bytes:
    """16 bytes of the SHA-256 of a row: its token ids and which of them are labels."""
    ids = np.ascontiguousarray(input_ids, dtype="<i4").tobytes()
    return hashlib.sha256(ids + np.ascontiguousarray(supervised, dtype=np.uint8).tobytes()).digest()[:16]


def cache_key(target: Target, recipe: Recipe, layers: Sequence[int], storage: str | None) -> dict[str, Any]:
    """The ingredients by name, JSON-ready.

    layers: the HF[k] beside the final state; the final state itself (HF[num_layers]) is always there. storage: None
    where a reader takes what there is.
    """
    facts = target.fingerprint()
    tokenizer = dict(facts["tokenizer"])
    template = tokenizer.pop("template")
    chat = recipe.data.chat
    quantization = recipe.target.quantization
    key = {
        "target": {part: facts[part] for part in ("shape", "config", "weights")},
        "target dtype": str(target.dtype).removeprefix("torch."),
        # of another quantisation the fingerprint says nothing; a plain target's key is as it was before there was any
        "target.adapter": facts.get("adapter"),
        "target.quantization": None if quantization == "none" else quantization,
        "tokenizer": tokenizer,
        "chat template": template,
        "data.chat.arguments": chat.arguments,
        "data.chat.system": chat.system,
        "data.chat.supervise": chat.supervise,
        "data.max_length": recipe.data.max_length,
        "layers": sorted({k for k in layers if k != target.num_layers}),
        "dtype": storage,
    }
    return json.loads(json.dumps(key, default=str))


def check_key(stored: dict[str, Any], wanted: dict[str, Any], folder: Path) -> None:
    """Raises DataError where the cache in `folder` was made from another ingredient, naming each that differs."""
    faults, mends = [], []
    for name in _MEND:
        before, now = stored.get(name), wanted[name]
        difference = _difference(name, before, now)
        if difference:
            faults.append(f"{name}: {difference}")
            mends.append(_MEND[name].format(stored=_typed(before)))
    if faults:
        raise DataError(
            f"The feature cache {folder} was made otherwise: {'; '.join(faults)}. To use it: {'; '.join(mends)}. Or "
            "name another folder (data.feature_cache, or --output where it is written)."
        )


def _difference(name: str, before: Any, now: Any) -> str | None:
    """The two values in words; None where this one serves."""
    if name == "layers":
        lacking = sorted(set(now) - set(before or ()))
        return f"it holds {before}, this run reads {now}" if lacking else None
    if name == "dtype" and now is None:
        return None
    if name == "target":
        return _differing_facts(before or {}, now)
    if before == now:
        return None
    if name == "tokenizer":
        keys = sorted(key for key in {*before, *now} if before.get(key) != now.get(key))
        return f"{', '.join(keys[:3])} differ{'s' if len(keys) == 1 else ''}"
    return f"it has {before!r}, this run has {now!r}"


def _differing_facts(before: dict[str, Any], now: dict[str, Any]) -> str | None:
    """`weights middle differs, shape num_layers was 4, is 5`; a checksum of None, of a quantised matrix, equals any."""
    found = []
    for part, values in now.items():
        old_values = before.get(part, {})
        for key in sorted({*old_values, *values}):
            old, new = old_values.get(key), values.get(key)
            if old == new or (part == "weights" and None in (old, new)):
                continue
            found.append(f"{part} {key} differs" if part == "weights" else f"{part} {key} was {old!r}, is {new!r}")
    return ", ".join(found[:4]) or None


def _typed(value: Any) -> str:
    """A value as it is typed after `=`."""
    return json.dumps(value) if isinstance(value, dict | list) or value is None else str(value)
