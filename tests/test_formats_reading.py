"""Checkpoints of other tools: recognised, imported, decoded with, written back bit for bit; what is wrong is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import foreign_cases as cases
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from headstart.decode.drafters.base import NoDraft, Request
from headstart.decode.drafters.eagle import EagleDrafter
from headstart.decode.drafters.medusa import MedusaDrafter
from headstart.decode.engine import Engine
from headstart.errors import HeadError
from headstart.heads.formats import imported_head, load_foreign, read_foreign, recognise, with_layers, write_foreign
from headstart.heads.medusa import MedusaHead
from headstart.heads.store import load_head, save_head
from headstart.target import Target

IDS = cases.DRAFT_IDS


@pytest.fixture(scope="module")
def target() -> Target:
    return cases.target()


# name -> (builder, layout that must be recognised, format that writes it back)
CASES: dict[str, tuple[Callable[[Path, Target], Path], str, str]] = {
    "medusa-pickle": (lambda f, t: cases.medusa(f), "medusa", "medusa"),
    "medusa-safetensors": (
        lambda f, t: cases.medusa(f, layers=2, weights="medusa_lm_head.safetensors"),
        "medusa",
        "medusa",
    ),
    "medusa-shared": (lambda f, t: cases.medusa(f, own=False, heads=5), "medusa-shared", "medusa"),
    "medusa-merged": (cases.medusa_merged, "medusa-merged", "medusa-merged"),
    "vllm-medusa": (cases.vllm_medusa, "vllm-medusa", "vllm-medusa"),
    "vllm-medusa-shared": (lambda f, t: cases.vllm_medusa(f, t, shared=True), "vllm-medusa", "vllm-medusa"),
    "vllm-medusa-map": (lambda f, t: cases.vllm_medusa(f, t, shared=True, ids=IDS), "vllm-medusa", "vllm-medusa"),
    "eagle": (cases.eagle, "eagle", "eagle"),
    "eagle-no-bias": (
        lambda f, t: cases.eagle(f, t, bias=False, layers=2, weights="model.safetensors"),
        "eagle",
        "eagle",
    ),
    "eagle-qkv-bias": (lambda f, t: cases.eagle(f, t, bias=False, qkv_bias=True), "eagle", "eagle"),
    "eagle3-original": (lambda f, t: cases.eagle3_original(f), "eagle3", "eagle"),
    "eagle3-original-full": (lambda f, t: cases.eagle3_original(f, ids=None), "eagle3", "eagle"),
    "sglang": (lambda f, t: cases.sglang(f), "eagle3", "sglang"),
    "sglang-flags": (
        lambda f, t: cases.sglang(f, ids=None, layers=2, fc_norm=True, norm_output=True),
        "eagle3",
        "sglang",
    ),
    "speculators": (cases.speculators, "speculators", "speculators"),
    "speculators-flags": (
        lambda f, t: cases.speculators(f, t, ids=None, layers=2, norm_before_fc=True, norm_output=True),
        "speculators",
        "speculators",
    ),
}


def held(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a folder, read without headstart."""
    (path,) = [path for path in folder.iterdir() if path.name != "config.json"]
    return load_file(path) if path.suffix == ".safetensors" else torch.load(path, weights_only=True)


def edit(folder: Path, tensors: Callable[[dict[str, Tensor]], None] = lambda _: None, **config: Any) -> Path:
    """Changes a folder in place: its tensors by a function, keys of its config.json (None: removed)."""
    (path,) = [path for path in folder.iterdir() if path.name != "config.json"]
    changed = held(folder)
    tensors(changed)
    save_file(changed, path) if path.suffix == ".safetensors" else torch.save(changed, path)
    values = json.loads((folder / "config.json").read_text()) | config
    kept = {key: value for key, value in values.items() if value is not None or key not in config}
    (folder / "config.json").write_text(json.dumps(kept))
    return folder


