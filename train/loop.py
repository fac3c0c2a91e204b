"""The one training loop: what is common to all heads, on one process or many, straight through or resumed.

A step that was taken is finished in this order: metrics, evaluation, checkpoint. So whatever a checkpoint holds was
logged and evaluated, and a resumed run goes on as if nothing had happened, to the bit on a CPU. Which processes train
together, and what each of them holds, is known to `train.wrapping` alone.
"""

from __future__ import annotations

import hashlib
import shutil
import signal
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate import Accelerator

from headstart.atomic import whole_folder
from headstart.data.rendering import Row
from headstart.errors import HeadError, TrainingError
from headstart.heads.base import Head
from headstart.heads.store import ADAPTER, load_head, save_head
from headstart.loading import parse_dtype
from headstart.recipe import Recipe
from headstart.stopping import Stopped, heaviest, stop_requests
from headstart.target import Target
from headstart.train.calibrate import steps_within
from headstart.train.checkpoint import Progress, latest_checkpoint, load_checkpoint, save_best, save_checkpoint
from headstart.train.curriculum import stages
from headstart.train.features import FeatureSource, feature_source
from headstart.train.feed import StreamFeed, open_feed
from headstart.train.forecasting import Forecast, Forecaster
from headstart.train.held_out import evaluate, held_out_batches, report, shares
from headstart.train.lr_schedule import Schedule
from headstart.train.metrics import Metrics
from headstart.train.modes import on_main
from headstart.train.optimisers import make_optimizer
from headstart.train.progress_line import Meter
from headstart.train.random_state import seed_everything, unmoved_random_state
from headstart.train.run_folder import RunFolder, training_hash, with_steps
from headstart.train.shared_decoding import Acceptance, SharedDecoding
from headstart.train.stepping import optimiser_step
from headstart.train.train_module import Totals, TrainModule
from headstart.train.wrap import wrap

if TYPE_CHECKING:
    from headstart.train.joint import Drift, Joint


