"""What exports hold: names, shapes, dtypes, configurations, and the same draft logits as the head."""

from __future__ import annotations

import json
from pathlib import Path

import foreign_cases as cases
import pytest
import torch
from head_cases import vocab_of
from safetensors.torch import load_file

from headstart.errors import HeadError
from headstart.heads.base import Head
from headstart.heads.configs import HEADS
from headstart.heads.formats import WRITERS, load_foreign, write_foreign
from headstart.heads.formats.lint import check
from headstart.heads.store import build_head
from headstart.target import Target

IDS = cases.DRAFT_IDS


@pytest.fixture(scope="module")
def target() -> Target:
    return cases.target()


def head_of(kind: str, target: Target, *, ids: list[int] | None = None, dtype=torch.bfloat16, **settings) -> Head:
    """A head of ours whose every parameter has moved from its start."""
    if kind != "medusa":
        settings = {"init": "random", **settings}
    vocab = None if ids is None else vocab_of(ids, target.vocab_size)
    config = HEADS[kind](draft_vocab_size=None if ids is None else len(ids), **settings)
    with torch.random.fork_rng():
        torch.manual_seed(2)
        head = build_head(config, target, vocab)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return head.to(dtype).eval()


def table(folder: Path) -> dict[str, tuple[list[int], str]]:
    (path,) = folder.glob("*.safetensors")
    return {name: (list(tensor.shape), str(tensor.dtype)[6:]) for name, tensor in load_file(path).items()}


def config_of(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())


B, I64 = "bfloat16", "int64"
LAYER = {
    "self_attn.q_proj.weight": [64, 128],
    "self_attn.k_proj.weight": [32, 128],
    "self_attn.v_proj.weight": [32, 128],
    "self_attn.o_proj.weight": [64, 64],
    "mlp.gate_proj.weight": [96, 64],
    "mlp.up_proj.weight": [96, 64],
    "mlp.down_proj.weight": [64, 96],
    "input_layernorm.weight": [64],
    "hidden_norm.weight": [64],
    "post_attention_layernorm.weight": [64],
}
FULL = {"fc.weight": ([64, 192], B), "norm.weight": ([64], B), "lm_head.weight": ([264, 64], B)}
REDUCED = {**FULL, "lm_head.weight": ([10, 64], B), "d2t": ([10], I64), "t2d": ([264], "bool")}
EAGLE_LAYER = {
    f"layers.0.{name}": ([shape[0], 64] if len(shape) == 2 and shape[1] == 128 else shape, B)
    for name, shape in LAYER.items()
    if name not in ("input_layernorm.weight", "hidden_norm.weight")
}
MEDUSA_BLOCKS = {
    f"{head}.0.linear.{kind}": (shape, B) for head in range(2) for kind, shape in (("weight", [64, 64]), ("bias", [64]))
}
VLLM_BLOCKS = {f"blocks.{name.replace('.0.linear', '.layers.0')}": value for name, value in MEDUSA_BLOCKS.items()}


def first_layer(prefix: str) -> dict[str, tuple[list[int], str]]:
    return {f"{prefix}.{name}": (shape, B) for name, shape in LAYER.items()}


EMBEDDING = {"embed_tokens.weight": ([264, 64], B)}
GOLDEN = {
    ("sglang", "eagle3", "full"): {**FULL, **first_layer("midlayer")},
    ("sglang", "eagle3", "reduced"): {**REDUCED, **first_layer("midlayer")},
    ("eagle", "eagle3", "full"): {**FULL, **first_layer("midlayer")},
    ("eagle", "eagle3", "reduced"): {**REDUCED, **first_layer("midlayer")},
    ("speculators", "eagle3", "full"): {**FULL, **first_layer("layers.0"), **EMBEDDING},
    ("speculators", "eagle3", "reduced"): {**REDUCED, **first_layer("layers.0"), **EMBEDDING},
    ("eagle", "eagle", "full"): {"fc.weight": ([64, 128], B), **EAGLE_LAYER, **EMBEDDING},
    ("sglang", "eagle", "full"): {"fc.weight": ([64, 128], B), "fc.bias": ([64], B), **EAGLE_LAYER},
    ("medusa", "medusa", "full"): MEDUSA_BLOCKS,
    ("medusa", "medusa", "reduced"): MEDUSA_BLOCKS,
    ("vllm-medusa", "medusa", "full"): {**VLLM_BLOCKS, "lm_head.weight": ([264, 64], B)},
    ("vllm-medusa", "medusa", "reduced"): {
        **VLLM_BLOCKS,
        "lm_head.weight": ([10, 64], B),
        "token_map": ([10], I64),
    },
}


