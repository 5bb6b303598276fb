"""One product y = x·w on several ranks, four ways, as plain data and as pictures: who holds which block of what.

`data` cuts the rows of x, `column` the columns of w, `row` the rows of w with the columns of x, `hybrid` the rows of x
and the columns of w. No torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from meshwright.errors import ConfigError
from meshwright.layout.tensor_layout import even_sizes

WAYS = ("data", "column", "row", "hybrid")
# (first, one past the last) of rows and of columns.
Range = tuple[int, int]
# Sizes of the SVG in pixels.
_CELL, _GAP, _TOP, _LEFT = 30, 60, 60, 12
_COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2", "#e45756", "#72b7b2", "#eeca3b", "#9d755d")


@dataclass(frozen=True)
class Share:
    """One rank's part: rows and inner columns of x, columns of w."""

    rows: Range
    inner: Range
    columns: Range

    def describe(self) -> str:
        """Its three blocks."""
        rows, inner, columns = (stop - start for start, stop in (self.rows, self.inner, self.columns))
        return f"x {rows} x {inner} · w {inner} x {columns} = {rows} x {columns}"


@dataclass(frozen=True)
class Product:
    """A product on ranks.

    Attributes:
        way: one of `WAYS`.
        rows: of x.
        inner: columns of x, rows of w.
        columns: of w.
        shares: of each rank.
    """

    way: str
    rows: int
    inner: int
    columns: int
    shares: tuple[Share, ...]

    @property
    def sums(self) -> bool:
        """Whether each output is a sum over ranks."""
        return self.way == "row"

    def exchange(self) -> list[str]:
        """What travels, forward and backward."""
        forward = {
            "data": "nothing",
            "column": "all-gather y, where what follows needs all of it",
            "row": "all-reduce y",
            "hybrid": "all-gather y over the columns, where what follows needs all of it",
        }
        x_grad = {
            "data": "nothing",
            "column": "all-reduce",
            "row": "nothing",
            "hybrid": "all-reduce over the columns",
        }
        w_grad = {
            "data": "all-reduce",
            "column": "nothing",
            "row": "nothing",
            "hybrid": "all-reduce over the rows",
        }
        return [
            f"forward   {forward[self.way]}",
            f"backward  x_grad: {x_grad[self.way]} · w_grad: {w_grad[self.way]}",
        ]


def make_product(way: str, num_ranks: int, *, rows: int = 4, inner: int = 5, columns: int = 8) -> Product:
    """Spread x (rows, inner) · w (inner, columns) over ranks; `hybrid` on a square number of them.

    Raises:
        ConfigError: E109 for another way, or where a rank would have nothing.
    """
    if way not in WAYS:
        raise ConfigError("E109", f"--matmul {way!r} is neither of {', '.join(WAYS)}")
    side = math.isqrt(num_ranks)
    if way == "hybrid" and (side * side != num_ranks or num_ranks < 1):
        raise ConfigError(
            "E109", f"--matmul hybrid --ranks {num_ranks}: needs a square number of ranks, e.g. 4"
        )
    cuts = {"data": (num_ranks, 1, 1), "row": (1, num_ranks, 1), "column": (1, 1, num_ranks)}
    parts = cuts.get(way, (side, 1, side))
    if any(not 1 <= count <= size for count, size in zip(parts, (rows, inner, columns), strict=True)):
        raise ConfigError(
            "E109",
            f"--matmul {way} --ranks {num_ranks}: x is {rows} x {inner} and w {inner} x {columns}, so a rank would "
            f"have nothing. Take fewer ranks, e.g. --ranks 2",
        )
    ranges = [_ranges(size, count) for size, count in zip((rows, inner, columns), parts, strict=True)]
    shares = tuple(Share(r, i, c) for r in ranges[0] for i in ranges[1] for c in ranges[2])
    return Product(way, rows, inner, columns, shares)


