"""Classic speculative decoding: a smaller language model with the target's vocabulary drafts a chain.

    drafter = ModelDrafter(load_target("HuggingFaceTB/SmolLM2-135M-Instruct"), target, length=4)

https://arxiv.org/abs/2211.17192, https://arxiv.org/abs/2302.01318. Rows that sample draw their drafts from the model's
distribution under their own settings, and the rejection rule verifies them; greedy rows draft its likeliest tokens.
The model keeps a cache of its own, which is cut back to what it shares with the text before every proposal. So it may
be any copy of the target too, say one with weights in 8 bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from headstart.decode.attention import IMPLEMENTATION, tree_mask
from headstart.decode.cache import KVCache
from headstart.decode.drafters.base import Committed, NoDraft, Rows
from headstart.decode.drafters.drawing import draw_chain
from headstart.decode.drafters.plans import check_stop
from headstart.decode.tree import TokenTree, Topology
from headstart.errors import HeadstartError
from headstart.target import Target

SHARED_AT_LEAST = 0.99
"""Of the larger vocabulary, the share of tokens that both tokenizers have: they may differ in what was added later."""


class ModelDrafter:
    """Chains of `length` tokens of another causal model. Raises HeadstartError where it reads other tokens.

    Its attention is switched to ours, for good. Ids that only one of the two output heads has, as padded vocabularies
    do, are never drafted. A row whose text has come to the end of the model's positions is decoded plainly. drawn: rows
    that sample draw their drafts; False: they take the likeliest tokens too, which keeps the text of plain sampling and
    which a union can verify. stop_below: drafting ends, in each row, where the model's own probability of all that is
    drafted is below this.
    """

    wants: tuple[int, ...] = ()

    def __init__(
        self,
        model: Target,
        target: Target,
        length: int = 4,
        *,
        drawn: bool = True,
        stop_below: float = 0.0,
        name: str = "model",
    ):
        if length < 0:
            raise HeadstartError(f"a chain of {length} drafts cannot be drafted; give 0 or more")
        check_same_tokens(model, target)
        check_stop(stop_below)
        self.model, self.length, self.drawn, self.name = model, length, drawn, name
        self.stop_below: float | Sequence[float] = stop_below
        """One for all rows, or one for each."""
        ours = {id(tensor) for tensor in (*target.model.parameters(), *target.model.buffers())}
        own = [*model.model.parameters(), *model.model.buffers()]
        self._own = [tensor for tensor in own if id(tensor) not in ours]
        """What it does not share with the target, as a copy or a student does."""
        self.num_columns = min(model.vocab_size, target.vocab_size)
        model.model.set_attn_implementation(IMPLEMENTATION)
        self._cache = KVCache(model.num_layers, slots=0, capacity=0)
        self._read: list[list[int]] = []
        """Per row: the tokens whose keys are in the cache, drafts of the last proposal among them."""
        self._sure: list[int] = []
        """Per row: how many of them are known to be the text's."""

    def start(self, rows: Rows, first: int) -> None:
        self._cache.grow(rows.cache.slots, rows.cache.capacity + self.length)
        self._cache.join(len(rows) - first)
        self._read += [[] for _ in range(first, len(rows))]
        self._sure += [0] * (len(rows) - first)

    def propose(self, rows: Rows, budget: int) -> TokenTree:
        wanted = min(self.length, budget - 1)
        limits = [max(0, min(wanted, self.model.max_positions - len(ids))) for ids in rows.ids]
        if max(limits) == 0:
            return NoDraft().propose(rows, budget)
        self._cut_back(rows)
        final = self._run([ids[len(read) :] for ids, read in zip(rows.ids, self._read, strict=True)])

        def read(tokens: Int[Tensor, "rows"]) -> Float[Tensor, "rows columns"]:
            return self._logits(self._run([[token] for token in tokens.tolist()]))

        more = {"to_ids": self._ids, "drawn": self.drawn, "stop_below": self.stop_below}
        return draw_chain(self._logits(final), rows, limits, read, **more)

    def commit(self, rows: Rows, first: int, committed: Committed) -> None:
        """A prompt is read as it comes in; what a step committed is read with the next proposal."""
        if rows.num_new(first) == 0:
            prompts = zip(rows.ids[first:], self._read[first:], committed.counts, strict=True)
            self._run([ids[len(read) : len(read) + count] for ids, read, count in prompts], first)

    def select(self, keep: Int[Tensor, "kept"]) -> None:
        self._cache.select(keep)
        self._read = [self._read[row] for row in keep.tolist()]
        self._sure = [self._sure[row] for row in keep.tolist()]

    def num_parameters(self) -> int:
        return sum(tensor.numel() for tensor in self._own if isinstance(tensor, nn.Parameter))

    def num_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self._own) + self._cache.num_bytes()

    def _logits(self, final: Float[Tensor, "rows dim"]) -> Float[Tensor, "rows columns"]:
        return self.model.output.logits(final)[:, : self.num_columns]

    def _ids(self, columns: Int[Tensor, "*shape"]) -> Int[Tensor, "*shape"]:
        """Target ids of columns of the logits."""
        return columns

    def _cut_back(self, rows: Rows) -> None:
        """Forgets what is not the beginning of a row's text, and the root, whose logits are wanted."""
        for row, (ids, read) in enumerate(zip(rows.ids, self._read, strict=True)):
            sure, end = self._sure[row], min(len(read), len(ids) - 1)
            while sure < end and read[sure] == ids[sure]:
                sure += 1
            del read[sure:]
            self._sure[row] = self._cache.lengths[row] = sure

    def _run(self, tokens: list[list[int]], first: int = 0) -> Float[Tensor, "rows dim"]:
        """Reads the next tokens of rows first.., and gives the final state behind each row's last one (any, where a row
        has none)."""
        device, counts = torch.device(self.model.device), [len(some) for some in tokens]
        most = max(max(counts), 1)
        padded = torch.tensor([some + [0] * (most - len(some)) for some in tokens], device=device)
        self._cache.begin(first, len(tokens))
        lengths = torch.tensor(self._cache.lengths[first : first + len(tokens)], device=device)
        topology = Topology.chain(most - 1, device).expand(len(tokens))
        allowed, distance, positions = tree_mask(topology, lengths, self._cache.key_length(most))
        features = self.model.forward(
            padded.clamp(max=self.model.embedding.vocab_size - 1),
            positions.clamp(max=self.model.max_positions - 1),
            self.model.masks(allowed, distance),
            cache=self._cache.as_transformers,
        )
        for row, some in enumerate(tokens, first):
            self._cache.extend(row, len(some))
            self._read[row] += some
        last = torch.tensor(counts, device=device).clamp(min=1) - 1
        return features.final[torch.arange(len(tokens), device=device), last]


def check_same_tokens(model: Target, target: Target) -> None:
    """Refuses a model whose tokenizer gives other ids than the target's: its drafts would be other words."""
    ours, theirs = target.tokenizer.get_vocab(), model.tokenizer.get_vocab()
    if ours == theirs:
        return
    # what chat templates add behind the words may differ: ids that are both there must mean the same
    other = sorted(token for token in ours.keys() & theirs.keys() if ours[token] != theirs[token])
    shared = len(ours.keys() & theirs.keys()) / max(len(ours), len(theirs), 1)
    if other or shared < SHARED_AT_LEAST:
        example = f"; {other[0]!r} is {theirs[other[0]]} in one and {ours[other[0]]} in the other" if other else ""
        raise HeadstartError(
            f"{model.name} cannot draft for {target.name}: {shared:.0%} of their tokens are the same{example}. A draft "
            "model needs the target's tokenizer"
        )
