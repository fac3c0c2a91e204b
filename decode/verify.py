"""Which part of a tree the target would have written itself: pure functions of tree, logits, settings and randomness.

Deterministic trees (all that do not draw their tokens: Medusa, n-grams, top-k trees) are verified by one rule for
greedy decoding and sampling: at a node, take the token y that plain decoding would take there, greedy or drawn; if y is
among the node's children, go there, else stop. y is emitted in either case. So every visited node emits exactly one
token of the target's own, which is lossless whatever the tree (a draft as a point mass in the rejection rule of
Leviathan et al., arXiv 2211.17192, appendix A.1; Chen et al., arXiv 2302.01318).

Drawn trees are verified by that rule in full: a draft x, drawn from q where the target has p, stays with probability
min(1, p(x) / q(x)). If it does not, p becomes max(p - q, 0), normalised, and its next sibling, drawn without
replacement, is tried against q without x, normalised, and so on; if none stays, a token is drawn from what is then left
of p (recursive rejection: SpecInfer, arXiv 2305.09781, with replacement; without, EAGLE-1 and Sequoia, arXiv 2401.15077
and 2402.12374). Behind a node without children one is drawn from p. In a chain there are no siblings. p and q come from
the one function that turns logits into probabilities, q being the very tensor that the drafts were drawn from.

Rows whose settings say `lossy="typical"` are verified by Medusa's typical acceptance instead, which is not exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from headstart.decode.processors import Text
from headstart.decode.sampling import SamplingSettings, choose, draw, group_by_distribution, probabilities, without
from headstart.decode.tree import DrawnFrom, TokenTree


@dataclass(frozen=True)
class Verified:
    """The outcome of one step for one row."""

    path: list[int]
    """Accepted nodes, the root first: the nodes whose keys and values stay."""
    tokens: list[int]
    """Tokens emitted: those of path[1:], then the one that the target wrote after them (the bonus)."""

    @property
    def accepted(self) -> int:
        """Drafted tokens accepted."""
        return len(self.path) - 1


Children = dict[int, dict[int, int]]
"""Per node with children: their tokens, each with its node, in the order of the nodes."""


def verify(
    tree: TokenTree,
    logits: Float[Tensor, "batch nodes vocab"],
    settings: Sequence[SamplingSettings],
    uniforms: Float[Tensor, "batch levels"],
    trials: Float[Tensor, "batch drafts"] | None = None,
    texts: Sequence[Text] = (),
) -> list[Verified]:
    """Walks every row's tree from the root; `uniforms[b, d]` serves the node visited at depth d (none: all are greedy).

    trials: for drawn trees, the number by which node i + 1 stays or not, at i. texts: each row's text, where any of
    them has processors, which are applied at the visited nodes alone.
    """
    batch, _ = tree.tokens.shape
    tokens, parents, valid = tree.tokens.tolist(), tree.topology.parents.tolist(), tree.topology.valid.tolist()
    children = [_children(*row) for row in zip(tokens, parents, valid, strict=True)]
    greedy = all(setting.greedy for setting in settings)
    if greedy and not texts:
        picks = logits.argmax(-1).tolist()
        return [_walk(children[row], lambda node, row=row: picks[row][node]) for row in range(batch)]
    paths: list[list[int]] = [[0] for _ in range(batch)]
    emitted: list[list[int]] = [[] for _ in range(batch)]
    going = [row for row in range(batch) if settings[row].exact]
    if greedy:
        uniforms = torch.zeros(batch, tree.topology.max_depth + 1, dtype=torch.float64, device=logits.device)
    for level in range(uniforms.shape[1]):
        if not going:
            break
        nodes = [paths[row][-1] for row in going]
        below = [children[row].get(node, {}) for row, node in zip(going, nodes, strict=True)]
        at = torch.tensor(going, device=logits.device), torch.tensor(nodes, device=logits.device)
        chosen, seen = [settings[row] for row in going], logits[at]
        if texts:
            after = zip(going, seen, strict=True)
            seen = torch.stack([texts[row].process(one, emitted[row]).to(torch.float64) for row, one in after])
        if tree.drawn is None:
            written = choose(seen, chosen, uniforms[at[0], level]).tolist()
        else:
            assert trials is not None
            drafts = Drafts.below(tree.drawn, trials, going, nodes, below)
            written = choose_or_keep(seen, chosen, drafts, uniforms[at[0], level]).tolist()
        still = []
        for row, token, known in zip(going, written, below, strict=True):
            emitted[row].append(token)
            if token in known:
                paths[row].append(known[token])
                still.append(row)
        going = still
    for row in (row for row in range(batch) if not settings[row].exact):
        text = texts[row] if texts else None
        paths[row], emitted[row] = _typical(children[row], logits[row], settings[row], uniforms[row], text)
    return [Verified(path, new) for path, new in zip(paths, emitted, strict=True)]


@dataclass(frozen=True)
class Drafts:
    """What some rows have drawn below one node each: siblings in the order in which they were drawn."""

    tokens: Int[Tensor, "rows siblings"]
    """-1 behind a row's last one: a row that has drawn nothing there has none, nor has a deterministic one."""
    trials: Float[Tensor, "rows siblings"]
    """The number by which each stays or not."""
    probs: Float[Tensor, "rows columns"]
    """What the first was drawn from; the others from what their elder siblings left of it."""
    ids: Int[Tensor, "columns"]

    @classmethod
    def below(
        cls,
        drawn: DrawnFrom,
        trials: Float[Tensor, "batch drafts"],
        rows: Sequence[int],
        nodes: Sequence[int],
        children: Sequence[Mapping[int, int]],
    ) -> Drafts:
        """The drafts below one node of each of these rows, whose children are given."""
        siblings = [list(some.items()) if drawn.sampled[row] else [] for row, some in zip(rows, children, strict=True)]
        most, device = max(map(len, siblings)), drawn.probs.device
        padded = torch.tensor([some + [(-1, 1)] * (most - len(some)) for some in siblings], device=device)
        tokens, places = padded.view(len(rows), most, 2).long().unbind(-1)
        index = torch.tensor(rows, device=device)
        place = [drawn.place(node) if some else 0 for node, some in zip(nodes, siblings, strict=True)]
        probs = drawn.probs[index, torch.tensor(place, device=device)]
        return cls(tokens, trials[index[:, None], places - 1], probs, drawn.ids)


