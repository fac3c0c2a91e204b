"""Medusa-2: what the second stage minimises, that it resumes and is shared out alike, and what is shipped."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import tiny
import torch
import train_cases as cases
from accelerate import Accelerator
from parallel import in_two_processes
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

from headstart import cli
from headstart.adapters import Adapters
from headstart.data.packing import TokenBatch, collate
from headstart.decode.drafters.base import Request
from headstart.decode.drafters.heads import head_drafter
from headstart.decode.engine import Engine
from headstart.errors import RecipeError, TargetError
from headstart.eval.trained import find_named, open_trained
from headstart.heads.losses import REFERENCE_LOSSES
from headstart.heads.medusa import MedusaHead
from headstart.heads.store import ADAPTER, build_head, load_head
from headstart.recipe import JointSection, Recipe, override
from headstart.target import Features, load_target
from headstart.train.checkpoint import ADAPTERS
from headstart.train.joint import Joint, scale_gradient
from headstart.train.metrics import read_metrics
from headstart.train.modes import start_processes
from headstart.train.train_module import TrainModule

JOINT = ("train.joint={start: 0.5, lr: 1e-2, rank: 4, dropout: 0.1, warmup: 0.2}", "train.max_steps=8")
SETTINGS = (*JOINT, "train.save_every=3", "train.eval_every=2", "head.dropout=0")


def made(base_loss: str, *, dropout: float = 0.0, recomputes: bool = False) -> tuple[Joint, MedusaHead, TokenBatch]:
    """Adapters that have moved on a tiny target in float64, heads that have too, and three rows."""
    torch.manual_seed(0)
    target = tiny.target(dtype=torch.float64)
    head = build_head(cases.recipe("head.dropout=0").head, target).double()
    assert isinstance(head, MedusaHead)
    settings = JointSection(rank=4, base_loss=base_loss, head_weight=0.3, dropout=dropout)
    joint = Joint(settings, target, recomputes=recomputes)
    joint.active = True
    with torch.no_grad():
        for parameter in [*head.parameters(), *joint.adapters.parameters.values()]:
            parameter.add_(0.05 * torch.randn_like(parameter))
    rows = cases.random_rows(3)
    return joint, head, collate(rows, [[0], [1], [2]])


def original(joint: Joint, batch: TokenBatch) -> Features:
    target = joint.target
    with torch.no_grad():
        return target.forward(batch.input_ids, batch.position_ids, target.masks(*batch.attention()))


def by_hand(joint: Joint, head: MedusaHead, batch: TokenBatch) -> tuple[Tensor, Tensor]:
    """(loss of the target, loss of the heads) with all logits at once, from the models' own forwards."""
    model = joint.target.model
    attention = batch.document_ids >= 0
    with torch.no_grad():
        teacher = model(batch.input_ids, attention_mask=attention).logits
    with joint.adapters.on(training=head.training):
        tuned = model(batch.input_ids, attention_mask=attention, output_hidden_states=True)
    drafts = head.draft_logits(tuned.hidden_states[-1], joint.target.output)
    of_target, of_heads = teacher.new_zeros(()), teacher.new_zeros(())
    for row, place in batch.supervised.nonzero().tolist():
        label = batch.input_ids[row, place][None]
        log_p = teacher[row, place - 1][None].log_softmax(-1)
        of_target = (
            of_target
            + REFERENCE_LOSSES[joint.settings.base_loss](tuned.logits[row, place - 1][None], log_p, label).sum()
        )
        log_p_now = tuned.logits[row, place - 1][None].log_softmax(-1).detach()
        for depth in range(head.num_depths):
            reads = place - 2 - depth
            if reads >= 0:
                loss = REFERENCE_LOSSES[str(head.config.loss)](drafts[row, reads, depth][None], log_p_now, label)
                of_heads = of_heads + head.config.loss_decay**depth * loss.sum()
    return of_target, of_heads


