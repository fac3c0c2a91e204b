"""Frozen targets in 8 and 4 bits: a model of their own, which heads learn and decoding is exact for."""

from __future__ import annotations

import pytest
import tiny
import torch
import train_cases as cases

from headstart.decode.decode_copy import in_float32
from headstart.decode.drafters.base import NoDraft, Request
from headstart.decode.drafters.ngram import NgramDrafter
from headstart.decode.engine import Engine
from headstart.decode.selfcheck import check_target
from headstart.errors import TargetError
from headstart.quantised_linear import QuantisedLinear, quantise_layers
from headstart.target import load_target


def quantised(bits: int, dtype: torch.dtype = torch.float64):
    target = tiny.target(dtype=dtype)
    quantise_layers(target, bits)
    return target


@pytest.mark.parametrize("bits", [8, 4])
def test_the_weight_is_near_and_its_codes_are_small(bits):
    linear = torch.nn.Linear(40, 24)  # neither is a multiple of the kernels' blocks
    layer = QuantisedLinear(linear, bits)
    step = linear.weight.abs().max() / (127 if bits == 8 else 7.5)
    assert (layer.weight - linear.weight).abs().max() < 0.6 * step
    codes = layer.codes
    assert isinstance(codes, torch.Tensor) and codes.numel() * codes.element_size() == 32 * 64 * bits // 8
    hidden = torch.randn(3, 5, 40)
    expected = torch.nn.functional.linear(hidden, layer.weight, linear.bias)
    torch.testing.assert_close(layer(hidden), expected)
    with torch.no_grad():  # few rows in bfloat16 go through the kernel, many through the widened weight
        few, many = (layer.bfloat16()(hidden.repeat(times, 1, 1).bfloat16())[:3].float() for times in (1, 20))
    assert (few - expected).abs().max() < 0.05 * expected.abs().max()
    assert (many - expected).abs().max() < 0.05 * expected.abs().max()


@pytest.mark.parametrize("bits", [8, 4])
def test_drafted_decoding_is_plain_decoding_of_the_quantised_target(bits):
    target = quantised(bits)
    check_target(target)
    requests = [Request(prompt_ids=[256, *text], max_new_tokens=24) for text in (b"abcabcab", b"the the the")]
    plain = [one.token_ids for one in Engine(target, NoDraft(), batch_size=2).generate(requests)]
    drafted = [one.token_ids for one in Engine(target, NgramDrafter(), batch_size=2).generate(requests)]
    assert sorted(plain) == sorted(drafted)
    whole = [one.token_ids for one in Engine(tiny.target(dtype=torch.float64), NoDraft()).generate(requests)]
    assert sorted(whole) != sorted(plain), "it is another model"


def test_a_copy_in_float32_is_the_same_model():
    target = quantised(4, torch.bfloat16)
    ids = torch.tensor([[1, 2, 3, 4]])
    with torch.no_grad():
        rounded, fine = (one.model(ids).logits.float() for one in (target, in_float32(target)))
    assert (rounded - fine).abs().mean() < 0.05 * fine.std()


def test_a_head_learns_the_quantised_target(tmp_path):
    target = quantised(8, torch.float32)
    training = cases.training(tmp_path / "run", cases.recipe("train.max_steps=3"), target=target)
    training.finish()
    assert all(torch.isfinite(value).all() for value in cases.weights(tmp_path / "run/head").values())


def test_a_target_is_loaded_quantised_and_one_without_linear_layers_is_refused(tmp_path):
    folder = tiny.save(tmp_path / "target")
    kinds = {type(one) for layer in load_target(str(folder), quantization="int4").layers for one in layer.modules()}
    assert QuantisedLinear in kinds and torch.nn.Linear not in kinds
    with pytest.raises(TargetError, match="tiny-gpt2 has no linear layers that could be quantised"):
        quantise_layers(tiny.target("gpt2"), 8)