def choose_or_keep(
    logits: Float[Tensor, "rows vocab"],
    settings: Sequence[SamplingSettings],
    drafts: Drafts,
    uniform: Float[Tensor, "rows"],
) -> Int[Tensor, "rows"]:
    """One token per row: the first of its drafts that its trial keeps, else one drawn at `uniform` from what the drafts
    leave over, or from the whole distribution where nothing was drafted."""
    tokens = logits.argmax(-1)
    for rows in group_by_distribution(settings):
        index = torch.tensor(rows, device=logits.device)
        p = probabilities(logits[index], settings[rows[0]])
        q = torch.zeros_like(p)
        q[:, drafts.ids] = drafts.probs[index].to(p)
        kept, left = reject_in_turn(p, q, drafts.tokens[index], drafts.trials[index])
        tokens[index] = kept.where(kept >= 0, draw(left, uniform[index]))
    return tokens


def reject_in_turn(
    p: Float[Tensor, "rows vocab"],
    q: Float[Tensor, "rows vocab"],
    drafts: Int[Tensor, "rows siblings"],
    trials: Float[Tensor, "rows siblings"],
) -> tuple[Int[Tensor, "rows"], Float[Tensor, "rows vocab"]]:
    """The first draft that is kept, or -1, and what the others leave of p: where none is kept, a token is drawn from
    that.

    A draft that the target gives no probability is never kept, not even at a trial of 0.
    """
    kept = torch.full((len(p),), -1, device=p.device)
    for turn, (draft, trial) in enumerate(zip(drafts.unbind(1), trials.unbind(1), strict=True)):
        if turn:
            p, q = normalised(p), normalised(q)
        at = draft.clamp(min=0)
        tried = (draft >= 0) & (kept < 0)
        keeps = tried & (trial * q.gather(1, at[:, None])[:, 0] < p.gather(1, at[:, None])[:, 0])
        kept = draft.where(keeps, kept)
        p = residual(p, q).where((tried & ~keeps)[:, None], p)
        q = without(q, at)
    return kept, p