@pytest.mark.parametrize("case", GOLDEN, ids="-".join)
def test_names_shapes_and_dtypes(case, target, tmp_path):
    """And the check finds nothing, draft logits included."""
    name, kind, vocabulary = case
    settings = {"num_heads": 2} if kind == "medusa" else {}
    head = head_of(kind, target, ids=IDS if vocabulary == "reduced" else None, **settings)
    folder = write_foreign(head, target, tmp_path / "out", name, target_name="org/model")
    assert table(folder) == GOLDEN[case]
    report = check(folder, target=target, head=head)
    assert report.ok, report


def test_own_output_matrices(target, tmp_path):
    head = head_of("medusa", target, num_heads=2, output="own")
    folder = write_foreign(head, target, tmp_path / "a", "medusa")
    assert table(folder) == {**MEDUSA_BLOCKS, "0.1.weight": ([264, 64], B), "1.1.weight": ([264, 64], B)}
    assert check(folder, target=target, head=head).ok
    low = head_of("medusa", target, num_heads=2, output="low-rank", rank=4, dtype=torch.float32)
    folder = write_foreign(low, target, tmp_path / "b", "vllm-medusa")
    rows = load_file(folder / "model.safetensors")["lm_heads.1.weight"]
    expected = target.output.weight_rows() + low.output_up[1].detach() @ low.output_down[1].detach()
    torch.testing.assert_close(rows, expected)
    assert check(folder, target=target, head=low).ok


@pytest.mark.parametrize("flag", ["fc_norm", "norm_before_fc", "norm_output", "norm_before_residual", None])
@pytest.mark.parametrize("name", ["sglang", "speculators"])
def test_every_flag_means_the_same_in_both_engines(name, flag, target, tmp_path):
    """Two layers, and the logits of two steps in a row by each engine's twin."""
    head = head_of("eagle3", target, ids=IDS, num_layers=2, output="own", **({flag: True} if flag else {}))
    if (name, flag) == ("sglang", "norm_before_residual"):
        with pytest.raises(HeadError, match="which SGLang and the original do not compute; export with --format spec"):
            write_foreign(head, target, tmp_path / "out", name)
        return
    folder = write_foreign(head, target, tmp_path / "out", name, target_name="org/model")
    report = check(folder, target=target, head=head)
    assert report.ok, report
    assert all(config_of(folder)[each] is (each == flag) for each in ("fc_norm", "norm_output", "norm_before_residual"))


def test_one_config_for_both_engines(target, tmp_path):
    """B31, B33, B38, B39: sizes of both vocabularies, no tie, both ropes, the target's positions and layer ids."""
    head = head_of("eagle3", target, ids=IDS, layers=[1, 4, 7])
    config = config_of(write_foreign(head, target, tmp_path / "out", "sglang"))
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 4, 7]
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 3, 6]
    assert (config["vocab_size"], config["draft_vocab_size"]) == (264, 10)
    assert config["tie_word_embeddings"] is False and config["max_position_embeddings"] == 128
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 500000.0
    assert config["torch_dtype"] == "bfloat16" and config["head_dim"] == 16


def test_offsets_of_four_ids(target, tmp_path):
    """B31."""
    folder = write_foreign(head_of("eagle3", target, ids=[0, 3, 5, 257]), target, tmp_path / "out", "sglang")
    held = load_file(folder / "model.safetensors")
    assert held["d2t"].tolist() == [0, 2, 3, 254]
    assert held["t2d"].nonzero().squeeze(-1).tolist() == [0, 3, 5, 257]


def test_a_tied_target_gives_untied_rows(tmp_path):
    """B33: the rows are in the file, the flag is off, the target is as it was."""
    tied = cases.tiny.target("tied", num_hidden_layers=8)
    before = {name: tensor.clone() for name, tensor in tied.model.state_dict().items()}
    head = head_of("eagle3", tied, ids=list(range(64)))
    folder = write_foreign(head, tied, tmp_path / "out", "speculators", target_name="org/model")
    held = load_file(folder / "model.safetensors")
    rows = tied.model.get_input_embeddings().weight[:64].to(torch.bfloat16)
    assert torch.equal(held["lm_head.weight"], rows) and config_of(folder)["tie_word_embeddings"] is False
    assert check(folder, target=tied, head=head).ok
    assert all(torch.equal(tensor, before[name]) for name, tensor in tied.model.state_dict().items())


