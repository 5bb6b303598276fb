"""Dims of tensors as products of axes: which dims of a graph go together, found by what its operations do.

An axis is a number of things (heads, channels, words) that runs through a graph. A dim is a sequence of axes, outermost
first: the outputs of a fused projection are (3, heads, width). An axis is split where a view splits a dim, and two
become one where an operation takes their indices for the same. Owns this bookkeeping; knows no operations.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

# A dim: axes, outermost first; those of a dim of extent 1 are none.
Dim = tuple[int, ...]


class Axes:
    """All axes of a graph; numbers that were handed out stay valid while axes are split and united."""

    def __init__(self) -> None:
        self._sizes: list[int] = []
        self._same: list[int] = []
        self._inner: dict[int, Dim] = {}

    def make(self, size: int) -> Dim:
        """A dim of a new axis."""
        if size == 1:
            return ()
        self._sizes.append(size)
        self._same.append(len(self._same))
        return (len(self._same) - 1,)

    def leaves(self, dim: Iterable[int]) -> Dim:
        """A dim in terms of the axes that are not split further."""
        found: list[int] = []
        for axis in dim:
            root = self._root(axis)
            inner = self._inner.get(root)
            found += (root,) if inner is None else self.leaves(inner)
        return tuple(found)

    def extent(self, dim: Iterable[int]) -> int:
        """Elements of a dim."""
        return math.prod(self._sizes[self._root(axis)] for axis in dim)

    def unite(self, left: Dim, right: Dim) -> bool:
        """Two dims of one extent have the same indices. False: they are divided in ways that do not fit."""
        queues = [list(self.leaves(dim)) for dim in (left, right)]
        while queues[0] and queues[1]:
            first, second = queues[0].pop(0), queues[1].pop(0)
            if first == second:
                continue
            a, b = self._sizes[first], self._sizes[second]
            if a == b:
                self._same[second] = first
            elif max(a, b) % min(a, b) == 0:
                # The larger is split: its inner part must go on behind the smaller.
                longer, side = (first, 0) if a > b else (second, 1)
                outer, inner = self._split(longer, max(a, b) // min(a, b))
                other = second if side == 0 else first
                self._same[self._root(other)] = self._root(outer)
                queues[side].insert(0, inner)
            else:
                return False
            # What was split or united may stand in the rest of either side.
            queues = [list(self.leaves(queue)) for queue in queues]
        return not queues[0] and not queues[1]

    def regroup(self, dims: Sequence[Dim], extents: Sequence[int]) -> list[Dim] | None:
        """The same elements, in the same order, as dims of other extents; None where that cuts an axis unevenly."""
        queue = [axis for dim in dims for axis in self.leaves(dim)]
        found: list[Dim] = []
        for extent in extents:
            taken: list[int] = []
            left = extent
            while left > 1:
                if not queue:
                    return None
                axis = queue.pop(0)
                size = self._sizes[axis]
                if left % size == 0:
                    taken.append(axis)
                    left //= size
                elif size % left == 0:
                    outer, inner = self._split(axis, size // left)
                    taken.append(outer)
                    queue = list(self.leaves([inner, *queue]))
                    left = 1
                else:
                    return None
            found.append(tuple(taken))
        return found if not queue else None

    def _split(self, axis: int, inner_size: int) -> tuple[int, int]:
        """An axis as (outer, inner)."""
        root = self._root(axis)
        (outer,), (inner,) = self.make(self._sizes[root] // inner_size), self.make(inner_size)
        self._inner[root] = (outer, inner)
        return outer, inner

    def _root(self, axis: int) -> int:
        while self._same[axis] != axis:
            axis = self._same[axis]
        return axis
