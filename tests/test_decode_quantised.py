"""The target in 8 and 4 bits as its own drafter: codes within their bound, kernels equal to widened weights, the
target's text and distribution, and the target itself untouched."""

from __future__ import annotations

import functools

import pytest
import stubs
import tiny
import torch
from test_decode_model import NEW, WARMISH, decode, plain, target
from test_decode_sampling import SMOKE_DRAWS, assert_distribution, small_target
from torch import nn
from torch.nn import functional

from headstart.decode.decode_copy import make_faster, untouched
from headstart.decode.drafters.base import NoDraft, Request
from headstart.decode.drafters.model import ModelDrafter
from headstart.decode.drafters.quantised import QuantisedDrafter
from headstart.decode.engine import Engine
from headstart.decode.prepack import LeanLinear, SiblingLinear, plain_linears
from headstart.decode.quantised import QuantisedProduct, quantised_copy
from headstart.errors import HeadstartError
from headstart.quantised_linear import GROUP, quantise

BITS = (8, 4)


def weight_of(rows: int, columns: int) -> torch.Tensor:
    """Rows of very different sizes, one of them zero, another of one sign."""
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))
    weight *= torch.logspace(-3, 1, rows)[:, None]
    weight[0], weight[1] = 0.0, weight[1].abs() + 1
    return weight


# -- the codes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", BITS)
def test_every_entry_is_off_by_half_a_step_at_most(bits):
    """A step by its definition, computed here entry by entry: the range of the row, or of 32 columns, over the codes.
    To it comes what bf16, of 8 bits, makes of scale and zero."""
    weight = weight_of(24, 96)
    codes = quantise(weight, bits)
    assert codes.codes.dtype == torch.int8
    assert int(codes.codes.min()) >= (-127 if bits == 8 else -8) and int(codes.codes.max()) <= (127 if bits == 8 else 7)
    widened, width = codes.widened(), 96 if bits == 8 else GROUP
    for row in range(24):
        for start in range(0, 96, width):
            part = slice(start, start + width)
            values = weight[row, part]
            step = float(values.abs().max()) / 127 if bits == 8 else float(values.max() - values.min()) / 15
            slack = 0.0 if bits == 8 else 2.0**-8 * float(values.abs().max() + 8 * step)
            off = (widened[row, part] - values).abs().max()
            assert off <= 0.5 * step * (1 + 2.0**-7) + slack, (row, start)
            assert off > 0.2 * step or step == 0, "and no finer than its bits"


