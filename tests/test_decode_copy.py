"""Faster modules of a decode copy: the same numbers as the model's own, which stay wherever they would not be."""

from __future__ import annotations

import warnings

import head_cases
import pytest
import tiny
import torch

from headstart.decode import decode_copy as module
from headstart.decode.decode_copy import in_float32, linear_seconds, make_faster, untouched
from headstart.decode.drafters.eagle import EagleDrafter
from headstart.decode.norms import OneKernelRMSNorm
from headstart.decode.prepack import LeanLinear, PackedLinear, SiblingLinear, packed_linears, plain_linears
from headstart.decode.swapped import Swapped

DTYPES = [torch.float32] + [torch.bfloat16] * torch.ops.mkldnn._is_mkldnn_bf16_supported()
"""What this processor can prepack."""


def logits(target, ids=((5, 9, 200, 31, 7),)):
    return target.model(torch.tensor(ids), use_cache=False).logits.float()


def kinds(target) -> set[type]:
    return {type(layer) for layer in target.model.modules() if isinstance(layer, Swapped)}


@pytest.fixture
def packing_wins(monkeypatch):
    """Packs whatever the clock says: what is tested is the numbers."""
    monkeypatch.setattr(module, "pass_seconds", lambda arms, *_, **__: dict(zip(arms, (2.0, 1.0), strict=False)))


