"""What the readers of foreign checkpoints share: what they give back, and how names, shapes and values are refused."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Int
from torch import Tensor

from headstart.errors import HeadError

Tensors = Mapping[str, Tensor]
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Checkpoint:
    """A foreign folder as it was found: nothing is renamed, cast or dropped."""

    folder: Path
    config: dict[str, Any]
    tensors: dict[str, Tensor]

    def value(self, key: str, kind: type = int) -> Any:
        """A value of config.json that must be there with this type."""
        return config_value(self.config, key, kind, self.folder)


@dataclass(frozen=True)
class Foreign:
    """A foreign head in the words of ours: what `imported_head` makes a head of, given its target."""

    format: str
    """The layout that was recognised, one of `formats.READERS`."""
    type: Literal["medusa", "eagle", "eagle3"]
    """Which head of ours it is."""
    state: dict[str, Tensor]
    """Tensors by the names of our head's state dict, in their stored dtype."""
    settings: dict[str, Any]
    """Keys of the head's configuration that follow from the checkpoint; `layers` None: the published default."""
    hidden_size: int
    vocab_size: int | None
    """Rows of the target's output weight; None where the checkpoint does not say."""
    borrowed: dict[str, Tensor] = field(default_factory=dict)
    """Copies of the target's own tensors (`embedding`, `output`): compared with the target's, never kept."""
    target_name: str | None = None
    """The target that the checkpoint names."""


def config_value(config: Mapping[str, Any], key: str, kind: type, folder: Path) -> Any:
    found = config.get(key)
    if isinstance(found, bool) != (kind is bool) or not isinstance(found, kind):
        raise HeadError(
            f"{folder / 'config.json'}: {key} is {found!r}, expected {_article(kind)}; copy the checkpoint's own "
            "config.json again"
        )
    return found


def _article(kind: type) -> str:
    return {int: "a whole number", str: "a text", bool: "true or false", float: "a number", dict: "an object"}[kind]


def check_layout(checkpoint: Checkpoint, expected: Mapping[str, Shape], optional: Collection[str] = ()) -> None:
    """Every tensor of the layout once with its shape, nothing else; those in `optional` may be absent."""
    found = checkpoint.tensors
    missing = sorted(expected.keys() - found.keys() - set(optional))
    extra = sorted(found.keys() - expected.keys())
    if missing or extra:
        faults = [f"lacks {', '.join(missing)}"] * bool(missing)
        faults += [f"holds {', '.join(extra)}, which no part of our head has a place for"] * bool(extra)
        raise HeadError(f"{checkpoint.folder} {' and '.join(faults)}; give a whole checkpoint of a known layout")
    for name, shape in expected.items():
        if name in found and tuple(found[name].shape) != shape:
            raise HeadError(
                f"{checkpoint.folder}: {name} has shape {list(found[name].shape)}, its config.json asks for "
                f"{list(shape)}; copy the checkpoint's own config.json again"
            )


def target_ids(checkpoint: Checkpoint, vocab_size: int) -> Int[Tensor, "draft"] | None:
    """The draft vocabulary of `d2t` (offsets) and `t2d` (membership); None: the whole vocabulary.

    Target id of draft index i is i + d2t[i]. https://arxiv.org/abs/2503.01840
    """
    offsets, members = checkpoint.tensors.get("d2t"), checkpoint.tensors.get("t2d")
    if offsets is None:
        if members is not None and not bool(members.all()):
            raise HeadError(f"{checkpoint.folder} lacks d2t, but its t2d leaves ids out; give the whole checkpoint")
        return None
    ids = torch.arange(len(offsets)) + offsets.long()
    fault = _fault_of_ids(offsets, ids, members, vocab_size)
    if fault:
        raise HeadError(
            f"{checkpoint.folder}: d2t {fault}; expected offsets, target id = i + d2t[i], ascending: export the "
            "checkpoint again with the tool that trained it"
        )
    return None if len(ids) == vocab_size else ids


def _fault_of_ids(offsets: Tensor, ids: Tensor, members: Tensor | None, vocab_size: int) -> str | None:
    """What is wrong with a draft vocabulary, in words; None: nothing."""
    kept = None if members is None else members.bool().nonzero().squeeze(-1)
    if kept is not None and not torch.equal(ids, kept):
        if torch.equal(offsets.long(), kept):
            return "holds target ids, not offsets"
        if not bool(offsets.any()):
            return f"is all zeros, which means the ids 0 to {len(offsets) - 1}, but t2d keeps others"
        return "gives other ids than t2d"
    if members is not None and len(members) != vocab_size:
        return f"goes with a t2d of {len(members)} ids, not the {vocab_size} of the vocabulary"
    if bool((ids[1:] <= ids[:-1]).any()) or int(ids[0]) < 0 or int(ids[-1]) >= vocab_size:
        return f"does not give ascending ids below {vocab_size}"
    return None


def equal_rounded(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors are one, each in its own dtype: rounded to the coarser of the two, bit for bit."""
    dtype = min(left.dtype, right.dtype, key=lambda kind: torch.finfo(kind).bits)
    return left.shape == right.shape and torch.equal(left.to("cpu", dtype), right.to("cpu", dtype))


def offsets_of(ids: Int[Tensor, "draft"], vocab_size: int) -> dict[str, Tensor]:
    """`d2t` (int64 offsets) and `t2d` (bool membership) of a draft vocabulary; nothing for a whole one."""
    if len(ids) == vocab_size:
        return {}
    members = torch.zeros(vocab_size, dtype=torch.bool)
    members[ids] = True
    return {"d2t": ids - torch.arange(len(ids)), "t2d": members}
