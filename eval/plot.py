"""The acceptance of a head by depth as a PNG: the hub shows no SVG of a repository's own in its model cards."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from typing import Any

from PIL import Image, ImageDraw, ImageFont

from headstart.eval.acceptance import Number

WIDTH, HEIGHT = 1200, 640
LEFT, TOP, BOTTOM = 90, 90, 520
LONGEST_TITLE = 66
INK, GRID, PAPER = "#1c2733", "#d9dfe5", "#ffffff"
SERIES = (("given the earlier ones", "conditional", "#2f6fde"), ("of all steps", "per_position", "#f0a03c"))


def acceptance_plot(title: str, depths: Sequence[dict[str, Any]]) -> bytes:
    """Columns between 0 and 1 for every depth of `details.per_depth` of a report; equal figures give equal bytes."""
    image = Image.new("RGB", (WIDTH, HEIGHT), PAPER)
    draw = ImageDraw.Draw(image)
    _text(draw, (LEFT, 30), title if len(title) <= LONGEST_TITLE else f"{title[:LONGEST_TITLE]}…", 30)
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        draw.line([(LEFT, _y(share)), (WIDTH - 40, _y(share))], fill=GRID, width=2)
        _text(draw, (LEFT - 14, _y(share)), f"{share:g}", 22, "rm")
    group = (WIDTH - 40 - LEFT) / max(len(depths), 1)
    width = min(group / 2.6, 110)
    for index, depth in enumerate(depths):
        middle = LEFT + (index + 0.5) * group
        _text(draw, (middle, BOTTOM + 24), str(depth["depth"]), 24, "mm")
        for place, (_, key, colour) in enumerate(SERIES):
            if depth[key] is not None:
                x = middle + (place - 1) * width
                draw.rectangle([x + 4, _y(depth[key]), x + width - 4, BOTTOM], fill=colour)
                label = f"{depth[key]:.2f}".removeprefix("0")
                _text(draw, (x + width / 2, _y(depth[key]) - 16), label, 22, "mm")
    x = LEFT
    for name, _, colour in SERIES:
        draw.rectangle([x, HEIGHT - 60, x + 24, HEIGHT - 36], fill=colour)
        _text(draw, (x + 36, HEIGHT - 48), name, 24, "lm")
        x += 420
    content = BytesIO()
    image.save(content, "PNG")
    return content.getvalue()


def _y(share: Number) -> Number:
    return BOTTOM - share * (BOTTOM - TOP)


def _text(draw: ImageDraw.ImageDraw, place: tuple[Number, Number], text: str, size: Number, anchor: str = "la") -> None:
    draw.text(place, text, fill=INK, font=ImageFont.load_default(size), anchor=anchor)