@pytest.mark.parametrize("base_loss", ["kl", "hard-ce"])
def test_loss_and_gradients_are_those_of_the_formula(base_loss):
    joint, head, batch = made(base_loss)
    learnt = [*joint.adapters.parameters.values(), *head.parameters()]
    output = joint.forward(head, batch, original(joint, batch))
    output.loss_sum.backward()
    found = [parameter.grad.clone() for parameter in learnt if parameter.grad is not None]
    assert len(found) == len(learnt)

    of_target, of_heads = by_hand(joint, head, batch)
    assert float(output.loss_sum.detach()) == pytest.approx(float((of_target + of_heads).detach()), rel=1e-6)
    adapters = list(joint.adapters.parameters.values())
    expected = list(torch.autograd.grad(of_target + 0.3 * of_heads, adapters, retain_graph=True))
    expected += torch.autograd.grad(of_heads, list(head.parameters()))
    for gradient, reference in zip(found, expected, strict=True):
        torch.testing.assert_close(gradient, reference, rtol=1e-4, atol=1e-6)
    assert all(parameter.grad is None for parameter in joint.target.model.parameters() if not parameter.requires_grad)


def test_recomputed_activations_give_the_same_gradients():
    """Also with dropout, and though the adapters are off again when the backward pass comes."""
    gradients = []
    for recomputes in (False, True):
        joint, head, batch = made("kl", dropout=0.3, recomputes=recomputes)
        states = original(joint, batch)
        torch.manual_seed(7)
        joint.forward(head, batch, states).loss_sum.backward()
        gradients.append([parameter.grad for parameter in joint.adapters.parameters.values()])
    for kept, again in zip(*gradients, strict=True):
        assert kept.abs().max() > 0
        torch.testing.assert_close(kept, again, rtol=1e-9, atol=1e-12)


def test_scaling_a_gradient_changes_no_number():
    states = torch.randn(2, 3, 4, requires_grad=True)
    scaled = scale_gradient(states, 0.2)
    assert torch.equal(scaled, states)
    scaled.sum().backward()
    assert torch.equal(states.grad, torch.full_like(states, 0.2))


def test_drift_is_the_mean_of_the_formula_and_zero_for_fresh_adapters():
    joint, head, batch = made("kl")
    processes = Accelerator(cpu=True, mixed_precision="no")
    source = TrainModule(joint.target, head, torch.float64, joint=joint).features
    drift = joint.measure_drift(source, [batch], processes)
    assert drift is not None
    kl, _ = by_hand(joint, head, batch)
    assert drift.labels == int(batch.supervised.sum())
    assert drift.kl == pytest.approx(float(kl.detach()) / drift.labels, rel=1e-5)
    teacher = joint.target.output.logits(original(joint, batch).final)
    rows, places = batch.supervised.nonzero(as_tuple=True)
    text = functional.cross_entropy(teacher[rows, places - 1], batch.input_ids[rows, places])
    assert drift.original_perplexity == pytest.approx(float(text.exp()), rel=1e-5)
    assert drift.perplexity != pytest.approx(drift.original_perplexity, rel=1e-3)
    with torch.no_grad():
        for name, parameter in joint.adapters.parameters.items():
            if "lora_B" in name:
                parameter.zero_()
    still = joint.measure_drift(source, [batch], processes)
    assert still is not None and still.kl == pytest.approx(0.0, abs=1e-12)
    assert still.perplexity == pytest.approx(still.original_perplexity, rel=1e-9)


def test_the_first_stage_is_a_frozen_run_and_the_second_moves_both(tmp_path):
    joint = cases.training(tmp_path / "joint", cases.recipe(*SETTINGS, "train.schedule=constant"))
    frozen = cases.training(tmp_path / "frozen", cases.recipe(*SETTINGS, "train.schedule=constant", "train.joint=null"))
    assert joint.joint is not None
    fresh = joint.joint.adapters.state()
    for training in (joint, frozen):
        for _ in range(4):
            training.step(training.progress, training.schedule)
    assert all(torch.equal(value, frozen.head.state_dict()[name]) for name, value in joint.head.state_dict().items())
    assert all(torch.equal(value, fresh[name]) for name, value in joint.joint.adapters.state().items())
    before = copy.deepcopy(joint.head.state_dict())
    joint.step(joint.progress, joint.schedule)
    joint.step(joint.progress, joint.schedule)
    assert any(not torch.equal(value, before[name]) for name, value in joint.head.state_dict().items())
    moved = joint.joint.adapters.state()
    # the first factor learns once the second is no longer zero
    assert all(not torch.equal(value, fresh[name]) for name, value in moved.items())


