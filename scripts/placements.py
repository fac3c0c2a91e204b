"""Where target and head can stand on several GPUs, and what each way takes there: memory, traffic, speed.

    for placement in placements(footprint, cluster, accumulation=1):
        placement.total, placement.fits, placement.tokens_per_second

Every figure follows from a footprint (eval/footprint.py) by dividing it over the GPUs; what is assumed beside is
said in `ASSUMPTIONS`. Times are those of the products at a stated share of the peak, plus that of the traffic, as if
neither hid the other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from headstart.eval.acceptance import Number
from headstart.eval.footprint import Footprint

UNITS_IN_FLIGHT = 2
"""Layers of a spread target that are whole at one time: the one that runs, and the next, on its way."""
KEPT_FREE = 0.05
"""Share of each GPU that a plan leaves alone."""
ASSUMPTIONS = (
    f"{KEPT_FREE:.0%} of each GPU are left alone: CUDA's own context, communication buffers, fragmentation",
    f"a spread target has {UNITS_IN_FLIGHT} layers whole on each GPU, one that runs and the next one; a spread head is "
    "whole while it runs",
    "plain data parallelism and ZeRO-2 keep a second copy of the gradients, in which they travel",
    "tensor parallelism shortens the target's products and not the activations, the head or the loss",
    "products and traffic are added up, as if neither ran behind the other; the optimiser's own time is left out",
)


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """GPUs, all alike. Rates are per GPU and second."""

    gpus: int
    memory: int
    """Bytes of one GPU."""
    target_flops: Number
    """Floating-point operations at the peak, in the target's dtype."""
    head_flops: Number
    """The same in the dtype of the head's forward."""
    utilisation: Number
    """Share of the peak that is reached."""
    bandwidth: Number
    """Bytes between GPUs, in one direction."""

    @property
    def usable(self) -> int:
        return round(self.memory * (1 - KEPT_FREE))

    def around(self, size: Number) -> Number:
        """Seconds until `size` bytes have gone once around all GPUs: gathered from all, or reduced over all."""
        return (self.gpus - 1) / self.gpus * size / self.bandwidth


@dataclass(frozen=True, kw_only=True)
class Placement:
    """One way to place target and head. Bytes are those of one GPU."""

    name: str
    parts: dict[str, int]
    """target, head, gradients, optimizer, buffers, and working: what comes and goes in a step."""
    usable: int
    micro_batch_seconds: Number
    tokens_at_once: int
    """Tokens that all GPUs together go through in one micro-batch."""
    refusal: str | None = None
    """Why this way cannot be gone, whatever the memory."""
    total: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "total", sum(self.parts.values()))

    @property
    def fits(self) -> bool:
        return self.refusal is None and self.total <= self.usable

    @property
    def tokens_per_second(self) -> Number:
        """Of all GPUs together."""
        return self.tokens_at_once / self.micro_batch_seconds


def placements(footprint: Footprint, cluster: Cluster, *, accumulation: int) -> list[Placement]:
    """All of them, those that hold most on each GPU first."""
    return [build(footprint, cluster, accumulation) for build in BUILDERS.values()]


def fastest(found: list[Placement], *, offline: bool) -> Placement | None:
    """Of those that fit, the one with the most tokens a second; None: none fits. offline: whether features may come
    from a cache, which has to be filled first."""
    fitting = [placement for placement in found if placement.fits and (offline or placement.name != "offline")]
    return max(fitting, key=lambda placement: placement.tokens_per_second, default=None)


def _replicate(footprint: Footprint, cluster: Cluster, accumulation: int) -> Placement:
    return _data_parallel("replicate", footprint, cluster, accumulation, target=footprint.target.weights)


def _offline(footprint: Footprint, cluster: Cluster, accumulation: int) -> Placement:
    return _data_parallel(
        "offline",
        footprint,
        cluster,
        accumulation,
        target=footprint.target.borrowed,
        working=footprint.working_offline,
        target_flops=0,
    )


