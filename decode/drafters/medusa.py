"""Medusa: every head's first choices, laid out along a static tree. https://arxiv.org/abs/2401.10774

    drafter = MedusaDrafter(load_head("runs/demo/head", target), target, paths=[(0,), (1,), (0, 0)])

A node at depth d is a choice of head d - 1, and all nodes of a depth choose among the same tokens (the paper's
cartesian tree): the heads do not see which token stands above. They read the feature of the token before the root.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from headstart.decode.drafters.base import Committed, Rows
from headstart.decode.drafters.draft_rows import DraftRows
from headstart.decode.drafters.plans import chain_paths
from headstart.decode.tree import Path, TokenTree, Topology, sort_paths
from headstart.heads.medusa import MedusaHead
from headstart.target import Target


class MedusaDrafter:
    """Proposes the static tree `paths` of a Medusa head's choices; None: a chain of every head's first choice.

    Takes a copy of the head, in the target's dtype and on its device. widen: draft each row's own prompt and answer
    tokens too, where the head borrows the target's output rows. Raises HeadstartError, naming the node, for a tree that
    these heads cannot fill.
    """

    name = "medusa"

    def __init__(
        self, head: MedusaHead, target: Target, paths: Sequence[Sequence[int]] | None = None, *, widen: bool = True
    ):
        heads = head.config.num_heads
        self.paths = sort_paths(chain_paths(heads) if paths is None else paths, heads, head.draft_vocab_size)
        self.head = copy.deepcopy(head).to(target.device, target.dtype).eval().requires_grad_(False)
        self.wants = self.head.wants
        self._rows = DraftRows(target.output, self.head.vocab, borrows=self.head.output_weight is None, widen=widen)
        self._trees: dict[int, _Layout] = {}
        self._final: Float[Tensor, "rows dim"] = torch.zeros(
            0, target.hidden_size, dtype=target.dtype, device=target.device
        )
        self._known: list[bool] = []
        """Whether a row has a feature: not yet after a prompt of one token."""

    def start(self, rows: Rows, first: int) -> None:
        count = len(rows) - first
        self._final = torch.cat([self._final, self._final.new_zeros(count, self._final.shape[1])])
        self._known += [False] * count
        self._rows.add_rows(count)

    def propose(self, rows: Rows, budget: int) -> TokenTree:
        layout = self._layout(min(len(self.paths), max(budget - 1, 0)))
        topology = layout.topology.expand(len(rows))
        if layout.depth == 0:
            return TokenTree(torch.zeros_like(topology.parents), topology)
        self._rows.read(rows.ids)
        logits = self.head.logits(self.head.draft_hidden(self._final, layout.depth), self._rows.selected)
        logits = self._rows.forbid_others(logits)
        choices = self._rows.target_ids(logits.topk(layout.num_ranks, dim=-1).indices)
        drafts = choices.flatten(1)[:, layout.choice]
        tokens = torch.cat([torch.zeros_like(drafts[:, :1]), drafts], dim=1)
        if not all(self._known):
            most = [layout.depth if known else 0 for known in self._known]
            topology = topology.within(torch.tensor(most, device=tokens.device))
        return TokenTree(tokens, topology)

    def commit(self, rows: Rows, first: int, committed: Committed) -> None:
        came = [first + row for row, count in enumerate(committed.counts) if count]
        self._final[came] = committed.last_final()[[row - first for row in came]]
        for row in came:
            self._known[row] = True

    def select(self, keep: Int[Tensor, "kept"]) -> None:
        self._final, kept = self._final[keep], keep.tolist()
        self._known = [self._known[row] for row in kept]
        self._rows.select(kept)

    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.head.parameters())

    def num_bytes(self) -> int:
        """Parameters, the copied output rows, and one feature per row."""
        held = [*self.head.parameters(), *self.head.buffers(), self._final]
        return sum(tensor.numel() * tensor.element_size() for tensor in held) + self._rows.num_bytes()

    def _layout(self, drafts: int) -> _Layout:
        """The first nodes of the tree: it is in order of depth, so a smaller one is its beginning."""
        if drafts not in self._trees:
            self._trees[drafts] = _Layout(self.paths[:drafts], self._final.device)
        return self._trees[drafts]


class _Layout:
    """Where each node of a static tree finds its token among the heads' choices."""

    def __init__(self, paths: Sequence[Path], device: torch.device):
        self.topology = Topology.from_paths(paths, device)
        self.depth = max(map(len, paths), default=0)
        self.num_ranks = 1 + max((path[-1] for path in paths), default=0)
        self.choice = torch.tensor(
            [(len(path) - 1) * self.num_ranks + path[-1] for path in paths], dtype=torch.long, device=device
        )
        """Per node, the index into the choices of all depths, rank after rank."""
