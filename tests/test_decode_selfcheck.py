"""Which models are found fit for tree decoding, and which are refused in a sentence."""

from __future__ import annotations

import pytest
import stubs
import tiny
import torch

from headstart.decode import selfcheck
from headstart.decode.attention import tree_mask
from headstart.decode.selfcheck import check_target
from headstart.decode.tree import Topology
from headstart.errors import TargetError

DTYPES = [torch.float64, torch.float32, torch.bfloat16]


def whole_state(target) -> dict:
    """Weights, buffers and settings that a check must leave alone."""
    model = target.model
    return {
        "tensors": {name: tensor.clone() for name, tensor in [*model.named_parameters(), *model.named_buffers()]},
        "attention": model.config._attn_implementation,
        "config": model.config.to_dict(),
        "mode": [module.training for module in model.modules()],
        "hooks": sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()),
    }


def assert_same(before: dict, after: dict) -> None:
    assert before["tensors"].keys() == after["tensors"].keys()
    for name, tensor in before["tensors"].items():
        assert torch.equal(tensor, after["tensors"][name]), name
    assert {k: v for k, v in before.items() if k != "tensors"} == {k: v for k, v in after.items() if k != "tensors"}


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("family", tiny.TREE_FAMILIES)
def test_fit_models_pass_unchanged(family, dtype):
    target = tiny.target(family, dtype=dtype)
    before = whole_state(target)
    check_target(target)
    assert_same(before, whole_state(target))


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("mpt", "takes no position_ids"),
        ("bloom", "takes no position_ids"),
        ("falcon-alibi", "cannot be tree-decoded"),
        ("mamba", "linear_attention"),
    ],
)
def test_unfit_models_are_refused_in_one_sentence_that_names_what_failed(family, reason, dtype):
    target = tiny.target(family, dtype=dtype)
    before = whole_state(target)
    with pytest.raises(TargetError) as caught:
        check_target(target)
    message = str(caught.value)
    assert family.split("-")[0] in message and reason in message
    assert "\n" not in message and len(message) < 400
    assert_same(before, whole_state(target))


def ignoring_the_tree(topology: Topology, lengths, num_keys):
    allowed, distance, positions = tree_mask(topology, lengths, num_keys)
    last = lengths[:, None] + torch.arange(topology.num_nodes)
    return torch.arange(num_keys) <= last[:, :, None], distance, positions


def ignoring_positions(topology: Topology, lengths, num_keys):
    allowed, distance, positions = tree_mask(topology, lengths, num_keys)
    return allowed, distance, lengths[:, None] + torch.arange(topology.num_nodes)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("fault", [ignoring_the_tree, ignoring_positions, "stale row"])
@pytest.mark.parametrize("family", ["llama", "headdim", "hyb"])
def test_models_and_caches_that_get_it_wrong_are_found_out(family, fault, dtype, monkeypatch):
    """Stand-ins for a model that takes the arguments and ignores them, and for a cache that keeps a rejected row."""
    if fault == "stale row":
        stubs.plant_stale_rows(monkeypatch)
    else:
        monkeypatch.setattr(selfcheck, "tree_mask", fault)
    with pytest.raises(TargetError, match="standard deviations"):
        check_target(tiny.target(family, dtype=dtype))


def test_a_model_is_checked_once(monkeypatch):
    target = tiny.target("llama")
    check_target(target)
    monkeypatch.setattr(target.model, "forward", None)
    check_target(target)


def test_small_vocabularies_can_be_checked():
    for vocab in (2, 12, 17, 40):
        check_target(tiny.target("llama", dtype=torch.float64, vocab_size=vocab))
