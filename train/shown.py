"""What a tracker shows of a head beside numbers: texts with its accepted drafts coloured, and its tree.

Both come from the replay that forecasts acceptance, so they cost no decoding: a text is a held-out answer, and a token
is coloured where the head, drafting along it with the best tree, would have been right.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from transformers import PreTrainedTokenizerBase

from headstart.decode.cost import RankedAnswer, replay
from headstart.decode.tree import Path

SAMPLES, TOKENS = 4, 160
"""Answers shown, and tokens of each."""
ACCEPTED = "background:#bfe8c8;border-radius:3px;font-weight:normal"
COLUMN, ROW = 26, 44
"""Pixels between the nodes of a drawn tree."""


def drafted_tokens(answer: RankedAnswer, paths: Sequence[Path]) -> list[bool]:
    """Of every token of the answer, whether it would have been drafted and accepted; the end that a replay leaves out
    counts as the target's own."""
    drafted = [False] * len(answer.token_ids)
    for base, accepted in replay(answer, paths):
        drafted[base : base + accepted] = [True] * accepted
    return drafted


def coloured(token_ids: Sequence[int], drafted: Sequence[bool], tokenizer: PreTrainedTokenizerBase) -> str:
    """The text as HTML, accepted drafts in <strong>. A character whose bytes several tokens share goes with its last.

    Takes time in the square of the length.
    """
    html, shown = "", ""
    for place, accepted in enumerate(drafted, 1):
        text = str(tokenizer.decode(list(token_ids[:place])))
        if text.endswith("\ufffd") and place < len(drafted):
            continue
        piece, shown = escape(text[len(shown) :]), text
        html += f'<strong style="{ACCEPTED}">{piece}</strong>' if accepted else piece
    return html


def samples_page(answers: Sequence[RankedAnswer], paths: Sequence[Path], tokenizer: PreTrainedTokenizerBase) -> str:
    """A few answers, the accepted drafts of each coloured, with their number."""
    parts = []
    for answer in answers[:SAMPLES]:
        ids, drafted = answer.token_ids[:TOKENS], drafted_tokens(answer, paths)[:TOKENS]
        told = f"{sum(drafted)} of {len(ids)} tokens drafted and accepted"
        parts.append(f'<p>{told}</p><p style="white-space:pre-wrap">{coloured(ids, drafted, tokenizer)}</p>')
    return "\n".join(parts)


def tree_page(paths: Sequence[Path]) -> str:
    """The tree as a drawing, the root on top and children by rank from the left, and as text."""
    places = _places(paths)
    lines = [(places[node[:-1]], places[node]) for node in places if node]
    width, height = (max(place[axis] for place in places.values()) for axis in (0, 1))
    drawn = "".join(f'<line x1="{a:g}" y1="{b:g}" x2="{c:g}" y2="{d:g}" stroke="#888"/>' for (a, b), (c, d) in lines)
    for node, (x, y) in places.items():
        drawn += f'<circle cx="{x:g}" cy="{y:g}" r="9" fill="#eef"/><text x="{x:g}" y="{y + 4:g}" font-size="11" '
        drawn += f'text-anchor="middle">{node[-1] if node else ""}</text>'
    size = f'width="{width + COLUMN:g}" height="{height + ROW:g}"'
    ranks = " ".join(".".join(map(str, one)) for one in paths)
    told = f"{len(paths) + 1} nodes with the root, by their ranks: {ranks}"
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{drawn}</svg><p>{told}</p>'


def _places(paths: Sequence[Path]) -> dict[Path, tuple[float, float]]:
    """Where every node stands: leaves side by side, a parent over the middle of its children."""
    places: dict[Path, tuple[float, float]] = {}
    leaves = 0
    for node in sorted([(), *paths], reverse=True):  # children before their parent
        below = [places[one][0] for one in places if one[:-1] == node and len(one) == len(node) + 1]
        if not below:
            leaves += 1
        places[node] = (sum(below) / len(below) if below else -float(leaves * COLUMN), len(node) * ROW + ROW / 2)
    left = min(x for x, _ in places.values()) - COLUMN
    return {node: (x - left, y) for node, (x, y) in places.items()}
