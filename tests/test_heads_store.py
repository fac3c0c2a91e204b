"""Saved heads: only what they own, bit for bit, whole or not at all, and nothing that does not fit."""

from __future__ import annotations

import json
import os

import pytest
import torch
from head_cases import collate, forward, head_for, row, tiny, vocab_of
from safetensors.torch import load_file, save_file

from headstart.errors import HeadError, HeadstartError
from headstart.heads import store
from headstart.heads.store import load_head, read_description, save_head


@pytest.fixture(scope="module")
def target():
    return tiny.target("llama")


def save(head, target, folder):
    return save_head(head, folder, fingerprint=target.fingerprint(), training_record={"steps": 3})


def edit_config(folder, **changes):
    path = folder / "config.json"
    description = json.loads(path.read_text())
    head = changes.pop("head", {})
    description.update(changes)
    description["head"].update(head)
    path.write_text(json.dumps(description))


@pytest.mark.parametrize(
    "settings", [{}, {"num_layers": 2}, {"output": "own"}, {"output": "low-rank", "rank": 3}], ids=str
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_head_comes_back_bit_for_bit(target, tmp_path, settings, dtype):
    head = head_for(target, vocab_of(range(0, 128, 2)), num_heads=3, loss={"soft-ce": 0.9, "tv": 0.1}, **settings)
    head.to(dtype)
    loaded = load_head(save(head, target, tmp_path / "head"), target)
    assert loaded.config == head.config and not loaded.training
    assert loaded.state_dict().keys() == head.state_dict().keys()
    for name, tensor in head.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor) and loaded.state_dict()[name].dtype == tensor.dtype
    assert all(parameter.requires_grad for parameter in loaded.parameters())
    final = torch.randn(2, 64)
    assert torch.equal(loaded.draft_logits(final, target.output), head.eval().draft_logits(final, target.output))
    assert read_description(tmp_path / "head")["training"] == {"steps": 3}


def test_the_file_holds_only_what_the_head_owns(tmp_path):
    """B36: three heads that share the output rows of a tied target."""
    target = tiny.target("tied")
    head = head_for(target, num_heads=3)
    folder = save(head, target, tmp_path / "head")
    tensors = load_file(folder / "head.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == {
        "blocks.0.weight": (3, 64, 64),
        "blocks.0.bias": (3, 64),
    }
    assert sum(file.stat().st_size for file in folder.iterdir()) < 100_000
    assert sorted(os.listdir(folder)) == ["config.json", "head.safetensors"]


def test_an_own_output_over_a_small_vocabulary_of_a_tied_target(tmp_path):
    """B33: the head's 64 x 64 matrices are in the file, the target stays tied and as it was."""
    target = tiny.target("tied")
    before = {name: parameter.clone() for name, parameter in target.model.named_parameters()}
    head = head_for(target, vocab_of(range(64), 257), num_heads=2, output="own")
    optimizer = torch.optim.Adam(head.parameters(), lr=1e-2)
    for _ in range(2):
        optimizer.zero_grad()
        forward(head, target, collate([row(12, range(3, 12), vocab=64)], [[0]])).loss_sum.backward()
        optimizer.step()
    loaded = load_head(save(head, target, tmp_path / "head"), target)
    assert tuple(load_file(tmp_path / "head" / "head.safetensors")["output_weight"].shape) == (2, 64, 64)
    assert torch.equal(loaded.get_parameter("output_weight"), head.get_parameter("output_weight"))
    assert loaded.draft_logits(torch.randn(64), target.output).shape == (2, 64)
    assert target.config.tie_word_embeddings
    assert all(torch.equal(parameter, before[name]) for name, parameter in target.model.named_parameters())


def test_a_configuration_that_does_not_fit_names_both_numbers(target, tmp_path):
    folder = save(head_for(target, vocab_of(range(64)), num_heads=3), target, tmp_path / "head")
    edit_config(folder, head={"num_heads": 4})
    with pytest.raises(HeadError, match="num_heads 3, the configuration says num_heads 4"):
        load_head(folder)
    edit_config(folder, head={"num_heads": 3, "draft_vocab_size": 65})
    with pytest.raises(HeadError, match="draft_vocab_size is 65, but one of 64 ids"):
        load_head(folder)
    edit_config(folder, head={"draft_vocab_size": 64, "num_layers": 2})
    with pytest.raises(HeadError, match=r"lacks blocks\.1\.bias, blocks\.1\.weight"):
        load_head(folder)
    edit_config(folder, head={"num_layers": 1, "num_heads": 0})
    with pytest.raises(HeadError, match=r"head\.num_heads.*found 0"):
        load_head(folder)
    edit_config(folder, head={"num_heads": 3, "type": "eagle9"})
    with pytest.raises(HeadError, match="type 'eagle9' is not known, expected medusa"):
        load_head(folder)