@pytest.mark.parametrize("bits", BITS)
def test_a_weight_of_few_values_is_met_exactly(bits):
    """Codes times 2^-4 stand for themselves: nothing is rounded."""
    values = torch.arange(-8, 8).repeat(4, 2 * GROUP // 16) / 16.0
    if bits == 8:
        values[:, 0] = 127 / 16
    assert torch.equal(quantise(values, bits).widened(), values)


@pytest.mark.parametrize("bits", [0, 3, 16])
def test_other_bits_are_refused(bits):
    with pytest.raises(HeadstartError, match=f"in {bits} bits cannot be made; give 8 or 4 bits"):
        QuantisedDrafter(target(), bits)


# -- the products ------------------------------------------------------------------------------------------------------


def linear(rows: int, columns: int, bias: bool = False, dtype: torch.dtype = torch.float32) -> nn.Linear:
    made = nn.Linear(columns, rows, bias=bias)
    with torch.no_grad():
        made.weight.copy_(weight_of(rows, columns))
    return made.to(dtype).requires_grad_(False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(("rows", "columns", "bias"), [(32, 64, False), (264, 64, True), (24, 48, True), (5, 7, False)])
@pytest.mark.parametrize("bits", BITS)
def test_a_product_is_that_of_the_widened_weight(bits, rows, columns, bias, dtype):
    """Also where the kernels want larger blocks than the layer has."""
    layer = linear(rows, columns, bias, dtype)
    product = QuantisedProduct([layer], bits)
    assert product.has_kernel
    padded = functional.pad(layer.weight.float(), (0, -columns % GROUP))
    widened = quantise(padded, bits).widened()[:, :columns]
    hidden = torch.randn(2, 3, columns, generator=torch.Generator().manual_seed(1)).to(dtype)
    expected = hidden.bfloat16().float() @ widened.T + (layer.bias.float() if bias else 0.0)
    found = product(hidden)
    assert found.dtype == dtype and found.shape == (2, 3, rows)
    assert float((found.float() - expected).abs().max()) <= 0.012 * float(expected.abs().max())
    part = torch.cat([hidden, hidden], -1).narrow(-1, 0, columns)  # as a faster norm hands it over
    assert torch.equal(product(part), found)


def test_bytes_are_an_eighth_of_float32_and_a_quarter_in_8_bits():
    layer = linear(512, 256)
    plain = layer.weight.numel() * 4
    assert QuantisedProduct([layer], 8).num_bytes() == plain // 4 + 512 * 2
    assert QuantisedProduct([layer], 4).num_bytes() == plain // 8 + 512 * 256 // GROUP * 4


@pytest.mark.parametrize("fault", ["absent", "wrong"])
@pytest.mark.parametrize("bits", BITS)
def test_a_kernel_that_is_absent_or_wrong_is_done_without(monkeypatch, bits, fault):
    def broken(rows, weight, *more):
        if fault == "absent":
            raise NotImplementedError("not on this device")
        return torch.ones(len(rows), 32, dtype=rows.dtype)

    layer = linear(24, 64)
    hidden = torch.randn(3, 64, generator=torch.Generator().manual_seed(1))
    expected = QuantisedProduct([layer], bits)(hidden)
    monkeypatch.setattr(torch, "_weight_int8pack_mm" if bits == 8 else "_weight_int4pack_mm_for_cpu", broken)
    product = QuantisedProduct([layer], bits)
    assert not product.has_kernel
    torch.testing.assert_close(product(hidden), expected, rtol=0.02, atol=0.02 * float(expected.abs().max()))
    with pytest.warns(UserWarning, match=f"no kernel for weights in {bits} bits"):
        quantised_copy(tiny.target("llama"), bits)


# -- the copy ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "tied", "gemma2", "neox", "phi", "headdim"])
def test_the_target_is_untouched_and_shared_where_nothing_is_quantised(family):
    model = tiny.target(family)
    ids = torch.arange(20)[None]
    with torch.no_grad():
        before = model.model(ids).logits
    weights = {name: tensor.clone() for name, tensor in model.model.state_dict().items()}
    copy = quantised_copy(model, 4).target
    assert not plain_linears(copy.model), "every linear layer, the output head too"
    with torch.no_grad():
        after, drafted = model.model(ids).logits, copy.model(ids).logits
    assert torch.equal(before, after) and not torch.equal(before, drafted)
    assert all(torch.equal(weights[name], tensor) for name, tensor in model.model.state_dict().items())
    assert copy.model.get_input_embeddings().weight is model.model.get_input_embeddings().weight
    with torch.no_grad():
        assert torch.equal(untouched(copy).model(ids).logits, before), "the plain weights stay beside the codes"


def test_layers_that_read_the_same_tensor_share_a_product():
    copy = quantised_copy(tiny.target("llama"), 8)
    assert len(copy.products) == 4 * 4 + 1  # qkv, o, gate and up, down; and the output head
    assert sum(isinstance(module, SiblingLinear) for module in copy.target.model.modules()) == 4 * 5


def test_a_target_with_faster_modules_is_quantised_as_the_plain_one():
    model = tiny.target("llama")
    plainly = quantised_copy(model, 8).target
    make_faster(model)
    assert any(isinstance(module, LeanLinear) for module in model.model.modules())
    swapped = quantised_copy(model, 8).target
    ids = torch.arange(20)[None]
    with torch.no_grad():
        torch.testing.assert_close(swapped.model(ids).logits, plainly.model(ids).logits, rtol=0.02, atol=0.5)
    assert any(isinstance(module, LeanLinear) for module in model.model.modules()), "the target keeps them"


def test_a_target_of_few_linear_layers_is_told_of():
    with pytest.warns(UserWarning, match="% of the weights of tiny-olmoe stand in linear layers"):
        quantised_copy(tiny.target("olmoe"), 8)


# -- drafting ----------------------------------------------------------------------------------------------------------


@functools.lru_cache
def drafter(bits: int, length: int = 4) -> QuantisedDrafter:
    return QuantisedDrafter(target(), bits, length)


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("bits", BITS)
def test_the_text_is_the_targets_own_and_drafts_are_right_by_the_bits(bits, batch_size):
    done = decode(drafter(bits), batch_size, prefill_chunk=5)
    assert [one.token_ids for one in done] == plain()
    steps = [step for one in done for step in one.steps if not step.cut]
    share = sum(step.accepted for step in steps) / sum(step.depth for step in steps)
    assert share > (0.7 if bits == 8 else 0.03), "these weights are random and wide: a trained model bears more"


@pytest.mark.parametrize("family", ["tied", "hyb", "gpt2", "gemma2", "olmoe"])
@pytest.mark.filterwarnings("ignore:only")
def test_other_families_draft_in_4_bits(family):
    """Ties, windows, soft-caps, layers that are not linear: greedy in float64 against transformers' generate."""
    model = tiny.target(family, dtype=torch.float64)
    asked = stubs.prompts_of((3, 9, 17), model.embedding.vocab_size)
    ends = model.end_token_ids
    expected = stubs.plain_answers(tiny.model(family, dtype=torch.float64), asked, NEW, end_token_ids=ends)
    requests = [Request(prompt_ids=prompt, max_new_tokens=NEW, request_id=n) for n, prompt in enumerate(asked)]
    done = list(Engine(model, QuantisedDrafter(model, 4, 3), batch_size=2).generate(requests))
    assert {one.request.request_id: one.token_ids for one in done} == dict(enumerate(expected))
    assert sum(step.accepted for one in done for step in one.steps) > 0


@pytest.mark.parametrize("bits", BITS)
def test_sampled_rows_have_the_targets_joint_distribution(bits):
    drafter = QuantisedDrafter(small_target(), bits, 3)
    assert_distribution(drafter, "warm", SMOKE_DRAWS, (701 + bits) * 1_000_000, tests=2, accepted=(1, 3))


def test_a_seed_gives_the_same_text_in_any_batch():
    texts = [[one.token_ids for one in decode(drafter(8), size, WARMISH)] for size in (1, 3, 8)]
    assert texts[0] == texts[1] == texts[2]


def test_a_drafter_of_first_choices_keeps_the_text_of_plain_sampling():
    copy = ModelDrafter(quantised_copy(target(), 4).target, target(), 3, drawn=False)
    plainly = [one.token_ids for one in decode(NoDraft(), 3, WARMISH)]
    assert [one.token_ids for one in decode(copy, 3, WARMISH)] == plainly != plain()


def test_what_it_holds_is_counted_without_the_targets_own():
    made = QuantisedDrafter(target(), 8, 2)
    linears = sum(layer.weight.numel() for layer in plain_linears(target().model).values())
    assert made.num_parameters() == linears
    empty = made.num_bytes()
    assert linears < empty < 1.2 * linears, "a byte a weight, and the scales"
    decode(made, 1)
    assert made.num_bytes() > empty, "and its cache"
