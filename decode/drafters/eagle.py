"""EAGLE: a head that feeds on its own states drafts a static tree, by rank or drawn, or a tree of its likeliest tokens.

    drafter = EagleDrafter(load_head("runs/demo/head", target), target, DynamicTree(depth=5, width=8, num_nodes=24))

https://arxiv.org/abs/2401.15077, https://arxiv.org/abs/2406.16858 (dynamic trees), https://arxiv.org/abs/2503.01840.
The step that takes in a row's committed tokens gives the choices for depth 1; every further level is one step of the
head over the nodes that are expanded, each reading its token's embedding and the state of the node above it.

Letters in shapes: rows of the batch, width (nodes of one level), columns (draft vocabulary, widened).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from headstart.decode.decode_copy import make_head_faster
from headstart.decode.drafters.base import Committed, Rows, take
from headstart.decode.drafters.draft_rows import DraftRows
from headstart.decode.drafters.drawing import draw_children, drawable, least_scores
from headstart.decode.drafters.growth import Growth, StaticLayout, best_choices, log_probabilities
from headstart.decode.drafters.plans import DEEPEST, DynamicTree, Plan, SampledTree, StaticTree, as_plan, chain_paths
from headstart.decode.drafters.unrolling import PairCache, TreeLevels
from headstart.decode.tree import DrawnFrom, Path, TokenTree, Topology, sort_paths
from headstart.heads.unrolled import UnrolledHead
from headstart.target import Features, Target


class EagleDrafter:
    """Drafts with an EAGLE-1 or EAGLE-3 head after one plan; None: a chain as deep as the head was trained.

    Takes a copy of the head, in the target's dtype and on its device. widen: draft each row's own prompt and answer
    tokens too, where the head borrows the target's output rows. A list of paths is a static tree. Raises
    HeadstartError, naming the node, for a tree that the head cannot fill.
    """

    name = "eagle"

    def __init__(
        self, head: UnrolledHead, target: Target, plan: Plan | Sequence[Path] | None = None, *, widen: bool = True
    ):
        plan = as_plan(chain_paths(head.num_depths) if plan is None else plan)
        if isinstance(plan, StaticTree | SampledTree):
            plan = replace(plan, paths=sort_paths(plan.paths, DEEPEST, head.draft_vocab_size))
        self.plan = plan
        self.stop_below: float | Sequence[float] = plan.stop_below
        """The plan's, until somebody sets another: one for all rows, or one for each."""
        self.head = copy.deepcopy(head).to(target.device, target.dtype).eval().requires_grad_(False)
        make_head_faster(self.head, target)
        self.wants = self.head.wants
        self._rows = DraftRows(target.output, self.head.vocab, borrows=self.head.output_weight is None, widen=widen)
        self._new_pairs = lambda: PairCache(self.head, target.embedding, target.dtype, torch.device(target.device))
        self._pairs = self._new_pairs()
        self._layouts: dict[int, StaticLayout] = {}
        """Of a static tree, by number of drafts."""

    # -- the contract with the engine --------------------------------------------------------------------------------

    def start(self, rows: Rows, first: int) -> None:
        self._pairs.join(len(rows) - first, rows.cache.slots, rows.cache.capacity + self._most_expanded())
        self._rows.add_rows(len(rows) - first)

    def propose(self, rows: Rows, budget: int) -> TokenTree:
        self._rows.read(rows.ids)
        drafts = min(self.plan.num_nodes, budget) - 1
        if drafts < 1:
            topology = Topology.chain(0, self._device).expand(len(rows))
            return TokenTree(torch.zeros_like(topology.parents), topology)
        with TreeLevels(self._pairs) as levels:
            if isinstance(self.plan, DynamicTree):
                return self._grow(self.plan, levels).tree(drafts)
            return self._static(levels, drafts, rows)

    def commit(self, rows: Rows, first: int, committed: Committed) -> None:
        if not any(committed.counts):
            return
        texts = rows.ids[first : first + len(committed.counts)]
        self._pairs.append(first, texts, committed.counts, committed.features)

    def select(self, keep: Int[Tensor, "kept"]) -> None:
        self._pairs.select(keep)
        self._rows.select(keep.tolist())

    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.head.parameters())

    def num_bytes(self) -> int:
        states = [*self.head.parameters(), *self.head.buffers()]
        weights = sum(tensor.numel() * tensor.element_size() for tensor in states)
        return weights + self._pairs.num_bytes() + self._rows.num_bytes()

    # -- what all plans share ----------------------------------------------------------------------------------------

    @property
    def _device(self) -> torch.device:
        return self._pairs.output.device

    def _most_expanded(self) -> int:
        """Nodes of one tree that are expanded at most: room behind the true pairs."""
        if isinstance(self.plan, DynamicTree):
            return self.plan.depth * self.plan.width
        return self.plan.num_nodes

    def _logits(self, output: Float[Tensor, "rows width dim"]) -> Float[Tensor, "rows width columns"]:
        return self._rows.forbid_others(self.head.logits(output, self._rows.selected))

    def _first_logits(self) -> Float[Tensor, "rows 1 columns"]:
        return self._logits(self._pairs.output[:, None])

    def _known(self) -> Bool[Tensor, "rows"]:
        """Whether a row has a pair to draft from: not yet after a prompt of one token."""
        return torch.tensor([length > 0 for length in self._pairs.cache.lengths], device=self._device)

    def _least_scores(self) -> Float[Tensor, "bounds"] | None:
        return least_scores(self.stop_below, self._device)

    # -- static trees, their nodes taken by rank or drawn ------------------------------------------------------------

    def _static(self, levels: TreeLevels, drafts: int, rows: Rows) -> TokenTree:
        by_rank = isinstance(self.plan, StaticTree)
        sampled = [not by_rank and not request.settings.greedy for request in rows.requests]
        logits, known, least = self._first_logits(), self._known(), self._least_scores()
        drafted: list[Int[Tensor, "rows nodes"]] = []
        scores: list[Float[Tensor, "rows nodes"]] = []
        """Cumulative log-probabilities, where they are asked for."""
        drawn_from: list[Float[Tensor, "rows width columns"]] = []
        missing: list[Bool[Tensor, "rows nodes"]] = []
        """Nodes for which nothing was left to be drawn."""
        going, limit = known, known.long()
        for level in self._layout(drafts).levels:
            if level.depth > 1:
                if least is not None:
                    going = going & (scores[-1].amax(1) >= least)
                if not going.any():
                    break
                limit = limit + going
                above = level.above.expand(len(known), -1)
                logits = self._logits(levels.expand(drafted[-1][:, level.expanded], above))
            if any(sampled):
                columns, probs = draw_children(logits, rows, going.tolist(), level.num_ranks)
                values = logits.gather(2, columns)
                drawn_from.append(probs)
                missing.append(~drawable(probs, sampled, level.num_ranks).flatten(1)[:, level.choice])
            else:
                values, columns = best_choices(logits, level.num_ranks)
            drafted.append(self._rows.target_ids(columns).flatten(1)[:, level.choice])
            if least is not None:
                logs = log_probabilities(values, logits)
                if scores:
                    logs = logs + scores[-1][:, level.expanded, None]
                scores.append(logs.flatten(1)[:, level.choice])
        tree = self._within(torch.cat(drafted, dim=1), drafts, limit)
        if not any(sampled):
            return tree
        ids = self._rows.target_ids(torch.arange(logits.shape[-1], device=self._device))
        drawn = DrawnFrom(torch.cat(drawn_from, dim=1), ids, sampled, self._layout(drafts).places)
        unfilled = drafts - sum(nodes.shape[1] for nodes in missing)
        dropped = torch.nn.functional.pad(torch.cat(missing, dim=1), (1, unfilled), value=False)
        return TokenTree(tree.tokens, tree.topology.without(dropped), drawn)

    def _within(self, drafted: Int[Tensor, "rows some"], drafts: int, limit: Int[Tensor, "rows"]) -> TokenTree:
        """The tree of a fixed shape, nodes below `limit` of their row made invalid; missing tokens are among them."""
        topology = self._layout(drafts).topology.expand(len(drafted))
        tokens = torch.nn.functional.pad(drafted, (1, drafts - drafted.shape[1]))
        if bool((limit < topology.max_depth).any()):
            topology = topology.within(limit)
        return TokenTree(tokens, topology)

    def _layout(self, drafts: int) -> StaticLayout:
        """The first nodes of the tree: it is in order of depth, so a smaller one is its beginning."""
        if drafts not in self._layouts:
            assert not isinstance(self.plan, DynamicTree)
            self._layouts[drafts] = StaticLayout(self.plan.paths[:drafts], self._device)
        return self._layouts[drafts]

    # -- dynamic trees -----------------------------------------------------------------------------------------------

    def _grow(self, plan: DynamicTree, levels: TreeLevels) -> Growth:
        growth, least = Growth(self._known()), self._least_scores()
        logits = self._first_logits()
        width = min(plan.width, self.head.draft_vocab_size)
        for depth in range(1, plan.depth + 1):
            values, columns = best_choices(logits, width)
            growth.add(self._rows.target_ids(columns), log_probabilities(values, logits))
            if depth == plan.depth or not growth.choose_frontier(width, least):
                break
            logits = self._logits(levels.expand(*growth.frontier()))
        return growth

    def grow_along(
        self, token_ids: Sequence[int], features: Features, roots: Sequence[int], chunk: int = 32
    ) -> Iterator[Growth]:
        """What a dynamic plan would draft at each of these roots of one text, `chunk` of them at a time.

        Every root's tree is what `propose` gives there; the text's pairs are computed once for all. For a drafter
        that is not decoding: it forgets its rows.
        """
        assert isinstance(self.plan, DynamicTree)
        known = [root for root in roots if root > 0]
        text = self._new_pairs()
        text.join(1, 1, len(token_ids))
        states = text.append(
            0, [token_ids], [len(token_ids) - 1], take(features, slice(None), slice(len(token_ids) - 1))
        )
        for start in range(0, len(known), chunk):
            some = known[start : start + chunk]
            self._pairs = text.beginnings(states, some, self._most_expanded())
            self._rows.select([])
            self._rows.add_rows(len(some))
            self._rows.read([list(token_ids[: root + 1]) for root in some])
            with TreeLevels(self._pairs) as levels:
                yield self._grow(self.plan, levels)
        self._rows.select([])
        self._pairs = self._new_pairs()
