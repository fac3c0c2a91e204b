"""A student that headstart trained, as draft model.

    drafter = student_drafter("runs/smollm2-draft", target, length=4)

Where it has a draft vocabulary it drafts from that alone, widened by the tokens of each row's text as any head's is.
"""

from __future__ import annotations

import copy
from pathlib import Path

from jaxtyping import Float, Int
from torch import Tensor

from headstart.decode.decode_copy import make_head_faster
from headstart.decode.drafters.base import Rows
from headstart.decode.drafters.draft_rows import DraftRows
from headstart.decode.drafters.model import ModelDrafter
from headstart.decode.tree import TokenTree
from headstart.errors import HeadError
from headstart.heads.draft import DraftHead, student_model
from headstart.heads.store import load_head
from headstart.target import Target


class StudentDrafter(ModelDrafter):
    """Chains of a student, in the target's dtype and on its device. drawn, stop_below: as for any draft model. widen:
    draft each row's own prompt and answer tokens too, where the student borrows the target's output rows."""

    def __init__(
        self,
        head: DraftHead,
        target: Target,
        length: int = 4,
        *,
        drawn: bool = True,
        stop_below: float = 0.0,
        widen: bool = True,
    ):
        model = student_model(head, target, whole=False)
        make_head_faster(model.model, target)
        super().__init__(model, target, length, drawn=drawn, stop_below=stop_below, name="student")
        vocab = None if head.vocab is None else copy.deepcopy(head.vocab).to(target.device)
        borrows = head.output_weight is None
        self._static = None if vocab is None else vocab.ids
        self._rows = DraftRows(model.output, vocab, borrows=True, widen=widen) if vocab and borrows else None

    def start(self, rows: Rows, first: int) -> None:
        super().start(rows, first)
        if self._rows is not None:
            self._rows.add_rows(len(rows) - first)

    def propose(self, rows: Rows, budget: int) -> TokenTree:
        if self._rows is not None:
            self._rows.read(rows.ids)
        return super().propose(rows, budget)

    def select(self, keep: Int[Tensor, "kept"]) -> None:
        super().select(keep)
        if self._rows is not None:
            self._rows.select(keep.tolist())

    def num_bytes(self) -> int:
        return super().num_bytes() + (0 if self._rows is None else self._rows.num_bytes())

    def _logits(self, final: Float[Tensor, "rows dim"]) -> Float[Tensor, "rows columns"]:
        if self._rows is None:
            return super()._logits(final)
        assert self._rows.selected is not None
        return self._rows.forbid_others(self._rows.selected.logits(final)[:, None])[:, 0]

    def _ids(self, columns: Int[Tensor, "*shape"]) -> Int[Tensor, "*shape"]:
        if self._rows is not None:
            return self._rows.target_ids(columns)
        return columns if self._static is None else self._static[columns]


def student_drafter(
    folder: str | Path, target: Target, length: int = 4, *, drawn: bool = True, allow_other_target: bool = False
) -> StudentDrafter:
    """The drafter of a student that was trained for this target. folder: of its run, or of its head. Raises HeadError
    for other heads, and TargetError for another target."""
    folder = Path(folder)
    folder = folder / "head" if (folder / "head").is_dir() else folder
    head = load_head(folder, target, allow_other_target)
    if not isinstance(head, DraftHead):
        raise HeadError(f"{folder} holds a head of type {head.config.type}, no student; draft with head:{folder}")
    return StudentDrafter(head, target, length, drawn=drawn)