def _zero2(footprint: Footprint, cluster: Cluster, accumulation: int) -> Placement:
    share = 1 / cluster.gpus
    return _data_parallel(
        "zero2", footprint, cluster, accumulation, target=footprint.target.weights, gradients=share, optimizer=share
    )


def _data_parallel(
    name: str,
    footprint: Footprint,
    cluster: Cluster,
    accumulation: int,
    *,
    target: int,
    gradients: Number = 1.0,
    optimizer: Number = 1.0,
    working: int | None = None,
    target_flops: int | None = None,
) -> Placement:
    """Every GPU has the head and its own micro-batches; gradients are summed once in an optimiser step."""
    several = cluster.gpus > 1
    return Placement(
        name=name,
        parts={
            "target": target,
            "head": footprint.head,
            "gradients": round(footprint.gradients * gradients),
            "optimizer": round(footprint.optimizer * optimizer),
            "buffers": footprint.gradients if several else 0,
            "working": footprint.working if working is None else working,
        },
        usable=cluster.usable,
        micro_batch_seconds=_products(footprint, cluster, target_flops)
        + 2 * cluster.around(footprint.gradients) / accumulation,
        tokens_at_once=cluster.gpus * footprint.tokens,
    )


def _shard(footprint: Footprint, cluster: Cluster, accumulation: int) -> Placement:
    """ZeRO-3 or FSDP2: weights, gradients and optimiser in pieces, gathered layer by layer in every forward. The head
    is gathered again for its backward, and its gradients are summed into pieces."""
    target, share = footprint.target, 1 / cluster.gpus
    gathered = UNITS_IN_FLIGHT * target.unit + footprint.head + footprint.gradients if cluster.gpus > 1 else 0
    return Placement(
        name="shard",
        parts={
            "target": round(target.weights * share),
            "head": round(footprint.head * share),
            "gradients": round(footprint.gradients * share),
            "optimizer": round(footprint.optimizer * share),
            "buffers": gathered,
            "working": footprint.working,
        },
        usable=cluster.usable,
        micro_batch_seconds=_products(footprint, cluster)
        + cluster.around(target.weights + 2 * footprint.head + footprint.gradients),
        tokens_at_once=cluster.gpus * footprint.tokens,
    )


def _tensor_parallel(footprint: Footprint, cluster: Cluster, accumulation: int) -> Placement:
    """Every GPU has a part of every matrix of the target and all of the head; all go through the same micro-batch. Two
    sums over the GPUs in every layer."""
    target = footprint.target
    split = target.splittable or 0
    refusal = None
    if target.splittable is None:
        refusal = "transformers has no plan for dividing this architecture"
    elif target.key_heads % cluster.gpus:
        refusal = f"{target.key_heads} key heads cannot be dealt to {cluster.gpus} GPUs"
    sums = 2 * target.layers * footprint.tokens * target.state
    return Placement(
        name="tensor_parallel",
        parts={
            "target": target.weights - split + round(split / cluster.gpus),
            "head": footprint.head,
            "gradients": footprint.gradients,
            "optimizer": footprint.optimizer,
            "buffers": 0,
            "working": footprint.working,
        },
        usable=cluster.usable,
        micro_batch_seconds=_products(footprint, cluster, footprint.target_flops / cluster.gpus)
        + 2 * cluster.around(sums),
        tokens_at_once=footprint.tokens,
        refusal=refusal,
    )


def _products(footprint: Footprint, cluster: Cluster, target_flops: Number | None = None) -> Number:
    """Seconds of one GPU for the products of one micro-batch."""
    target = footprint.target_flops if target_flops is None else target_flops
    return (target / cluster.target_flops + footprint.head_flops / cluster.head_flops) / cluster.utilisation


BUILDERS: dict[str, Callable[[Footprint, Cluster, int], Placement]] = {
    "replicate": _replicate,
    "zero2": _zero2,
    "tensor_parallel": _tensor_parallel,
    "shard": _shard,
    "offline": _offline,
}
"""Every way, by the recipe's own words where it has one: `target.placement` or `data.features`. zero2 is a launch mode
of a replicated target."""