def _ranges(size: int, count: int) -> list[Range]:
    sizes = even_sizes(size, count)
    return [(sum(sizes[:i]), sum(sizes[: i + 1])) for i in range(count)]


Holders = list[list[tuple[int, ...]]]


def _holders(
    num_rows: int, num_columns: int, shares: Sequence[Share], of: Callable[[Share], tuple[Range, Range]]
) -> Holders:
    """Ranks that hold each element of a matrix."""
    held = [(number, *of(share)) for number, share in enumerate(shares)]
    return [
        [
            tuple(n for n, rows, columns in held if rows[0] <= i < rows[1] and columns[0] <= j < columns[1])
            for j in range(num_columns)
        ]
        for i in range(num_rows)
    ]


def _matrices(product: Product) -> list[tuple[str, Holders]]:
    rows, inner, columns, shares = product.rows, product.inner, product.columns, product.shares
    return [
        (f"x {rows} x {inner}", _holders(rows, inner, shares, lambda s: (s.rows, s.inner))),
        (f"w {inner} x {columns}", _holders(inner, columns, shares, lambda s: (s.inner, s.columns))),
        (f"y {rows} x {columns}", _holders(rows, columns, shares, lambda s: (s.rows, s.columns))),
    ]


def _label(product: Product, matrix: int, ranks: tuple[int, ...]) -> str:
    if matrix == 2 and product.sums:
        return "Σ"
    return "*" if len(ranks) == len(product.shares) > 1 else "".join(map(str, ranks))


def as_text(product: Product) -> str:
    """Each element with the ranks that hold it (* all, Σ a sum over all), each rank's blocks, and what travels."""
    grids = []
    for number, (title, holders) in enumerate(_matrices(product)):
        width = max(len(_label(product, number, ranks)) for row in holders for ranks in row)
        lines = [" ".join(f"{_label(product, number, ranks):<{width}}" for ranks in row) for row in holders]
        size = max(len(title), *map(len, lines))
        grids.append([f"{line:<{size}}" for line in (title, *lines)])
    height = max(map(len, grids))
    for grid in grids:
        grid += [" " * len(grid[0])] * (height - len(grid))
    blocks = [f"rank {number}  {share.describe()}" for number, share in enumerate(product.shares)]
    picture = ["   ".join(parts).rstrip() for parts in zip(*grids, strict=True)]
    return "\n".join(
        [f"y = x·w on {len(product.shares)} ranks, {product.way}", *picture, *blocks, *product.exchange()]
    )


def as_svg(product: Product) -> str:
    """The three matrices side by side, a colour a rank; grey is held by several."""
    matrices = _matrices(product)
    width = _LEFT * 2 + sum(len(holders[0]) * _CELL + _GAP for _, holders in matrices)
    height = _TOP + max(len(holders) for _, holders in matrices) * _CELL + 60
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="{_LEFT}" y="20" font-size="14">y = x·w on {len(product.shares)} ranks, {product.way}</text>',
    ]
    left = _LEFT
    for number, (title, holders) in enumerate(matrices):
        parts.append(f'<text x="{left}" y="{_TOP - 10}">{title}</text>')
        for i, row in enumerate(holders):
            for j, ranks in enumerate(row):
                colour = _COLOURS[ranks[0] % len(_COLOURS)] if len(ranks) == 1 else "#dddddd"
                x, y = left + j * _CELL, _TOP + i * _CELL
                parts.append(
                    f'<rect x="{x}" y="{y}" width="{_CELL - 2}" height="{_CELL - 2}" fill="{colour}"/>'
                    f'<text x="{x + _CELL / 2 - 1:.0f}" y="{y + 18}" text-anchor="middle">'
                    f"{_label(product, number, ranks)}</text>"
                )
        left += len(holders[0]) * _CELL + _GAP
    for number, line in enumerate(product.exchange()):
        parts.append(f'<text x="{_LEFT}" y="{height - 36 + 18 * number}">{escape(line)}</text>')
    return "\n".join([*parts, "</svg>"])