@pytest.mark.parametrize("name", CASES)
def test_import_save_load_decode_and_export_again(name, target, tmp_path):
    build, layout, written = CASES[name]
    folder = build(tmp_path / "foreign", target)
    foreign = read_foreign(folder)
    assert foreign.format == layout
    saved = save_head(imported_head(foreign, target), tmp_path / "head", fingerprint=target.fingerprint())
    head = load_head(saved, target)

    drafter = MedusaDrafter(head, target) if isinstance(head, MedusaHead) else EagleDrafter(head, target)
    asked = [Request(prompt_ids=[5, 9, 200], max_new_tokens=8, request_id=0)]
    (drafted,) = Engine(target, drafter).generate(asked)
    (plain,) = Engine(target, NoDraft()).generate(asked)
    assert drafted.token_ids == plain.token_ids

    out = write_foreign(head, target, tmp_path / "out", written, target_name="org/model")
    before, after = held(folder), held(out)
    assert after.keys() == before.keys()
    for tensor, again in ((before[key], after[key]) for key in before):
        assert again.dtype == tensor.dtype and torch.equal(again, tensor)


@pytest.mark.parametrize("name", CASES)
def test_a_layout_is_known_by_its_tensors_whatever_the_config_says(name, target, tmp_path):
    build, layout, _ = CASES[name]
    assert recognise(held(build(tmp_path / "foreign", target))) == layout


def test_published_defaults_hold_where_the_config_is_silent(target, tmp_path):
    """The original's config.json has no rope and no layer ids: base 10000 and HF[2], HF[N // 2], HF[N - 3]."""
    head = load_foreign(cases.eagle3_original(tmp_path / "a"), target)
    assert head.config.rope == {"rope_type": "default", "rope_theta": 10000.0} and head.wants == (2, 4, 5)
    frequencies = 10000.0 ** (-torch.arange(0, 16, 2) / 16)
    torch.testing.assert_close(head.rotary.frequencies, frequencies, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("config", "rope"),
    [
        ({"rope_theta": 5e5}, {"rope_type": "default", "rope_theta": 5e5}),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, {"rope_type": "default", "rope_theta": 5e5}),
        (
            {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
            {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0},
        ),
    ],
    ids=["old", "new", "scaled"],
)
def test_the_rope_that_a_head_was_trained_with_is_kept_in_every_spelling(target, tmp_path, config, rope):
    """B38: not the target's, not corrected; the same frequencies after an export and a second import."""
    folder = edit(cases.eagle3_original(tmp_path / "a"), **config)
    head = load_foreign(folder, target)
    assert head.config.rope == rope
    again = load_foreign(write_foreign(head, target, tmp_path / "b", "sglang"), target)
    assert again.config.rope == rope and torch.equal(again.rotary.frequencies, head.rotary.frequencies)


def test_two_spellings_that_disagree_are_refused(tmp_path):
    folder = edit(cases.sglang(tmp_path / "a"), rope_theta=10000.0)
    with pytest.raises(HeadError, match="rope_parameters say .*500000.0.*rope_theta and rope_scaling say .*10000.0"):
        read_foreign(folder)


def test_layer_ids_are_read_where_each_tool_writes_them(target, tmp_path):
    """Inside eagle_config they are layer outputs, one less than the hidden_states at the top."""
    inside = read_foreign(cases.sglang(tmp_path / "a"))
    assert inside.settings["layers"] == [2, 4, 5]
    top = read_foreign(
        edit(cases.sglang(tmp_path / "b"), eagle_config=None, eagle_aux_hidden_state_layer_ids=[1, 4, 7])
    )
    assert top.settings["layers"] == [1, 4, 7]
    both = edit(cases.sglang(tmp_path / "c"), eagle_aux_hidden_state_layer_ids=[1, 3, 4])
    with pytest.raises(
        HeadError, match=r"\[1, 3, 4\] at the top.*\[1, 3, 4\] inside eagle_config.*\[2, 4, 5\].*--layers"
    ):
        read_foreign(both)
    unsorted = edit(cases.sglang(tmp_path / "d"), eagle_config={"eagle_aux_hidden_state_layer_ids": [4, 1, 3]})
    with pytest.raises(HeadError, match="ascending, distinct"):
        read_foreign(unsorted)
    chosen = with_layers(read_foreign(cases.eagle3_original(tmp_path / "e")), [1, 2, 6])
    assert imported_head(chosen, target).wants == (1, 2, 6)
    with pytest.raises(HeadError, match="expected 3 ascending"):
        with_layers(read_foreign(tmp_path / "e"), [1, 2])


