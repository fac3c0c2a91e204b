"""EAGLE-1 and EAGLE-3: what each computes, what a head takes from its target, and what it starts from."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
import torch
from head_cases import collate, features, forward, head_for, pad, row, tiny, vocab_of
from pydantic import ValidationError
from torch.nn import functional

from headstart.errors import HeadError
from headstart.heads.base import Alignment
from headstart.heads.configs import Eagle3Config, EagleConfig, MedusaConfig
from headstart.heads.eagle import document_lengths
from headstart.heads.last_layer import Scales, norm_gain
from headstart.heads.store import build_head, load_head, save_head
from headstart.heads.vocab import DraftVocab
from headstart.target import Features

F64 = torch.float64
KINDS = ["eagle", "eagle3"]


@pytest.fixture(scope="module")
def target():
    return tiny.target("llama", dtype=F64)


def text(length: int = 12):
    return collate([row(length, range(4, length), 1)], [[0]])


def first_step(head, target, batch):
    """Of a batch: (output, carried) of step 0, without gradient."""
    head.eval()
    with torch.no_grad():
        step = head.unroll(features(target, batch, head.wants), batch, target.embedding, 1)[0]
    return step.output, step.carried


# ---------------------------------------------------------------------------------------------------------------------
# The block, written out from the state dict
# ---------------------------------------------------------------------------------------------------------------------


def rms(x, weight, eps):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def layer_of(state, prefix, config, reading, residual):
    """One layer over a whole document, positions from 0: its own rotary embedding, its own softmax."""
    heads, kv_heads, width = config.num_attention_heads, config.num_kv_heads, config.head_dim
    angles = torch.arange(len(reading))[:, None] * config.rope["rope_theta"] ** (-torch.arange(0, width, 2) / width)
    turn = torch.polar(torch.ones_like(angles), angles).to(torch.complex128)

    def project(name, count):
        given = reading @ state[f"{prefix}.self_attn.{name}.weight"].T
        given = (given + state.get(f"{prefix}.self_attn.{name}.bias", 0)).unflatten(-1, (count, width)).transpose(0, 1)
        return given

    def rotated(given):
        half = torch.complex(given[..., : width // 2].contiguous(), given[..., width // 2 :].contiguous()) * turn
        return torch.cat([half.real, half.imag], dim=-1)

    query, key, value = (
        rotated(project("q_proj", heads)),
        rotated(project("k_proj", kv_heads)),
        project("v_proj", kv_heads),
    )
    gathered = []
    for head in range(heads):
        scores = query[head] @ key[head * kv_heads // heads].T / width**0.5
        scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf)
        gathered.append(scores.softmax(-1) @ value[head * kv_heads // heads])
    hidden = residual + torch.cat(gathered, dim=-1) @ state[f"{prefix}.self_attn.o_proj.weight"].T
    normed = rms(hidden, state[f"{prefix}.post_attention_layernorm.weight"], config.rms_norm_eps)
    gate, up, down = (state[f"{prefix}.mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
    return hidden + (functional.silu(normed @ gate.T) * (normed @ up.T)) @ down.T


def block_of(head, embeds, features) -> tuple[torch.Tensor, torch.Tensor]:
    """(output, carried) of step 0 for one document, from the equations in the files' docstrings."""
    state, config = head.state_dict(), head.config
    eps = config.rms_norm_eps
    if isinstance(config, EagleConfig):
        joined = torch.cat([embeds * config.embedding_scale, features.final[0] * config.feature_scale], dim=-1)
        reading = residual = joined @ state["fc.weight"].T + state.get("fc.bias", 0)
    else:
        taps = [features.taps[k][0] for k in config.layers]
        if config.fc_norm:
            taps = [rms(tap, state[f"fc_norm.{i}.weight"], eps) for i, tap in enumerate(taps)]
        fused = torch.cat(taps, dim=-1)
        if config.norm_before_fc:
            fused = rms(fused, state["input_norm.weight"], eps)
        states = fused @ state["fc.weight"].T
        normed = rms(states, state["layers.0.hidden_norm.weight"], eps)
        reading = torch.cat([rms(embeds, state["layers.0.input_layernorm.weight"], eps), normed], dim=-1)
        residual = normed if config.norm_before_residual else states
    for index in range(config.num_layers):
        if index:
            reading = rms(residual, state[f"layers.{index}.input_layernorm.weight"], eps)
        residual = layer_of(state, f"layers.{index}", config, reading, residual)
    if isinstance(config, EagleConfig):
        return residual, residual
    output = rms(residual, state["norm.weight"], eps)
    return output, output if config.norm_output else residual