def test_a_run_that_was_stopped_in_the_second_stage_equals_a_straight_one(tmp_path):
    recipe = cases.recipe(*SETTINGS)
    cases.training(tmp_path / "straight", recipe).finish()
    stopped = cases.training(tmp_path / "resumed", recipe)
    cases.stop_after_save(stopped, 6)
    with pytest.raises(cases.Stopped):
        stopped.finish()
    torch.manual_seed(999)
    cases.training(tmp_path / "resumed", recipe, resume=True).finish()
    for name in ("head.safetensors", f"{ADAPTER}/adapter_model.safetensors"):
        one, other = (load_file(tmp_path / run / "head" / name) for run in ("straight", "resumed"))
        assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)
    for run in ("straight", "resumed"):
        folder = cases.newest(tmp_path / run)
        state = load_file(folder / "optimizer.safetensors")
        assert any(name.startswith("exp_avg/adapter.") for name in state) and (folder / ADAPTERS).is_file()
    lines = [read_metrics(tmp_path / run / "metrics.jsonl", "held_out") for run in ("straight", "resumed")]
    assert [line["target_kl"] for line in lines[0][2:]] == [line["target_kl"] for line in lines[1][2:]]


def test_a_budget_leaves_the_adapters_as_they_were(tmp_path):
    recipe = cases.recipe(*SETTINGS, "train.max_steps=null", "train.cpu_seconds=3")
    training = cases.training(tmp_path / "run", recipe)
    assert training.joint is not None and training.schedule.total_steps > 1
    assert all(not value.any() for name, value in training.joint.adapters.state().items() if "lora_B" in name)


def test_two_processes_are_one(tmp_path):
    settings = (*SETTINGS, "train.joint.dropout=0", "train.batch_size=1")
    one, two = (cases.recipe(*settings, f"train.accumulation={count}") for count in (4, 2))

    def work(rank: int) -> str:
        training = cases.training(tmp_path / "two", two, processes=start_processes(two, smoke=True))
        assert type(training.wrapped.module).__name__ == "DistributedDataParallel"
        training.finish()
        assert training.joint is not None
        return str(sum(float(value.double().abs().sum()) for value in training.joint.adapters.state().values()))

    sums = in_two_processes(tmp_path / "logs", work)
    assert sums[0] == sums[1]
    cases.training(tmp_path / "one", one).finish()
    for name in ("head.safetensors", f"{ADAPTER}/adapter_model.safetensors"):
        alone, shared = (load_file(tmp_path / run / "head" / name) for run in ("one", "two"))
        for key, value in alone.items():
            torch.testing.assert_close(shared[key], value, rtol=1e-3, atol=1e-3)
    for kind, key in (("train", "loss"), ("held_out", "target_kl")):
        lines, twins = (read_metrics(tmp_path / run / "metrics.jsonl", kind)[-2:] for run in ("one", "two"))
        assert [line[key] for line in lines] == pytest.approx([line[key] for line in twins], rel=1e-4)


def test_what_is_shipped_is_head_and_adapters_for_the_tuned_target(tmp_path):
    tiny.save(tmp_path / "model", "llama")
    target = load_target(str(tmp_path / "model"), dtype="float32")
    recipe = cases.recipe(*SETTINGS, f"target.name={tmp_path / 'model'}")
    training = cases.training(tmp_path / "run", recipe, target=target)
    training.finish()
    named = find_named(tmp_path / "run")
    assert named.recipe.target.adapter == str(tmp_path / "run/head" / ADAPTER)
    tuned = load_target(str(tmp_path / "model"), dtype="float32", adapter=named.recipe.target.adapter)
    head = load_head(tmp_path / "run/head", tuned)
    assert all(torch.equal(value, training.head.state_dict()[name]) for name, value in head.state_dict().items())
    with pytest.raises(TargetError, match="adapter"):
        load_head(tmp_path / "run/head", load_target(str(tmp_path / "model"), dtype="float32"))
    assert training.joint is not None
    ids = torch.arange(20)[None]
    with torch.no_grad(), training.joint.adapters.on():
        expected = target.model(ids).logits
        assert (tuned.model(ids).logits - expected).abs().max() < 1e-4 * expected.abs().max()
    record = json.loads((tmp_path / "run/head/config.json").read_text())["training"]
    assert record["joint"]["head_weight"] == 0.2 and record["target_kl"] > 0
    assert f"KL to the original is {record['target_kl']:.4f} nats" in named.notes[0]
    assert not list((tmp_path / "run/checkpoints").glob("best*")), "losses of two targets do not compare"


