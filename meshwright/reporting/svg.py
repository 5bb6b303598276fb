"""Drawings that fit any width: lengths along x are percentages, text keeps its size.

Plain numbers in, text of SVG out. Every mark has the class `mark` and is one datum, or a line whose points are. Knows
nothing of runs.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

_ROW, _BAR, _LINE = 22, 12, 18
# Characters of a line that fit a phone's width.
_MOST_CHARACTERS = 48
_PLOT, _TOP, _BOTTOM = 150, 18, 34


@dataclass(frozen=True)
class Bar:
    """One bar: its CSS class (which is its colour), its length, and its text."""

    kind: str
    value: float
    text: str


@dataclass(frozen=True)
class Box:
    """One box of a row over time: CSS class, from where to where, and its text."""

    kind: str
    start: float
    end: float
    text: str


def bars(groups: Mapping[str, Sequence[Bar]], *, label: str) -> str:
    """Groups of horizontal bars over a common scale, each group's name above its bars; a bar of nothing has no mark.

    Args:
        groups: name to bars; their texts stand in the name's line, or below it where a phone has no room for both.
        label: what the picture shows, for those who hear it.
    """
    largest = max((bar.value for group in groups.values() for bar in group), default=0.0) or 1.0
    values = {name: " / ".join(bar.text for bar in group) for name, group in groups.items()}
    # In all lines of a picture values stand alike.
    below = any(len(name) + len(text) > _MOST_CHARACTERS for name, text in values.items())
    parts, y = [], 0
    for name, group in groups.items():
        lines = textwrap.wrap(name, _MOST_CHARACTERS) or [""]
        for number, line in enumerate(lines):
            parts.append(f'<text x="0" y="{y + number * _LINE + 14}">{escape(line)}</text>')
        y += (len(lines) - 1 + below) * _LINE
        parts.append(f'<text x="100%" y="{y + 14}" text-anchor="end">{escape(values[name])}</text>')
        y += _ROW - 2
        for bar in _shown(group):
            width = 100 * bar.value / largest
            parts.append(
                f'<rect class="mark {bar.kind}" x="0" y="{y}" width="{width:.4f}%" height="{_BAR}">'
                f"<title>{escape(f'{name}: {bar.text}')}</title></rect>"
            )
            y += _BAR + 2
        y += 8
    return _frame(parts, y, label)


def count_bars(groups: Mapping[str, Sequence[Bar]]) -> int:
    """Marks that `bars` draws."""
    return sum(len(_shown(group)) for group in groups.values())


def _shown(group: Sequence[Bar]) -> list[Bar]:
    return [bar for bar in group if bar.value > 0]


def curve(
    line: Sequence[tuple[float, float]], *, label: str, points: Sequence[tuple[float, float]] = ()
) -> str:
    """A line over steps from its lowest to its highest value, and single points on the same scale.

    A line of one step is a point.

    Args:
        line: (x, y), x rising; not empty.
        label: what the picture shows, for those who hear it.
        points: (x, y) drawn as circles.
    """
    everything = [*line, *points]
    left, right = min(x for x, _ in everything), max(x for x, _ in everything)
    low, high = min(y for _, y in everything), max(y for _, y in everything)

    def place(x: float, y: float) -> tuple[float, float]:
        across = (x - left) / (right - left) if right > left else 0.5
        up = (y - low) / (high - low) if high > low else 0.5
        return across, _TOP + (1 - up) * _PLOT

    placed = [place(x, y) for x, y in line]
    text = " ".join(f"{across * 1000:.1f},{y - _TOP:.1f}" for across, y in placed)
    parts = [
        f'<line class="grid" x1="0" x2="100%" y1="{y}" y2="{y}"/>'
        for y in (_TOP, _TOP + _PLOT / 2, _TOP + _PLOT)
    ]
    if len(line) > 1:
        parts.append(
            f'<svg x="0" y="{_TOP}" width="100%" height="{_PLOT}" viewBox="0 0 1000 {_PLOT}" '
            f'preserveAspectRatio="none" overflow="visible"><polyline class="mark line" points="{text}"/></svg>'
        )
    singles = [
        *((x, y, "measured") for x, y in line[: len(line) == 1]),
        *((x, y, "point") for x, y in points),
    ]
    for x, y, kind in singles:
        across, down = place(x, y)
        title = f"<title>{escape(f'step {x:g}: {y:.4g}')}</title>"
        parts.append(
            f'<circle class="mark {kind}" cx="{100 * across:.2f}%" cy="{down:.1f}" r="4">{title}</circle>'
        )
    bottom = _TOP + _PLOT
    heights = [(_TOP - 5, high), (bottom + 13, low)] if high > low else [(_TOP + _PLOT / 2 - 5, low)]
    parts += [f'<text class="tick" x="0" y="{y:g}">{_number(value)}</text>' for y, value in heights]
    parts.append(f'<text class="tick" x="0" y="{bottom + 28}">step {left:g}</text>')
    parts.append(f'<text class="tick" x="100%" y="{bottom + 28}" text-anchor="end">step {right:g}</text>')
    return _frame(parts, bottom + _BOTTOM, label)


def rows_over_time(rows: Mapping[str, Sequence[Box]], *, label: str) -> str:
    """Boxes over a common time, a row each; their names stand above the rows."""
    end = max(box.end for boxes in rows.values() for box in boxes)
    parts, y = [], 0
    for name, boxes in rows.items():
        parts.append(f'<text class="tick" x="0" y="{y + 12}">{escape(name)}</text>')
        for box in boxes:
            left, width = 100 * box.start / end, 100 * (box.end - box.start) / end
            parts.append(
                f'<rect class="mark box {box.kind}" x="{left:.3f}%" y="{y + 16}" width="{width:.3f}%" height="16">'
                f"<title>{escape(box.text)}</title></rect>"
            )
        y += 38
    return _frame(parts, y, label)


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _frame(parts: Sequence[str], height: float, label: str) -> str:
    body = "\n".join(parts)
    size = f'width="100%" height="{height:g}" overflow="visible"'
    return f'<svg role="img" aria-label="{escape(label)}" {size}>\n{body}\n</svg>'
