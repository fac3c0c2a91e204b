"""Embedding and output head as a head borrows them: what the model itself computes, for every family."""

from __future__ import annotations

from typing import Any

import pytest
import tiny
import torch

from headstart.borrowed import check_borrowed, read_weight
from headstart.errors import TargetError

IDS = torch.arange(12)[None] * 20


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("family", tiny.TREE_FAMILIES)
@torch.no_grad()
def test_logits_equal_those_of_the_model(family, dtype):
    target = tiny.target(family, dtype=dtype)
    final = target.decoder(IDS, use_cache=False).last_hidden_state
    expected = target.model(IDS, use_cache=False).logits
    tolerance = {"rtol": 0, "atol": 1e-12 if dtype == torch.float64 else 0.02}
    torch.testing.assert_close(target.output.logits(final), expected, check_dtype=False, **tolerance)
    rows = torch.tensor([200, 3, 256, 3])
    torch.testing.assert_close(target.output.logits(final, rows), expected[..., rows], check_dtype=False, **tolerance)
    held = target.output.select(rows)
    assert torch.equal(held.logits(final), target.output.logits(final, rows))


@pytest.mark.parametrize("family", tiny.TREE_FAMILIES)
@torch.no_grad()
def test_embeddings_are_what_the_first_layer_reads(family):
    target = tiny.target(family, dtype=torch.float64)
    first = target.model(IDS, output_hidden_states=True, use_cache=False).hidden_states[0]
    if family == "gpt2":
        first = first - target.model.get_parameter("transformer.wpe.weight")[:12]
    if family == "opt":
        first = first - target.model.get_parameter("model.decoder.embed_positions.weight")[2:14]
    torch.testing.assert_close(target.embedding(IDS), first, rtol=0, atol=1e-12)


@pytest.mark.parametrize("family", tiny.TREE_FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_check_at_load_passes_for_every_family(family, dtype):
    check_borrowed(tiny.target(family, dtype=dtype))


@pytest.mark.parametrize(
    ("family", "key", "value", "what"),
    [
        ("granite", "logits_scaling", 3.0, "logits"),
        ("cohere", "logit_scale", 0.7, "logits"),
        ("gemma2", "final_logit_softcapping", 2.0, "logits"),
        ("granite", "embedding_multiplier", 2.0, "embeddings"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_scale_that_is_not_known_is_refused(family, key, value, what, dtype):
    """As if the model used another name for its scale than the ones known here."""
    target = tiny.target(family, dtype=dtype)
    other = tiny.target(family, dtype=dtype, **{key: value})
    target.output.scale, target.output.soft_cap = other.output.scale, other.output.soft_cap
    target.embedding.multiplier = other.embedding.multiplier
    with pytest.raises(TargetError, match=f"{what}.*does not know"):
        check_borrowed(target)


def test_norm_first_where_asked():
    target = tiny.target("llama")
    hidden = torch.randn(2, 3, 64)
    expected = target.output.logits(target.model.model.norm(hidden))
    assert torch.equal(target.output.logits(hidden, norm=True), expected)


def test_gradients_reach_the_hidden_states_and_not_the_target():
    target = tiny.target("gemma2")
    hidden = torch.randn(1, 3, 64, requires_grad=True)
    for rows in (None, torch.arange(5)):
        hidden.grad = None
        target.output.logits(hidden, rows).sum().backward()
        assert hidden.grad is not None and hidden.grad.abs().sum() > 0
    assert all(parameter.grad is None for parameter in target.model.parameters())


def test_a_head_in_another_precision_is_rounded_to_the_weights():
    target = tiny.target("llama", dtype=torch.bfloat16)
    hidden = torch.randn(1, 2, 64)
    assert target.output.logits(hidden).dtype == torch.bfloat16
    fp32 = tiny.target("llama")
    with torch.autocast("cpu", torch.bfloat16):
        assert fp32.output.logits(hidden, torch.arange(4)).dtype == torch.bfloat16


def test_shards_are_gathered(tmp_path):
    """FSDP2 leaves sharded tensors outside of the forward of its root; one process holds a shard that is the whole."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    target, plain = tiny.target("gemma"), tiny.target("gemma")
    hidden, rows = torch.randn(1, 3, 64), torch.tensor([5, 200])
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        fully_shard(target.model, mesh=torch.distributed.device_mesh.init_device_mesh("cpu", (1,)))
        assert isinstance(target.model.lm_head.weight, DTensor)
        assert torch.equal(target.embedding(IDS), plain.embedding(IDS))
        assert torch.equal(target.output.logits(hidden), plain.output.logits(hidden))
        assert torch.equal(target.output.logits(hidden, rows), plain.output.logits(hidden, rows))
        assert type(read_weight(target.model.lm_head.weight)) is torch.Tensor
        assert target.vocab_size == 264
    finally:
        dist.destroy_process_group()


def test_sizes_of_a_partitioned_weight_are_those_of_the_whole():
    """ZeRO-3 leaves an empty tensor and notes the shape in ds_shape; a weight without rows is never believed."""
    from headstart.borrowed import weight_shape

    partitioned: Any = torch.empty(0)
    with pytest.raises(TargetError, match="shape"):
        weight_shape(partitioned)
    partitioned.ds_shape = (257, 64)
    assert weight_shape(partitioned) == (257, 64)