FLAGS = ("fc_norm", "norm_before_fc", "norm_before_residual", "norm_output")


@pytest.mark.parametrize(
    "kind,settings",
    [
        ("eagle", {}),
        ("eagle", {"fc_bias": True, "num_layers": 2, "attention_bias": True}),
        ("eagle3", {}),
        *(("eagle3", {flag: True}) for flag in FLAGS),
        ("eagle3", {**dict.fromkeys(FLAGS, True), "num_layers": 3, "layers": [0, 2, 3, 4], "attention_bias": True}),
    ],
    ids=str,
)
def test_a_step_is_its_equations(target, kind, settings):
    head = head_for(target, kind=kind, **settings)
    batch = text()
    given = features(target, batch, head.wants)
    embeds = target.embedding.embed(torch.cat([batch.input_ids[0, 1:], torch.tensor([0])]))
    with torch.no_grad():
        for found, expected in zip(first_step(head, target, batch), block_of(head, embeds, given), strict=True):
            torch.testing.assert_close(found[0], expected, rtol=1e-4, atol=1e-5)  # angles are in fp32


def test_every_norm_flag_changes_what_is_computed(target):
    batch = text()
    found = [first_step(head_for(target, kind="eagle3"), target, batch)[1]]
    for flag in FLAGS:
        found.append(first_step(head_for(target, kind="eagle3", **{flag: True}), target, batch)[1])
    for index, one in enumerate(found):
        assert all(not torch.allclose(one, other) for other in found[:index])


def test_parameters_have_the_published_names(target):
    layer = {f"layers.0.self_attn.{name}_proj.weight" for name in "qkvo"}
    layer |= {f"layers.0.mlp.{name}_proj.weight" for name in ("gate", "up", "down")}
    layer.add("layers.0.post_attention_layernorm.weight")
    assert head_for(target, kind="eagle", fc_bias=True).state_dict().keys() == layer | {"fc.weight", "fc.bias"}
    head = head_for(
        target, vocab_of(range(9)), kind="eagle3", num_layers=2, fc_norm=True, norm_before_fc=True, output="own"
    )
    first = layer | {"layers.0.input_layernorm.weight", "layers.0.hidden_norm.weight"}
    second = {name.replace("layers.0", "layers.1") for name in layer} | {"layers.1.input_layernorm.weight"}
    own = {"fc.weight", *(f"fc_norm.{i}.weight" for i in range(3)), "input_norm.weight", "norm.weight"}
    assert head.state_dict().keys() == first | second | own | {"output_weight", "vocab.ids"}
    shapes = {name: tuple(tensor.shape) for name, tensor in head.state_dict().items()}
    assert shapes["fc.weight"] == (64, 192) and shapes["layers.0.self_attn.q_proj.weight"] == (64, 128)
    assert shapes["layers.1.self_attn.k_proj.weight"] == (32, 64) and shapes["output_weight"] == (9, 64)


# ---------------------------------------------------------------------------------------------------------------------
# Losses of EAGLE-1, noise
# ---------------------------------------------------------------------------------------------------------------------


def test_the_feature_loss_is_smooth_l1_to_the_next_features(target):
    settings = {"kind": "eagle", "unrolled_steps": 2, "loss_decay": 0.5}
    batch = pad(collate([row(9, range(3, 9), 1), row(8, range(4, 7), 2)], [[0, 1]]), 20)
    given = features(target, batch)
    both, tokens = (
        forward(head_for(target, **settings, feature_loss=weight).eval(), target, batch, given) for weight in (2.0, 0.0)
    )
    head = head_for(target, **settings).eval()
    with torch.no_grad():
        unrolled = head.unroll(given, batch, target.embedding, 2)
    expected = []
    alignment = Alignment.of_drafts(batch, 2)
    for depth in range(2):
        total = torch.zeros((), dtype=F64)
        for token in alignment.tokens[alignment.scored[:, depth]].tolist():
            gap = (unrolled[depth].output[0, token - 2 - depth] - given.final[0, token - 1]).abs()
            total += torch.where(gap < 1, gap.square() / 2, gap - 0.5).mean()
        expected.append(total)
    torch.testing.assert_close(both.loss - tokens.loss, 2 * torch.stack(expected))
    torch.testing.assert_close((both.loss_sum - tokens.loss_sum).detach(), 2 * (expected[0] + expected[1] / 2))
    assert torch.equal(both.hits, tokens.hits)


