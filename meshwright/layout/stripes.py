"""Runs of a flat tensor that repeat at one distance, as few values: how a rank's part of a matrix lies in the whole.

Owns the compression, and the check that such parts cover a tensor once. Knows nothing of what is stored. No torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

# (first in the whole, first in local memory, one past the last there).
Run = tuple[int, int, int]


@dataclass(frozen=True)
class Stripe:
    """`count` runs of `length` consecutive elements.

    Attributes:
        start: flat place of the first element in the whole tensor.
        length: elements of a run.
        count: of runs.
        stride: from run to run in the whole tensor; 0 for one run.
        offset: flat place of the first element in local memory.
        local_stride: from run to run there; 0 for one run.
    """

    start: int
    length: int
    count: int = 1
    stride: int = 0
    offset: int = 0
    local_stride: int = 0

    @property
    def stop(self) -> int:
        """One past the last element in the whole tensor."""
        return self.start + (self.count - 1) * self.stride + self.length


def stripes_of(runs: Sequence[Run], *, period: int = 1) -> list[Stripe]:
    """All of `runs`, put together where every `period`-th has one length and one distance from the last."""
    return [stripe for number in range(period) for stripe in _joined(runs[number::period])]


def _joined(runs: Iterable[Run]) -> Iterable[Stripe]:
    last: Stripe | None = None
    for start, low, high in runs:
        joined = None if last is None else _with_run(last, start, low, high - low)
        if last is not None and joined is None:
            yield last
        last = joined or Stripe(start, high - low, offset=low)
    if last is not None:
        yield last


def _with_run(last: Stripe, start: int, low: int, length: int) -> Stripe | None:
    """`last` with one run more; None where it does not fit."""
    if length != last.length:
        return None
    if last.count == 1:
        stride, local = start - last.start, low - last.offset
        if stride < length:
            return None
        return Stripe(last.start, length, 2, stride, last.offset, local)
    places = (last.start + last.count * last.stride, last.offset + last.count * last.local_stride)
    if (start, low) != places:
        return None
    return Stripe(last.start, length, last.count + 1, last.stride, last.offset, last.local_stride)


def wrong_cover(stripes: Iterable[Stripe], numel: int) -> str:
    """What is wrong with stripes that should hold each of `numel` elements once: a gap, an overlap, or nothing.

    All stripes of several runs have one stride, the width of the matrix whose columns are cut.
    """
    stripes = list(stripes)
    width = max((stripe.stride for stripe in stripes), default=0) or max(numel, 1)
    rectangles = sorted(rectangle for stripe in stripes for rectangle in _rectangles(stripe, width))
    rows = sorted({row for top, bottom, *_ in rectangles for row in (top, bottom)})
    end, place, active = 0, 0, []
    for top, bottom in pairwise(rows):
        while place < len(rectangles) and rectangles[place][0] == top:
            active.append(rectangles[place])
            place += 1
        active = [rectangle for rectangle in active if rectangle[1] > top]
        for _, _, left, right in sorted(active, key=lambda rectangle: rectangle[2]):
            start = top * width + left
            if start != end:
                what = "missing" if start > end else "there twice"
                return f"elements {min(end, start)} to {max(end, start)} are {what}"
            end = top * width + right
        if active and end == (top + 1) * width:
            end = bottom * width
        elif bottom - top > 1:
            return f"elements {end} to {(top + 1) * width} are missing"
    return "" if end == numel else f"elements {end} to {numel} are missing"


def _rectangles(stripe: Stripe, width: int) -> Iterable[tuple[int, int, int, int]]:
    """(first row, end row, first column, end column) of a matrix of `width` columns."""
    if stripe.count > 1:
        row, column = divmod(stripe.start, width)
        assert stripe.stride == width, f"runs {stripe.stride} apart in a tensor of rows of {width}"
        assert column + stripe.length <= width, f"a run at column {column} leaves its row"
        yield row, row + stripe.count, column, column + stripe.length
        return
    start, stop = stripe.start, stripe.stop
    while start < stop:
        row, column = divmod(start, width)
        if column or stop - start < width:  # a part of a row
            end = min(stop, (row + 1) * width)
            yield row, row + 1, column, column + end - start
        else:
            end = stop - stop % width
            yield row, end // width, 0, width
        start = end
