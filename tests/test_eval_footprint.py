"""What a plan foretells for a step is what PyTorch's allocator hands out for it, and what its products really are."""

from __future__ import annotations

import json

import pytest
import tiny
import torch
from transformers import LlamaConfig

from headstart.errors import HeadstartError, TargetError
from headstart.eval import bench_memory
from headstart.eval.bench_memory import HEADS, SMALL, compare, example
from headstart.eval.bench_train import StepShape, step_flops
from headstart.eval.footprint import bare_head, bare_target, foretell
from headstart.rehearsal import Ledger, Rehearsal

CONFIG = LlamaConfig(**SMALL)


@pytest.mark.parametrize(
    ("head", "train"),
    [
        (HEADS["medusa"], {}),
        (HEADS["eagle3"], {}),
        (HEADS["eagle3"], {"accumulation": 2}),
        ({"type": "medusa", "num_heads": 2, "output": "own"}, {"optimizer": "muon", "batch_size": 2}),
        ({"type": "eagle", "unrolled_steps": 2}, {}),
        ({"type": "draft", "num_layers": 2}, {}),
    ],
    ids=["medusa", "eagle3", "accumulated", "muon", "eagle", "draft"],
)
def test_every_part_is_foretold_to_five_percent(head, train):
    torch.set_num_threads(1)
    result = compare(example(head, length=128, draft_vocab=128, **train), CONFIG)
    for part, figures in result["parts"].items():
        assert figures["foretold"] == pytest.approx(figures["measured"], rel=0.05), (part, result["parts"])


@pytest.mark.slow
def test_a_target_of_three_hundred_million_parameters_too(tmp_path, capsys):
    output = tmp_path / "memory.json"
    assert bench_memory.main(["--output", str(output)]) == 0
    results = json.loads(output.read_text())["results"]
    assert set(results) == {"medusa", "eagle3"}
    for result in results.values():
        assert result["target_parameters"] >= 3e8
        for part, figures in result["parts"].items():
            assert abs(figures["off_by"]) < 0.05, (part, result)
        assert result["resident"] > result["parts"]["at_once"]["measured"]
    assert "MB, the whole process at its highest" in capsys.readouterr().out


def test_features_and_state_have_the_sizes_of_their_definitions():
    footprint = foretell(example(HEADS["eagle3"], length=64, draft_vocab=128), CONFIG, kind="cpu")
    assert footprint.taps == 3 and footprint.tokens == 64
    assert footprint.features == (1 + 3) * 64 * CONFIG.hidden_size * 4
    assert footprint.gradients == footprint.head_parameters * 4
    assert footprint.optimizer == pytest.approx(2 * footprint.gradients, rel=0.01)
    parts = (footprint.features, footprint.logits, footprint.activations)
    assert max(parts) < footprint.working <= sum(parts)
    assert footprint.working_offline <= footprint.working


@pytest.mark.slow
def test_products_are_those_of_the_formula():
    recipe = example({**HEADS["eagle3"], "fc_norm": True}, length=128, draft_vocab=128)
    footprint = foretell(recipe, CONFIG, kind="cpu")
    head = bare_head(recipe, bare_target(recipe, CONFIG))
    length = 128
    # step k goes on where k + 1 tokens follow at least; a text's last position is scored by the target's own choice
    parts = step_flops(StepShape.of(head), length, length - 1, length * (length - 1) // 2, length - 1)
    parts["attention"] *= 2  # the kernel is counted with the half that it masks
    assert footprint.head_flops == pytest.approx(sum(parts.values()), rel=0.03)
    layers = footprint.target.parameters - 2 * CONFIG.vocab_size * CONFIG.hidden_size
    attention = 4 * CONFIG.num_hidden_layers * CONFIG.hidden_size * length**2
    assert footprint.target_flops == pytest.approx(2 * layers * length + attention, rel=0.03)


@pytest.mark.slow
def test_a_curriculum_costs_the_mean_of_its_stages_and_the_memory_of_its_longest():
    def of(steps):
        return foretell(
            example({**HEADS["eagle3"], "unrolled_steps": steps}, length=64, draft_vocab=128), CONFIG, kind="cpu"
        )

    one, three = of(1), of(3)
    both = of([{"until": 0.25, "steps": 1}, {"until": 1.0, "steps": 3}])
    assert one.working < three.working == both.working
    assert both.head_flops == pytest.approx(0.25 * one.head_flops + 0.75 * three.head_flops)


@pytest.mark.slow
def test_a_gpu_takes_larger_chunks_and_plain_attention():
    recipe = example(HEADS["eagle3"], length=128, draft_vocab=128, batch_size=2)
    cpu, gpu = (foretell(recipe, CONFIG, kind=kind) for kind in ("cpu", "cuda"))
    scores = 2 * CONFIG.num_attention_heads * 128 * 128 * 4  # one set of them, kept for each of three steps
    assert gpu.activations > cpu.activations + 2 * scores
    assert (gpu.head, gpu.optimizer, gpu.features) == (cpu.head, cpu.optimizer, cpu.features)


def test_what_cannot_be_foretold_is_said():
    recipe = example(HEADS["medusa"], length=16, draft_vocab=600)
    with pytest.raises(HeadstartError, match="draft_vocab_size is 600, the target has 512 output rows"):
        foretell(recipe, CONFIG, kind="cpu")
    broken = tiny.config("llama", hidden_act="none-such")
    with pytest.raises(TargetError, match="no llama can be made of the architecture of random"):
        foretell(example(HEADS["medusa"], length=16, draft_vocab=128), broken, kind="cpu")


def test_a_rehearsal_takes_no_memory_and_goes_the_ways_of_real_ids():
    with Rehearsal("work") as rehearsal:
        weight = torch.zeros(2**20, 2**20)  # 4 TiB
        ids = torch.tensor([3, 0, 5, 0])
        rows = weight[ids.nonzero().squeeze(-1)]
        assert rows.shape == (2, 2**20) and ids.tolist() == [3, 0, 5, 0]
        ids[ids == 0] = rows.argmax(-1)  # of numbers that are not there
        rows = rows @ weight
    assert rehearsal.flops["work"] == 2 * 2 * 2**40
    assert rehearsal.ledger.most("work") >= 2**42 + 2 * 2**22
    assert bool(ids[0] == 3)


def test_the_ledger_knows_what_lived_together():
    ledger = Ledger()
    first = ledger.take(10, "a")
    second = ledger.take(5, "b")
    ledger.free(first, 10)
    ledger.take(7, "a")
    assert (ledger.most("a"), ledger.most("b"), ledger.most("a", "b")) == (10, 5, 15)
    ledger.relabel(second, "c")
    assert (ledger.most("b"), ledger.most("c")) == (0, 5)
    ledger.restart()
    assert ledger.most("a", "c") == 12
