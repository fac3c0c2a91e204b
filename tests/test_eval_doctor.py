"""The doctor: every cause is planted, and named first; a healthy head gets "nothing wrong found"."""

from __future__ import annotations

import json
import random
import re
import shutil
from pathlib import Path

import doctor_cases as cases
import pytest
import tiny
import torch

from headstart import cli
from headstart.data.rendering import ChatRenderer
from headstart.decode.cost import CostCurve
from headstart.decode.drafters.eagle import EagleDrafter
from headstart.eval.diagnosis import decoding
from headstart.eval.diagnosis.finding import CAUSES
from headstart.heads.configs import EagleConfig, MedusaConfig
from headstart.heads.store import save_head
from headstart.recipe import ChatSection, load_recipe
from headstart.target import Features, load_target


@pytest.fixture(scope="session")
def world(tmp_path_factory) -> cases.World:
    return cases.make_world(tmp_path_factory.mktemp("doctor"))


@pytest.fixture(scope="session")
def healthy(world) -> Path:
    """A run of an EAGLE-3 head that has learnt to count."""
    return world.train("eagle3")


@pytest.fixture(autouse=True)
def costs(monkeypatch) -> list[float]:
    """A device on which a step of n tokens takes 1 + slope * (n - 1) of one: real clocks are for real models."""
    slope = [0.01]

    def curve(target, *, widths, **_):
        seconds = {width: 1e-2 * (1 + slope[0] * (width - 1)) for width in widths}
        return CostCurve(seconds=seconds, context_length=64, rows=1, device="cpu", dtype="float32")

    monkeypatch.setattr(decoding, "measure_costs", curve)
    monkeypatch.setattr(decoding, "measure_draft_costs", lambda *_, **__: 1e-3)
    return slope


@pytest.fixture
def run(healthy, tmp_path) -> Path:
    """A copy of the healthy run, to be spoilt."""
    return Path(shutil.copytree(healthy, tmp_path / "run"))


def causes(run: Path, *words: str, status: int = 1) -> list[str]:
    """What `headstart doctor` finds, the likeliest first."""
    output = run / "doctor.json"
    assert cli.main(["doctor", "--head", str(run), "--json", str(output), *words]) == status
    found = json.loads(output.read_text())["findings"]
    assert all(one["cause"] in CAUSES and one["figure"] and one["remedy"] for one in found)
    return [one["cause"] for one in found]


def edit(path: Path, **changes) -> None:
    """Changes keys of a head's settings, or of a configuration where there are no such."""
    values = json.loads(path.read_text())
    (values["head"] if isinstance(values.get("head"), dict) else values).update(changes)
    path.write_text(json.dumps(values))


def test_a_healthy_head_has_nothing_wrong(healthy, tmp_path, capsys):
    run = Path(shutil.copytree(healthy, tmp_path / "run"))
    assert causes(run, status=0) == []
    assert "nothing wrong found" in capsys.readouterr().out


# -- what the head reads -----------------------------------------------------------------------------------------------


def test_feature_layers(run, capsys):
    edit(run / "head/config.json", layers=[0, 2, 4])
    assert causes(run)[0] == "feature-layers"
    said = capsys.readouterr().out
    assert 'set "layers": [1, 3, 5] in' in said and "likeliest cause" in said


@pytest.mark.slow
def test_norm(run):
    edit(run / "head/config.json", norm_before_residual=True)
    assert causes(run)[0] == "final-norm"


@pytest.mark.slow
def test_rope(run):
    edit(run / "head/config.json", rope={"rope_type": "default", "rope_theta": 3.0})
    assert causes(run)[0] == "rope"