def test_default_layers_that_a_small_target_has_not_are_asked_for(tmp_path):
    small = cases.tiny.target("llama")
    with pytest.raises(HeadError, match=r"the usual \[2, 2, 1\].*add --layers"):
        load_foreign(cases.eagle3_original(tmp_path / "a"), small)


def test_offsets_are_told_from_ids(target, tmp_path):
    """B31: target id = i + d2t[i]."""
    folder = cases.eagle3_original(tmp_path / "a", ids=[0, 3, 5, 257])
    assert held(folder)["d2t"].tolist() == [0, 2, 3, 254] and int(held(folder)["t2d"].sum()) == 4
    assert load_foreign(folder, target).vocab.ids.tolist() == [0, 3, 5, 257]

    def as_ids(tensors):
        tensors["d2t"] = torch.tensor([0, 3, 5, 257])

    def as_zeros(tensors):
        tensors["d2t"] = torch.zeros(4, dtype=torch.long)

    with pytest.raises(HeadError, match="d2t holds target ids, not offsets"):
        read_foreign(edit(folder, as_ids))
    with pytest.raises(HeadError, match="d2t is all zeros, which means the ids 0 to 3, but t2d keeps others"):
        read_foreign(edit(folder, as_zeros))


def test_all_zeros_are_the_identity(target, tmp_path):
    folder = cases.eagle3_original(tmp_path / "a", ids=[0, 1, 2, 3])
    assert held(folder)["d2t"].tolist() == [0, 0, 0, 0]
    assert load_foreign(folder, target).vocab.ids.tolist() == [0, 1, 2, 3]


def drop(name: str) -> Callable[[dict[str, Tensor]], None]:
    def change(tensors: dict[str, Tensor]) -> None:
        del tensors[name]

    return change


def put(**new: Tensor) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.update({name.replace("__", "."): tensor for name, tensor in new.items()})