def test_sizes_are_compared_with_the_target(target, tmp_path):
    """B29: a head for 265 output rows on a target of 264."""
    folder = save(head_for(target), target, tmp_path / "head")
    edit_config(folder, vocab_size=265)
    with pytest.raises(HeadError, match="vocab_size 265, the target tiny-llama has 264"):
        load_head(folder, target)
    edit_config(folder, vocab_size=264)
    with pytest.raises(HeadError, match="hidden_size 64, the target tiny-headdim has 48"):
        load_head(folder, tiny.target("headdim"))


def test_another_target_of_the_same_shape_is_refused_unless_asked_for(target, tmp_path):
    folder = save(head_for(target), target, tmp_path / "head")
    other = tiny.target("llama", seed=1)
    with pytest.raises(HeadstartError, match="weights"):
        load_head(folder, other)
    with pytest.warns(UserWarning, match="weights"):
        load_head(folder, other, allow_other_target=True)


def test_nothing_missing_and_nothing_left_over(target, tmp_path):
    folder = save(head_for(target, num_heads=2), target, tmp_path / "head")
    weights = folder / "head.safetensors"
    whole = load_file(weights)
    save_file({**whole, "blocks.0.extra": torch.zeros(2)}, weights)
    with pytest.raises(HeadError, match=r"holds blocks\.0\.extra too"):
        load_head(folder)
    save_file({"blocks.0.weight": whole["blocks.0.weight"]}, weights)
    with pytest.raises(HeadError, match=r"lacks blocks\.0\.bias"):
        load_head(folder)
    weights.write_bytes(weights.read_bytes()[:200])
    with pytest.raises(HeadError, match="cannot be read"):
        load_head(folder)
    weights.unlink()
    with pytest.raises(HeadError, match="cannot be read"):
        load_head(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(HeadError, match="no description of a head"):
        load_head(folder)
    parts = {"format": 1, "head": 3, "hidden_size": 64, "vocab_size": 264, "target": {}}
    (folder / "config.json").write_text(json.dumps(parts))
    with pytest.raises(HeadError, match="head is 3, expected an object"):
        load_head(folder)
    with pytest.raises(HeadError, match="holds no trained head"):
        load_head(tmp_path / "nowhere")


def test_a_pickle_is_never_opened(target, tmp_path):
    folder = save(head_for(target), target, tmp_path / "head")
    torch.save({"blocks.0.weight": torch.zeros(1)}, folder / "head.safetensors")
    with pytest.raises(HeadError, match="cannot be read"):
        load_head(folder)


def test_a_save_that_breaks_leaves_the_last_head_whole(target, tmp_path, monkeypatch):
    folder = save(head_for(target, num_heads=2), target, tmp_path / "head")
    before = load_file(folder / "head.safetensors")
    with monkeypatch.context() as patch:
        patch.setattr(store, "_flush", lambda file: (_ for _ in ()).throw(OSError("disk full")))
        with pytest.raises(OSError, match="disk full"):
            save(head_for(target, num_heads=3), target, folder)
    assert os.listdir(tmp_path) == ["head"]
    assert torch.equal(load_file(folder / "head.safetensors")["blocks.0.weight"], before["blocks.0.weight"])
    save(head_for(target, num_heads=3), target, folder)
    assert load_head(folder, target).config.num_heads == 3 and os.listdir(tmp_path) == ["head"]


def test_a_gathered_state_is_checked_before_it_is_written(target, tmp_path):
    head = head_for(target, num_heads=2)
    state = {name: tensor + 1 for name, tensor in head.state_dict().items()}
    save_head(head, tmp_path / "head", fingerprint=target.fingerprint(), state=state)
    assert torch.equal(load_head(tmp_path / "head").state_dict()["blocks.0.bias"], state["blocks.0.bias"])
    with pytest.raises(HeadError, match=r"the state to be saved lacks blocks\.0\.bias"):
        save_head(head, tmp_path / "no", fingerprint={}, state={"blocks.0.weight": state["blocks.0.weight"]})
    assert not (tmp_path / "no").exists()


def test_no_path_of_this_machine_is_written(target, tmp_path):
    fingerprint = {**target.fingerprint(), "name": str(tmp_path / "models" / "tiny")}
    folder = save_head(head_for(target), tmp_path / "head", fingerprint=fingerprint)
    assert str(tmp_path) not in (folder / "config.json").read_text()
    assert read_description(folder)["target"]["name"] == "tiny"
