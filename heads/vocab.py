"""The draft vocabulary: the few thousand of the target's tokens that a head may draft.

Fewer output rows make training and drafting faster and put a ceiling on acceptance, the share of tokens inside. A head
that borrows the target's output rows can use any row, so while decoding the vocabulary of each text is widened by the
tokens that the text itself has (`WidenedVocab`): names and words of the prompt are what the static list misses.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn

from headstart.errors import HeadError


def usable_ids(size: int, rows: int, tokenizer_size: int) -> int:
    """How many ids can be drafted of a target with so many output rows and tokens; HeadError where `size` is none of
    the sizes that a draft vocabulary can have there."""
    usable = min(tokenizer_size, rows)
    if size < 1:
        raise HeadError(f"draft_vocab_size is {size}, expected a whole number from 1 to {usable}, or null for all")
    if size > usable and size != rows:
        raise HeadError(
            f"draft_vocab_size is {size}, but the target has {usable} ids that can be drafted "
            f"({rows} output rows, {tokenizer_size} ids in the tokenizer); set it to {usable} at most, or to null"
        )
    return usable


class DraftVocab(nn.Module):
    """Target ids that can be drafted, ascending; draft index k stands for target id `ids[k]`.

    A module without parameters, so that it is saved with its head and moves with it.
    """

    ids: Int[Tensor, "draft"]
    _index: Int[Tensor, "vocab"]

    def __init__(self, ids: Int[Tensor, "draft"] | Sequence[int], vocab_size: int):
        super().__init__()
        ids = torch.as_tensor(ids, dtype=torch.long).clone()
        if len(ids) == 0 or bool((ids[1:] <= ids[:-1]).any()) or int(ids[0]) < 0 or int(ids[-1]) >= vocab_size:
            raise HeadError(
                f"a draft vocabulary needs ascending, distinct ids from 0 to {vocab_size - 1} (the target's output "
                "rows), which this one does not have; build it with DraftVocab.build"
            )
        self.vocab_size = vocab_size
        self.register_buffer("ids", ids)
        self.register_buffer("_index", torch.empty(0, dtype=torch.long), persistent=False)
        self._refresh()
        self.register_load_state_dict_post_hook(lambda module, _: module._refresh())

    def _refresh(self) -> None:
        """Works out the way back from target id to draft index."""
        self._index = torch.full((self.vocab_size,), -1, dtype=torch.long, device=self.ids.device)
        self._index[self.ids] = torch.arange(len(self.ids), device=self.ids.device)

    @classmethod
    def build(
        cls, counts: Int[Tensor, "vocab"], size: int, *, special_ids: Iterable[int], tokenizer_size: int
    ) -> DraftVocab | None:
        """The `size` ids that are supervised most often, special ids in any case; None for the whole vocabulary.

        counts: supervised tokens by target id, as long as the target's output weight has rows. special_ids: the end
        tokens and the tokenizer's special tokens; those without an output row are passed over. tokenizer_size: ids from
        there on are padding rows and never enter. Of equally frequent ids the lowest come first, so ids never seen fill
        the rest from the lowest up, and the same data give the same vocabulary.
        """
        rows = len(counts)
        usable = usable_ids(size, rows, tokenizer_size)
        if size == rows:
            return None
        beyond = counts[usable:].nonzero()
        if len(beyond):
            raise HeadError(
                f"the data hold the id {usable + int(beyond[0])}, which the tokenizer of {tokenizer_size} ids does not "
                "have; prepare the data with this target's tokenizer"
            )
        special = sorted({token for token in special_ids if 0 <= token < usable})
        if len(special) > size:
            raise HeadError(
                f"draft_vocab_size is {size}, less than the {len(special)} special and end tokens that are always in "
                f"it; set it to {len(special)} or more"
            )
        ranked = counts[:usable].to(torch.long).clone()
        ranked[special] = torch.iinfo(torch.long).max
        chosen = ranked.argsort(descending=True, stable=True)[:size]
        return cls(chosen.sort().values, rows)

    def __len__(self) -> int:
        return len(self.ids)

    def index_of(self, target_ids: Int[Tensor, "*batch"]) -> Int[Tensor, "*batch"]:
        """Draft index of each target id, -1 for those outside."""
        return self._index[target_ids]

    def coverage(self, counts: Int[Tensor, "vocab"]) -> float:
        """Share of the counted tokens that are inside: no head with this vocabulary can have more of them right."""
        total = int(counts.sum())
        return float(counts[self.ids.to(counts.device)].sum()) / total if total else float("nan")


class WidenedVocab:
    """The draft vocabularies of a batch while decoding: one static part, and per row the ids that its text has.

    Logits are computed once for the static ids and the union of all extra ids; `allowed` tells each row's own, so that
    a row drafts the same in any batch. Extra ids come in the order in which they were met.
    """

    def __init__(self, vocab: DraftVocab):
        self._static = set(vocab.ids.tolist())
        self.extra_ids: list[int] = []
        """The union over the rows, in the order of the logits behind the static ids."""
        self._column: dict[int, int] = {}
        self._rows: list[set[int]] = []

    def __len__(self) -> int:
        return len(self._rows)

    def add_rows(self, count: int) -> None:
        self._rows += [set() for _ in range(count)]

    def widen(self, row: int, token_ids: Iterable[int]) -> None:
        """Tokens that joined the row's text: only those that are new to it cost anything."""
        seen = self._rows[row]
        for token in token_ids:
            if token in self._static or token in seen:
                continue
            seen.add(token)
            if token not in self._column:
                self._column[token] = len(self.extra_ids)
                self.extra_ids.append(token)

    def select(self, keep: Iterable[int]) -> bool:
        """Keeps these rows, in this order, and forgets ids that no row has any more; True if the columns changed."""
        self._rows = [self._rows[row] for row in keep]
        used = set().union(*self._rows)
        if len(used) == len(self.extra_ids):
            return False
        self.extra_ids = [token for token in self.extra_ids if token in used]
        self._column = {token: column for column, token in enumerate(self.extra_ids)}
        return True

    def allowed(self, device: torch.device | str = "cpu") -> Bool[Tensor, "rows extra"]:
        """Which of the extra ids each row may draft."""
        table = torch.zeros(len(self._rows), len(self.extra_ids), dtype=torch.bool)
        for row, seen in enumerate(self._rows):
            table[row, [self._column[token] for token in seen]] = True
        return table.to(device)
