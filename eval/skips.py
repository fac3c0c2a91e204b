"""`headstart skips`: the attention and MLP blocks that the target can best draft without.

headstart skips --target bundled:smollm2-135m --output runs/skips
headstart eval --target bundled:smollm2-135m --drafters layer-skip:runs/skips

Measures what a step and what every block costs on this device, tries sets of blocks on held-out answers, and writes the
best set with the length of chain that suits it. Nothing is trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from headstart.data.packing import spread
from headstart.data.prepare import prepare
from headstart.data.progress import Progress
from headstart.decode.decode_copy import make_faster
from headstart.decode.skip_search import SkipSearch, measure_skip_costs, search_skips
from headstart.decode.skips import save_skips
from headstart.errors import refuse_unwritable
from headstart.eval.trained import open_trained

NUM_ANSWERS = 24
"""Held-out answers that blocks are chosen and judged on, at most."""


def run(
    target: str,
    output: str,
    *,
    tries: int = 200,
    overrides: Sequence[str] = (),
    device: str | None = None,
    dtype: str | None = None,
) -> SkipSearch:
    """Searches, writes the folder, prints what was found."""
    trained = open_trained(None, target, overrides=overrides, device=device, dtype=dtype)
    model, recipe = trained.target, trained.recipe
    Path(output).mkdir(parents=True, exist_ok=True)  # a place that cannot be written shows before the work
    refuse_unwritable(output)
    make_faster(model)
    data = prepare(recipe, model.tokenizer, vocab_size=model.vocab_size, max_positions=model.max_positions)
    costs = measure_skip_costs(model)
    with Progress("trying blocks", tries, unit="sets") as progress:
        rows = spread(data.held_out, NUM_ANSWERS)
        found = search_skips(model, rows, costs, tries=tries, seed=recipe.seed, progress=lambda: progress.add(1))
    # a chain that would not pay is saved all the same: with it, one can see why
    folder = save_skips(found.skips, output, model, length=max(found.length, 1), search=found.record())
    left_out = f"attention {_listed(found.skips.attention)} and MLP {_listed(found.skips.mlp)}"
    print(
        f"of {model.num_layers} layers, {left_out} are left out; {found.agreement:.1%} of first drafts are the "
        f"target's own, over {found.positions} positions"
    )
    print(
        f"forecast: chains of {found.length} drafts, speedup {found.speedup:.2f}"
        if found.length
        else "forecast: plain decoding is faster than drafting with any of the sets that were tried"
    )
    print(folder)
    return found


def _listed(layers: Sequence[int]) -> str:
    return ", ".join(map(str, layers)) or "of none"
