"""The plots of a comparison, inline SVG like those of `eval.charts`; runs are told apart by their numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from headstart.eval.acceptance import Number
from headstart.eval.charts import WIDTH, drawing, line, text

COLOURS = 8
"""Lines that can be told apart; the page has as many classes, c0 to c7."""
Point = tuple[str, Number, Number]
"""A label, and where it stands."""


def named_bars(
    title: str,
    rows: Sequence[tuple[str, Number | None]],
    intervals: Sequence[Sequence[Number] | None],
    *,
    reference: Number,
    unit: str = "",
) -> str:
    """One bar per row under its name, which may be long, with its interval; `reference` is a dashed line."""
    highs = [interval[1] for interval in intervals if interval]
    top = max([value for _, value in rows if value is not None] + highs + [reference, 1e-12]) * 1.02
    room, parts = WIDTH - 52, []
    for place, ((name, value), interval) in enumerate(zip(rows, intervals, strict=True)):
        y = 14 + place * 36
        parts.append(text(0, y, _short(name, 56)))
        if value is None:
            parts.append(text(4, y + 16, "n/a"))
            continue
        width = max(value, 0) / top * room
        parts.append(f'<rect class="one" x="0" y="{y + 5}" width="{width:.1f}" height="14" rx="2"/>')
        end = width
        if interval:
            low, high = (max(edge, 0) / top * room for edge in interval)
            parts.append(line(low, y + 12, high, y + 12, "ink"))
            end = max(width, high)
        parts.append(text(end + 5, y + 16, f"{value:.2f}{unit}"))
    height = 10 + len(rows) * 36
    x = reference / top * room
    return drawing(title, height, [*parts, line(x, 18, x, height - 4, "dash")])


def depth_lines(title: str, series: Sequence[tuple[str, Sequence[Number | None]]]) -> str:
    """Acceptance by depth, a line for each run, at most COLOURS of them, with a legend below."""
    series = [(name, list(values)) for name, values in series if values][:COLOURS]
    depths = max((len(values) for _, values in series), default=1)
    bottom, left, right = 170, 30, WIDTH - 12
    step = (right - left) / max(depths - 1, 1)
    parts = []
    for tick in (0, 0.25, 0.5, 0.75, 1.0):
        y = bottom - tick * 150
        parts += [line(left, y, right, y, "grid"), text(left - 4, y + 4, f"{tick:g}", "end")]
    parts += [text(left + depth * step, bottom + 15, str(depth + 1), "middle") for depth in range(depths)]
    for place, (name, values) in enumerate(series):
        points = [(left + d * step, bottom - value * 150) for d, value in enumerate(values) if value is not None]
        drawn = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline class="c{place}" points="{drawn}"><title>{escape(name)}</title></polyline>')
        parts += [f'<circle class="c{place}" cx="{x:.1f}" cy="{y:.1f}" r="3"/>' for x, y in points]
    parts.append(text((left + right) / 2, bottom + 30, "depth", "middle"))
    legend = "".join(f'<span><i class="c{place}"></i>{escape(name)}</span>' for place, (name, _) in enumerate(series))
    return drawing(title, bottom + 36, parts, f'<p class="legend">{legend}</p>')


def scatter(
    title: str,
    points: Sequence[Point],
    *,
    across: str,
    up: str,
    front: Sequence[int],
    rays: Sequence[Number] = (),
    log: bool = False,
) -> str:
    """Points with their labels, and a dashed line through those on the Pareto front, cheapest first (`front`: their
    places). rays: lines of equal up / across from the origin, labelled with it. log: the horizontal axis is one."""
    left, right, top, bottom = 40, WIDTH - 14, 10, 190
    low_x, high_x = _range([x for _, x, _ in points], log=log)
    low_y, high_y = _range([y for *_, y in points])

    def along(x: Number) -> float:
        share = math.log(x / low_x) / math.log(high_x / low_x) if log else (x - low_x) / (high_x - low_x)
        return left + share * (right - left)

    def above(y: Number) -> float:
        return bottom - (y - low_y) / (high_y - low_y) * (bottom - top)

    parts = []
    for share in (0, 0.25, 0.5, 0.75, 1.0):
        y = low_y + share * (high_y - low_y)
        x = low_x * (high_x / low_x) ** share if log else low_x + share * (high_x - low_x)
        parts += [line(left, above(y), right, above(y), "grid"), text(left - 4, above(y) + 4, f"{y:.2f}", "end")]
        parts.append(text(along(x), bottom + 15, _tick(x), "middle" if 0 < share < 1 else "end" if share else "start"))
    parts.append(text((left + right) / 2, bottom + 30, across, "middle"))
    for slope in rays:
        ends = [(x, slope * x) for x in (max(low_x, low_y / slope), min(high_x, high_y / slope))]
        if ends[0][0] < ends[1][0]:
            (x1, y1), (x2, y2) = [(along(x), above(y)) for x, y in ends]
            parts += [line(x1, y1, x2, y2, "ray"), text(x2 - 3, max(y2 + 12, top + 12), f"{slope:g}×", "end")]
    ordered = [points[place] for place in front]
    for (_, x1, y1), (_, x2, y2) in zip(ordered, ordered[1:], strict=False):
        parts.append(line(along(x1), above(y1), along(x2), above(y2), "dash"))
    for place, (label, x, y) in enumerate(points):
        kind = "one" if place in front else "four"
        parts.append(f'<circle class="{kind}" cx="{along(x):.1f}" cy="{above(y):.1f}" r="4"/>')
        parts.append(text(along(x) + 6, above(y) - 4, label))
    return drawing(f"{title}: {up} against {across}", bottom + 36, parts)


def _range(values: Sequence[Number], *, log: bool = False) -> tuple[float, float]:
    """A little more than the values take."""
    low, high = min(values), max(values)
    if log:
        return low / 1.25, high * 1.25
    margin = (high - low) * 0.12 or abs(high) * 0.1 or 1.0
    return low - margin, high + margin


def _tick(value: Number) -> str:
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:.3g}"


def _short(name: str, length: int) -> str:
    return name if len(name) <= length else f"{name[: length - 1]}…"