def test_a_head_wider_than_its_target(tmp_path):
    """B40: hidden 48, four heads of width 32."""
    wide = cases.tiny.target("headdim", num_hidden_layers=8)
    head = head_of("eagle3", wide)
    folder = write_foreign(head, wide, tmp_path / "out", "sglang")
    assert table(folder)["midlayer.self_attn.q_proj.weight"][0] == [128, 96]
    assert config_of(folder)["head_dim"] == 32 and check(folder, target=wide, head=head).ok
    again = load_foreign(folder, wide)
    assert torch.equal(again.state_dict()["fc.weight"], head.state_dict()["fc.weight"])


def test_scales_of_eagle_go_into_fc(target, tmp_path):
    head = head_of("eagle", target, embedding_scale=4.0, feature_scale=0.5, dtype=torch.float32)
    folder = write_foreign(head, target, tmp_path / "out", "eagle")
    weight = load_file(folder / "model.safetensors")["fc.weight"]
    assert torch.equal(weight[:, :64], 4 * head.fc.weight[:, :64])
    assert torch.equal(weight[:, 64:], 0.5 * head.fc.weight[:, 64:])
    assert check(folder, target=target, head=head).ok


def test_the_draft_vocabulary_of_eagle_is_a_file_for_sglang(target, tmp_path):
    head = head_of("eagle", target, ids=IDS)
    folder = write_foreign(head, target, tmp_path / "a", "sglang")
    assert torch.load(folder / "speculative_token_map.pt", weights_only=True) == IDS
    assert check(folder, target=target, head=head).ok
    with pytest.warns(UserWarning, match="eagle layout has no draft vocabulary: all ids will be drafted"):
        folder = write_foreign(head, target, tmp_path / "b", "eagle")
    assert check(folder, target=target, head=head).ok


def test_every_dtype_is_the_one_that_is_said(target, tmp_path):
    """B34: as the head has it unless asked; the maps stay integers."""
    head = head_of("eagle3", target, ids=IDS, dtype=torch.float32)
    folder = write_foreign(head, target, tmp_path / "a", "sglang")
    assert {dtype for _, dtype in table(folder).values()} == {"float32", "int64", "bool"}
    assert config_of(folder)["torch_dtype"] == "float32" and check(folder, target=target, head=head).ok
    folder = write_foreign(head, target, tmp_path / "b", "sglang", dtype=torch.bfloat16)
    assert {dtype for _, dtype in table(folder).values()} == {"bfloat16", "int64", "bool"}
    assert check(folder, target=target, head=head).ok


def test_logits_of_an_export_are_the_heads_own_in_fp32(target, tmp_path):
    """B34 and B55: for every layout, read back by our own reader; zero where the rows are still borrowed."""
    final = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    head = head_of("medusa", target, num_heads=3, dtype=torch.float32)
    expected = head.draft_logits(final, target.output)
    for name in WRITERS:
        if "medusa" in WRITERS[name]:
            again = load_foreign(write_foreign(head, target, tmp_path / name, name), target)
            found = again.draft_logits(final, target.output)
            tolerance = 0.0 if again.output_weight is None else 1e-5
            torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def test_what_a_layout_has_no_place_for_is_refused(target, tmp_path):
    def refused(said: str, head: Head, name: str, of: Target = target, **settings) -> None:
        with pytest.raises(HeadError, match=said):
            write_foreign(head, of, tmp_path / "out", name, **settings)
        assert not (tmp_path / "out").exists()

    refused(
        "format speculators has no place for medusa heads; give --format medusa",
        head_of("medusa", target),
        "speculators",
    )
    own = head_of("medusa", target, ids=IDS, output="own")
    refused("10 rows of 264, and the original layout has no draft vocabulary", own, "medusa")
    refused("own output rows of 10 of 264 ids", head_of("eagle", target, ids=IDS, output="own"), "eagle")
    refused("add --target-name OWNER/MODEL", head_of("eagle3", target), "speculators")
    refused("no engine's EAGLE-3 loads", head_of("eagle3", target, attention_bias=True), "sglang")
    scaled = cases.tiny.target("granite", num_hidden_layers=8)
    refused("scales its embedding", head_of("eagle3", scaled), "sglang", scaled)
    capped = cases.tiny.target("phi", num_hidden_layers=8)
    refused("have a bias, for which no exported layout has a place", head_of("eagle3", capped), "sglang", capped)
    broken = head_of("eagle3", target)
    with torch.no_grad():
        broken.norm.weight[0] = float("nan")
    refused("norm.weight holds values that are not finite", broken, "sglang")


def test_a_folder_that_exists_is_kept(target, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "note").write_text("mine")
    with pytest.raises(HeadError, match="exists already and is kept"):
        write_foreign(head_of("medusa", target), target, tmp_path / "out", "medusa")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