@pytest.mark.slow
def test_a_head_that_was_trained_on_states_before_the_final_norm(world, healthy, tmp_path):
    """Of a target whose norm makes its states eight times larger, and whose output rows make up for it."""

    def rescale(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.norm.weight"] *= 8
        tensors["lm_head.weight"] /= 8

    place = Path(shutil.copytree(world.target, tmp_path / "target"))
    cases.change_tensors(place / "model.safetensors", rescale)
    loud = cases.World(tmp_path)
    shutil.copy(world.folder / "train.jsonl", tmp_path)
    run = taught(loud, healthy, tmp_path, lambda _, unnormed: lambda features: Features(unnormed(), {}), EAGLE)
    assert causes(run, "--target", str(place))[0] == "final-norm"


@pytest.mark.slow
@pytest.mark.parametrize("step", [1, -1])
def test_a_head_that_was_trained_on_features_of_the_next_or_the_last_position(world, healthy, tmp_path, step):
    def moved(_, __):
        return lambda features: Features(features.final.roll(step, 1), {})

    assert causes(taught(world, healthy, tmp_path, moved))[0] == "position-offset"


MEDUSA = MedusaConfig(num_heads=3, loss="hard-ce")
EAGLE = EagleConfig(unrolled_steps=2, noise=0.0, feature_loss=0.0, token_loss=1.0, loss="hard-ce")


def taught(world, healthy: Path, folder: Path, change, config: MedusaConfig | EagleConfig = MEDUSA) -> Path:
    """A run whose head was trained on changed features."""
    target = load_target(str(world.target), dtype="float32")
    kept: list[torch.Tensor] = []
    target.decoder.get_submodule("norm").register_forward_pre_hook(lambda _, inputs: kept.append(inputs[0]))
    head = cases.teach(target, config, world, change(target, lambda: kept[-1]))
    run = folder / "run"
    run.mkdir()
    recipe = load_recipe(healthy / "recipe.yaml", ["head={type: medusa, num_heads: 3}"])
    (run / "recipe.yaml").write_text(recipe.to_yaml())
    save_head(head, run / "head", fingerprint=target.fingerprint(), training_record={})
    return run


# -- tensors -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_stale_head(run):
    """Another head's weights were copied over it; the run still has its best ones."""
    cases.change_tensors(run / "head/head.safetensors", lambda tensors: tensors["fc.weight"].normal_())
    assert causes(run)[0] == "head-tensors"


@pytest.fixture(scope="session")
def narrow(world) -> Path:
    """Own output rows, for fewer tokens than the target says."""
    own = "head={type: eagle3, layers: [1, 3, 5], unrolled_steps: 3, fc_norm: true, output: own, draft_vocab_size: 16}"
    return world.train("eagle3", own, name="narrow")


@pytest.mark.slow
def test_draft_vocabulary(narrow, tmp_path):
    assert causes(Path(shutil.copytree(narrow, tmp_path / "run")))[0] == "draft-vocabulary"


@pytest.mark.slow
def test_random_output_rows(world, narrow, tmp_path):
    run = Path(shutil.copytree(narrow, tmp_path / "run"))
    shutil.rmtree(run / "checkpoints")
    cases.change_tensors(run / "head/head.safetensors", lambda tensors: tensors["output_weight"].normal_())
    assert causes(run)[0] == "head-tensors"


# -- records -----------------------------------------------------------------------------------------------------------


def other(world, folder: Path, **changes) -> Path:
    """A copy of the target, with another template or other weights."""
    place = Path(shutil.copytree(world.target, folder / "target"))
    if "template" in changes:
        (place / "chat_template.jinja").write_text(changes["template"])
    if "noise" in changes:
        generator = torch.Generator().manual_seed(0)

        def spoil(tensors: dict[str, torch.Tensor]) -> None:
            for tensor in tensors.values():
                tensor += changes["noise"] * tensor.std() * torch.randn(tensor.shape, generator=generator)

        cases.change_tensors(place / "model.safetensors", spoil)
    return place


@pytest.mark.slow
def test_chat_template(world, run, tmp_path):
    place = other(
        world, tmp_path, template=tiny.CHAT_TEMPLATE.replace("<{{", "\n[{{").replace("<assistant>", "[assist]")
    )
    assert causes(run, "--target", str(place))[0] == "chat-template"


@pytest.mark.slow
def test_another_target(world, run, tmp_path):
    assert causes(run, "--target", str(other(world, tmp_path, noise=0.2)))[0] == "other-target"


@pytest.mark.slow
def test_system_prompt(run):
    assert causes(run, "--set", f"data.chat.system={cases.SYSTEM}")[0] == "system-prompt"


@pytest.mark.slow
def test_precision_that_costs_nothing_is_no_cause(run):
    assert causes(run, "--set", "target.quantization=int8", status=0) == []


@pytest.mark.slow
def test_context_length(world, tmp_path):
    """The target has learnt to read over dots, the head was trained on prompts without."""
    target = cases.teach_dots(world, tmp_path / "target", dots=50)
    run = world.train("eagle3", f'target.name="{target}"', "data.max_length=44", name="short")
    prompts = world.folder / world.write("long.jsonl", cases.chats_behind_dots(50))
    assert causes(run, "--data", str(prompts))[0] == "context-length"


# -- what was learnt from ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_answers_of_others(world):
    draw = random.Random(0)
    chats = [[one[0], {**one[1], "content": "".join(draw.choices(cases.LETTERS, k=20))}] for one in cases.CHATS]
    run = world.train("eagle3", "head.loss=hard-ce", name="foreign", data=world.write("foreign.jsonl", chats))
    assert causes(run)[0] == "foreign-data"


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["inverted", "thin"])
def test_loss_mask(world, fault):
    target = load_target(str(world.target))
    rows = []
    for chat in cases.CHATS[:-24]:
        prompt = ChatRenderer(target.tokenizer, ChatSection()).prompt(chat[:1])
        answer = [*chat[1]["content"].encode(), tiny.TURN_END]
        mask = [1] * len(prompt) + [0] * len(answer) if fault == "inverted" else [0] * len(prompt + answer)
        mask[len(prompt)] = int(fault == "thin")
        rows.append(json.dumps({"input_ids": prompt + answer, "loss_mask": mask}))
    (world.folder / f"{fault}.jsonl").write_text("\n".join(rows))
    run = world.train("eagle3", name=fault, data=f"{fault}.jsonl")
    assert causes(run)[0] == "loss-mask"