@pytest.fixture
def packing_loses(monkeypatch):
    monkeypatch.setattr(module, "pass_seconds", lambda arms, *_, **__: dict(zip(arms, (1.0, 2.0), strict=False)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", ["llama", "headdim", "tied", "gpt2", "neox", "opt", "gemma2"])
def test_logits_stay_within_rounding(family, dtype, packing_wins):
    target, plain = (tiny.target(family, dtype=dtype) for _ in range(2))
    assert "linears" in make_faster(target) and {PackedLinear, SiblingLinear} & kinds(target)
    allowed = 0.03 if dtype == torch.bfloat16 else 1e-5
    assert (logits(target) - logits(plain)).abs().mean() <= allowed * logits(plain).std()


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rms_norms_are_found_whatever_their_weights_mean(family, dtype, packing_loses):
    """Gemma keeps its weights less one."""
    target = tiny.target(family, dtype=dtype)
    with torch.no_grad():
        for parameter in target.model.parameters():
            if parameter.dim() == 1:
                parameter.uniform_(0.2, 1.5)
    norms = {name: one for name, one in target.model.named_modules() if "RMSNorm" in type(one).__name__}
    assert "norms" in make_faster(target)
    hidden = torch.randn(2, 3, 1, dtype=dtype)
    for name, own in norms.items():
        swapped = target.model.get_submodule(name)
        assert isinstance(swapped, OneKernelRMSNorm)
        states = hidden * torch.linspace(0.1, 4, len(own.weight), dtype=dtype)
        torch.testing.assert_close(
            swapped(states), own(states), rtol=1e-5 if dtype == torch.float32 else 0.02, atol=1e-5
        )


def test_a_norm_that_only_looks_like_one_stays(packing_loses):
    target = tiny.target("llama", dtype=torch.float32)

    class OddRMSNorm(type(target.model.model.norm)):
        def forward(self, hidden):
            return super().forward(hidden) + hidden

    target.model.model.norm.__class__ = OddRMSNorm
    make_faster(target)
    assert type(target.model.model.norm) is OddRMSNorm
    assert isinstance(target.model.model.layers[0].input_layernorm, OneKernelRMSNorm)


def test_queries_keys_and_values_are_one_product(packing_wins):
    target = tiny.target("llama", dtype=torch.float32)
    make_faster(target)
    attention = target.model.model.layers[0].self_attn
    assert isinstance(attention.q_proj, SiblingLinear) and attention.q_proj._product is attention.v_proj._product
    assert type(attention.o_proj) is PackedLinear


def test_siblings_in_any_order_and_with_other_inputs_give_their_own_part(packing_wins):
    target, plain = (tiny.target("llama", dtype=torch.float32) for _ in range(2))
    make_faster(target)
    packed, linear = target.model.model.layers[1].self_attn, plain.model.model.layers[1].self_attn
    one, other = torch.randn(2, 3, 64), torch.randn(2, 3, 64)
    for name, hidden in [("v_proj", one), ("q_proj", one), ("q_proj", one), ("k_proj", other), ("v_proj", other)]:
        torch.testing.assert_close(getattr(packed, name)(hidden), getattr(linear, name)(hidden))


def test_float64_stays_as_it_is():
    target = tiny.target("llama", dtype=torch.float64)
    assert not make_faster(target) and not kinds(target)


def test_the_same_products_stay_where_packing_is_no_faster(packing_loses):
    target, plain = (tiny.target("llama", dtype=torch.float32) for _ in range(2))
    make_faster(target)
    assert kinds(target) == {LeanLinear, OneKernelRMSNorm}
    torch.testing.assert_close(logits(target), logits(plain))


def test_weights_too_large_to_copy_are_not_packed(monkeypatch):
    linears = plain_linears(tiny.target("llama", dtype=torch.float32).model)
    assert packed_linears(linears)
    monkeypatch.setattr("psutil.virtual_memory", lambda: type("Memory", (), {"available": 1000})())
    assert packed_linears(linears) == {}


def test_a_wrong_product_is_noticed_and_taken_back(packing_wins, monkeypatch):
    target, plain = (tiny.target("llama", dtype=torch.float32) for _ in range(2))
    monkeypatch.setattr(SiblingLinear, "forward", lambda self, hidden: self._product.part(hidden, self.index) + 1)
    with pytest.warns(UserWarning, match="changed the logits"):
        assert make_faster(target) == {"norms"}
    torch.testing.assert_close(logits(target), logits(plain))


def test_missing_operators_fall_back_with_one_warning(monkeypatch):
    def missing(*_):
        raise AttributeError("no such operator")

    monkeypatch.setattr("headstart.decode.prepack._Prepacked", missing)
    target = tiny.target("llama", dtype=torch.float32)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make_faster(target)
    assert len(caught) == 1 and "plain ones" in str(caught[0].message)
    assert kinds(target) == {LeanLinear, OneKernelRMSNorm}


def test_copies_are_the_models_own_again_and_share_their_weights(packing_wins):
    target, plain = (tiny.target("llama", dtype=torch.float32) for _ in range(2))
    names = set(dict(target.model.named_parameters()))
    make_faster(target)
    assert set(dict(target.model.named_parameters())) == names, "a parameter has a second name"
    own, wide = untouched(target), in_float32(target)
    assert not kinds(own) and not kinds(wide) and kinds(target)
    assert own.model.model.norm.weight is target.model.model.norm.weight
    assert own.model.model.layers[0].mlp.up_proj.weight is target.model.model.layers[0].mlp.up_proj.weight
    assert torch.equal(logits(own), logits(plain)) and torch.equal(logits(wide), logits(plain))


def test_every_linear_layer_is_timed_in_both_dtypes(monkeypatch):
    target = tiny.target("llama", dtype=torch.float32)
    count = len(plain_linears(target.model))
    timed = []

    def seconds(arms, rows, dtype, repeats=3):
        timed.append((rows, dtype, {name: len(layers) for name, layers in arms.items()}))
        return dict.fromkeys(arms, float(rows))

    monkeypatch.setattr(module, "pass_seconds", seconds)
    assert linear_seconds(target, (1, 4)) == {dtype: {1: 1.0, 4: 4.0} for dtype in (torch.bfloat16, torch.float32)}
    assert all(number == count for *_, arms in timed for number in arms.values())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_a_drafting_head_gets_the_modules_of_its_target(kind, dtype, packing_wins):
    target, plain = (tiny.target("llama", dtype=dtype) for _ in range(2))
    head = head_cases.head_for(target, kind=kind).eval()
    make_faster(target)
    fast, slow = (EagleDrafter(head, one).head for one in (target, plain))
    swapped = {type(module) for module in fast.modules() if isinstance(module, Swapped)}
    assert swapped == {OneKernelRMSNorm, PackedLinear, SiblingLinear}
    assert sum(p.numel() for p in fast.parameters()) == sum(p.numel() for p in head.parameters())

    def attend(layer, query, key, value):
        return query * value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)

    embeds, states = torch.randn(2, 1, 2, target.hidden_size, generator=torch.manual_seed(0)).to(dtype)
    given = [one.step(embeds, states, torch.tensor([[4, 5]]), attend) for one in (fast, slow)]
    rtol = 0.05 if dtype == torch.bfloat16 else 1e-4
    torch.testing.assert_close(given[0].output, given[1].output, rtol=rtol, atol=rtol)
    torch.testing.assert_close(given[0].carried, given[1].carried, rtol=rtol, atol=rtol)
