"""Which attention and MLP blocks of a target are left out while it drafts for itself, kept in a folder like a head.

    save_skips(Skips(attention=(9, 14), mlp=(12,)), "runs/skips", target, length=4)
    skips, length = load_skips("runs/skips", target)

A block that is left out adds nothing to the residual stream (Draft & Verify, arXiv 2309.08168; SWIFT, arXiv
2410.06916).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headstart.atomic import write_text
from headstart.bypass import unchanged
from headstart.errors import HeadError, TargetError
from headstart.target import Target, check_fingerprint

FORMAT = 1
"""Of the file; a reader refuses a later one."""
FILE = "skips.json"
ATTENTION = (("self_attn",), ("attn",), ("attention",), ("self_attention",))
MLP = (("mlp",), ("feed_forward",), ("block_sparse_moe",), ("fc1", "fc2"))
"""The modules of a layer that are its block, by transformers' names; the first of these that it has."""

Call = tuple[nn.Module, Callable[..., Any]]
"""A module, and what is called in its place."""


@dataclass(frozen=True)
class Skips:
    """Layers, in ascending order, whose attention or whose MLP is left out."""

    attention: tuple[int, ...] = ()
    mlp: tuple[int, ...] = ()

    @property
    def num_blocks(self) -> int:
        return len(self.attention) + len(self.mlp)

    def calls(self, target: Target) -> list[Call]:
        """What a `Bypass` needs; a layer of which nothing is left is passed over whole, norms and all.

        Modules are looked up anew each time: a decode copy may have swapped some. Raises TargetError in one sentence
        where a layer has no such blocks.
        """
        both = set(self.attention) & set(self.mlp)
        calls: list[Call] = [(target.layers[layer], unchanged) for layer in sorted(both)]
        for layers, names, nothing in ((self.attention, ATTENTION, _no_attention), (self.mlp, MLP, torch.zeros_like)):
            for layer in layers:
                if layer not in both:
                    calls += [(module, nothing) for module in _block(target, layer, names)]
        return calls


def _no_attention(hidden_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
    """Zeros in the place of what attention gives, and of its weights."""
    return torch.zeros_like(hidden_states), None


def _block(target: Target, layer: int, names: tuple[tuple[str, ...], ...]) -> list[nn.Module]:
    for some in names:
        found = [getattr(target.layers[layer], name, None) for name in some]
        if all(isinstance(module, nn.Module) for module in found):
            return [module for module in found if module is not None]
    expected = ", ".join("+".join(some) for some in names)
    raise TargetError(
        f"layer {layer} of {target.name} ({target.config.model_type}) has no block of a known name ({expected}), so "
        "none can be left out; take another drafter"
    )


def check_skips(skips: Skips, target: Target, where: str) -> None:
    """Raises HeadError where they are no blocks of this target; `where` begins the sentence."""
    for what, layers in asdict(skips).items():
        if list(layers) != sorted({int(layer) for layer in layers}) or any(
            not 0 <= layer < target.num_layers for layer in layers
        ):
            raise HeadError(
                f"{where}: {what} {list(layers)} are no layers of {target.name}, expected numbers from 0 to "
                f"{target.num_layers - 1} in ascending order; search for the blocks anew"
            )


def save_skips(
    skips: Skips, folder: str | Path, target: Target, *, length: int, search: Mapping[str, Any] | None = None
) -> Path:
    """Writes the file into the folder, whole or not at all; returns the folder.

    length: drafts of a chain. search: what a reader may want to know of how they were found.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    stored = {
        "format": FORMAT,
        "skips": asdict(skips),
        "length": length,
        "target": target.fingerprint(),
        "search": dict(search or {}),
    }
    write_text(folder / FILE, json.dumps(stored, indent=2) + "\n")
    return folder


def load_skips(folder: str | Path, target: Target, allow_other_target: bool = False) -> tuple[Skips, int]:
    """(the blocks, drafts of a chain) in this folder. Raises HeadError, or TargetError for another target
    (`allow_other_target`: only warned of, if it has the same shape)."""
    skips, length, made_for = read_skips(folder)
    check_fingerprint(made_for, target, allow_other_target, made="the skipped blocks were found for")
    check_skips(skips, target, str(Path(folder) / FILE))
    return skips, length


def read_skips(folder: str | Path) -> tuple[Skips, int, dict[str, Any]]:
    """(the blocks, drafts of a chain, the target's fingerprint) as the folder has them. Raises HeadError."""
    path = Path(folder) / FILE
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        found, length = stored["format"], int(stored["length"])
        skips = Skips(*(tuple(map(int, stored["skips"][what])) for what in ("attention", "mlp")))
        made_for = dict(stored["target"])
    except (FileNotFoundError, NotADirectoryError):
        raise HeadError(
            f"{folder} holds no skipped blocks ({FILE} is missing); search for them: "
            f"headstart skips --target NAME --output {folder}"
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise HeadError(f"{path} is no file of skipped blocks ({error!r}); search for them anew") from None
    if found != FORMAT:
        raise HeadError(f"{path} has format {found}, this version reads {FORMAT}; update headstart")
    return skips, length, made_for
