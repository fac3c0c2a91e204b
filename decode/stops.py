"""Stop strings: with which token an answer's text holds one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

MARGIN = 4
"""Characters at the start of a piece of a text that may be others than in the whole: a piece can begin within a
character of several bytes, and some tokenizers strip a blank there."""


def stopped_at(
    decode: Callable[[list[int]], str], before: Sequence[int], emitted: Sequence[int], stop: Sequence[str]
) -> int | None:
    """How many of the `emitted` tokens it takes until the text of all tokens holds a stop string; None: it does not.

    decode: token ids to text, special tokens kept. before: the tokens before, whose text holds no stop string. Looks at
    the end of the text, as far back as a stop string can begin, and at the whole text only where one seems to be there.
    """
    reach = max(map(len, stop)) + MARGIN
    known = _tail(decode, before, reach)
    for count in range(1, len(emitted) + 1):
        piece, whole = ([*some, *emitted[:count]] for some in (known, before))
        if _holds(decode(piece), stop) and _holds(decode(whole), stop):
            return count
    return None


def _tail(decode: Callable[[list[int]], str], token_ids: Sequence[int], reach: int) -> Sequence[int]:
    """The last tokens, as many as hold `reach` characters (a token may hold none); all, where all together do not."""
    size = reach
    while size < len(token_ids) and len(decode([*token_ids[-size:]])) < reach:
        size *= 2
    return token_ids[-size:]


def _holds(text: str, stop: Sequence[str]) -> bool:
    return any(one in text for one in stop)
