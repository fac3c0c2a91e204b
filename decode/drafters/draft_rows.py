"""The output rows that a head drafts from while decoding: its draft vocabulary, widened by each row's own text."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from headstart.borrowed import OutputHead, SelectedRows
from headstart.heads.vocab import DraftVocab, WidenedVocab


class DraftRows:
    """Keeps the target's output rows of the static ids and, behind them, of the tokens that the texts have.

    Only tokens that are new to all texts are gathered from the target. vocab: None for the target's whole vocabulary,
    where nothing can be added. borrows: False for heads with output matrices of their own, which have static ids only.
    """

    def __init__(self, output: OutputHead, vocab: DraftVocab | None, *, borrows: bool, widen: bool = True):
        self._output = output
        self._static = None if vocab is None else vocab.ids
        self._widened = WidenedVocab(vocab) if vocab is not None and borrows and widen else None
        self._read: list[int] = []
        """How many tokens of each row's text have been seen."""
        self._ids = self._static
        self.selected: SelectedRows | None = output.select(self._static) if borrows else None
        self._num_extra = 0
        self._order: Tensor | None = None
        """Which of the extra rows come first by their ids; they are kept in the order in which they were met."""

    def add_rows(self, count: int) -> None:
        self._read += [0] * count
        if self._widened is not None:
            self._widened.add_rows(count)

    def select(self, keep: list[int]) -> None:
        self._read = [self._read[row] for row in keep]
        if self._widened is not None and self._widened.select(keep):
            self._num_extra = 0
            self._extend()

    def read(self, texts: list[list[int]]) -> None:
        """Takes in what each row's text has got since the last time."""
        if self._widened is None:
            return
        for row, ids in enumerate(texts):
            self._widened.widen(row, ids[self._read[row] :])
            self._read[row] = len(ids)
        if len(self._widened.extra_ids) > self._num_extra:
            self._extend()

    def _extend(self) -> None:
        """Brings weights and ids in line with the extra ids; those already there stay where they are."""
        assert self._widened is not None and self._static is not None and self.selected is not None
        kept = len(self._static) + self._num_extra
        new = torch.tensor(self._widened.extra_ids[self._num_extra :], dtype=torch.long, device=self._static.device)
        self._num_extra = len(self._widened.extra_ids)
        fresh = self._output.select(new)
        extra = torch.tensor(self._widened.extra_ids, dtype=torch.long, device=self._static.device)
        in_order, self._order = extra.sort()
        self._ids = torch.cat([self._static, in_order])
        bias = fresh.bias
        if bias is not None and self.selected.bias is not None:
            bias = _grow(self.selected.bias, kept, bias)
        self.selected = SelectedRows(self._output, _grow(self.selected.weight, kept, fresh.weight), bias)

    def forbid_others(self, logits: Float[Tensor, "rows depth vocab"]) -> Float[Tensor, "rows depth vocab"]:
        """-inf where a row may not draft: the tokens that only other rows' texts have. The extra columns come in order
        of their ids, so that a row's number draws the same token in any batch."""
        if self._widened is None or self._num_extra == 0:
            return logits
        extra = logits[..., -self._num_extra :]
        if len(self._widened) > 1:
            extra.masked_fill_(~self._widened.allowed(logits.device)[:, None], -torch.inf)
        logits[..., -self._num_extra :] = extra[..., self._order]
        return logits

    def target_ids(self, columns: Int[Tensor, "*shape"]) -> Int[Tensor, "*shape"]:
        """From columns of the draft logits to target ids."""
        return columns if self._ids is None else self._ids[columns]

    def num_bytes(self) -> int:
        """Of the copied rows; the whole vocabulary is the target's own weight."""
        if self._static is None or self.selected is None:
            return 0
        return self.selected.weight.untyped_storage().nbytes()


def _grow(old: Tensor, kept: int, new: Tensor) -> Tensor:
    """The first `kept` rows of `old` and then `new`, in the storage of `old` where it has room."""
    needed = kept + len(new)
    room = old.untyped_storage().nbytes() // old.element_size() // old.stride(0)
    if room < needed:
        larger = old.new_empty((needed + max(256, needed // 16), *old.shape[1:]))
        larger[:kept] = old[:kept]
        old = larger
    grown = old.as_strided((needed, *old.shape[1:]), old.stride())
    grown[kept:] = new
    return grown
