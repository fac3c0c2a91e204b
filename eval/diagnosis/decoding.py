"""What happens while decoding: does decoding accept what the head drafts, does the tree suit the device?"""

from __future__ import annotations

from collections.abc import Iterator

from headstart.decode.cost import SIZES, Forecast, measure_costs, replay, tune
from headstart.decode.drafters.plans import chain_paths
from headstart.eval.acceptance import ratio
from headstart.eval.diagnosis.evidence import Evidence
from headstart.eval.diagnosis.finding import Finding, NotLookedAt, counts, gained
from headstart.eval.trees import choose_plan, read_trees
from headstart.heads.draft import DraftHead
from headstart.heads.medusa import MedusaHead
from headstart.train.forecasting import measure_draft_costs

APART = 0.1
"""Share of the drafts by which forecast and decoding may differ: in bfloat16 kernels round differently for one row and
for many, and a draft parts at a tie of its logits."""
SLOW = 1.15
"""The best size must be this much faster than the one in use."""
REPEATS = 6
COMPARED = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48)
"""Sizes of trees that the one in use is compared with."""


def forecast_apart(evidence: Evidence) -> Iterator[Finding]:
    """A replay of the head along the decoded texts against the steps that decoding took."""
    counted, depth = evidence.served.counts, evidence.depth
    runs = [one for answer in evidence.ranks for _, one in replay(answer, chain_paths(depth))]
    if not runs or not counted.steps:
        raise NotLookedAt("the answers are too short")
    forecast, decoded = 1 + sum(runs) / len(runs), evidence.served.along.tau
    apart = forecast - decoded
    if abs(apart) <= APART * max(forecast - 1, decoded - 1) or not counts(abs(apart), forecast - 1):
        return
    rates = [_rate(runs, level) for level in range(1, depth + 1)]
    accepted = [*counted.conditional, *[None] * depth][:depth]
    parted = [abs((a or 0.0) - (b or 0.0)) > APART for a, b in zip(rates, accepted, strict=True)]
    level = parted.index(True) + 1 if any(parted) else 1
    yield Finding(
        "forecast-apart",
        abs(apart),
        f"forecast {forecast:.2f}, decoded {decoded:.2f} along the same texts; they part at depth {level}, where "
        f"{rates[level - 1] or 0.0:.2f} of the drafts are right and {accepted[level - 1] or 0.0:.2f} were accepted",
        "the drafter feeds the head something else than training did (cache, positions, masks): run "
        "`headstart eval --head RUN --set eval.identity_prompts=8`, and report it with both figures",
    )


def _rate(accepted: list[int], level: int) -> float | None:
    return ratio(sum(one >= level for one in accepted), sum(one >= level - 1 for one in accepted))


def temperature(evidence: Evidence) -> Iterator[Finding]:
    """Greedy answers to the same prompts, where answers are sampled."""
    served = float(evidence.recipe.eval.temperature[0])
    if served == 0:
        return
    remedy = "lower the temperature"
    if not isinstance(evidence.head, MedusaHead):  # whose depths know nothing of each other's tokens
        remedy += f", or draw the drafts: --drafters head@drawn4 --set eval.temperature={served:g}"
    greedy = evidence.answer(evidence.recipe.data.chat, 0.0).along
    yield from gained(
        "temperature",
        evidence.served.along,
        greedy,
        f"temperature 0 (served: {served:g})",
        remedy,
    )


def tree_size(evidence: Evidence) -> Iterator[Finding]:
    """The tree in use against every smaller one, by the costs of this device now. (That a larger one might be faster is
    for `headstart tune` to say: nothing is lost to what was not asked for.)"""
    if isinstance(evidence.head, DraftHead):
        raise NotLookedAt("a student drafts chains; `headstart tune` compares their lengths")
    if not read_trees(evidence.folder):
        raise NotLookedAt(f"no tree was tuned: headstart tune --head {evidence.named.run or evidence.folder}")
    plan = choose_plan(evidence.folder, None, evidence.recipe.eval.tree)[0]
    used = next((size for size in SIZES if size >= plan.num_nodes), SIZES[-1])
    sizes = [size for size in SIZES if size <= used and (size in COMPARED or size == used)]
    found = [_sizes(evidence, sizes, used) for _ in range(2)]  # a busy machine slows one width down, seldom twice
    now, best, cost = min(found, key=lambda one: one[1].speedup / one[0].speedup)
    lost = now.acceptance_length * (1 - now.speedup / best.speedup)
    if best.speedup > SLOW * now.speedup and counts(lost, now.acceptance_length - 1):
        yield Finding(
            "tree-size",
            lost,
            f"with {plan.num_nodes} nodes a step takes {cost:.2f} plain ones, and {now.acceptance_length:.2f} tokens "
            f"come of it: speedup {now.speedup:.2f}; with {len(best.paths) + 1} nodes {best.speedup:.2f}",
            f"headstart tune --head {evidence.named.run or evidence.folder}, and --set eval.tree=auto",
        )


def _sizes(evidence: Evidence, sizes: list[int], used: int) -> tuple[Forecast, Forecast, float]:
    """The forecast of the size in use and of the best, and what a step of the one in use takes, drafting apart."""
    costs = measure_costs(evidence.target, widths=sizes, repeats=REPEATS)
    chain = chain_paths(evidence.depth)
    drafting = measure_draft_costs(evidence.head, evidence.target, evidence.depth, chain, quick=True)
    forecasts = tune(evidence.ranks, costs, drafting, sizes)
    return forecasts[used], max(forecasts.values(), key=lambda one: one.speedup), costs.ratio(used)
