"""Prepacked linear layers: the same numbers as plain ones, and the plain ones wherever they would not be."""

from __future__ import annotations

import warnings

import pytest
import tiny
import torch
from torch import nn

from headstart.decode import prepack as module
from headstart.decode.prepack import PackedLinear, SiblingLinear, prepack, seconds_by_dtype


def logits(target, ids=((5, 9, 200, 31, 7),)):
    return target.model(torch.tensor(ids), use_cache=False).logits.float()


@pytest.fixture
def always_faster(monkeypatch):
    """Packs whatever the clock says: what is tested is the numbers."""
    monkeypatch.setattr(module, "_best_seconds", lambda layer, *_: 2.0 if type(layer) is nn.Linear else 1.0)


@pytest.mark.parametrize("family", ["llama", "headdim", "tied", "gpt2", "neox", "opt"])
def test_logits_stay_within_bf16_rounding(family, always_faster):
    target, plain = (tiny.target(family, dtype=torch.bfloat16) for _ in range(2))
    assert prepack(target)
    assert (logits(target) - logits(plain)).abs().mean() <= 0.03 * logits(plain).std()


def test_queries_keys_and_values_are_one_product(always_faster):
    target = tiny.target("llama", dtype=torch.bfloat16)
    prepack(target)
    attention = target.model.model.layers[0].self_attn
    assert isinstance(attention.q_proj, SiblingLinear) and attention.q_proj._product is attention.v_proj._product
    assert type(attention.o_proj) is PackedLinear


def test_siblings_in_any_order_and_with_other_inputs_give_their_own_part(always_faster):
    target, plain = (tiny.target("llama", dtype=torch.bfloat16) for _ in range(2))
    prepack(target)
    packed, linear = target.model.model.layers[1].self_attn, plain.model.model.layers[1].self_attn
    one, other = torch.randn(2, 3, 64).bfloat16(), torch.randn(2, 3, 64).bfloat16()
    for name, hidden in [("v_proj", one), ("q_proj", one), ("q_proj", one), ("k_proj", other), ("v_proj", other)]:
        torch.testing.assert_close(getattr(packed, name)(hidden), getattr(linear, name)(hidden), rtol=0.05, atol=0.05)


def test_only_bf16_on_a_cpu_is_packed():
    target = tiny.target("llama", dtype=torch.float32)
    assert not prepack(target) and not any(isinstance(m, PackedLinear) for m in target.model.modules())


def test_plain_layers_stay_where_packing_is_no_faster(monkeypatch):
    monkeypatch.setattr(module, "_best_seconds", lambda layer, *_: 1.0 if type(layer) is nn.Linear else 2.0)
    target = tiny.target("llama", dtype=torch.bfloat16)
    assert not prepack(target) and not any(isinstance(m, PackedLinear) for m in target.model.modules())


def test_a_wrong_product_is_noticed_and_taken_back(always_faster, monkeypatch):
    target, plain = (tiny.target("llama", dtype=torch.bfloat16) for _ in range(2))
    monkeypatch.setattr(
        module._Product, "part", lambda self, hidden, index: self(hidden).split(self.sizes, -1)[index] + 1
    )
    with pytest.warns(UserWarning, match="changed the logits"):
        assert not prepack(target)
    assert torch.equal(logits(target), logits(plain))


def test_missing_operators_fall_back_with_one_warning(monkeypatch):
    def missing(*_):
        raise AttributeError("no such operator")

    monkeypatch.setattr(module, "_Product", missing)
    target = tiny.target("llama", dtype=torch.bfloat16)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert not prepack(target)
    assert len(caught) == 1 and "plain ones" in str(caught[0].message)


def test_seconds_by_dtype_count_every_layer_once(monkeypatch):
    target = tiny.target("llama", dtype=torch.bfloat16)
    num_layers = sum(isinstance(layer, nn.Linear) for layer in target.model.modules())
    monkeypatch.setattr(
        module, "_best_seconds", lambda layer, hidden, _: 1.0 if hidden.dtype == torch.bfloat16 else 0.5
    )
    assert seconds_by_dtype(target) == {torch.bfloat16: num_layers, torch.float32: num_layers / 2}