@pytest.mark.parametrize(
    ("build", "change", "config", "said"),
    [
        ("sglang", drop("midlayer.hidden_norm.weight"), {}, r"lacks midlayer\.hidden_norm\.weight"),
        ("sglang", drop("fc.weight"), {}, "fc.weight is missing"),
        ("sglang", put(surprise__weight=torch.zeros(2)), {}, r"holds surprise\.weight"),
        (
            "sglang",
            put(norm__weight=torch.zeros(65)),
            {},
            r"norm\.weight has shape \[65\], its config.json asks for \[64\]",
        ),
        ("sglang", drop("d2t"), {}, "t2d leaves ids out"),
        ("sglang", put(mask_hidden=torch.zeros(1, 192)), {}, "mask_hidden belongs to a P-EAGLE head"),
        ("sglang", put(midlayer__self_attn__q_norm__weight=torch.zeros(16)), {}, "Qwen3's norms"),
        ("sglang", put(draft_model__fc__weight=torch.zeros(2)), {}, "a training checkpoint of SpecForge"),
        (
            "sglang",
            put(midlayer__self_attn__q_proj__bias=torch.zeros(64)),
            {},
            r"holds midlayer\.self_attn\.q_proj\.bias",
        ),
        ("sglang", None, {"fc_norm": True}, r"says fc_norm: true, but fc_norm\.0\.weight is missing"),
        ("sglang", None, {"target_hidden_size": 128}, "target_hidden_size is 128, the head's hidden_size 64"),
        ("sglang", None, {"num_attention_heads": None}, "num_attention_heads is None, expected a whole number"),
        ("sglang", None, {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ("speculators", None, {"norm_before_residual": None}, "vLLM then takes for true"),
        ("speculators", None, {"speculators_model_type": "peagle"}, "'peagle', only 'eagle3' is read"),
        ("eagle", put(layers__0__input_layernorm__weight=torch.ones(64)), {}, "no norm on its input"),
        ("eagle", drop("layers.0.mlp.up_proj.weight"), {}, r"lacks layers\.0\.mlp\.up_proj\.weight"),
        ("medusa-pickle", drop("1.0.linear.bias"), {}, r"lacks 1\.0\.linear\.bias"),
        ("medusa-pickle", None, {"medusa_num_heads": 4}, "medusa_num_heads 4, the weights hold 3"),
        ("vllm-medusa", None, {"num_heads": 4}, "num_heads 4, the weights hold 3"),
    ],
)
def test_what_does_not_fit_is_named(target, tmp_path, build, change, config, said):
    """B55 too: a configuration of four heads beside the weights of three."""
    folder = CASES[build][0](tmp_path / "a", target)
    edit(folder, change or (lambda _: None), **config)
    with pytest.raises(HeadError, match=said):
        read_foreign(folder)


def test_a_width_that_is_no_multiple_needs_head_dim(tmp_path):
    """B40: 28 heads in 80 columns."""
    folder = edit(cases.eagle3_original(tmp_path / "a"), hidden_size=80, num_attention_heads=28)
    with pytest.raises(HeadError, match="hidden_size 80 is no multiple of num_attention_heads 28, and head_dim is not"):
        read_foreign(folder)


def test_norms_of_later_layers_may_have_either_name_but_not_two_values(target, tmp_path):
    folder = cases.sglang(tmp_path / "a", layers=2)
    whole = load_foreign(folder, target)
    alone = edit(folder, drop("layers.1.input_layernorm.weight"))
    state = load_foreign(alone, target).state_dict()
    assert torch.equal(state["layers.1.input_layernorm.weight"], whole.state_dict()["layers.1.input_layernorm.weight"])
    with pytest.raises(HeadError, match="vLLM and SGLang compute different heads"):
        read_foreign(edit(alone, put(layers__1__input_layernorm__weight=torch.ones(64))))


def test_a_head_for_another_target_is_refused(target, tmp_path):
    """B34: the file's embedding is the target's bit for bit, or the head is not for this target."""
    folder = cases.eagle(tmp_path / "a", target)
    with pytest.raises(HeadError, match="the embedding in the checkpoint is not that of"):
        load_foreign(folder, cases.target(seed=1))
    with pytest.raises(HeadError, match="hidden_size 64, .* has 48"):
        load_foreign(folder, cases.tiny.target("headdim"))
    with pytest.raises(HeadError, match="vocab_size 264, .* has 288"):
        load_foreign(folder, cases.tiny.target("padded"))
    merged = cases.medusa_merged(tmp_path / "b", target)
    with pytest.raises(HeadError, match="for a merged model the checkpoint's own folder"):
        load_foreign(merged, cases.target(seed=1))


class Planted:
    """What a pickle could run."""

    def __reduce__(self):
        return (print, ("a pickle ran",))


def test_a_pickle_runs_no_code(tmp_path, capsys):
    folder = cases.medusa(tmp_path / "a")
    torch.save({"0.0.linear.weight": Planted()}, folder / "medusa_lm_head.pt")
    with pytest.raises(HeadError, match="nothing else in a pickle is opened"):
        read_foreign(folder)
    assert "a pickle ran" not in capsys.readouterr().out


def test_folders_that_are_no_checkpoint(tmp_path):
    with pytest.raises(HeadError, match="holds no config.json"):
        read_foreign(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(HeadError, match="holds no weights, expected one of model.safetensors"):
        read_foreign(tmp_path)
    save_file({"some.weight": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(HeadError, match="tensors such as some.weight belong to no layout"):
        read_foreign(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"short")
    with pytest.raises(HeadError, match="cannot be read"):
        read_foreign(tmp_path)


def test_a_checkpoint_in_several_files(target, tmp_path):
    folder = cases.sglang(tmp_path / "a")
    tensors = held(folder)
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = {"model-1.safetensors": names[:5], "model-2.safetensors": names[5:]}
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, folder / file)
    index = {"weight_map": {name: file for file, part in parts.items() for name in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    state = load_foreign(folder, target).state_dict()
    assert torch.equal(state["fc.weight"], tensors["fc.weight"])