def test_noise_is_uniform_by_length_of_the_document_and_only_while_training(target):
    head = head_for(target, kind="eagle", noise=0.4)
    batch = pad(collate([row(32, [], 1), row(8, [], 2)], [[0, 1]]), 48)
    assert document_lengths(batch)[0].tolist() == [32] * 32 + [8] * 8 + [8] * 8
    given = features(target, batch)
    noise = head.train().first_states(given, batch) - given.final
    for place, length in [(slice(0, 32), 32), (slice(32, 40), 8)]:
        bound = 0.2 * 512 / length / head.feature_scale
        largest, deviation = float(noise[0, place].abs().max()), float(noise[0, place].std())
        assert 0.95 * bound < largest <= bound and deviation == pytest.approx(bound / 3**0.5, rel=0.1)
    assert torch.equal(head.eval().first_states(given, batch), given.final)


def test_embedding_and_feature_meet_at_one_scale(target):
    head = build_head(EagleConfig(), target)
    embeds = target.embedding.embed(torch.arange(256)) * head.embedding_scale
    final = features(target, text(40)).final * head.feature_scale
    for states in (embeds, final):
        assert 0.6 < float(states.square().mean().sqrt()) < 1.7
    for scale in (head.embedding_scale, head.feature_scale):
        assert math.frexp(scale)[0] == 0.5, "a power of two: an export multiplies it into fc without loss"


# ---------------------------------------------------------------------------------------------------------------------
# Starting from the target
# ---------------------------------------------------------------------------------------------------------------------


def without_embedding(head):
    """The head as its copied part: no noise in fc, no embedding."""
    dim = head.hidden_size
    with torch.no_grad():
        head.fc.weight.zero_()
        head.fc.weight[:, -dim:] = torch.eye(dim)
        for name in ("q_proj", "k_proj", "v_proj"):
            getattr(head.layers[0].self_attn, name).weight[:, :-dim] = 0
    return head


@pytest.mark.parametrize("family", ["llama", "tied", "granite", "swa"])
@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize("output", ["shared", "own"])
def test_a_draft_layer_starts_as_the_targets_last(family, num_layers, output):
    """Over the very state that the target's layer reads it gives the target's final state, and its logits."""
    target = tiny.target(family, dtype=F64)
    tap = target.num_layers - num_layers
    head = without_embedding(
        build_head(Eagle3Config(layers=[tap], num_layers=num_layers, output=output), target).double()
    )
    batch = text()
    found, _ = first_step(head, target, batch)
    final = features(target, batch).final
    scale = Scales.measure(target, [tap])
    assert scale.of(tap) > 0
    torch.testing.assert_close(found, final, rtol=1e-4, atol=1e-4)  # the copy is in fp32
    rows = target.output.select() if output == "shared" else None
    torch.testing.assert_close(head.logits(found, rows), target.output.logits(final), rtol=1e-3, atol=1e-3)