class Training:
    """A run in memory: the wrapped module, its optimiser, the order of the data, and how far it has come."""

    def __init__(
        self,
        recipe: Recipe,
        run: RunFolder,
        accelerator: Accelerator,
        target: Target,
        head: Head,
        rows: Sequence[Row],
        held_out: Sequence[Row],
        features: FeatureSource | None = None,
    ):
        """features: where the target's states come from; None: what the recipe asks for."""
        self.recipe, self.run, self.accelerator = recipe, run, accelerator
        self.target, self.head, self.held_out = target, head, held_out
        target.fingerprint()  # while all processes are here, and its weights
        if recipe.train.activation_checkpointing:
            head.recompute_activations()
        self.joint = _open_joint(recipe, target)
        rank = accelerator.process_index // target.group
        seed_everything(recipe.seed, rank)
        self.features = features or feature_source(recipe, target, head.wants, (rows, held_out), rank=rank)
        compute = parse_dtype(recipe.train.dtype, accelerator.device)
        module = TrainModule(target, head, compute, self.features, self.joint).train()
        adapters = () if self.joint is None else self.joint.adapters.parameters.values()
        self.wrapped = wrap(accelerator, module, make_optimizer(recipe.train, head, adapters), target.group)
        self.feed = open_feed(rows, recipe, rank=rank, world_size=self.wrapped.world_size)
        self.forecaster = self._new_forecaster()
        self.progress = Progress()
        self.drift: Drift | None = None
        self.meter = Meter()
        self.schedule = self._work_out_length()
        self._resume()
        self.metrics = Metrics(run, self.recipe, accelerator, step=self.progress.step)

    def finish(self) -> Progress:
        """Trains to the last step, from wherever the run stands, and writes `head/`: the best head if any was held to
        be best, else the last one. A head whose target learnt too is always the last, with its adapters. Raises
        Stopped, after a checkpoint, if any process was asked to end meanwhile."""
        if self.progress.step == self.schedule.total_steps and self.run.head.is_dir():
            self.metrics.close()
            return self.progress  # finished before; beside its head may lie what was tuned for it
        with stop_requests():
            self._take_steps()
        self.features.close()
        self._ship()
        self.metrics.close()
        return self.progress

    def _take_steps(self) -> None:
        train, total = self.recipe.train, self.schedule.total_steps
        logged = None
        self.meter.start(self.progress.step, total)
        while self.progress.step < total:
            totals, norm, rate = self.step(self.progress, self.schedule)
            logged = totals if logged is None else logged + totals
            step, last = self.progress.step, self.progress.step == total
            stop = heaviest(totals.stop)  # of any process, and known to all of them
            if step % self.recipe.logging.every == 0 or last or stop:
                self._log(logged, norm, rate)
                logged = None
            with self.meter.paused():
                if last or due(step, train.eval_every):
                    self._evaluate()
                if last or stop or due(step, train.save_every):
                    self._save()
            if stop and not last:
                self._leave(stop)

    def _leave(self, asked: signal.Signals) -> None:
        self.metrics.close()
        self.features.close()
        reached = f"step {self.progress.step} of {self.schedule.total_steps}"
        raise Stopped(asked, f"{reached} is saved in {self.run.path}; the same command with --resume goes on")

    def step(self, progress: Progress, schedule: Schedule, share: float | None = None) -> tuple[Totals, float, float]:
        """One optimiser step, which moves `progress` on: its totals, the gradient's norm, the learning rate. share: how
        far the training is, for heads with a curriculum; None: as `progress` says."""
        rate, adapter_rate = schedule.rate(progress.step), 0.0
        share = progress.step / schedule.total_steps if share is None else share
        self.head.set_share(share)
        if self.joint is not None:
            self.joint.active = share >= self.joint.settings.start
            adapter_rate = self.joint.rate(progress.step, schedule)
        with self.meter.waiting():
            batches = self.feed.next_step(progress)
        clip = self.recipe.train.clip
        totals, norm = optimiser_step(
            self.wrapped, batches, rate=rate, clip=clip, step=progress.step + 1, adapter_rate=adapter_rate
        )
        progress.step += 1
        progress.tokens += int(totals.tokens)
        progress.empty_steps += int(totals.token_count == 0)
        return totals, norm, rate

    def record(self) -> dict[str, Any]:
        """What is written beside a head about its making."""
        return {
            "recipe": self.recipe.name,
            "chat": self.recipe.data.chat.model_dump(),
            "world_size": self.accelerator.num_processes,
            "mode": self.wrapped.mode,
            **({} if self.joint is None else {"joint": self.joint.settings.model_dump()}),
            **({} if self.drift is None else self.drift.as_metrics()),
            **asdict(self.progress),
        }

    def _new_forecaster(self) -> Forecaster | SharedDecoding | None:
        """What says at every evaluation how much of the head's drafts is accepted."""
        if not len(self.held_out) or self.recipe.data.features == "offline":
            return None  # without its layers there is no target to ask
        if self.recipe.target.placement == "replicate":
            tuned = nullcontext if self.joint is None else self.joint.tuned
            return Forecaster(self.target, self.held_out, tuned)
        return SharedDecoding(self.target, self.held_out, self.recipe.eval)

    def _work_out_length(self) -> Schedule:
        """Steps from `max_steps`, else `cpu_seconds` (calibrated, and kept in the recipe), else `epochs`."""
        train = self.recipe.train
        total = train.max_steps
        if total is None and train.cpu_seconds is not None:
            total = steps_within(
                train.cpu_seconds,
                self._new_trial,
                wrapped=self.wrapped,
                phases=[stage.until for stage in stages(self.head.config)],
                epoch_steps=self.feed.num_steps(1),
                remembered=self._share_remembered(),
            )
            self.accelerator.print(f"{train.cpu_seconds:g} CPU seconds are {total} steps on this machine")
            self.recipe = with_steps(self.run, self.recipe, total, write=self.accelerator.is_main_process)
        total = total or self.feed.num_steps(train.epochs)
        return Schedule.of(train.schedule, train.lr, train.warmup, total)

    def _new_trial(self, share: float) -> Callable[[], object]:
        """A function that takes steps from the first of all on, each as when the training is `share` over."""
        trial, flat = Progress(), Schedule("constant", self.recipe.train.lr, 0, 1)
        return lambda: self.step(trial, flat, share)

    def _share_remembered(self) -> float:
        """Of this rank's tokens of an epoch, the share whose target states are kept for later epochs."""
        tokens = sum(len(row.input_ids) for row in self.feed.rows) / self.wrapped.world_size
        return self.features.share_kept(tokens)

    def _about(self) -> dict[str, Any]:
        """What must be the same when the run is continued; the lengths of its rows stand for the data."""
        rows = hashlib.sha256(repr([len(row.input_ids) for row in self.feed.rows]).encode()).hexdigest()[:16]
        stored = {} if self.features.storage is None else {"feature dtype": self.features.storage}
        if isinstance(self.feed, StreamFeed):  # its rows are dealt to the ranks as they are read
            stored["ranks of the stream"] = str(self.wrapped.world_size)
        return {"recipe": training_hash(self.recipe), "rows": rows, **stored}

    def _plan(self) -> dict[str, Any]:
        """What a resumed run goes on with, and the sequences of a step, which it should keep to."""
        train = self.recipe.train
        sequences = train.batch_size * train.accumulation * self.wrapped.world_size
        return {"schedule": asdict(self.schedule), "sequences": sequences}

    def _resume(self) -> None:
        # one process looks, for all: they must not go on from different ones
        folder = on_main(self.accelerator, lambda: latest_checkpoint(self.run.checkpoints, set_aside=True))
        if folder is None:
            if self.run.resumed:
                self.accelerator.print(f"{self.run.path} has no checkpoint yet: starting from the first step")
            return
        self.progress, plan = load_checkpoint(folder, wrapped=self.wrapped, target=self.target, about=self._about())
        self.schedule = Schedule(**plan["schedule"])  # also where these processes make other steps of an epoch
        if plan["sequences"] != self._plan()["sequences"]:
            self.accelerator.print(
                f"warning: a step was of {plan['sequences']} sequences and is of {self._plan()['sequences']} now; "
                "train.accumulation times the number of processes makes up for others"
            )
        self.accelerator.print(f"going on from {folder}")

    def _log(self, totals: Totals, norm: float, rate: float) -> None:
        speed = self.meter.lap(self.progress.step, int(totals.tokens))
        values = {
            "loss": totals.mean_loss(),
            "head_loss": totals.losses(),
            "top_1": totals.accuracies(1),
            "rate": rate,
            "gradient_norm": norm,
            "epoch": self.progress.epoch,
            "tokens": self.progress.tokens,
            "empty_steps": self.progress.empty_steps,
            "tokens_per_second": speed.tokens_per_second,
            "data_wait_share": speed.wait_share,
            "seconds": speed.seconds,
            "cpu_seconds": speed.cpu_seconds,
        }
        self.metrics.write(self.progress.step, "train", values)
        self.accelerator.print(
            f"step {self.progress.step}/{self.schedule.total_steps}  loss {values['loss']:.3f}  "
            f"top-1 {shares(values['top_1'])}  rate {rate:.2e}  {speed}",
            flush=True,
        )

    def _evaluate(self) -> None:
        totals = evaluate(self.wrapped, self.held_out, self.recipe, step=self.progress.step)
        if totals is None:
            return
        values, forecast = report(totals), self._forecast()
        if forecast is not None:
            values |= forecast.as_metrics()
        if self.joint is not None and self.joint.active:
            batches = held_out_batches(self.wrapped, self.held_out, self.recipe)
            self.drift = self.joint.measure_drift(self.features, batches, self.accelerator)
            values |= {} if self.drift is None else self.drift.as_metrics()
        self.metrics.write(self.progress.step, "held_out", values)
        self.metrics.show(self.progress.step, forecast, self.target.tokenizer)
        if self.joint is None:  # else losses compare different targets
            self._keep_best(values["loss"])
        best = "" if self.progress.best_step is None else f"  best at step {self.progress.best_step}"
        line = (
            f"step {self.progress.step}  held out: loss {values['loss']:.3f}  top-1 {shares(values['top_1'])}  "
            f"top-5 {shares(values['top_5'])}{best}"
        )
        said = [line, *(f"  {more}" for more in (forecast, self.drift) if more is not None)]
        self.accelerator.print("\n".join(said), flush=True)

    def _keep_best(self, loss: float) -> None:
        """The head as it stands, if no loss on held-out text was lower."""
        if self.progress.best_value is not None and loss >= self.progress.best_value:
            return
        self.progress.best_step, self.progress.best_value = self.progress.step, loss
        self.progress.best_metric = "loss"
        head = self.wrapped.whole_head()
        on_main(self.accelerator, lambda: save_best(self.run.checkpoints, head, self.target, self.record()))

    def _forecast(self) -> Forecast | Acceptance | None:
        """Of the head as it stands; from the main process alone, unless the target takes all of them."""
        together = isinstance(self.forecaster, SharedDecoding)
        if self.forecaster is None or not (together or self.accelerator.is_main_process):
            return None
        head, forecaster = self.wrapped.whole_head(), self.forecaster
        with unmoved_random_state():
            return self.wrapped.inside(lambda: forecaster(head))

    def _save(self) -> None:
        self.features.flush()
        save_checkpoint(
            self.run.checkpoints,
            self.progress,
            wrapped=self.wrapped,
            target=self.target,
            about=self._about(),
            plan=self._plan(),
            record=self.record(),
            keep=self.recipe.train.keep,
        )

    def _ship(self) -> None:
        """`head/` is the best head, or the last where none was held out or the target learnt too."""
        head = self.wrapped.whole_head()
        best = self.run.checkpoints / "best"
        adapters = None if self.joint is None else self.joint.adapters

        def write() -> None:
            with whole_folder(self.run.head) as partial:
                if best.is_dir():
                    _refuse_damaged(best)
                    shutil.copytree(best, partial, dirs_exist_ok=True)
                else:
                    made_for = (adapters or self.target).fingerprint()
                    save_head(head, partial, fingerprint=made_for, training_record=self.record())
                if adapters is not None:
                    adapters.save(partial / ADAPTER)

        on_main(self.accelerator, write)
        self.metrics.ship(self.run.head, self.recipe.name, self.record())


def _refuse_damaged(best: Path) -> None:
    try:
        load_head(best)
    except HeadError as error:
        raise TrainingError(
            f"the best head can't be shipped: {error}; or remove it, and the same command with --resume ships the last "
            "head instead"
        ) from None


def _open_joint(recipe: Recipe, target: Target) -> Joint | None:
    """What trains the target too, where the recipe asks for it; its adapters are put in place."""
    if recipe.train.joint is None:
        return None
    from headstart.train.joint import Joint  # PEFT takes seconds to import

    return Joint(recipe.train.joint, target, recomputes=recipe.train.activation_checkpointing)


def due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0
