"""What speculative decoding yields in closed form, from rates of acceptance and costs.

A chain of K drafts, the k-th accepted with probability alpha_k once all before it were, emits

    E[accepted] = alpha_1 + alpha_1 alpha_2 + .. + alpha_1 .. alpha_K,    tau = 1 + E[accepted]

tokens a step, the bonus token counted; with one alpha for all, tau = (1 - alpha^(K+1)) / (1 - alpha) (Leviathan et al.,
arXiv 2211.17192, equation 1). Where drafting and verifying take s plain steps, speed grows by the walltime factor
tau / s; the paper takes s = K c + 1, a draft costing c steps and verifying one (theorem 3.8). alpha itself is what two
distributions share, sum of min(p, q), in the mean (corollary 3.6); in greedy decoding, how often both choose alike.

`decode.cost` forecasts from recorded answers instead, where neither depths nor positions are independent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from operator import mul

from headstart.decode.tree import Path
from headstart.errors import HeadstartError

Number = int | float


def expected_accepted(rates: Sequence[Number]) -> float:
    """Drafts accepted per step of a chain. rates[k]: the chance of draft k + 1 once all before it were accepted."""
    for rate in rates:
        _check("a rate of acceptance", rate, 0, 1)
    return float(sum(accumulate(rates, mul)))


def expected_tokens_of_tree(paths: Sequence[Path], rate: Callable[[Path], Number]) -> float:
    """tau of a static tree: 1 + the sum over its nodes of the chance that the whole path to the node is right.

    rate(path): the chance of a node once its parent was accepted. Siblings exclude each other, so the rates of one
    parent's children sum to at most 1; HeadstartError where they do not. paths: every node's parent among them.
    """
    chances: dict[Path, Number] = {(): 1.0}
    shares: dict[Path, float] = {}
    for path in sorted(paths, key=len):
        parent, one = path[:-1], rate(path)
        _check("a rate of acceptance", one, 0, 1)
        shares[parent] = shares.get(parent, 0.0) + one
        if shares[parent] > 1 + 1e-9:
            raise HeadstartError(
                f"the rates of the children of tree node {list(parent)} sum to {shares[parent]:.3f}, expected at most "
                "1: only one of them can be right"
            )
        chances[path] = chances[parent] * one
    return float(sum(chances.values()))


def walltime_factor(rates: Sequence[Number], step_cost: Number) -> float:
    """Speed over plain decoding of a chain whose drafting and verifying together take `step_cost` plain steps."""
    _check("the cost of a step", step_cost, 1e-9)
    return (1 + expected_accepted(rates)) / step_cost


def operations_factor(rates: Sequence[Number], draft_cost: Number) -> float:
    """Arithmetic over that of plain decoding; draft_cost: operations of one draft over those of the target for a token.

    What is drafted or verified in vain is computed all the same (Leviathan et al., theorem 3.11).
    """
    _check("the cost of a draft", draft_cost, 0)
    return (len(rates) * draft_cost + len(rates) + 1) / (1 + expected_accepted(rates))


def best_length(rates: Sequence[Number], step_cost: Callable[[int], Number]) -> int:
    """How many drafts have the highest walltime factor, at most as many as there are rates; of equals the fewest. 0:
    drafting is slower than not.

    step_cost(K): of drafting and verifying K drafts, in plain steps; step_cost(0) is 1.
    """
    return max(range(len(rates) + 1), key=lambda k: (walltime_factor(rates[:k], step_cost(k)), -k))


def _check(what: str, value: Number, low: Number, high: Number = float("inf")) -> None:
    if not low <= value <= high:
        bounds = f"from {low:g} to {high:g}" if high < float("inf") else f"from {low:g} on"
        raise HeadstartError(f"{what} is {value:g}, expected a number {bounds}")
