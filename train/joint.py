"""The second stage of Medusa-2: the target learns with its heads, through adapters. https://arxiv.org/abs/2401.10774

    joint = Joint(recipe.train.joint, target)
    output = joint.forward(head, batch, original, target)   # where `joint.active`; differentiated like any head's

What is minimised is (loss of the target + head_weight * loss of the heads), by the adapters; the heads minimise their
own loss, for the target as it is in that very step. The target's loss is KL to its own original distribution (section
3.2.2 there: the adapters off, so no second model is held), or the cross-entropy with the text.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from jaxtyping import Float
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from headstart.adapters import Adapters
from headstart.borrowed import OutputHead
from headstart.bypass import Bypass
from headstart.data.packing import TokenBatch
from headstart.heads.base import Alignment, Head, HeadOutput
from headstart.heads.chunked import ChunkedLoss
from headstart.recipe import JointSection
from headstart.target import Features, Target
from headstart.train.features import FeatureSource
from headstart.train.lr_schedule import Schedule

States = Float[Tensor, "batch seq dim"]


@dataclass(frozen=True)
class Drift:
    """What joint training did to the target, on held-out text: means per supervised token, whole vocabulary.

    kl: KL(original || tuned) in nats. original_perplexity, perplexity: of the text, by the original and the tuned one.
    labels: how many tokens that is the mean of.
    """

    labels: int
    kl: float
    original_perplexity: float
    perplexity: float

    def as_metrics(self) -> dict[str, Any]:
        """As `metrics.jsonl` and the head's training record have them."""
        return {f"target_{name}": value for name, value in asdict(self).items()}

    def __str__(self) -> str:
        return (
            f"tuned target: KL to the original {self.kl:.4f} nats a token, perplexity of held-out text "
            f"{self.original_perplexity:.3f} -> {self.perplexity:.3f}"
        )


class Joint:
    """Adapters on a target, and when and how they learn. recomputes: the layers' activations are worked out again in
    the backward pass."""

    def __init__(self, settings: JointSection, target: Target, *, recomputes: bool = False):
        self.settings, self.target, self.recomputes = settings, target, recomputes
        self.adapters = Adapters(target, settings)
        self.active = False
        """Whether the second stage has begun."""

    def begins_at(self, total_steps: int) -> int:
        """Steps of the first stage."""
        return math.ceil(self.settings.start * total_steps)

    def rate(self, step: int, schedule: Schedule) -> float:
        """The adapters' learning rate in the step after `step` finished ones; 0 in the first stage. schedule: of the
        heads, whose kind and length it shares."""
        first = self.begins_at(schedule.total_steps)
        if step < first:
            return 0.0
        own = Schedule.of(schedule.kind, self.settings.lr, self.settings.warmup, schedule.total_steps - first)
        return own.rate(step - first)

    def tuned(self) -> AbstractContextManager[None]:
        """The target as it is decoded at this point: with its adapters on, from the second stage on."""
        return self.adapters.on() if self.active else nullcontext()

    def forward(self, head: Head, batch: TokenBatch, original: Features) -> HeadOutput:
        """The heads' output with the target's loss added to its `loss_sum`. original: the states with adapters off."""
        output = self.target.output
        with torch.autocast(batch.input_ids.device.type, enabled=False):
            tuned = self.states(batch, training=head.training)
            own = target_loss(self.settings.base_loss, batch, tuned, original.final, output)
        weighed = scale_gradient(tuned, float(self.settings.head_weight))
        of_heads = head(Features(weighed, {}), batch, self.target.embedding, output)
        return of_heads._replace(loss_sum=of_heads.loss_sum + own.loss_sum)

    def states(self, batch: TokenBatch, *, training: bool) -> States:
        """The tuned target's final states, with gradient by the adapters where gradients are on."""
        with self.adapters.on(training=training), self._recomputing(training):
            return self.target.forward(batch.input_ids, batch.position_ids, self.target.masks(*batch.attention())).final

    @torch.no_grad()
    def measure_drift(
        self, features: FeatureSource, batches: Iterable[TokenBatch], accelerator: Accelerator
    ) -> Drift | None:
        """What the target has become, over the batches of all ranks; None where they have no labels."""
        sums = torch.zeros(4, dtype=torch.float64)
        output = self.target.output
        for batch in batches:
            original, tuned = features(batch, keep=False).final, self.states(batch, training=False)
            of_text = [target_loss("hard-ce", batch, states, original, output) for states in (original, tuned)]
            moved = target_loss("kl", batch, tuned, original, output)
            parts = [float(part.loss_sum) for part in (moved, *of_text)]
            sums += torch.tensor([float(moved.token_count), *parts], dtype=torch.float64)
        reduced: Any = accelerator.reduce(sums.to(accelerator.device, torch.float32), reduction="sum")
        labels, kl, before, after = reduced.tolist()
        if not labels:
            return None
        return Drift(int(labels), kl / labels, math.exp(before / labels), math.exp(after / labels))

    def _recomputing(self, training: bool) -> AbstractContextManager[None]:
        if not (self.recomputes and torch.is_grad_enabled()):
            return nullcontext()
        # the backward pass comes when the adapters are off again
        again = partial(self.adapters.on, training=training)
        settings = {"use_reentrant": False, "context_fn": lambda: (nullcontext(), again())}
        layers = self.target.running_layers
        return Bypass([(layer, partial(checkpoint, layer.forward, **settings)) for layer in layers])


def target_loss(name: str, batch: TokenBatch, states: States, teacher: States, output: OutputHead) -> HeadOutput:
    """The loss `name` (of `heads.losses`) of a target's own next-token predictions, over all supervised tokens and the
    whole vocabulary. states: what is judged, with gradient. teacher: the states whose distribution `kl` compares with.
    """
    alignment, rows = Alignment.of_next(batch), output.select()
    loss = ChunkedLoss(
        alignment=alignment,
        labels=batch.input_ids.flatten()[alignment.tokens],
        project=rows.logits,
        teacher_logits=rows.logits,
        final=teacher.flatten(0, 1),
        vocab_size=output.vocab_size,
        loss_weights={name: 1.0},
        depth_weights=[1.0],
    )
    return loss(states.flatten(0, 1)[alignment.positions][:, None])


def scale_gradient(states: States, scale: float) -> States:
    """The same numbers; the gradient that comes back is multiplied by `scale`."""
    still = states.detach()
    return still + (states - still) * scale