def test_biases_of_the_target_are_taken_where_the_head_has_them():
    target = tiny.target("qwen2", dtype=F64, use_sliding_window=False)
    with torch.no_grad():
        target.layers[-1].self_attn.q_proj.bias += 0.5
    head = without_embedding(build_head(Eagle3Config(layers=[3], attention_bias=True), target).double())
    batch = text()
    torch.testing.assert_close(first_step(head, target, batch)[0], features(target, batch).final, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "config",
    [
        EagleConfig(),
        Eagle3Config(layers=[1, 3]),
        Eagle3Config(layers=[1, 3], norm_before_residual=True),
        Eagle3Config(layers=[1, 3], norm_before_residual=True, fc_norm=True),
        Eagle3Config(layers=[1, 3], norm_before_fc=True),
    ],
    ids=["eagle", "eagle3", "normed residual", "normed taps and residual", "norm before fc"],
)
def test_what_a_layer_adds_is_in_proportion_to_its_stream(target, config):
    """The residual scale trap: the last layer unscaled would drown a normed stream, or be drowned by a wide one."""
    head = build_head(config, target).double().eval()
    batch, layer = text(40), head.layers[0]
    seen = {}
    layer.register_forward_hook(lambda _m, arguments, out: seen.update(stream=arguments[1], given=out))
    first_step(head, target, batch)
    states = target.forward(batch.input_ids, batch.position_ids, None, layers=[3])
    last = target.layers[-1]
    out = {}
    last.register_forward_hook(lambda _m, arguments, given: out.update(given=given))
    target.forward(batch.input_ids, batch.position_ids, None)
    theirs = out["given"] if isinstance(out["given"], torch.Tensor) else out["given"][0]
    ratio = float((seen["given"] - seen["stream"]).norm() / seen["stream"].norm())
    expected = float((theirs - states.taps[3]).norm() / states.taps[3].norm())
    assert expected / 2 < ratio < expected * 2


def test_a_target_of_another_build_gives_a_random_start_and_says_so():
    with pytest.warns(UserWarning, match="head.init: .* start at random, .*gpt2: its last layer is not built"):
        head = build_head(Eagle3Config(), tiny.target("gpt2"))
    assert torch.isfinite(forward(head, tiny.target("gpt2"), text()).loss_sum)
    with pytest.warns(UserWarning, match=r"its gate_proj is \[96, 64\], the head's \[80, 64\]"):
        build_head(Eagle3Config(intermediate_size=80), tiny.target("llama"))


@pytest.mark.parametrize("family", ["llama", "gemma", "gpt2", "cohere"])
def test_the_gain_of_an_rms_norm_is_found_whatever_its_form(family):
    target = tiny.target(family, dtype=F64)
    gain = norm_gain(target.output.normalise, 64, torch.zeros((), dtype=F64))
    if family in ("gpt2", "cohere"):  # layer norms
        assert gain is None
    else:
        states = torch.randn(5, 64, dtype=F64)
        expected = states / states.square().mean(-1, keepdim=True).sqrt() * gain
        torch.testing.assert_close(target.output.normalise(states), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "family", ["llama", "tied", "padded", "headdim", "hyb", "granite", "qwen2", "olmoe", "minicpm"]
)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore:head.init")
def test_dimensions_are_the_targets_and_are_recorded(family, kind):
    target = tiny.target(family)
    head = build_head({"eagle": EagleConfig, "eagle3": Eagle3Config}[kind](), target)
    config, theirs = head.config, target.config
    assert (config.num_attention_heads, config.num_kv_heads) == (theirs.num_attention_heads, theirs.num_key_value_heads)
    assert config.intermediate_size == theirs.intermediate_size and config.max_positions == target.max_positions
    if family in ("llama", "headdim", "hyb"):
        assert config.head_dim == theirs.head_dim
    assert None not in (config.rope, config.rms_norm_eps) and json.loads(json.dumps(config.rope)) == config.rope
    assert torch.isfinite(forward(head, target, text()).loss_sum)


def test_layers_read_are_the_published_ones_or_spread_over_a_small_target():
    def layers(count):
        return build_head(Eagle3Config(init="random"), tiny.target("llama", num_hidden_layers=count)).wants

    assert layers(32) == (2, 16, 29) and layers(7) == (2, 3, 4)
    assert layers(6) == (1, 3, 5) and layers(4) == (1, 2, 3) and layers(2) == (0, 1) and layers(1) == (0,)


# ---------------------------------------------------------------------------------------------------------------------
# Rotary embedding: B38, B39
# ---------------------------------------------------------------------------------------------------------------------

SCALED = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
ROPES = {
    "llama3": {"rope_parameters": {**SCALED, "rope_theta": 500000.0}},
    "linear": {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}},
    "yarn": {
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 32,
            "rope_theta": 1e6,
        }
    },
    "old fields": {"rope_parameters": None, "rope_theta": 500000.0, "rope_scaling": SCALED},
    "default": {},
}


