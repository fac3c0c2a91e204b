"""Which part of a tree the target would have written itself: pure functions of tree, logits, settings and randomness.

Deterministic trees (all that do not draw their tokens: Medusa, n-grams, top-k trees) are verified by one rule for
greedy decoding and sampling: at a node, take the token y that plain decoding would take there, greedy or drawn; if y is
among the node's children, go there, else stop. y is emitted in either case. So every visited node emits exactly one
token of the target's own, which is lossless whatever the tree (a draft as a point mass in the rejection rule of
Leviathan et al., arXiv 2211.17192, appendix A.1; Chen et al., arXiv 2302.01318).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from headstart.decode.sampling import SamplingSettings, choose
from headstart.decode.tree import TokenTree


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
) -> list[Verified]:
    """Walks every row's tree from the root; `uniforms[b, d]` serves the node visited at depth d."""
    batch, _ = tree.tokens.shape
    tokens, parents, valid = tree.tokens.tolist(), tree.topology.parents.tolist(), tree.topology.valid.tolist()
    children = [_children(*row) for row in zip(tokens, parents, valid, strict=True)]
    if all(setting.greedy for setting in settings):
        picks = logits.argmax(-1).tolist()
        return [_walk(children[row], lambda node, row=row: picks[row][node]) for row in range(batch)]
    paths: list[list[int]] = [[0] for _ in range(batch)]
    emitted: list[list[int]] = [[] for _ in range(batch)]
    going = list(range(batch))
    for level in range(uniforms.shape[1]):
        rows = torch.tensor(going, device=logits.device)
        nodes = torch.tensor([paths[row][-1] for row in going], device=logits.device)
        drawn = choose(logits[rows, nodes], [settings[row] for row in going], uniforms[rows, level]).tolist()
        still = []
        for row, token in zip(going, drawn, strict=True):
            emitted[row].append(token)
            child = children[row].get((paths[row][-1], token))
            if child is not None:
                paths[row].append(child)
                still.append(row)
        if not still:
            break
        going = still
    return [Verified(path, new) for path, new in zip(paths, emitted, strict=True)]


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
