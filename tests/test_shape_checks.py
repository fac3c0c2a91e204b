"""`--typecheck-shapes` finds wrong shapes, wrong types and sizes that differ within one call, wherever they stand."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
import torch
from beartype.roar import BeartypeCallHintViolation
from jaxtyping import Float, Int, TypeCheckError
from shape_checks import OFTEN, checked
from torch import Tensor

from headstart.decode.sampling import SamplingSettings, draw

if TYPE_CHECKING:
    from headstart.nowhere import Unknown

WRONG = BeartypeCallHintViolation


@checked
def pick(table: Float[Tensor, "rows columns"], places: Int[Tensor, "rows"]) -> Float[Tensor, "rows"]:
    picked = table[torch.arange(len(table)), places[: len(table)]]
    return picked[1:] if table.shape[1] == 1 else picked


@checked
def outer(table: Float[Tensor, "rows columns"]) -> Float[Tensor, "columns rows"]:
    """Calls another checked function, whose `rows` are not its own."""
    pick(table.T, torch.zeros(table.shape[1], dtype=torch.long))
    return table.T


@checked
@dataclass(frozen=True)
class Pair:
    one: Float[Tensor, "n"]
    other: Float[Tensor, "n"]
    count: int = 0

    @checked
    @property
    def longer(self) -> int:
        return self.count or "none"  # type: ignore

    @checked
    @classmethod
    def of(cls, sizes: list[int]) -> Pair:
        return cls(*(torch.zeros(size) for size in sizes))


def test_arguments_and_results_agree_within_a_call():
    table, places = torch.zeros(3, 2), torch.zeros(3, dtype=torch.long)
    assert len(pick(table, places)) == 3
    assert outer(table).shape == (2, 3)
    for wrong in [(table, places[:2]), (table, places.float()), (table[0], places), (table.long(), places)]:
        with pytest.raises(WRONG):
            pick(*wrong)
    with pytest.raises(WRONG):  # two of three rows come back
        pick(torch.zeros(3, 1), places)
    assert len(pick(torch.zeros(4, 2), torch.zeros(4, dtype=torch.long))) == 4, "nothing of the calls before stays"


def test_dataclasses_properties_and_class_methods_are_checked():
    with pytest.raises(WRONG):
        Pair.of([2, 3])
    with pytest.raises(WRONG):
        Pair(torch.zeros(2), torch.zeros(2), count="3")  # type: ignore
    with pytest.raises(WRONG):
        _ = Pair.of([2, 2]).longer
    assert Pair(torch.zeros(2), torch.zeros(2), count=3).longer == 3


def test_what_cannot_be_known_at_run_time_is_not_asked_and_the_rest_is():
    @checked
    def mixed(one: Unknown, other: int | None = None) -> int:
        return 1

    assert mixed("anything", 3) == mixed(3) == 1
    with pytest.raises(WRONG):
        mixed("anything", 0.5)


def test_a_function_that_is_made_anew_each_time_is_checked_at_first():
    def made(number):
        @checked
        def inner(value: int) -> int:
            return number

        return inner

    for number in range(OFTEN):
        with pytest.raises(WRONG):
            made(number)("one")
    assert made(3)("one") == 3


def test_generators_too():
    @checked
    def parts(rows: Float[Tensor, "rows"]) -> Iterator[Float[Tensor, ""]]:
        yield from rows

    assert len(list(parts(torch.zeros(3)))) == 3
    with pytest.raises((WRONG, TypeCheckError)):
        list(parts(torch.zeros(3, 3)))


def test_headstart_is_checked_where_it_is_asked_for(request):
    probs = torch.full((2, 4), 0.25)
    if not request.config.getoption("--typecheck-shapes"):
        pytest.skip("without --typecheck-shapes nothing of headstart is checked")
    with pytest.raises(WRONG):
        draw(probs, torch.rand(3))
    with pytest.raises(WRONG):
        draw(probs.long(), torch.rand(2))
    with pytest.raises(WRONG):
        SamplingSettings(temperature="warm")  # type: ignore