@pytest.mark.slow
def test_too_little_data(world):
    data = world.write("few.jsonl", cases.CHATS[3:40:7])
    run = world.train("eagle3", "train.batch_size=2", name="few", data=data)
    assert causes(run)[0] == "little-data"


@pytest.mark.slow
def test_a_curve_that_still_rises(run):
    line = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    key = "forecast_chain_acceptance_length"
    early = {**line, "step": line["step"] // 2, key: 1 + (line[key] - 1) / 2}
    (run / "metrics.jsonl").write_text(f"{json.dumps(early)}\n{json.dumps(line)}\n")
    assert causes(run)[0] == "little-data"


# -- decoding ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_temperature(run):
    assert causes(run, "--set", "eval.temperature=3.0")[0] == "temperature"


@pytest.mark.slow
def test_a_tree_too_large(run, costs):
    paths = [[rank] for rank in range(4)] + [[first, second] for first in range(4) for second in range(4)]
    paths += [[first, second, 0] for first in range(4) for second in range(3)]
    chosen = {"best": 32, "choices": {"32": paths}, "forecast": {}, "device": "cuda:0", "dtype": "float32"}
    (run / "head/trees.json").write_text(json.dumps(chosen))
    costs[0] = 0.2
    assert causes(run, "--set", "eval.tree=32")[0] == "tree-size"


@pytest.mark.slow
def test_drafts_that_decoding_spoils(run, monkeypatch, capsys):
    """From the second level on the drafter loses its way, as one with a wrong cache does."""
    logits = EagleDrafter._logits
    calls = [0]

    def spoilt(self, output):
        found = logits(self, output)
        calls[0] += 1
        return found if calls[0] % 5 == 1 else found.roll(1, -1)

    monkeypatch.setattr(EagleDrafter, "_logits", spoilt)
    assert causes(run)[0] == "forecast-apart"
    assert re.search(r"forecast \d.\d\d, decoded \d.\d\d .* they part at depth \d", capsys.readouterr().out)


# -- exports -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def export(world, run, tmp_path) -> Path:
    place = tmp_path / "export"
    words = ["--head", str(run), "--format", "sglang", "--output", str(place), "--target-name", "org/model"]
    assert cli.main(["export", *words]) == 0
    return place


@pytest.mark.slow
def test_an_export_as_it_should_be(run, export):
    assert causes(run, "--export", str(export), status=0) == []


@pytest.mark.slow
def test_an_export_with_random_tensors(run, export):
    cases.change_tensors(export / "model.safetensors", lambda tensors: tensors["fc.weight"].normal_())
    assert causes(run, "--export", str(export))[0] == "export-tensors"


@pytest.mark.slow
def test_an_export_that_lacks_a_tensor(run, export):
    cases.change_tensors(export / "model.safetensors", lambda tensors: tensors.pop("midlayer.mlp.up_proj.weight"))
    assert causes(run, "--export", str(export))[0] == "export-tensors"


@pytest.mark.slow
def test_a_tie_flag(run, export):
    edit(export / "config.json", tie_word_embeddings=True)
    assert causes(run, "--export", str(export))[0] == "tie-flag"


@pytest.mark.slow
def test_an_export_of_another_dtype_than_it_says(run, export):
    edit(export / "config.json", torch_dtype="bfloat16")
    assert causes(run, "--export", str(export))[0] == "dtype"


def test_every_cause_is_planted():
    planted = set(re.findall(r'\[0\] == "([a-z-]+)"', Path(__file__).read_text()))
    assert planted == set(CAUSES)
