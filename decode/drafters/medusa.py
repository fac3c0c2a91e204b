"""Medusa: every head's first choices, laid out along a static tree. https://arxiv.org/abs/2401.10774

    drafter = MedusaDrafter(load_head("runs/demo/head", target), target, [(0,), (1,), (0, 0)])

A node at depth d is a choice of head d - 1, and all nodes of a depth choose among the same tokens (the paper's
cartesian tree): the heads do not see which token stands above. They read the feature of the token before the root.
In a sampled tree these tokens are drawn, once for all nodes of a depth: whichever of them is accepted, the draws below
it are independent of that.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from headstart.decode.drafters.base import Committed, Rows
from headstart.decode.drafters.draft_rows import DraftRows
from headstart.decode.drafters.drawing import draw_children, drawable
from headstart.decode.drafters.growth import best_choices
from headstart.decode.drafters.plans import DynamicTree, Plan, StaticTree, as_plan, chain_paths
from headstart.decode.tree import DrawnFrom, Path, TokenTree, Topology, sort_paths
from headstart.errors import HeadstartError
from headstart.heads.medusa import MedusaHead
from headstart.target import Target


class MedusaDrafter:
    """Proposes a static tree of a Medusa head's choices, given by its paths, or a sampled one; None: a chain of every
    head's first choice.

    Takes a copy of the head, in the target's dtype and on its device. widen: draft each row's own prompt and answer
    tokens too, where the head borrows the target's output rows. Raises HeadstartError, naming the node, for a tree that
    these heads cannot fill, and for a plan that asks them for each other's drafts.
    """

    name = "medusa"

    def __init__(
        self, head: MedusaHead, target: Target, plan: Plan | Sequence[Path] | None = None, *, widen: bool = True
    ):
        heads = head.config.num_heads
        plan = as_plan(chain_paths(heads) if plan is None else plan)
        if isinstance(plan, DynamicTree) or plan.stop_below:
            raise HeadstartError(
                f"Medusa heads draft all depths at once and cannot follow {plan}; give a static or a sampled tree "
                "without stop_below"
            )
        self.paths = sort_paths(plan.paths, heads, head.draft_vocab_size)
        self._by_rank = isinstance(plan, StaticTree)
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
        if not all(self._known):
            most = [layout.depth if known else 0 for known in self._known]
            topology = topology.within(torch.tensor(most, device=logits.device))
        sampled = [not self._by_rank and not request.settings.greedy for request in rows.requests]
        if not any(sampled):
            return TokenTree(self._tokens(best_choices(logits, layout.num_ranks)[1], layout), topology)
        columns, probs = draw_children(logits, rows, self._known, layout.num_ranks)
        missing = ~drawable(probs, sampled, layout.num_ranks).flatten(1)[:, layout.choice]
        topology = topology.without(torch.nn.functional.pad(missing, (1, 0), value=False))
        ids = self._rows.target_ids(torch.arange(logits.shape[-1], device=logits.device))
        return TokenTree(self._tokens(columns, layout), topology, DrawnFrom(probs, ids, sampled, layout.places))

    def _tokens(self, columns: Int[Tensor, "rows depth ranks"], layout: _Layout) -> Int[Tensor, "rows nodes"]:
        drafts = self._rows.target_ids(columns).flatten(1)[:, layout.choice]
        return torch.nn.functional.pad(drafts, (1, 0))

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
        self.places = [0, *map(len, paths)]
        """Per node, whose choices its children are: those of the head of its depth."""
