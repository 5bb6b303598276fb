"""What a search has found so far, and what could still change its answer.

Owns the three things that are wanted: the fastest layouts of the best meshes, the front of time and memory, and the
fastest layout that training runs today. Must not know how anything is priced: it is told seconds and bytes, or bounds.
"""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass

from meshwright.simulation.job import Layout

Mesh = tuple[int, int, int, int]


@dataclass(frozen=True)
class Priced:
    """Attributes: a layout, seconds of its step, bytes of its fullest rank."""

    layout: Layout
    seconds: float
    bytes: float

    @property
    def order(self) -> tuple[float, ...]:
        """Faster first, then smaller, then fewer ways of cutting."""
        own = self.layout
        return (
            self.seconds,
            self.bytes,
            own.pp,
            own.tp,
            own.cp,
            own.zero,
            own.shard,
            -own.micro_batch,
            own.chunks,
            # Without these two a tie would be decided by the order of the space.
            own.pipeline_inside,
            own.half_layers,
        )


@dataclass(frozen=True)
class Bound:
    """What is known of layouts before they are priced.

    Attributes:
        mesh: their degrees.
        seconds: none of them has less.
        is_beaten: whether another layout is never worse than any of them, so that only training may want them.
        may_run: whether training may run some of them today.
    """

    mesh: Mesh
    seconds: float
    is_beaten: bool = False
    may_run: bool = False


def mesh_of(layout: Layout) -> Mesh:
    """Its degrees."""
    return layout.tp, layout.pp, layout.cp, layout.dp


class Standing:
    """The best so far."""

    def __init__(self, *, slack: float, num_meshes: int, wants_ready: bool) -> None:
        """Start with nothing.

        Args:
            slack: the front reaches to this factor of the best's time.
            num_meshes: how many meshes are wanted with their fastest layouts.
            wants_ready: whether the fastest layout that training runs is wanted.
        """
        self._slack = slack
        self._num_meshes = num_meshes
        self._wants_ready = wants_ready
        self._meshes: dict[Mesh, Priced] = {}
        self._front: list[Priced] = []  # in their order, each with fewer bytes than the one before
        self._last = math.inf  # seconds of the slowest mesh that is wanted
        self.best: Priced | None = None
        self.ready: Priced | None = None

    @property
    def limit(self) -> float:
        """Seconds to which the front reaches."""
        return self.best.seconds * self._slack if self.best else math.inf

    @property
    def last(self) -> float:
        """Seconds beyond which nothing is wanted."""
        return max(self.limit, self._last, self._ready_limit)

    @property
    def _ready_limit(self) -> float:
        if not self._wants_ready:
            return -math.inf
        return self.ready.seconds if self.ready else math.inf

    def may_matter(self, bound: Bound, seconds: float, num_bytes: float) -> bool:
        """Whether a layout could be part of the answer. Where in doubt, it could.

        Args:
            bound: of the group that it is of.
            seconds, num_bytes: it has no less.
        """
        if bound.may_run and seconds <= self._ready_limit:
            return True
        if bound.is_beaten:
            return False
        if seconds <= self._last:
            known = self._meshes.get(bound.mesh)
            if known is None or seconds <= known.seconds:
                return True
        # The front: whatever is faster must not be as small.
        at = bisect.bisect_left(self._front, seconds, key=lambda item: item.seconds)
        return seconds <= self.limit and (at == 0 or self._front[at - 1].bytes > num_bytes)

    def add(self, item: Priced, *, is_beaten: bool, runs: bool) -> None:
        """Take up a layout that fits."""
        if runs and self._wants_ready and (self.ready is None or item.order < self.ready.order):
            self.ready = item
        if is_beaten:
            return
        if self.best is None or item.order < self.best.order:
            self.best = item
        self._add_to_mesh(item)
        self._add_to_front(item)

    def _add_to_mesh(self, item: Priced) -> None:
        mesh = mesh_of(item.layout)
        known = self._meshes.get(mesh)
        if known is None or item.order < known.order:
            self._meshes[mesh] = item
            times = sorted(other.seconds for other in self._meshes.values())
            self._last = times[self._num_meshes - 1] if len(times) >= self._num_meshes else math.inf

    def _add_to_front(self, item: Priced) -> None:
        at = bisect.bisect_left(self._front, item.order, key=lambda other: other.order)
        if at and self._front[at - 1].bytes <= item.bytes:
            return
        end = at
        while end < len(self._front) and self._front[end].bytes >= item.bytes:
            end += 1
        self._front[at:end] = [item]

    def by_mesh(self) -> tuple[Priced, ...]:
        """Of the best meshes their fastest layouts, best first."""
        found = sorted(self._meshes.values(), key=lambda item: item.order)
        return tuple(found[: self._num_meshes])

    def front(self) -> tuple[Priced, ...]:
        """No other layout has less time and less memory; fastest first."""
        return tuple(item for item in self._front if item.seconds <= self.limit)
