"""Running a part of the target's layers: two parts, one after the other, are the whole, in every family."""

from __future__ import annotations

from typing import Any

import pytest
import tiny
import torch
from test_target import causal

from headstart.bypass import Bypass, unchanged
from headstart.errors import TargetError


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


@pytest.mark.parametrize("selects", [True, False])
@pytest.mark.parametrize("family", tiny.TREE_FAMILIES)
def test_two_parts_are_the_whole(family, selects):
    """Bit for bit: the model's own code runs, with its windows, masks by layer, scales and norms."""
    target = tiny.target(family, dtype=torch.float64)
    target._selects_states = selects
    ids, positions, allowed, distance = causal(24, batch=2)
    masks = target.masks(allowed, distance)
    whole = target.forward(ids, positions, masks, layers=range(target.num_layers + 1))
    for layer in range(1, target.num_layers):
        lower = target.forward(ids, positions, masks, layers=[0, layer], stop=layer)
        assert torch.equal(lower.taps[layer], whole.taps[layer]) and torch.equal(lower.taps[0], whole.taps[0])
        assert torch.allclose(lower.final, target.output.normalise(whole.taps[layer]))
        upper = target.forward(ids, positions, masks, layers=[layer, 4], start=(layer, lower.taps[layer]))
        assert torch.equal(upper.final, whole.final) and torch.equal(upper.taps[layer], whole.taps[layer])
    assert not any("forward" in vars(layer) for layer in target.layers)


def test_a_layer_that_is_left_out_does_no_work():
    target, calls = tiny.target("llama"), []
    for number, layer in enumerate(target.layers):
        layer.self_attn.register_forward_hook(lambda *_, number=number: calls.append(number))
    ids, positions, allowed, distance = causal(5)
    masks = target.masks(allowed, distance)
    lower = target.forward(ids, positions, masks, layers=[3], stop=3)
    assert calls == [0, 1, 2]
    target.forward(ids, positions, masks, start=(3, lower.taps[3]))
    assert calls == [0, 1, 2, 3]


def test_states_of_layers_that_are_left_out_are_refused():
    target = tiny.target("llama")
    ids, positions, allowed, distance = causal(5)
    masks = target.masks(allowed, distance)
    for layer, part in [(3, {"stop": 2}), (1, {"start": (2, torch.zeros(1, 5, 64))})]:
        with pytest.raises(TargetError, match=rf"layer {layer} was asked for, tiny-llama has HF\["):
            target.forward(ids, positions, masks, layers=[layer], **part)


def test_calls_are_given_back_whatever_happens():
    layer, own = torch.nn.Linear(2, 2), torch.zeros(1, 2)
    hooked: Any = lambda hidden: hidden + 1  # noqa: E731  (what accelerate leaves in a module)
    for before in (None, hooked):
        if before is not None:
            layer.forward = before
        expected = layer(own)
        with pytest.raises(ZeroDivisionError), Bypass([(layer, unchanged)]):
            assert layer(own) is own
            raise ZeroDivisionError
        assert torch.equal(layer(own), expected) and vars(layer).get("forward") is before
