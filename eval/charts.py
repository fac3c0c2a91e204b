"""A few plots as inline SVG: text that a browser draws, with no script, no network and no plotting library.

All are 360 units wide, so that on a phone a unit is about a pixel; colours come from the page (`--one`, `--two`, ...).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from headstart.eval.acceptance import Number

WIDTH = 360
ROW, LABEL = 22, 118
SERIES = ("one", "two", "three", "four")


def horizontal_bars(
    title: str,
    rows: Sequence[tuple[str, Number | None]],
    *,
    intervals: Sequence[tuple[float, float] | None] | None = None,
    reference: Number | None = None,
    unit: str = "",
) -> str:
    """One bar per row with its value, and a whisker where there is an interval; `reference` is a dashed line."""
    highs = [interval[1] for interval in intervals or [] if interval]
    top = max([value for _, value in rows if value is not None] + highs + [reference or 0, 1e-12]) * 1.02
    room = WIDTH - LABEL - 52
    parts = []
    for index, (label, value) in enumerate(rows):
        y = 8 + index * ROW
        parts.append(text(LABEL - 6, y + 13, _short(label, 18), "end"))
        if value is None:
            parts.append(text(LABEL + 4, y + 13, "n/a"))
            continue
        width = max(value, 0) / top * room
        parts.append(f'<rect class="one" x="{LABEL}" y="{y + 2}" width="{width:.1f}" height="{ROW - 7}" rx="2"/>')
        end = width
        interval = intervals[index] if intervals else None
        if interval:
            low, high = (max(edge, 0) / top * room for edge in interval)
            parts.append(line(LABEL + low, y + 9.5, LABEL + high, y + 9.5, "ink"))
            end = max(width, high)
        parts.append(text(LABEL + end + 5, y + 13, f"{value:.2f}{unit}"))
    height = 14 + len(rows) * ROW
    if reference is not None:
        x = LABEL + reference / top * room
        parts.append(line(x, 4, x, height - 6, "dash"))
    return drawing(title, height, parts)


def columns(title: str, labels: Sequence[str], series: Sequence[tuple[str, Sequence[Number | None]]]) -> str:
    """Groups of columns between 0 and 1, one group per label, one column per series, with a legend."""
    height, bottom, left = 190, 150, 30
    group = (WIDTH - left - 8) / max(len(labels), 1)
    width = min(group / (len(series) + 0.7), 42)
    parts = []
    for tick in (0, 0.25, 0.5, 0.75, 1.0):
        y = bottom - tick * 130
        parts += [line(left, y, WIDTH - 8, y, "grid"), text(left - 4, y + 4, f"{tick:g}", "end")]
    for index, label in enumerate(labels):
        middle = left + (index + 0.5) * group
        parts.append(text(middle, bottom + 14, label, "middle"))
        for place, (_, values) in enumerate(series):
            value = values[index]
            x = middle + (place - len(series) / 2) * width
            if value is None:
                continue
            tall = value * 130
            rect = f'x="{x + 1:.1f}" y="{bottom - tall:.1f}" width="{width - 2:.1f}" height="{tall:.1f}"'
            parts += [f'<rect class="{SERIES[place]}" {rect} rx="2"/>']
            parts.append(text(x + width / 2, bottom - tall - 3, f"{value:.2f}".removeprefix("0"), "middle"))
    return drawing(title, height, parts + _legend([name for name, _ in series], height - 8))


def dots(title: str, values: Sequence[Number], *, reference: Number, unit: str = "") -> str:
    """Values in ascending order, one dot each, with a dashed line at `reference`."""
    height, bottom, left = 180, 160, 34
    ordered = sorted(values)
    tick = next((tick for tick in (0.5, 1, 2, 5, 10) if tick * 5 >= max([*ordered, reference])), 100)
    top = tick * math.ceil(max([*ordered, reference]) / tick)
    parts = []
    for step in range(round(top / tick) + 1):
        value = step * tick
        y = bottom - value / top * 145
        parts += [line(left, y, WIDTH - 8, y, "grid"), text(left - 4, y + 4, f"{value:g}{unit}", "end")]
    y = bottom - reference / top * 145
    parts.append(line(left, y, WIDTH - 8, y, "dash"))
    room = WIDTH - left - 20
    for index, value in enumerate(ordered):
        x = left + 6 + room * (index + 0.5) / len(ordered)
        parts.append(f'<circle class="one" cx="{x:.1f}" cy="{bottom - value / top * 145:.1f}" r="3"/>')
    return drawing(title, height, parts)


def stacked_bars(title: str, rows: Sequence[tuple[str, Sequence[Number]]], names: Sequence[str], unit: str) -> str:
    """One bar per row, made of its parts in order, with the total behind it and a legend."""
    top = max([sum(parts) for _, parts in rows] + [1e-12])
    left = 62
    room = WIDTH - left - 66
    drawn = []
    for index, (label, values) in enumerate(rows):
        y, x = 10 + index * 30, float(left)
        drawn.append(text(left - 6, y + 15, label, "end"))
        for place, value in enumerate(values):
            width = max(value, 0) / top * room
            drawn.append(
                f'<rect class="{SERIES[place]}" x="{x:.1f}" y="{y}" width="{width:.1f}" height="22">'
                f"<title>{escape(names[place])}: {value:.2f} {escape(unit)}</title></rect>"
            )
            x += width
        drawn.append(text(x + 5, y + 15, f"{sum(values):.1f} {unit}"))
    height = 34 + len(rows) * 30
    return drawing(title, height, drawn + _legend(names, height - 8))


def _legend(names: Sequence[str], y: Number) -> list[str]:
    parts, x = [], 34.0
    for place, name in enumerate(names):
        parts.append(f'<rect class="{SERIES[place]}" x="{x}" y="{y - 9}" width="10" height="10"/>')
        parts.append(text(x + 14, y, name))
        x += 24 + 6.2 * len(name)
    return parts


def drawing(title: str, height: Number, parts: Sequence[str], below: str = "") -> str:
    """A figure of these parts under its title. below: HTML that follows the plot, such as a legend."""
    return (
        f'<figure><figcaption>{escape(title)}</figcaption><svg viewBox="0 0 {WIDTH} {height:g}" role="img" '
        f'aria-label="{escape(title, quote=True)}">{"".join(parts)}</svg>{below}</figure>'
    )


def text(x: Number, y: Number, words: str, anchor: str = "start") -> str:
    """A word whose `anchor` (start, middle, end) stands at x."""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def line(x1: Number, y1: Number, x2: Number, y2: Number, style: str) -> str:
    """style: a class of the page's."""
    return f'<line class="{style}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _short(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"