@pytest.mark.parametrize("name", ROPES)
@pytest.mark.parametrize("kind", KINDS)
def test_rotary_frequencies_are_the_targets_and_stay_so(name, kind, tmp_path):
    """B38: whatever the spelling of the target's configuration; after a cast and after saving too."""
    target = tiny.target("llama", **ROPES[name])
    head = build_head({"eagle": EagleConfig, "eagle3": Eagle3Config}[kind](), target)
    theirs = target.model.model.rotary_emb
    assert torch.equal(head.rotary.frequencies, theirs.inv_freq)
    positions = torch.arange(100)[None]
    for ours, expected in zip(head.rotary(positions, torch.zeros(1)), theirs(torch.zeros(1), positions), strict=True):
        assert torch.equal(ours[:, 0], expected)
    assert head.to(torch.bfloat16).rotary.frequencies.dtype == torch.float32
    save_head(head, tmp_path / "head", fingerprint=target.fingerprint())
    loaded = load_head(tmp_path / "head", target)
    assert torch.equal(loaded.rotary.frequencies, theirs.inv_freq)
    saved = json.loads((tmp_path / "head/config.json").read_text())["head"]["rope"]
    assert saved["rope_theta"] == target.config.rope_parameters["rope_theta"]
    assert saved["rope_type"] == target.config.rope_parameters["rope_type"]


def test_an_explicit_rope_wins():
    target = tiny.target("llama")
    head = build_head(Eagle3Config(rope={"rope_theta": "1e4"}), target)
    assert head.config.rope == {"rope_type": "default", "rope_theta": 10000.0}
    expected = 10000.0 ** (-torch.arange(0, 16, 2) / 16)
    torch.testing.assert_close(head.rotary.frequencies, expected)


def test_positions_beyond_the_declared_ones_are_computed(target):
    """B39: built heads inherit the target's positions; a smaller number limits nothing."""
    long, short = (head_for(target, kind="eagle3", max_positions=count) for count in (None, 32))
    assert (long.config.max_positions, short.config.max_positions) == (128, 32)
    batch = text(60)
    assert torch.equal(first_step(long, target, batch)[0], first_step(short, target, batch)[0])


# ---------------------------------------------------------------------------------------------------------------------
# Saving, and going on from a saved head
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "settings", [{}, {"num_layers": 2, "output": "own", "unrolled_steps": [{"until": 1.0, "steps": 2}]}]
)
def test_a_head_comes_back_bit_for_bit(kind, dtype, settings, tmp_path):
    target = tiny.target("llama")
    vocab = vocab_of(range(0, 264, 3))
    head = head_for(target, vocab, kind=kind, loss={"soft-ce": 0.9, "tv": 0.1}, **settings).to(dtype)
    save_head(head, tmp_path / "head", fingerprint=target.fingerprint())
    loaded = load_head(tmp_path / "head", target)
    assert loaded.config == head.config and type(loaded) is type(head) and not loaded.training
    assert loaded.state_dict().keys() == head.state_dict().keys()
    for name, tensor in head.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor) and loaded.state_dict()[name].dtype == tensor.dtype
    ours, theirs = (first_step(one, target, text())[0] for one in (head, loaded))
    rows = target.output.select(head.draft_ids) if head.output_weight is None else None
    assert torch.equal(head.logits(ours, rows), loaded.logits(theirs, rows))


def test_a_file_that_does_not_fit_its_description_is_refused(target, tmp_path):
    folder = save_head(head_for(target, kind="eagle3"), tmp_path / "head", fingerprint=target.fingerprint())
    description = json.loads((folder / "config.json").read_text())
    for change, message in [
        (
            {"intermediate_size": 100},
            "was made with intermediate_size 96, the configuration says",
        ),
        ({"fc_norm": True}, "lacks fc_norm.0.weight"),
        ({"num_kv_heads": None}, r"dimensions of this head are open"),
        ({"num_kv_heads": 3}, "must be a multiple of"),
    ]:
        (folder / "config.json").write_text(json.dumps({**description, "head": {**description["head"], **change}}))
        with pytest.raises(HeadError, match=message):
            load_head(folder, target)


def saved(target, folder: Path, **settings) -> Path:
    head = head_for(target, settings.pop("vocab", None), **settings)
    return save_head(head, folder, fingerprint=target.fingerprint())


