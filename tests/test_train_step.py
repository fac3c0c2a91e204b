"""One optimiser step: every label weighs alike, whatever the padding, packing, accumulation or rows without labels."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import tiny
import torch
import train_cases as cases
from accelerate import Accelerator

from headstart.data.packing import RowStore, TokenBatch, collate
from headstart.data.rendering import Row
from headstart.errors import TrainingError
from headstart.heads.base import HeadOutput
from headstart.heads.configs import MedusaConfig
from headstart.heads.medusa import MedusaHead
from headstart.heads.store import build_head
from headstart.train.checkpoint import Progress
from headstart.train.feed import Feed
from headstart.train.held_out import report
from headstart.train.lr_schedule import Schedule
from headstart.train.metrics import read_metrics
from headstart.train.stepping import optimiser_step
from headstart.train.train_module import Totals, TrainModule
from headstart.train.wrap import wrap


class FixedLosses(MedusaHead):
    """Every label of a row loses what the first token of the row says, times a weight that is learnt."""

    def __init__(self) -> None:
        super().__init__(MedusaConfig(num_heads=1), hidden_size=64, vocab_size=264)
        self.scale = torch.nn.Parameter(torch.ones(()))

    def forward(self, features: Any, batch: TokenBatch, embedding: Any, output: Any) -> HeadOutput:
        losses = batch.supervised * batch.input_ids[:, :1]
        loss, count = losses.sum() * self.scale, batch.supervised.sum()
        hits = torch.zeros(1, 10, dtype=torch.long)
        return HeadOutput(loss_sum=loss, token_count=count, scored=count[None], loss=loss.detach()[None], hits=hits)


def take_step(head: MedusaHead, rows: Sequence[Row], plan: list[list[list[int]]], clip: float | None = None):
    """One plain SGD step of size 1 over these micro-batches: its totals and norm; the gradient stays on the head."""
    accelerator = Accelerator(cpu=True, mixed_precision="no")
    dtype = next(head.parameters()).dtype
    module = TrainModule(tiny.target(dtype=dtype), head, dtype).train()
    optimizer = torch.optim.SGD(head.parameters(), lr=1.0)
    batches = [collate(rows, batch) for batch in plan]
    return optimiser_step(wrap(accelerator, module, optimizer), batches, rate=1.0, clip=clip, step=1)


def labelled(first: int, labels: int, length: int) -> Row:
    return Row("row", [first] + [5] * (length - 1), [place >= length - labels for place in range(length)])


def test_the_loss_is_a_mean_over_labels_not_over_micro_batches():
    rows = [labelled(2, 10, 12), labelled(1, 100, 101)]
    results = []
    for plan in ([[[0], [1]]], [[[0]], [[1]]]):
        head = FixedLosses()
        totals, _ = take_step(head, rows, plan)
        assert head.scale.grad is not None
        results.append((totals.mean_loss(), head.scale.grad.item()))
    assert results[0] == pytest.approx((120 / 110, 120 / 110), abs=1e-6)
    assert results[1] == pytest.approx(results[0], abs=1e-6)


def test_a_left_over_micro_batch_is_a_step_of_its_own():
    recipe = cases.recipe("train.batch_size=1", "train.accumulation=2")
    feed = Feed(cases.random_rows(5), recipe)
    progress = Progress()
    sizes = [len(feed.next_step(progress)) for _ in range(6)]
    assert feed.num_steps(1) == 3 and feed.num_steps(2) == 6
    assert sizes == [2, 2, 1, 2, 2, 1] and progress.epoch == 1


def test_padding_packing_and_accumulation_change_no_weight():
    rows = list(cases.random_rows(6, longest=20))
    start = double_head()
    alone = [[[number]] for number in range(6)]  # six micro-batches
    padded = [[[number] for number in range(6)]]  # one of six sequences
    packed = [[[0, 3, 1], [5, 2, 4]]]  # one of two sequences
    mixed = [[[4, 0], [2]], [[5], [1], [3]]]
    results = []
    for plan in (alone, padded, packed, mixed):
        head = copy.deepcopy(start)
        totals, norm = take_step(head, rows, plan, clip=0.5)
        results.append([totals.mean_loss(), norm, *(value for value in head.state_dict().values())])
    for other in results[1:]:
        for value, expected in zip(other, results[0], strict=True):
            torch.testing.assert_close(value, expected, rtol=1e-9, atol=1e-12)
    assert results[0][1] > 0.5, "clipping had something to do"


def test_rows_without_labels_add_nothing_and_are_counted(tmp_path):
    silent = Row("silent", list(range(12)), [False] * 12)
    head = double_head()
    before = copy.deepcopy(head.state_dict())
    totals, norm = take_step(head, [silent, silent], [[[0], [1]]])
    assert totals.mean_loss() == 0 and norm == 0 and totals.losses() == [None] * 3
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in head.parameters())
    assert all(torch.equal(value, before[name]) for name, value in head.state_dict().items())

    rows = [silent, *cases.random_rows(1)]
    with_silent, alone = (take_step(double_head(), rows, plan)[0] for plan in ([[[0], [1]]], [[[1]]]))
    assert with_silent.mean_loss() == pytest.approx(alone.mean_loss(), rel=1e-12)

    store = RowStore([silent] * 4)
    recipe = cases.recipe("train.max_steps=2", "train.batch_size=1", "train.accumulation=1")
    progress = cases.training(tmp_path / "run", recipe, rows=store).finish()
    assert progress.empty_steps == 2
    assert read_metrics(tmp_path / "run/metrics.jsonl", "train")[-1]["empty_steps"] == 2


def test_a_head_that_had_nothing_to_predict_has_no_accuracy():
    short = Row("short", [1, 2, 3, 4, 5], [False, False, False, True, True])  # head 4 would need a sixth token
    head = build_head(MedusaConfig(num_heads=4), tiny.target())
    batch = collate([short], [[0]])
    totals = Totals.of(TrainModule(tiny.target(), head, torch.float32)(batch), batch)
    values = report(totals)
    assert values["labels"] == 2
    assert values["top_1"][:3] != [None] * 3 and values["top_1"][3] is None and values["head_loss"][3] is None


@pytest.mark.parametrize("poison", ["weight", "gradient"])
def test_a_nan_stops_the_run_at_once_and_spoils_no_checkpoint(tmp_path, poison):
    recipe = cases.recipe("train.save_every=2", "train.max_steps=8", "head.dropout=0")
    training = cases.training(tmp_path / "run", recipe)
    step = training.step
    weight = training.head.get_parameter("blocks.0.weight")

    def poisoned_step(progress, schedule):
        if progress.step == 4 and poison == "weight":
            with torch.no_grad():
                weight[1, 0, 0] = torch.inf
        if progress.step == 4 and poison == "gradient":
            weight.register_hook(lambda gradient: gradient * torch.nan)
        return step(progress, schedule)

    training.step = poisoned_step
    with pytest.raises(TrainingError, match="step 5: .*" + ("head 2 is" if poison == "weight" else "blocks.0.weight")):
        training.finish()
    folders = sorted(folder.name for folder in (tmp_path / "run/checkpoints").iterdir())
    assert folders == ["step-00000002", "step-00000004"], "nothing later, nothing half written"
    assert cases.weights(tmp_path / "run/checkpoints/step-00000004")["blocks.0.weight"].isfinite().all()
    resumed = cases.training(tmp_path / "run", recipe, resume=True)
    assert resumed.progress.step == 4


def test_weights_that_broke_in_the_last_update_are_not_saved(tmp_path):
    training = cases.training(tmp_path / "run", cases.recipe())
    with torch.no_grad():
        training.head.get_parameter("blocks.0.bias")[0, 0] = torch.nan
    with pytest.raises(TrainingError, match="blocks.0.bias of the head is no longer finite"):
        training._save()
    assert not list((tmp_path / "run/checkpoints").iterdir())


def test_the_target_stays_as_it_was_and_in_evaluation_mode(tmp_path):
    target = tiny.target("gpt2", resid_pdrop=0.5, attn_pdrop=0.5, embd_pdrop=0.5)
    before = copy.deepcopy(target.model.state_dict())
    training = cases.training(tmp_path / "run", cases.recipe("train.eval_every=2"), target=target)
    training.finish()
    assert training.wrapped.module.training and training.head.training and not target.model.training
    for name, value in target.model.state_dict().items():
        assert torch.equal(value, before[name]), name
    held = {id(parameter) for group in training.wrapped.optimizer.param_groups for parameter in group["params"]}
    assert held == {id(parameter) for parameter in training.head.parameters()}
    assert all(parameter.grad is None for parameter in target.model.parameters())
    saved = set(cases.weights(tmp_path / "run/head"))
    assert saved == {"blocks.0.weight", "blocks.0.bias"}


def test_bf16_compute_keeps_fp32_weights(tmp_path):
    target = tiny.target(dtype=torch.bfloat16)
    recipe = cases.recipe("train.dtype=bfloat16", "train.max_steps=3")
    training = cases.training(tmp_path / "run", recipe, target=target)
    seen = []
    training.head.blocks[0].register_forward_hook(
        lambda *_: seen.append(torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None)
    )
    training.finish()
    assert set(seen) == {torch.bfloat16}
    assert all(value.dtype == torch.float32 for value in cases.weights(tmp_path / "run/head").values())
    state = training.wrapped.optimizer.state[training.head.get_parameter("blocks.0.weight")]
    assert state["exp_avg"].dtype == torch.float32


def test_schedules():
    linear = Schedule.of("linear", 1e-3, 0.1, 100)
    assert linear.rate(40) == pytest.approx(6.67e-4, abs=1e-6)
    assert [linear.rate(0), linear.rate(9), linear.rate(10)] == pytest.approx([1e-4, 1e-3, 1e-3])
    cosine = Schedule.of("cosine", 2.0, 0.0, 10)
    assert [cosine.rate(0), cosine.rate(5), cosine.rate(10)] == pytest.approx([2.0, 1.0, 0.0])
    constant = Schedule.of("constant", 2.0, 0.5, 10)
    assert [constant.rate(step) for step in (0, 4, 5, 9)] == pytest.approx([0.4, 2.0, 2.0, 2.0])


def double_head() -> MedusaHead:
    """Three heads in float64, some steps away from the identity."""
    torch.manual_seed(0)
    head = build_head(MedusaConfig(num_heads=3), tiny.target(dtype=torch.float64)).double()
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return head
