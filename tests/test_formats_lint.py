"""Each trap of the serving engines, planted alone in a good export, is found by its rule's name; nothing else is."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import foreign_cases as cases
import pytest
import torch
from safetensors.torch import load_file, save_file
from test_formats_writing import head_of

from headstart.heads.formats import READERS, write_foreign
from headstart.heads.formats.lint import RULES, check
from headstart.target import Target

IDS = cases.DRAFT_IDS
TOP = "eagle_aux_hidden_state_layer_ids"
ONES = torch.ones(64, dtype=torch.bfloat16)
HEADS: dict[str, dict[str, Any]] = {
    "sglang": {"kind": "eagle3", "ids": IDS, "num_layers": 2},
    "sglang-full": {"kind": "eagle3"},
    "speculators": {"kind": "eagle3", "ids": IDS, "num_layers": 2},
    "eagle": {"kind": "eagle"},
    "sglang-eagle": {"kind": "eagle"},
    "medusa": {"kind": "medusa", "num_heads": 2, "output": "own"},
    "vllm-medusa": {"kind": "medusa", "num_heads": 2, "ids": IDS},
}
FORMATS = {"sglang-full": "sglang", "sglang-eagle": "sglang"}


@pytest.fixture(scope="module")
def target() -> Target:
    return cases.target()


@pytest.fixture(scope="module")
def good(target, tmp_path_factory) -> Callable[[str, Path], Path]:
    """Copies a faultless export of a kind to a folder."""
    root = tmp_path_factory.mktemp("good")
    import shutil

    def copy(name: str, to: Path) -> Path:
        if not (root / name).exists():
            head = head_of(target=target, **HEADS[name])
            write_foreign(head, target, root / name, FORMATS.get(name, name), target_name="org/model")
        return Path(shutil.copytree(root / name, to))

    return copy


def without(*names: str):
    return lambda tensors: [tensors.pop(name) for name in names]


def put(**new: torch.Tensor):
    return lambda tensors: tensors.update({name.replace("__", "."): tensor for name, tensor in new.items()})


def config(**values: Any):
    return {key.replace("__", "."): value for key, value in values.items()}


GONE = object()
# (export, change of tensors, change of config.json, rules that must find it)
PLANTED: list[tuple[str, Any, dict[str, Any], set[str]]] = [
    ("sglang", None, config(architectures=["LlamaForCausalLM"]), {"architecture"}),
    ("speculators", None, config(architectures=["LlamaForCausalLM"]), {"architecture"}),
    ("sglang", None, config(torch_dtype="float16"), {"stored-dtype"}),
    ("sglang", put(norm__weight=torch.ones(64)), {}, {"stored-dtype"}),
    (
        "sglang",
        put(fc__weight=torch.full((64, 192), torch.nan, dtype=torch.bfloat16)),
        {},
        {"finite-values", "draft-logits"},
    ),
    ("speculators", None, config(transformer_layer_config__num_attention_heads="four"), {"whole-numbers"}),
    ("sglang", None, config(num_attention_heads=3), {"head-width", "vllm-loader", "sglang-loader"}),
    ("sglang", None, config(head_dim=GONE), {"head-width", "vllm-loader", "sglang-loader"}),
    ("sglang", None, config(rope_parameters=GONE), {"rope-spellings"}),
    ("sglang", None, config(rope_theta=GONE), {"rope-spellings"}),
    ("sglang", None, config(rope_theta=10000.0), {"rope-spellings"}),
    ("sglang", None, config(max_position_embeddings=2048), {"positions"}),
    ("speculators", None, config(transformer_layer_config__max_position_embeddings=64), {"positions"}),
    ("sglang", None, config(tie_word_embeddings=True), {"tie-flag"}),
    ("speculators", None, config(transformer_layer_config__tie_word_embeddings=GONE), {"tie-flag"}),
    ("speculators", put(embed_tokens__weight=torch.zeros(264, 64, dtype=torch.bfloat16)), {}, {"embedding"}),
    ("sglang", None, config(eos_token_id=GONE), {"special-ids"}),
    ("sglang", None, config(draft_vocab_size=GONE), {"draft-vocabulary", "membership", "vllm-loader", "sglang-loader"}),
    (
        "sglang",
        None,
        config(draft_vocab_size=12),
        {"draft-vocabulary", "membership", "vllm-loader", "sglang-loader"},
    ),
    (
        "sglang",
        None,
        config(vocab_size=10),
        {"target-vocabulary", "offsets", "membership", "vllm-loader", "sglang-loader"},
    ),
    ("sglang", without("d2t"), {}, {"offsets", "vllm-loader", "sglang-loader"}),
    ("sglang", put(d2t=torch.tensor(IDS)), {}, {"offsets"}),
    ("sglang", put(d2t=torch.zeros(10, dtype=torch.long)), {}, {"offsets"}),
    ("sglang", put(d2t=torch.tensor([i - k for k, i in enumerate(IDS)]).int()), {}, {"offsets"}),
    ("sglang-full", put(d2t=torch.zeros(264, dtype=torch.long)), {}, {"offsets", "vllm-loader", "sglang-loader"}),
    ("sglang", without("t2d"), {}, {"membership"}),
    ("sglang", put(t2d=torch.zeros(264, dtype=torch.bool)), {}, {"membership", "offsets"}),
    ("sglang", None, config(**{TOP: [1, 3, 4]}), {"layer-ids"}),
    ("sglang", None, config(**{TOP: GONE}), {"layer-ids", "vllm-loader"}),
    ("sglang", None, config(**{TOP: [4, 2, 5]}), {"layer-ids"}),
    ("sglang", None, config(**{TOP: [2, 2, 5]}), {"layer-ids", "vllm-loader"}),
    ("sglang", None, config(**{f"eagle_config__{TOP}": [2, 4, 5]}), {"layer-ids"}),
    ("sglang", None, config(**{TOP: [2, 4, 8], f"eagle_config__{TOP}": [1, 3, 7]}), {"layer-ids"}),
    ("sglang", None, config(eagle_config=GONE), {"layer-ids", "sglang-loader"}),
    ("speculators", None, config(**{TOP: [2, 4, 9]}), {"layer-ids"}),
    ("sglang", None, config(num_aux_hidden_states=5), {"fused-width"}),
    ("sglang", None, config(fc_norm=True), {"norm-flags", "vllm-loader", "sglang-loader"}),
    (
        "sglang",
        put(input_norm__weight=torch.ones(192, dtype=torch.bfloat16)),
        {},
        {"norm-flags", "vllm-loader", "sglang-loader"},
    ),
    ("sglang", None, config(norm_output=GONE), {"norm-flags"}),
    ("speculators", None, config(norm_before_residual=GONE), {"norm-before-residual", "draft-logits"}),
    ("sglang", None, config(norm_before_residual=True), {"norm-before-residual", "draft-logits"}),
    ("sglang", put(layers__1__hidden_norm__weight=ONES), {}, {"later-norms", "draft-logits"}),
    ("sglang", without("layers.1.input_layernorm.weight"), {}, {"later-norms", "vllm-loader", "sglang-loader"}),
    ("speculators", put(layers__1__hidden_norm__weight=ONES), {}, {"later-norms", "vllm-loader"}),
    ("sglang", put(midlayer__self_attn__q_proj__bias=ONES), {}, {"biases", "vllm-loader", "sglang-loader"}),
    ("sglang", None, config(target_hidden_size=128), set()),
    ("sglang", without("midlayer.hidden_norm.weight"), {}, {"vllm-loader", "sglang-loader"}),
    ("sglang", put(surprise=ONES), {}, {"vllm-loader", "sglang-loader"}),
    ("sglang", put(norm__weight=ONES), {}, {"draft-logits"}),
    ("speculators", None, config(speculators_model_type="eagle"), {"speculators-type"}),
    ("speculators", None, config(speculators_config__proposal_methods=[]), {"proposal"}),
    ("speculators", None, config(speculators_config__verifier__name_or_path="/models/target"), {"verifier-name"}),
    ("speculators", None, config(speculators_config__verifier__name_or_path=None), {"verifier-name"}),
    ("eagle", put(fc__bias=ONES), {}, {"fc-bias"}),
    ("sglang-eagle", without("fc.bias"), {}, {"fc-bias", "sglang-loader"}),
    ("eagle", put(layers__0__input_layernorm__weight=ONES), {}, {"first-layer-norm", "vllm-loader"}),
    ("medusa", None, config(medusa_num_heads=3), {"counts", "medusa-loader"}),
    ("medusa", None, config(num_attention_heads=4), {"renamed-keys", "medusa-loader"}),
    ("medusa", None, config(model_type=GONE), {"needed-keys"}),
    ("vllm-medusa", None, config(num_key_value_heads=2), {"renamed-keys"}),
    ("vllm-medusa", None, config(medusa_fc_bias=GONE), {"bias-flag", "medusa-loader"}),
    ("vllm-medusa", without("token_map"), {}, {"token-map", "medusa-loader"}),
    ("vllm-medusa", put(token_map=torch.zeros(10, dtype=torch.long)), {}, {"token-map"}),
]


def plant(folder: Path, change: Any, values: dict[str, Any]) -> None:
    (path,) = folder.glob("*.safetensors")
    if change is not None:
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path)
    whole = json.loads((folder / "config.json").read_text())
    for dotted, value in values.items():
        *outer, key = dotted.split(".")
        place = whole
        for name in outer:
            place = place[name]
        if value is GONE:
            del place[key]
        else:
            place[key] = value
    (folder / "config.json").write_text(json.dumps(whole))


@pytest.mark.parametrize("number", range(len(PLANTED)))
def test_a_planted_fault_is_found_by_name(number, good, target, tmp_path):
    name, change, values, expected = PLANTED[number]
    folder = good(name, tmp_path / "out")
    plant(folder, change, values)
    report = check(folder, target=target, head=head_of(target=target, **HEADS[name]))
    found = {fault.rule for fault in report.faults}
    # that the logits differ too is no second fault: it is the consequence
    assert found - {"draft-logits"} == expected - {"draft-logits"}, report
    assert found >= expected, report
    for fault in report.faults:
        assert fault.expected and fault.got and fault.consequence and fault.remedy


@pytest.mark.parametrize("name", HEADS)
def test_an_export_of_ours_has_no_fault(name, good, target, tmp_path):
    head = head_of(target=target, **HEADS[name])
    report = check(good(name, tmp_path / "out"), target=target, head=head)
    assert report.ok, report
    assert check(tmp_path / "out").ok, "without a target too"


def test_every_rule_has_its_planted_fault():
    planted = set().union(*(expected for *_, expected in PLANTED)) | {"weights-file", "draft-width"}
    names = {rule.__name__.replace("_", "-") for rules in RULES.values() for rule in rules}
    names |= {"draft-logits", "finite-values", "whole-numbers"}
    assert names == planted
    assert RULES.keys() == READERS.keys()


def test_two_files_of_weights(good, target, tmp_path):
    folder = good("sglang", tmp_path / "out")
    torch.save({}, folder / "pytorch_model.bin")
    assert [fault.rule for fault in check(folder, target=target).faults] == ["weights-file"]


def test_a_draft_of_another_width_must_say_the_targets(good, target, tmp_path):
    folder = good("sglang", tmp_path / "out")
    narrow = cases.tiny.target("headdim", num_hidden_layers=8)
    assert "draft-width" in {fault.rule for fault in check(folder, target=narrow).faults}


def test_a_folder_of_no_layout_is_a_fault(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    save_file({"some.weight": torch.zeros(1)}, tmp_path / "model.safetensors")
    report = check(tmp_path)
    assert not report.ok and report.faults[0].rule == "layout" and "no known layout" in str(report)
