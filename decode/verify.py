"""Which part of a tree the target would have written itself: pure functions of tree, logits, settings and randomness.

Deterministic trees (all that do not draw their tokens: Medusa, n-grams, top-k trees) are verified by one rule for
greedy decoding and sampling: at a node, take the token y that plain decoding would take there, greedy or drawn; if y is
among the node's children, go there, else stop. y is emitted in either case. So every visited node emits exactly one
token of the target's own, which is lossless whatever the tree (a draft as a point mass in the rejection rule of
Leviathan et al., arXiv 2211.17192, appendix A.1; Chen et al., arXiv 2302.01318).

Drawn chains are verified by that rule in full: a draft x, drawn from q where the target has p, stays with probability
min(1, p(x) / q(x)); the first that does not is replaced by a token drawn from max(p - q, 0), normalised; if all stay,
one more is drawn from p. p and q come from the one function that turns logits into probabilities, q being the very
tensor that the draft was drawn from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from headstart.decode.processors import Text
from headstart.decode.sampling import SamplingSettings, choose, draw, group_by_distribution, probabilities
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


def verify(
    tree: TokenTree,
    logits: Float[Tensor, "batch nodes vocab"],
    settings: Sequence[SamplingSettings],
    uniforms: Float[Tensor, "batch levels"],
    trials: Float[Tensor, "batch drafts"] | None = None,
    texts: Sequence[Text] = (),
) -> list[Verified]:
    """Walks every row's tree from the root; `uniforms[b, d]` serves the node visited at depth d (none: all are greedy).

    trials: for drawn chains, the number by which the draft at depth d + 1 stays or not. texts: each row's text, where
    any of them has processors, which are applied at the visited nodes alone.
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
    going = list(range(batch))
    if greedy:
        uniforms = torch.zeros(batch, tree.topology.max_depth + 1, dtype=torch.float64, device=logits.device)
    for level in range(uniforms.shape[1]):
        nodes = [paths[row][-1] for row in going]
        at = torch.tensor(going, device=logits.device), torch.tensor(nodes, device=logits.device)
        chosen, seen = [settings[row] for row in going], logits[at]
        if texts:
            after = zip(going, seen, strict=True)
            seen = torch.stack([texts[row].process(one, emitted[row]).to(torch.float64) for row, one in after])
        if tree.drawn is None:
            written = choose(seen, chosen, uniforms[at[0], level]).tolist()
        else:
            assert trials is not None
            drafts = Drafts.at(tree, tree.drawn, going, level)
            trial = trials[at[0], min(level, trials.shape[1] - 1)]
            written = choose_or_keep(seen, chosen, drafts, trial, uniforms[at[0], level]).tolist()
        still = []
        for row, token in zip(going, written, strict=True):
            emitted[row].append(token)
            child = children[row].get((paths[row][-1], token))
            if child is not None:
                paths[row].append(child)
                still.append(row)
        if not still:
            break
        going = still
    return [Verified(path, new) for path, new in zip(paths, emitted, strict=True)]


@dataclass(frozen=True)
class Drafts:
    """What some rows' chains have drawn at one depth."""

    tokens: list[int]
    """-1 where a row has drawn nothing there: it is deterministic, or its chain has ended."""
    probs: Float[Tensor, "rows columns"]
    ids: Int[Tensor, "columns"]

    @classmethod
    def at(cls, tree: TokenTree, drawn: DrawnFrom, rows: list[int], level: int) -> Drafts:
        """The drafts at depth level + 1."""
        index, node = torch.tensor(rows, device=drawn.probs.device), level + 1
        if level >= drawn.probs.shape[1]:
            return cls([-1] * len(rows), drawn.probs[index, 0], drawn.ids)
        tokens, valid = tree.tokens[index, node].tolist(), tree.topology.valid[index, node].tolist()
        known = [valid[place] and drawn.sampled[row] for place, row in enumerate(rows)]
        return cls(
            [token if there else -1 for token, there in zip(tokens, known, strict=True)],
            drawn.probs[index, level],
            drawn.ids,
        )


def choose_or_keep(
    logits: Float[Tensor, "rows vocab"],
    settings: Sequence[SamplingSettings],
    drafts: Drafts,
    trial: Float[Tensor, "rows"],
    uniform: Float[Tensor, "rows"],
) -> Int[Tensor, "rows"]:
    """One token per row: its draft where the trial keeps it, else one drawn at `uniform` from what the draft leaves
    over, or from the whole distribution where nothing was drafted.

    A draft that the target gives no probability is never kept, not even at a trial of 0.
    """
    tokens = logits.argmax(-1)
    for rows in group_by_distribution(settings):
        index = torch.tensor(rows, device=logits.device)
        p = probabilities(logits[index], settings[rows[0]])
        draft = torch.tensor([drafts.tokens[row] for row in rows], device=logits.device)
        there = draft >= 0
        at = draft.clamp(min=0)[:, None]
        q = torch.zeros_like(p)
        q[:, drafts.ids] = drafts.probs[index].to(p)
        kept = there & (trial[index] * q.gather(1, at)[:, 0] < p.gather(1, at)[:, 0])
        left = (p - q * there[:, None]).clamp(min=0)
        # Where p and q agree up to rounding nothing is left over; such a draft is hardly ever refused.
        left = left.where(left.sum(-1, keepdim=True) > 0, p)
        tokens[index] = draft.where(kept, draw(left, uniform[index]))
    return tokens


def follow(tree: TokenTree, texts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Per row the nodes, root first, that agree with what is known to come: `texts` holds the tokens behind the root.

    What `verify` accepts where the target goes on to write that text.
    """
    paths = []
    rows = zip(tree.tokens.tolist(), tree.topology.parents.tolist(), tree.topology.valid.tolist(), texts, strict=True)
    for tokens, parents, valid, text in rows:
        children, path = _children(tokens, parents, valid), [0]
        for token in text:
            child = children.get((path[-1], token))
            if child is None:
                break
            path.append(child)
        paths.append(path)
    return paths


def _children(tokens: list[int], parents: list[int], valid: list[bool]) -> dict[tuple[int, int], int]:
    """(parent, token) -> child; of two siblings with the same token the first counts."""
    table: dict[tuple[int, int], int] = {}
    for node in range(1, len(tokens)):
        if valid[node]:
            table.setdefault((parents[node], tokens[node]), node)
    return table


def _walk(children: dict[tuple[int, int], int], pick) -> Verified:
    path, emitted = [0], []
    while True:
        token = pick(path[-1])
        emitted.append(token)
        child = children.get((path[-1], token))
        if child is None:
            return Verified(path, emitted)
        path.append(child)
