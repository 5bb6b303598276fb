"""Pictures of an exchange: what each rank holds before, between and after its steps, as text and as SVG.

A chunk is a letter, its rank a digit: `b0` is chunk b of rank 0, `b012` the sum of three ranks' chunk b, `Σb` that of
all, `·` what nobody wrote yet. Knows nothing of where pictures go.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from meshwright.exchange.check import Message, Round, contributions, promised_value, rounds_of
from meshwright.exchange.program import Exchange

_LETTERS = "abcdefghijklmnopqrstuvwxyz"
# Chunks have one letter each: 26 are enough for any algorithm over so many ranks.
MOST_RANKS = 12
# Sizes of the SVG in pixels.
_CELL, _ROW, _GAP, _LEFT, _TOP = 44, 34, 56, 64, 48


def before_and_after(exchange: Exchange) -> str:
    """Blocks per rank before and after the collective, side by side."""
    history = rounds_of(exchange)
    first = [[_label(exchange, held) for held in row] for row in history[0].held]
    last = [
        [_label(exchange, _promised(exchange, rank, chunk)) for chunk in range(exchange.num_chunks)]
        for rank in range(exchange.num_ranks)
    ]
    width = max(len(label) for row in first + last for label in row)
    lines = [
        f"{exchange.collective} over {exchange.num_ranks} ranks ({exchange.algorithm}, {_steps(history)})"
    ]
    for rank, (before, after) in enumerate(zip(first, last, strict=True)):
        blocks = [" ".join(f"{label:<{width}}" for label in row) for row in (before, after)]
        lines.append(f"  {_name(exchange, rank):<9} [{blocks[0]}]  →  [{blocks[1]}]")
    return "\n".join(lines)


def step_by_step(exchange: Exchange) -> str:
    """What arrives in each step, and what every rank holds after it."""
    history = rounds_of(exchange)
    lines = [before_and_after(exchange)]
    for number, now in enumerate(history[1:], 1):
        lines.append(f"step {number}   {', '.join(_message(message) for message in now.messages)}")
        labels = _labels(exchange, now)
        width = max(len(label) for row in labels for label in row)
        for rank, row in enumerate(labels):
            lines.append(f"  {_name(exchange, rank):<9} [{' '.join(f'{label:<{width}}' for label in row)}]")
    return "\n".join(lines)


def as_svg(exchange: Exchange) -> str:
    """One column of blocks a step, and a line from where a chunk leaves to where it arrives."""
    history = rounds_of(exchange)
    column = exchange.num_chunks * _CELL + _GAP
    width, height = _LEFT + len(history) * column, _TOP + exchange.num_ranks * _ROW + 24
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="8" y="18" font-size="14">{escape(_title(exchange, history))}</text>',
    ]
    for rank in range(exchange.num_ranks):
        y = _TOP + rank * _ROW + _ROW / 2
        parts.append(f'<text x="8" y="{y:.0f}">{_name(exchange, rank)}</text>')
    for number, now in enumerate(history):
        x = _LEFT + number * column
        parts.append(
            f'<text x="{x}" y="{_TOP - 8}" fill="#555">{f"step {number}" if number else "start"}</text>'
        )
        from_start = exchange.collective == "all_to_all"  # its messages read the input buffer
        parts += [_line(m, _LEFT if from_start else x - column, x) for m in now.messages]
    for number, now in enumerate(history):  # over the lines
        parts += _cells(exchange, now, _LEFT + number * column)
    return "\n".join([*parts, "</svg>"])


def _cells(exchange: Exchange, now: Round, x: float) -> list[str]:
    changed = {(m.target, c) for m in now.messages for c in range(m.into.first, m.into.stop)}
    parts = []
    for rank, row in enumerate(_labels(exchange, now)):
        for chunk, label in enumerate(row):
            left, top = x + chunk * _CELL, _TOP + rank * _ROW
            share = len(now.held[rank][chunk]) / exchange.num_workers
            frame = 'stroke="#c2410c" stroke-width="2"' if (rank, chunk) in changed else 'stroke="#888"'
            parts.append(
                f'<rect x="{left + 2}" y="{top + 3}" width="{_CELL - 4}" height="{_ROW - 8}" rx="3" fill="#2563eb" '
                f'fill-opacity="{0.75 * share:.2f}" {frame}/>'
                f'<text x="{left + _CELL / 2}" y="{top + _ROW / 2 + 3}" text-anchor="middle">{label}</text>'
            )
    return parts


def _line(message: Message, source_x: float, target_x: float) -> str:
    x1 = source_x + (message.span.first + message.span.stop) / 2 * _CELL
    x2 = target_x + (message.into.first + message.into.stop) / 2 * _CELL
    y1, y2 = (_TOP + rank * _ROW + _ROW / 2 - 1 for rank in (message.source, message.target))
    colour = "#c2410c" if message.adds else "#15803d"
    return f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{colour}" stroke-opacity="0.5"/>'


def _title(exchange: Exchange, history: Sequence[Round]) -> str:
    return (
        f"{exchange.collective} by {exchange.algorithm}, {exchange.num_ranks} ranks, {_steps(history)} "
        f"(orange: added, green: stored)"
    )


def _steps(history: Sequence[Round]) -> str:
    number = len(history) - 1
    return f"{number} step" if number == 1 else f"{number} steps"


def _labels(exchange: Exchange, now: Round) -> list[list[str]]:
    return [[_label(exchange, held) for held in row] for row in now.held]


def _promised(exchange: Exchange, rank: int, chunk: int) -> frozenset[tuple[int, int]]:
    """What a rank has of the collective; other chunks are only working space."""
    value = promised_value(exchange, rank, chunk)
    return frozenset() if value is None else contributions(value)


def _label(exchange: Exchange, held: frozenset[tuple[int, int]]) -> str:
    if not held:
        return "·"
    letter = _LETTERS[min(chunk for _, chunk in held)]
    ranks = sorted(rank for rank, _ in held)
    if len(ranks) == exchange.num_workers > 1:
        return f"Σ{letter}"
    return letter + ("" if exchange.num_ranks <= 10 else "_").join(map(str, ranks))


def _message(message: Message) -> str:
    chunks = "".join(_LETTERS[chunk] for chunk in range(message.span.first, message.span.stop))
    return f"{message.source}→{message.target} {'+' if message.adds else ''}{chunks}"


def _name(exchange: Exchange, rank: int) -> str:
    return f"rank {rank}" if rank < exchange.num_workers else f"server {rank - exchange.num_workers}"
