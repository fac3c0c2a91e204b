"""Adapters on a target: off they change nothing, on they are what PEFT says, merged they are the same model."""

from __future__ import annotations

import pytest
import tiny
import torch
from peft import LoraConfig, PeftModel, get_peft_model

from headstart.adapters import Adapters, merge_adapter
from headstart.errors import TargetError
from headstart.fingerprint import check_fingerprint
from headstart.recipe import JointSection
from headstart.target import Target, load_target

SETTINGS = JointSection(rank=4, alpha=8)
IDS = torch.arange(24).view(2, 12) * 7 % 256


def logits(target: Target) -> torch.Tensor:
    with torch.no_grad():
        return target.model(input_ids=IDS, use_cache=False).logits


def moved(target: Target, settings: JointSection = SETTINGS) -> Adapters:
    """Adapters that change something."""
    adapters = Adapters(target, settings)
    with torch.no_grad():
        for parameter in adapters.parameters.values():
            parameter.normal_(std=0.1, generator=torch.Generator().manual_seed(parameter.numel()))
    return adapters


@pytest.mark.parametrize("family", ["llama", "tied", "gpt2", "olmoe"])
def test_off_they_change_no_bit_and_merged_they_are_what_they_were_on(family, tmp_path):
    target = tiny.target(family, dtype=torch.float64)
    before = logits(target)
    adapters = moved(target)
    assert torch.equal(logits(target), before)
    with adapters.on():
        tuned = logits(target)
    assert (tuned - before).abs().max() > 0.1
    assert torch.equal(logits(target), before)

    adapters.save(tmp_path / "adapter")
    other = tiny.target(family, dtype=torch.float64)
    merge_adapter(other, tmp_path / "adapter")
    # the factors are kept in float32, of which the merged weight is made in float64
    assert (logits(other) - tuned).abs().max() < 1e-4
    assert not any(parameter.requires_grad for parameter in other.model.parameters())
    assert other.fingerprint() == adapters.fingerprint() != target.fingerprint()


def test_a_fresh_adapter_is_the_original(tmp_path):
    target = tiny.target()
    before = logits(target)
    with Adapters(target, SETTINGS).on():
        assert torch.equal(logits(target), before)


def test_peft_itself_reads_the_folder(tmp_path):
    target = tiny.target(dtype=torch.float32)
    adapters = moved(target)
    with adapters.on():
        tuned = logits(target)
    adapters.save(tmp_path / "adapter")
    theirs = PeftModel.from_pretrained(tiny.model(dtype=torch.float32), str(tmp_path / "adapter"))
    with torch.no_grad():
        assert torch.equal(theirs(input_ids=IDS, use_cache=False).logits, tuned)


def test_a_state_comes_back_and_another_is_refused():
    adapters = moved(tiny.target())
    state = adapters.state()
    twin = Adapters(tiny.target(), SETTINGS)
    twin.load_state(state)
    assert all(torch.equal(value, state[name]) for name, value in twin.state().items())
    with pytest.raises(TargetError, match="go on with the train.joint they began with"):
        Adapters(tiny.target(), JointSection(rank=2)).load_state(state)


def test_a_head_of_the_tuned_target_is_for_that_alone(tmp_path):
    adapters = moved(tiny.target())
    made_for = adapters.fingerprint()
    with pytest.raises(TargetError, match="adapter scale, adapter weights"):
        check_fingerprint(made_for, tiny.target())
    adapters.save(tmp_path / "adapter")
    tiny.save(tmp_path / "model", "llama")
    check_fingerprint({**made_for, "name": "x"}, load_target(str(tmp_path / "model"), adapter=tmp_path / "adapter"))


def test_only_named_layers_are_adapted_and_unknown_ones_refused():
    adapters = Adapters(tiny.target(), JointSection(modules=["q_proj", "v_proj"]))
    assert {name.split(".")[-4] for name in adapters.parameters} == {"q_proj", "v_proj"}
    with pytest.raises(TargetError, match=r"names lm_head; .* are down_proj, gate_proj, k_proj"):
        Adapters(tiny.target(), JointSection(modules=["lm_head"]))


def test_adapters_learn_and_nothing_else_does():
    target = tiny.target()
    adapters = Adapters(target, SETTINGS)
    learning = [name for name, parameter in target.model.named_parameters() if parameter.requires_grad]
    assert set(learning) == set(adapters.parameters)
    with adapters.on(training=True):
        target.model(input_ids=IDS, use_cache=False).logits.sum().backward()
    assert all(parameter.grad is not None for parameter in adapters.parameters.values())


def foreign(folder, family: str, **settings):
    """An adapter that somebody else made of this model, its output head included."""
    theirs = get_peft_model(tiny.model(family), LoraConfig(r=2, init_lora_weights=False, **settings))
    theirs.save_pretrained(str(folder), save_embedding_layers=False)
    with torch.no_grad():
        return theirs.eval()(input_ids=IDS, use_cache=False).logits


def test_an_adapter_of_the_output_head_is_merged_untied_and_refused_tied(tmp_path):
    expected = foreign(tmp_path / "untied", "llama", target_modules=["q_proj", "lm_head"])
    target = tiny.target()
    merge_adapter(target, tmp_path / "untied")
    assert (logits(target) - expected).abs().max() < 1e-4
    assert torch.equal(target.output.logits(target.model.model(input_ids=IDS).last_hidden_state), logits(target))

    with pytest.warns(UserWarning, match="tied"):
        foreign(tmp_path / "tied", "tied", target_modules=["q_proj", "lm_head"])
    with pytest.raises(TargetError, match="embedding and output head tied"):
        merge_adapter(tiny.target("tied"), tmp_path / "tied")


def test_what_is_no_adapter_or_none_of_this_model_ends_in_one_sentence(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(TargetError, match="holds no adapter_config.json"):
        merge_adapter(tiny.target(), tmp_path / "empty")
    foreign(tmp_path / "other", "gpt2", target_modules=["c_attn"])
    with pytest.raises(TargetError, match="check target.adapter"):
        merge_adapter(tiny.target(), tmp_path / "other")
