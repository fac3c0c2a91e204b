"""The target's states that come up while it answers go into a feature cache, which saves a second forward of each row.

What is trained on is the conversation as the chat template renders it, whose tokens need not be those that the target
wrote: text is split anew, and a template may strip blanks. States belong to tokens, so a row is kept only where it
begins with the tokens that the target read, up to its last label. Positions from the last label on (it and the
template's own words behind it) have none, and get zeros: no label is predicted from them, and no earlier position reads
them. Rows that read differently are counted; `headstart data features` computes them.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from headstart.data.distill import Answer
from headstart.data.feature_cache import FeatureWriter
from headstart.data.feature_key import row_hash
from headstart.data.messages import Conversation, SkipRow
from headstart.data.rendering import ChatRenderer, Row


class Capture:
    """Adds each finished conversation to a cache; handed to `distill` as `finished`."""

    def __init__(self, cache: FeatureWriter, renderer: ChatRenderer, max_length: int):
        self.cache, self.renderer, self.max_length = cache, renderer, max_length
        self.kept = self.differing = 0

    def __call__(self, conversation: Conversation, answer: Answer) -> None:
        try:
            row = self.renderer.row(conversation, self.max_length)
        except SkipRow:  # training leaves it out too
            return
        states = {} if answer.states is None else padded(row, answer)
        if not states:
            self.differing += 1
            return
        ids, supervised = np.array(row.input_ids), np.array(row.supervised)
        self.cache.add(row_hash(ids, supervised), ids, supervised, states)
        self.kept += 1

    def summary(self) -> str:
        return (
            f"{self.kept} rows kept while answering; {self.differing} read differently once they are rendered, which "
            "`headstart data features` computes"
        )


def padded(row: Row, answer: Answer) -> dict[str, Tensor]:
    """The answer's states as those of the row, zeros from its last label on; empty where they are of other tokens."""
    assert answer.states is not None
    last = max(place for place, label in enumerate(row.supervised) if label)
    if list(answer.token_ids[:last]) != row.input_ids[:last]:
        return {}
    found = {}
    for name, state in answer.states.items():
        if len(state) < last:
            return {}
        found[name] = state.new_zeros(len(row.input_ids), state.shape[-1])
        found[name][:last] = state[:last]
    return found