@pytest.mark.parametrize("kind", KINDS)
def test_training_goes_on_from_a_saved_head(target, kind, tmp_path):
    """Weights and everything that the recipe leaves open are the saved head's; no path goes into the new one."""
    folder = saved(target, tmp_path / "old", kind=kind, rope={"rope_theta": 777.0}, intermediate_size=80)
    settings = {"init": str(folder), "unrolled_steps": 2}
    head = build_head({"eagle": EagleConfig, "eagle3": Eagle3Config}[kind](**settings), target)
    old = load_head(folder, target)
    assert head.config.init == "old" and head.config.intermediate_size == 80
    assert head.config.rope == {"rope_type": "default", "rope_theta": 777.0} and head.num_depths == 2
    for name, tensor in old.state_dict().items():
        assert torch.equal(head.state_dict()[name], tensor.float())


def test_a_run_can_be_started_from_by_the_name_of_its_folder(target, tmp_path):
    saved(target, tmp_path / "run/head", kind="eagle3", output="shared", vocab=None)
    by_run, by_head = (build_head(Eagle3Config(init=str(tmp_path / one)), target) for one in ("run", "run/head"))
    for name, tensor in by_run.state_dict().items():
        assert torch.equal(by_head.state_dict()[name], tensor)


def test_output_rows_are_carried_over_by_token(target, tmp_path):
    old_vocab, new_vocab = vocab_of(range(0, 60)), vocab_of(range(40, 100))
    folder = saved(target, tmp_path / "old", kind="eagle3", output="own", vocab=old_vocab)
    config = Eagle3Config(init=str(folder), output="own", draft_vocab_size=60)
    head, old = build_head(config, target, new_vocab), load_head(folder)
    assert torch.equal(head.output_weight[:20], old.output_weight[40:].float())
    assert torch.equal(head.output_weight[20:], target.output.weight_rows(torch.arange(60, 100)).float())


def test_a_head_that_means_something_else_is_no_start(target, tmp_path):
    folder = saved(target, tmp_path / "old", kind="eagle3", fc_norm=True, output="own")
    for settings, message in [
        ({}, "has fc_norm True, the recipe says False; set head.fc_norm"),
        ({"fc_norm": True, "num_layers": 2}, "has num_layers 1, the recipe says 2"),
        ({"fc_norm": True, "rope": {"rope_theta": 5.0}}, "has rope .*500000"),
        ({"fc_norm": True}, "output_weight has no place in the new head; set head.output"),
    ]:
        with pytest.raises(HeadError, match=message):
            build_head(Eagle3Config(init=str(folder), **settings), target)
    with pytest.raises(HeadError, match="holds a head of type eagle3, the recipe asks for eagle"):
        build_head(EagleConfig(init=str(folder)), target)
    with pytest.raises(HeadError, match=re.escape(f"head.init is {tmp_path / 'none'}, which holds no trained head")):
        build_head(EagleConfig(init=str(tmp_path / "none")), target)


def test_another_tools_folder_is_read_by_whoever_can(target, tmp_path):
    foreign = head_for(target, kind="eagle3", norm_output=True)
    (tmp_path / "published").mkdir()
    config = Eagle3Config(init=str(tmp_path / "published"), norm_output=True)
    seen = []
    head = build_head(config, target, read_foreign=lambda path, given: seen.append((path, given)) or foreign)
    assert seen == [(tmp_path / "published", target)]
    assert torch.equal(head.fc.weight, foreign.fc.weight.float())


# ---------------------------------------------------------------------------------------------------------------------
# Configuration
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings,message",
    [
        ({"unrolled_steps": 0}, "greater than or equal to 1"),
        ({"unrolled_steps": []}, "at least 1 item"),
        ({"unrolled_steps": [{"until": 0.5, "steps": 1}]}, "ascend and end at 1.0, found .0.5"),
        ({"unrolled_steps": [{"until": 0.5, "steps": 1}, {"until": 0.5, "steps": 2}]}, "ascend"),
        ({"unrolled_steps": [{"until": 1.5, "steps": 1}]}, "less than or equal to 1"),
        ({"layers": [3, 2]}, "must ascend"),
        ({"layers": [-1]}, "greater than or equal to 0"),
        ({"num_attention_heads": 4, "num_kv_heads": 3}, "multiple of `num_kv_heads`"),
        ({"head_dim": 7}, "multiple of 2"),
        ({"rope": {"rope_type": "magic", "rope_theta": 1e4}}, "rope_type.*expected one of default, linear"),
        ({"rope": {"rope_type": "default"}}, "rope_theta.*expected a number above 0"),
        ({"loss": "mse"}, "soft-ce"),
        ({"draft_vocab_size": 4.0}, "valid integer"),
        ({"init": ""}, "at least 1 character"),
    ],
    ids=str,
)
def test_wrong_settings_are_refused_where_they_are_declared(settings, message):
    with pytest.raises(ValidationError, match=message):
        Eagle3Config(**settings)


