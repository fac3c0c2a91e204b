"""`--typecheck-shapes`: every signature of headstart is checked at run time by beartype, shapes by jaxtyping.

jaxtyping's import hook decorates every function of a module with `jaxtyping.jaxtyped`, which binds each call to the
signature and checks its arguments twice: most of the time of a decoder that calls small functions. `checked` below
takes its place there and asks as much: one beartype wrapper, which looks at arguments and result, within one context of
jaxtyping, which holds the sizes of the axes, and without a context where no annotation has any.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import typing
from collections import Counter
from collections.abc import Callable
from types import CodeType
from typing import Any

import jaxtyping
from beartype import beartype
from beartype.roar import BeartypeCallHintViolation
from jaxtyping import AbstractArray

jaxtyped = jaxtyping.jaxtyped
OFTEN = 50
_made: Counter[CodeType] = Counter()
"""How often a function within a function was made."""


def install() -> None:
    """From now on: modules that were imported before are not checked."""
    jaxtyping.install_import_hook("headstart", "beartype.beartype")
    jaxtyping.jaxtyped = checked  # the name that the hook writes into the modules


def checked(one: Any = None, *, typechecker: object = None) -> Any:
    """The decorator: functions, what is made of them, and the constructors of dataclasses."""
    if one is None:
        return checked
    if inspect.isclass(one):
        if dataclasses.is_dataclass(one) and "__init__" in vars(one):
            one.__init__ = checked_function(one.__init__)
        return one
    if isinstance(one, classmethod | staticmethod):
        return type(one)(checked_function(one.__func__))
    if isinstance(one, property):
        return property(*(each and checked_function(each) for each in (one.fget, one.fset, one.fdel)))
    return checked_function(one)


def checked_function(function: Callable) -> Callable:
    # a generator's annotation is that of what it returns at once, an iterator: jaxtyping knows how to tell
    if inspect.isgeneratorfunction(function):
        return jaxtyped(function, typechecker=beartype)
    if not getattr(function, "__annotations__", None):
        return function
    # one that a loop makes anew each time costs more to wrap than to run: its later copies go unchecked
    _made[function.__code__] += 1
    if _made[function.__code__] > OFTEN:
        return function
    # by name, as modules that are imported for the type checker alone leave names that nothing stands for
    hints = {name: resolved(hint, function) for name, hint in function.__annotations__.items()}
    function.__annotations__ = hints
    inner = beartype(function)
    if not any(has_shape(hint) for hint in hints.values()):
        return inner

    @functools.wraps(function)
    def within_one_context(*args, **kwargs):
        with jaxtyped("context"):
            try:
                return inner(*args, **kwargs)
            except BeartypeCallHintViolation:
                jaxtyping.print_bindings()
                raise

    return within_one_context


def resolved(hint: Any, function: Callable) -> Any:
    """The type that an annotation names; Any where it cannot be known at run time."""

    def holder(value): ...

    holder.__annotations__ = {"value": hint}
    try:
        return typing.get_type_hints(holder, function.__globals__, include_extras=True)["value"]
    except Exception:
        return Any


def has_shape(hint: Any) -> bool:
    if inspect.isclass(hint) and issubclass(hint, AbstractArray):
        return True
    parts = hint if isinstance(hint, list) else typing.get_args(hint)
    return any(has_shape(part) for part in parts)