def test_a_merged_export_is_the_tuned_target_and_decodes_the_same_texts(tmp_path, capsys):
    tiny.save(tmp_path / "model", "llama")
    recipe = cases.recipe(*SETTINGS, f"target.name={tmp_path / 'model'}")
    cases.training(tmp_path / "run", recipe, target=load_target(str(tmp_path / "model"), dtype="float32")).finish()
    words = ["export", "--head", str(tmp_path / "run"), "--format", "merged"]
    assert cli.main([*words, "--output", str(tmp_path / "tuned")]) == 0
    assert f"--target {tmp_path / 'tuned'}" in capsys.readouterr().out
    exported = [path for path in (tmp_path / "tuned").rglob("*") if path.suffix in (".json", ".jinja")]
    assert exported and not any(str(tmp_path) in path.read_text() for path in exported)

    texts = []
    for named in (open_trained(tmp_path / "run"), open_trained(tmp_path / "tuned", str(tmp_path / "tuned"))):
        assert named.head is not None
        head = load_head(named.head, named.target)
        engine = Engine(named.target, head_drafter(head, named.target))
        requests = [Request(prompt_ids=list(range(10 * row, 10 * row + 8)), max_new_tokens=24) for row in range(3)]
        texts.append([answer.token_ids for answer in engine.generate(requests)])
    assert texts[0] == texts[1]

    assert cli.main(["export", "--head", str(tmp_path / "run"), "--to", "hub", "org/tuned", "--dry-run"]) == 0
    listed = capsys.readouterr().out
    assert "adapter/adapter_model.safetensors" in listed and "adapter/adapter_config.json" in listed

    frozen = cases.recipe("train.max_steps=1", f"target.name={tmp_path / 'model'}")
    cases.training(tmp_path / "frozen", frozen, target=load_target(str(tmp_path / "model"), dtype="float32")).finish()
    words[2] = str(tmp_path / "frozen")
    assert cli.main([*words, "--output", str(tmp_path / "none")]) == 1
    assert "there is nothing to merge" in capsys.readouterr().err and not (tmp_path / "none").exists()


def test_the_forecast_is_of_the_tuned_target(tmp_path, monkeypatch):
    """The replay asks a target whose adapters are on, the costs are those of the plain one."""
    from headstart.train import forecasting

    seen = []
    monkeypatch.setattr(forecasting, "rank_rows", spied(forecasting.rank_rows, seen, "replay"))
    monkeypatch.setattr(forecasting, "measure_costs", spied(forecasting.measure_costs, seen, "costs"))
    training = cases.training(tmp_path / "run", cases.recipe(*SETTINGS, "train.eval_every=null"), forecast=True)
    training.finish()
    assert seen == [("replay", True), ("costs", False)]
    assert read_metrics(tmp_path / "run/metrics.jsonl", "held_out")[-1]["forecast_acceptance_length"] >= 1


def spied(function, seen: list, name: str):
    def call(*arguments, **named):
        target = next(one for one in arguments if hasattr(one, "model"))
        layers = [module for module in target.model.modules() if isinstance(module, BaseTunerLayer)]
        seen.append((name, bool(layers) and not layers[0].disable_adapters))
        return function(*arguments, **named)

    return call


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("head={type: eagle3}", "a head of another type than medusa"),
        ("data.features=offline", "loads no layers"),
        ("target.placement=shard", "`target.placement: shard`"),
        ("target.quantization=int8", "`target.quantization: int8`"),
        ("target.adapter=some/adapter", "`target.adapter`, which is best merged"),
        ("train.optimizer=muon", "`train.optimizer: muon`"),
        ("train.joint.start=1", "a number below 1"),
        ("train.joint.base_loss=tv", "expected kl or hard-ce"),
    ],
)
def test_what_cannot_be_trained_jointly_is_refused_when_the_recipe_is_read(setting, message):
    with pytest.raises(RecipeError, match=message):
        override(cases.recipe(*JOINT), [setting])


def test_an_unknown_module_is_refused_before_a_step(tmp_path):
    recipe: Recipe = cases.recipe(*JOINT, "train.joint.modules=[query]")
    with pytest.raises(TargetError, match="train.joint.modules names query"):
        cases.training(tmp_path / "run", recipe)
    assert Path(tmp_path / "run").exists()
    assert isinstance(Adapters(tiny.target(), JointSection()), Adapters)
