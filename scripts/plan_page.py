"""A plan on the terminal: sizes, a column for each placement, the choice, and everything that was assumed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from headstart.eval.acceptance import Number
from headstart.eval.footprint import Footprint
from headstart.recipe import Recipe
from headstart.scripts.placements import Cluster, Placement, fastest


def show(
    recipe: Recipe,
    footprint: Footprint,
    cluster: Cluster,
    total_tokens: Number,
    found: Sequence[Placement],
    figures: dict[str, Any],
    console: Console,
) -> None:
    """Sizes, one column for each placement, cache and work, the choice, and every assumption."""
    target, section = footprint.target, recipe.target
    console.print(
        f"{recipe.name}: {section.name}, {target.parameters / 1e9:.2f} G parameters, {size(target.weights)} in "
        f"{section.dtype}; {_article(recipe.head.type)} {recipe.head.type} head of "
        f"{footprint.head_parameters / 1e6:.1f} M, trained in float32\n"
        f"{cluster.gpus} GPUs of {size(cluster.memory)}, of which {size(cluster.usable)} can be filled"
    )
    console.print(_table(recipe, footprint, found, figures))
    for placement in found:
        if placement.refusal:
            console.print(f"{placement.name}: no, {placement.refusal}")
    console.print(
        f"work: {footprint.target_flops / footprint.tokens / 1e9:.1f} GFLOP a token for the target's forward, "
        f"{footprint.head_flops / footprint.tokens / 1e9:.1f} for the head, forward and backward; "
        f"{total_tokens / 1e6:,.1f} M tokens"
    )
    stored = ", ".join(f"{size(count)} in {name}" for name, count in figures["cache_bytes"].items())
    console.print(f"cache for `data.features: offline`: {stored}, for one pass over the data")
    console.print(_choice(recipe, found))
    console.print("assumed:")
    for assumption in figures["assumptions"]:
        console.print(f"- {assumption}")


def _table(recipe: Recipe, footprint: Footprint, found: Sequence[Placement], figures: dict[str, Any]) -> Table:
    table = Table(box=None)
    table.add_column("on each GPU, GB", no_wrap=True)
    for placement in found:
        mark = "*" if placement.name == _asked(recipe) else ""
        table.add_column(placement.name + mark, justify="right", no_wrap=True)
    for part in ("target", "head", "gradients", "optimizer", "buffers"):
        table.add_row(part, *(_gb(placement.parts[part]) for placement in found))
    for part in ("features", "logits", "activations"):
        table.add_row(f"  {part}, at most", *[_gb(getattr(footprint, part))] * len(found))
    table.add_row("these together", *(_gb(placement.parts["working"]) for placement in found))
    table.add_row("all", *(_gb(placement.total) for placement in found))
    table.add_row("fits", *("yes" if placement.fits else "no" for placement in found))
    table.add_row("tokens/s, all GPUs", *(f"{placement.tokens_per_second:,.0f}" for placement in found))
    table.add_row("hours", *(f"{row['hours']:.2f}" for row in figures["placements"]))
    return table


def _asked(recipe: Recipe) -> str:
    """The placement that the recipe itself asks for."""
    return "offline" if recipe.data.features == "offline" else recipe.target.placement


def _choice(recipe: Recipe, found: Sequence[Placement]) -> str:
    asked = next(placement for placement in found if placement.name == _asked(recipe))
    online, cached = (fastest(list(found), offline=offline) for offline in (False, True))
    said = f"* the recipe's own: {asked.name} {'fits' if asked.fits else 'does not fit'}. "
    if cached is None:
        return said + "Nothing fits: more GPUs, more memory, a shorter data.max_length or a smaller train.batch_size."
    if online is None:
        return said + "Only offline features fit, and the target's forward that fills their cache needs more GPUs once."
    return said + f"Fastest that fits and runs the target: {online.name}."


def _article(word: str) -> str:
    return "an" if word[0] in "aeiou" else "a"


def size(count: Number) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{count / 1e6:.2f} MB"


def _gb(count: Number) -> str:
    return f"{count / 1e9:.2f}"
