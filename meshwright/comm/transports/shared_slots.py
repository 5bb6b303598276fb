"""Slots: memory through which a tensor goes piece by piece to ranks that cannot read it in place.

What a rank writes into its slot before a barrier all may read after it, until their next one. Knows nothing of sums.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.comm.transports.shared_barrier import Barrier

# A piece that goes through a slot: large enough to hide a barrier, small enough to stay in the cache.
SLOT_BYTES = 512 << 10
# All slots. Pieces of one tensor go through two in turn, or through so many smaller ones that a slot has left the
# reader's cache before it is written again: writing what another core still holds takes long where cores share no
# cache. Which is faster is measured, for a virtual core may move.
ALL_SLOTS_BYTES = 48 << 20
_TRY_EVERY = 16
_KEPT_VIEWS = 512


@dataclass(frozen=True)
class Neighbour:
    """What this rank knows of a rank of the group, itself included.

    Attributes:
        rank: its global rank.
        words: its control segment.
        slots: memory that all can read, cut into slots; even ones are for one turn, odd ones for the other.
    """

    rank: int
    words: memoryview
    slots: Tensor


@dataclass(frozen=True)
class _Views:
    """Slots of all ranks, as tensors of one size and type.

    Attributes:
        stop: where they end, in bytes.
        shown: each rank's, whole.
        own_blocks: this rank's, a row for each rank.
        for_me: each rank's row for this one.
    """

    stop: int
    shown: list[Tensor]
    own_blocks: Tensor | None
    for_me: list[Tensor]


class Route:
    """Whether the pieces of a tensor go through two slots (0) or all of them (1): what has taken less time so far."""

    def __init__(self) -> None:
        self._seconds_per_byte: list[float | None] = [None, None]
        self._num_tensors = 0

    def choose(self) -> int:
        """For the next tensor; now and then the other one, to see."""
        few, many = self._seconds_per_byte
        if few is None or many is None:
            return int(few is not None)
        self._num_tensors += 1
        best = int(many < few)
        return best if self._num_tensors % _TRY_EVERY else 1 - best

    def note(self, route: int, seconds_per_byte: float) -> None:
        """What writing a piece into a slot took; a piece that was interrupted counts little."""
        before = self._seconds_per_byte[route] or seconds_per_byte
        self._seconds_per_byte[route] = before + (min(seconds_per_byte, 4 * before) - before) / 8


class Slots:
    """The slots of a group's ranks.

    Args:
        index: this rank's position in the group.
        neighbours: all ranks of the group.
        barrier: of the group.

    Attributes:
        route: how the pieces of the present tensor go, see `Route`; all ranks set the same.
        routes: what this rank would have.
        written_bytes: how much of this rank's slots has been written so far.
    """

    def __init__(self, index: int, neighbours: Sequence[Neighbour], barrier: Barrier) -> None:
        self._index = index
        self._neighbours = neighbours
        self._size = len(neighbours)
        self._barrier = barrier
        self._views: dict[tuple[int, torch.dtype, int], _Views] = {}
        self.route = 0
        self.routes = Route()
        self.written_bytes = 0
        self._has_grown = False

    def begin(self, route: int) -> None:
        """The next tensor goes this way."""
        self.route = route
        self._has_grown = False

    @property
    def slot_bytes(self) -> int:
        """Of one slot."""
        return SLOT_BYTES >> self.route

    def fits(self, tensor: Tensor) -> bool:
        """Whether `tensor` is one piece."""
        return tensor.numel() * tensor.element_size() <= self.slot_bytes

    def pieces(self, flat: Tensor) -> Sequence[Tensor]:
        """Cuts of a flat tensor that fit into a slot; none of an empty one."""
        if not flat.numel():
            return ()
        return (flat,) if self.fits(flat) else flat.split(self.slot_bytes // flat.element_size())

    def columns(self, blocks: Tensor) -> list[slice]:
        """Cuts of blocks (ranks x numel), such that one cut of all of them fits into a slot."""
        numel = blocks.shape[1]
        step = self.slot_bytes // blocks.element_size() // self._size
        return [slice(start, min(start + step, numel)) for start in range(0, numel, step)]

    def shown(self, numel: int, dtype: torch.dtype, number: int) -> list[Tensor]:
        """Every rank's slot of this turn for piece `number` of a tensor."""
        return self._of(numel, dtype, number).shown

    def exchange(self, piece: Tensor, call: int, number: int = 0) -> list[Tensor]:
        """Show `piece` to all; every rank's, readable until the next barrier."""
        views = self._of(piece.numel(), piece.dtype, number)
        self._write(views, views.shown[self._index], piece, number)
        self._barrier.meet(call)
        return views.shown

    def exchange_blocks(self, blocks: Tensor, call: int, number: int = 0) -> list[Tensor]:
        """Show block j of `blocks` (ranks x numel) to rank j; what every rank shows to this one."""
        views = self._of(blocks.numel(), blocks.dtype, number)
        assert views.own_blocks is not None, "as many elements for each rank"
        self._write(views, views.own_blocks, blocks, number)
        self._barrier.meet(call)
        return views.for_me

    def _of(self, numel: int, dtype: torch.dtype, number: int) -> _Views:
        start = (2 * number * self.route + self._barrier.turn) * self.slot_bytes % ALL_SLOTS_BYTES
        key = (start, dtype, numel)
        views = self._views.get(key)
        if views is None:
            stop = start + numel * dtype.itemsize
            shown = [neighbour.slots[start:stop].view(dtype) for neighbour in self._neighbours]
            has_blocks = numel % self._size == 0
            blocks = [slot.view(self._size, -1) for slot in shown] if has_blocks else []
            own = blocks[self._index] if has_blocks else None
            views = _Views(stop, shown, own, for_me=[block[self._index] for block in blocks])
            if len(self._views) >= _KEPT_VIEWS:
                self._views.clear()
            self._views[key] = views
        return views

    def _write(self, views: _Views, slot: Tensor, piece: Tensor, number: int) -> None:
        """Copy a piece into this rank's slot; where it was used before, that tells how long a route takes."""
        start = time.perf_counter()
        slot.copy_(piece)
        if views.stop > self.written_bytes:
            self.written_bytes, self._has_grown = views.stop, True
        elif number > 1 and not self._has_grown:  # memory that nobody has touched yet costs more
            self.routes.note(self.route, (time.perf_counter() - start) / piece.nbytes)
