"""Which part of a logical tensor a rank holds, as boxes: the one language of shards.

A `Layout` is built from an ordered list of cuts (a mesh axis divides a dim into chunks), from flat ownership (a
rank owns an interval of the flattened local tensor, as ZeRO buckets do), or both. Uneven heads, two axes on one
dim and slices that cross rows are all the same thing: boxes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Box:
    """A rectangular part of a logical tensor and where it lies in the rank's flat local memory.

    Attributes:
        start: first index along each dim of the logical tensor.
        stop: one past the last index along each dim.
        offset: position of the box's first element in the rank's local flat shard.
    """

    start: tuple[int, ...]
    stop: tuple[int, ...]
    offset: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(stop - start for start, stop in zip(self.start, self.stop, strict=True))


@dataclass(frozen=True)
class Cut:
    """Mesh axis `axis` divides dim `dim` into chunks of `sizes` (of what earlier cuts left of that dim).

    With `parts` the dim is so many equal parts after each other, and each of them is divided so: a rank has a chunk of
    the queries, of the keys and of the values of one fused matrix.
    """

    axis: str
    dim: int
    sizes: tuple[int, ...]
    parts: int = 1

    @property
    def extent(self) -> int:
        """Of the dim."""
        return sum(self.sizes) * self.parts

    def chunks(self, index: int) -> list[tuple[int, int]]:
        """[start, stop) in the dim of what rank `index` has, one a part."""
        first, whole = sum(self.sizes[:index]), sum(self.sizes)
        return [
            (part * whole + first, part * whole + first + self.sizes[index]) for part in range(self.parts)
        ]


@dataclass(frozen=True)
class FlatOwnership:
    """Along `axis`, index i owns elements [intervals[i][0], intervals[i][1]) of the flattened local tensor."""

    axis: str
    intervals: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Layout:
    """Where the parts of a logical tensor of `shape` live.

    Attributes:
        shape: of the logical tensor.
        cuts: applied in order; two cuts on one dim nest.
        flat: ownership of the flattened tensor that the cuts leave, or None for all of it.
    """

    shape: tuple[int, ...]
    cuts: tuple[Cut, ...] = ()
    flat: FlatOwnership | None = None

    def boxes(self, coordinates: Mapping[str, int]) -> list[Box]:
        """The boxes that the rank at mesh `coordinates` holds, in order of their local offset."""
        held = [[(0, extent)] for extent in self.shape]
        for cut in self.cuts:
            index = coordinates.get(cut.axis, 0)
            assert cut.extent == _length(held[cut.dim]), (
                f"chunks {cut.sizes} of {cut.axis} do not cover dim {cut.dim} of {self.shape}"
            )
            held[cut.dim] = [
                piece for low, high in cut.chunks(index) for piece in _taken(held[cut.dim], low, high)
            ]
        local_shape = tuple(_length(pieces) for pieces in held)
        first, last = 0, math.prod(local_shape)
        if self.flat is not None:
            first, last = self.flat.intervals[coordinates.get(self.flat.axis, 0)]
        return [
            Box(start, stop, offset - first)
            for low, high, offset in interval_boxes(local_shape, first, last)
            for start, stop, offset in _whole_boxes(held, low, high, offset)
        ]


# [start, stop) of one dim, in order; what a rank holds of it.
_Pieces = list[tuple[int, int]]


def _length(pieces: _Pieces) -> int:
    return sum(stop - start for start, stop in pieces)


def _taken(pieces: _Pieces, low: int, high: int) -> _Pieces:
    """Elements [low, high) of what the pieces hold together, where they are in the whole."""
    found, before = [], 0
    for start, stop in pieces:
        first, last = max(start, start + low - before), min(stop, start + high - before)
        if first < last:
            found.append((first, last))
        before += stop - start
    return found


def _whole_boxes(
    held: list[_Pieces], low: tuple[int, ...], high: tuple[int, ...], offset: int
) -> list[tuple[tuple[int, ...], tuple[int, ...], int]]:
    """A box of the local tensor, consecutive in memory, as boxes of the whole (start, stop, flat offset).

    Where a dim is held in several pieces, a box has one piece, and one index of each dim before it.
    """
    taken = [_taken(pieces, first, last) for pieces, first, last in zip(held, low, high, strict=True)]
    broken = max((dim for dim, pieces in enumerate(taken) if len(pieces) > 1), default=-1)
    choices = [
        [(i, i + 1) for start, stop in pieces for i in range(start, stop)] if dim < broken else pieces
        for dim, pieces in enumerate(taken)
    ]
    boxes = []
    for chosen in itertools.product(*choices):
        start, stop = tuple(first for first, _ in chosen), tuple(last for _, last in chosen)
        boxes.append((start, stop, offset))
        offset += math.prod(last - first for first, last in chosen)
    return boxes


def interval_boxes(
    shape: tuple[int, ...], first: int, last: int
) -> list[tuple[tuple[int, ...], tuple[int, ...], int]]:
    """Cut the flat interval [first, last) of a row-major tensor into boxes (start, stop, flat offset).

    At most 2·ndim - 1 of them: a part row, whole rows, a part row, for each dim.
    """
    if first >= last:
        return []
    if not shape:
        return [((), (), 0)]
    row = math.prod(shape[1:])
    head, tail = -(-first // row), last // row
    if head > tail:  # inside one row
        return _prefixed(tail, interval_boxes(shape[1:], first - tail * row, last - tail * row), tail * row)
    boxes = []
    if first < head * row:
        boxes += _prefixed(
            head - 1, interval_boxes(shape[1:], first - (head - 1) * row, row), (head - 1) * row
        )
    if head < tail:
        boxes.append(((head, *itertools.repeat(0, len(shape) - 1)), (tail, *shape[1:]), head * row))
    if tail * row < last:
        boxes += _prefixed(tail, interval_boxes(shape[1:], 0, last - tail * row), tail * row)
    return boxes


def _prefixed(
    index: int, boxes: list[tuple[tuple[int, ...], tuple[int, ...], int]], base: int
) -> list[tuple[tuple[int, ...], tuple[int, ...], int]]:
    return [((index, *low), (index + 1, *high), base + offset) for low, high, offset in boxes]
