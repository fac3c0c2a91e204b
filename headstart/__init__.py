"""headstart: train light draft heads for a frozen language model, decode with them exactly, report what was gained.

The names below are loaded when they are first used (PEP 562), so that importing headstart costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headstart.decode.drafters.base import Request
    from headstart.decode.engine import Engine, Generation
    from headstart.decode.sampling import SamplingSettings
    from headstart.errors import HeadstartError
    from headstart.eval.accelerated import Accelerated, Answer, Stream, evaluate, generate, load_drafter, load_head
    from headstart.heads.store import build_head, save_head
    from headstart.recipe import Recipe, find_recipe, load_recipe
    from headstart.target import Target, load_target

__version__ = "0.1.0"

_HOMES = {
    "Accelerated": "headstart.eval.accelerated",
    "Answer": "headstart.eval.accelerated",
    "Engine": "headstart.decode.engine",
    "Generation": "headstart.decode.engine",
    "HeadstartError": "headstart.errors",
    "Recipe": "headstart.recipe",
    "Request": "headstart.decode.drafters.base",
    "SamplingSettings": "headstart.decode.sampling",
    "Stream": "headstart.eval.accelerated",
    "Target": "headstart.target",
    "build_head": "headstart.heads.store",
    "evaluate": "headstart.eval.accelerated",
    "find_recipe": "headstart.recipe",
    "generate": "headstart.eval.accelerated",
    "load_drafter": "headstart.eval.accelerated",
    "load_head": "headstart.eval.accelerated",
    "load_recipe": "headstart.recipe",
    "load_target": "headstart.target",
    "save_head": "headstart.heads.store",
}


__all__ = [
    "Accelerated",
    "Answer",
    "Engine",
    "Generation",
    "HeadstartError",
    "Recipe",
    "Request",
    "SamplingSettings",
    "Stream",
    "Target",
    "build_head",
    "evaluate",
    "find_recipe",
    "generate",
    "load_drafter",
    "load_head",
    "load_recipe",
    "load_target",
    "save_head",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'headstart' has no attribute '{name}'")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