def residual(p: Float[Tensor, "rows vocab"], q: Float[Tensor, "rows vocab"]) -> Float[Tensor, "rows vocab"]:
    """What a refused draft from q leaves over of p, not normalised."""
    left = (p - q).clamp(min=0)
    # Where p and q agree up to rounding nothing is left over; such a draft is hardly ever refused.
    return left.where(left.sum(-1, keepdim=True) > 0, p)


def normalised(mass: Float[Tensor, "rows vocab"]) -> Float[Tensor, "rows vocab"]:
    """The distribution of this shape; zeros stay where there is no mass at all."""
    total = mass.sum(-1, keepdim=True)
    return mass / total.where(total > 0, 1)


def _typical(
    children: Children,
    logits: Float[Tensor, "nodes vocab"],
    setting: SamplingSettings,
    uniforms: Float[Tensor, "levels"],
    text: Text | None,
) -> tuple[list[int], list[int]]:
    """Path and tokens of one row: the longest path of typical drafts, of equally long ones the likeliest, and one token
    drawn from the target behind it."""
    found: list[tuple[float, list[int], list[int]]] = [(0.0, [0], [])]
    while True:
        seen = logits[[path[-1] for _, path, _ in found]]
        if text is not None:
            after = zip(seen, found, strict=True)
            seen = torch.stack([text.process(one, tokens).to(torch.float64) for one, (_, _, tokens) in after])
        probs = probabilities(seen, setting)
        floors = typical_floor(probs, setting).tolist()
        longer = []
        for place, (score, path, tokens) in enumerate(found):
            known = children.get(path[-1], {})
            chances = probs[place, list(known)].tolist()
            for (token, node), chance in zip(known.items(), chances, strict=True):
                if chance > floors[place]:
                    longer.append((score + math.log(chance), [*path, node], [*tokens, token]))
        if not longer:
            best = max(range(len(found)), key=lambda place: found[place][0])
            _, path, tokens = found[best]
            bonus = draw(probs[best : best + 1], uniforms[len(tokens)][None])
            return path, [*tokens, int(bonus)]
        found = longer


def typical_floor(probs: Float[Tensor, "rows vocab"], setting: SamplingSettings) -> Float[Tensor, "rows"]:
    """What a draft's probability must exceed to be typical: min(epsilon, delta * exp(-entropy)), entropy in nats.
    Medusa, arXiv 2401.10774, "Typical Acceptance"."""
    entropy = -torch.special.xlogy(probs, probs).sum(-1)
    return (setting.typical_delta * (-entropy).exp()).clamp(max=setting.typical_epsilon)


def follow(tree: TokenTree, texts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Per row the nodes, root first, that agree with what is known to come: `texts` holds the tokens behind the root.

    What `verify` accepts where the target goes on to write that text.
    """
    paths = []
    rows = zip(tree.tokens.tolist(), tree.topology.parents.tolist(), tree.topology.valid.tolist(), texts, strict=True)
    for tokens, parents, valid, text in rows:
        children, path = _children(tokens, parents, valid), [0]
        for token in text:
            child = children.get(path[-1], {}).get(token)
            if child is None:
                break
            path.append(child)
        paths.append(path)
    return paths


def _children(tokens: list[int], parents: list[int], valid: list[bool]) -> Children:
    """Of two siblings with the same token the first counts."""
    table: Children = {}
    for node in range(1, len(tokens)):
        if valid[node]:
            table.setdefault(parents[node], {}).setdefault(tokens[node], node)
    return table


def _walk(children: Children, pick: Callable[[int], int]) -> Verified:
    path, emitted = [0], []
    while True:
        token = pick(path[-1])
        emitted.append(token)
        child = children.get(path[-1], {}).get(token)
        if child is None:
            return Verified(path, emitted)
        path.append(child)