def test_settings_that_only_a_target_can_refuse(target):
    with pytest.raises(HeadError, match="tiny-llama: .*multiple of `num_kv_heads`"):
        build_head(Eagle3Config(num_attention_heads=3), target)
    with pytest.raises(HeadError, match="lacks what rope_type yarn needs"):
        build_head(Eagle3Config(rope={"rope_type": "yarn", "rope_theta": 1e4}), target)
    with pytest.raises(ValueError, match="needs the target's whole distribution"):
        EagleConfig(loss="reverse-kl", teacher_top_k=4)
    with pytest.raises(HeadError, match=r"asks for HF\[9\]"):
        build_head(Eagle3Config(layers=[0, 9], init="random"), target)


def test_stages_begin_where_the_one_before_ends():
    config = EagleConfig(unrolled_steps=[{"until": 0.3, "steps": 1}, {"until": 1.0, "steps": 3}])  # type: ignore[list-item]
    assert [config.steps_at(share) for share in (0.0, 0.29, 0.3, 0.99, 1.0)] == [1, 1, 3, 3, 3]
    assert config.most_unrolled_steps == 3 and EagleConfig(unrolled_steps=2).steps_at(0.9) == 2
    assert MedusaConfig().loss_weights == {"soft-ce": 1.0}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("loss", ["hard-ce", "soft-ce", "kl", "reverse-kl", "tv", "lk"])
def test_every_loss_trains_over_a_draft_vocabulary_larger_than_the_data(target, kind, loss):
    """B30: 64 draft tokens where the text has 20 kinds; labels outside add no loss and are no hit."""
    counts = torch.zeros(264, dtype=torch.long)
    counts[100:120] = 3
    vocab = DraftVocab.build(counts, 64, special_ids=[tiny.END], tokenizer_size=tiny.VOCAB_SIZE)
    assert vocab is not None and len(vocab) == 64
    head = head_for(target, vocab, kind=kind, loss=loss, unrolled_steps=2).eval()
    batch = text()
    batch.input_ids[0] = torch.arange(12) + 103
    batch.input_ids[0, 7] = 200
    output = forward(head, target, batch)
    output.loss_sum.backward()
    assert torch.isfinite(output.loss_sum) and output.scored.tolist() == [8, 7]
    assert all(torch.isfinite(parameter.grad).all() for parameter in head.parameters())


def test_own_rows_cannot_be_widened(target):
    head = head_for(target, vocab_of(range(9)), kind="eagle3", output="own")
    with pytest.raises(HeadError, match="9 output rows of its own, 11 were asked for"):
        head.logits(torch.zeros(1, 64, dtype=F64), target.output.select(torch.arange(11)))
    shared = head_for(target, vocab_of(range(9)), kind="eagle3")
    assert shared.logits(torch.zeros(1, 64, dtype=F64), target.output.select(torch.arange(11))).shape == (1, 11)


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_in_fp32_reads_a_target_in_bf16(kind):
    target = tiny.target("llama", dtype=torch.bfloat16)
    head = build_head({"eagle": EagleConfig, "eagle3": Eagle3Config}[kind](unrolled_steps=2), target)
    for cast in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=cast):
            output = forward(head, target, text())
        output.loss_sum.backward()
        assert torch.isfinite(output.loss_sum) and head.fc.weight.grad.dtype == torch.float32
    taps = {k: torch.zeros(1, 3, 64, dtype=torch.bfloat16) for k in head.wants}
    fused = head.fuse(Features(torch.zeros(1, 3, 64, dtype=torch.bfloat16), taps))
    assert fused.dtype == torch.float32
