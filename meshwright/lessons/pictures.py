"""Text pictures of lessons: bars, and byte counts for people. Knows nothing of what they show."""

from __future__ import annotations

import math
from collections.abc import Mapping

_WIDTH = 40


def bars(values: Mapping[str, float], *, unit: str = "", digits: int = 0) -> str:
    """One bar a line, the largest value 40 characters wide; a positive value always shows."""
    largest = max(values.values())
    labels = max(map(len, values))
    lines = []
    for label, value in values.items():
        filled = 0 if value <= 0 or largest <= 0 else max(1, round(_WIDTH * value / largest))
        lines.append(f"  {label:<{labels}}  {'█' * filled:<{_WIDTH}}  {value:,.{digits}f} {unit}".rstrip())
    return "\n".join(lines)


def log_bars(values: Mapping[str, float]) -> str:
    """One bar a line over a logarithmic axis of whole decades below; a value of 0 has no place on it, and no bar."""
    exponents = [math.log10(value) for value in values.values() if value > 0]
    low, high = math.floor(min(exponents)), math.ceil(max(exponents))
    high = max(high, low + 1)
    decade, labels, lines = _WIDTH // (high - low), max(map(len, values)), []
    for label, value in values.items():
        filled = max(1, round(decade * (math.log10(value) - low))) if value > 0 else 0
        lines.append(f"  {label:<{labels}}  {'█' * filled:<{_WIDTH}}  {value:.1e}")
    ticks = [f"1e{exponent:03d}" for exponent in range(low, high + 1)]
    lines.append(" " * (labels + 4) + "".join(f"|{'-' * (decade - 1)}" for _ in ticks[1:]) + "|")
    lines.append(" " * (labels + 4) + "".join(f"{tick:<{decade}}" for tick in ticks).rstrip())
    return "\n".join(lines)


def stacked_bytes(rows: Mapping[str, Mapping[str, int]]) -> str:
    """One bar a row, the largest 40 characters wide; a part of it is drawn by its name's first letter."""
    largest, labels = max(sum(parts.values()) for parts in rows.values()), max(map(len, rows))
    lines = []
    for label, parts in rows.items():
        drawn = "".join(name[0] * round(_WIDTH * value / largest) for name, value in parts.items())
        lines.append(f"  {label:<{labels}}  {drawn:<{_WIDTH}}  {sum(parts.values()) / 2**20:,.2f} MiB")
    return "\n".join(lines)
