"""The fastest layouts that fit, by bound and stop, with a certificate.

Groups of layouts (`space.py`) stand in the order of a bound that no layout of theirs can beat: its computation without
recomputation, no bubble, no exchange of gradients. The search prices one group after the other and stops where the
next bound is above what is still wanted; so the best of all is found, and what is left out is certified to be slower.
What is wanted (`standing.py`): the fastest layouts of the best meshes, the front of time and memory up to `slack` times
the best time, and the fastest layout that training runs; a part of the space whose bounds of time and memory change
none of them is not priced.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from meshwright.planner.parts import Parts, least_of
from meshwright.planner.request import Request
from meshwright.planner.rules import refuse_layout
from meshwright.planner.runnable import why_not_trainable
from meshwright.planner.space import Group, groups
from meshwright.planner.standing import Bound, Priced, Standing, mesh_of
from meshwright.simulation.job import Layout, with_changes
from meshwright.simulation.step import Sharing

# The front reaches to plans that are slower than the best by this factor.
DEFAULT_SLACK = 1.1
DEFAULT_MESHES = 5
DOES_NOT_FIT = "does not fit in memory"
Share = tuple[int, int]


@dataclass(frozen=True)
class Found:
    """What a search found.

    Attributes:
        best: None where nothing fits.
        ready: the fastest that training runs today, where it was wanted and there is one.
        by_mesh: the best meshes, each with its fastest layout; best first.
        front: no other has less time and less memory, up to `slack`; fastest first.
        smallest: of those that were looked at, the one with the least memory, fitting or not.
        bound: no layout that fits is faster than this.
        num_priced: layouts with a price.
        num_bounded: groups that were left out by their bound.
        rejected: how many were refused, by reason.
    """

    best: Priced | None
    ready: Priced | None
    by_mesh: tuple[Priced, ...]
    front: tuple[Priced, ...]
    smallest: Priced | None
    bound: float
    num_priced: int
    num_bounded: int
    rejected: dict[str, int] = field(default_factory=dict)

    @property
    def gap(self) -> float:
        """How much faster than the best another layout could still be, as a part of its time."""
        return 0.0 if self.best is None else max(0.0, 1 - self.bound / self.best.seconds)


@dataclass(frozen=True)
class Wanted:
    """What a search looks for.

    Attributes:
        slack: the front reaches to this factor of the best's time; 1: the best only.
        num_meshes: of how many meshes the fastest layout is wanted.
        ready: whether the fastest layout that training runs today is wanted.
        exhaustive: price every layout and ignore bounds; what tests compare with.
        first: stop at the first group with a layout that fits; its best need not be the best of all.
    """

    slack: float = DEFAULT_SLACK
    num_meshes: int = DEFAULT_MESHES
    ready: bool = False
    exhaustive: bool = False
    first: bool = False


ALL = Wanted()
BEST_ONLY = Wanted(slack=1.0, num_meshes=1)


def search(request: Request, wanted: Wanted = ALL) -> Found:
    """Search the whole space for what is wanted."""
    return _Search(request, wanted).run()


class _Search:
    """One search: what it has found so far."""

    def __init__(self, request: Request, wanted: Wanted) -> None:
        self._request = request
        # Bounds are of formulas; what was measured need not keep them, and a host has few layouts.
        self._wanted = replace(wanted, exhaustive=True) if request.cluster.host is not None else wanted
        self._standing = Standing(slack=wanted.slack, num_meshes=wanted.num_meshes, wants_ready=wanted.ready)
        self._parts = Parts(request)
        self._shares: dict[tuple[object, ...], list[tuple[Sharing, list[Share]]]] = {}
        self._runs: dict[tuple[object, ...], bool] = {}
        self._rejected: dict[str, int] = {}
        self._smallest: Priced | None = None
        self._num_priced = 0
        self._num_bounded = 0

    def run(self) -> Found:
        """All groups in the order of their bounds, up to the first that cannot matter.

        A group stands by its computation until it is first; only then its bound is worth more.
        """
        standing = self._standing
        wanted = enumerate(self._groups())
        waiting = [(self._parts.computation(_first(group)), at, group) for at, group in wanted]
        queue: list[tuple[float, int, Group, Bound | None]] = [(*one, None) for one in waiting]
        heapq.heapify(queue)
        while queue:
            seconds, at, group, bound = heapq.heappop(queue)
            is_over = not self._wanted.exhaustive and seconds > standing.last
            if is_over or (self._wanted.first and standing.best is not None):
                self._num_bounded += len(queue) + 1
                break
            if bound is None:
                bound = self._bound(group)
                heapq.heappush(queue, (bound.seconds, at, group, bound))
            else:
                self._look_at(group, bound)
        best = standing.best
        return Found(
            best,
            standing.ready,
            standing.by_mesh(),
            standing.front(),
            self._smallest,
            best.seconds if best else math.inf,
            self._num_priced,
            self._num_bounded,
            self._rejected,
        )

    def _groups(self) -> list[Group]:
        """Every group that is wanted."""
        ready = self._wanted.ready
        return [
            group
            for group in groups(self._request, self._rejected, every=ready)
            if (not group.is_beaten or (ready and self._may_run(group.start)))
            and group.shares
            and group.schedules
        ]

    def _bound(self, group: Group) -> Bound:
        """What is known of a group before it is priced."""
        # What stands in the way of 1F1B without sharing stands in the way of all of a group.
        may_run = self._wanted.ready and self._may_run(group.start)
        mesh, least = mesh_of(group.start), self._least(group, _first(group))
        return Bound(mesh, least, is_beaten=group.is_beaten, may_run=may_run)

    def _may_run(self, start: Layout) -> bool:
        """Whether training runs 1F1B on these degrees; the micro-batch makes no difference."""
        words = (start.pipeline_inside, start.half_layers, start.sequence_parallel, start.cp_kind)
        key = (mesh_of(start), *words)
        if key not in self._runs:
            self._runs[key] = not why_not_trainable(self._request.work, start)
        return self._runs[key]

    def _kinds(self, group: Group) -> list[tuple[Sharing, list[Share]]]:
        """Ways to share without and with weights, each with the least of what they exchange."""
        start = group.start
        key = (mesh_of(start), start.pipeline_inside, start.half_layers)
        found = self._shares.get(key)
        if found is None:
            found = []
            for is_last in (False, True):
                shares = [share for share in group.shares if (share[0] == 3) is is_last]
                own = [self._parts.sharing(with_changes(start, zero=z, shard=n)) for z, n in shares]
                found += [(least_of(own), shares)] if own else []
            self._shares[key] = found
        return found

    def _may_matter(self, bound: Bound, seconds: float, num_bytes: float) -> bool:
        return self._wanted.exhaustive or self._standing.may_matter(bound, seconds, num_bytes)

    def _look_at(self, group: Group, bound: Bound) -> None:
        """Price what of a group may matter, each kind of recomputation with the least memory that it can have."""
        if not self._may_matter(bound, bound.seconds, 0.0):
            self._num_bounded += 1
            return
        for recompute in group.recomputes:
            start = with_changes(group.start, recompute=recompute)
            least = bound.seconds if recompute == group.recomputes[0] else self._least(group, start)
            if not self._may_matter(bound, least, 0.0):
                continue
            frugal = self._frugal(group, start)
            if frugal is None or not self._may_matter(bound, least, frugal):
                continue
            for seconds, way, shares in self._ways(group, start):
                if self._may_matter(bound, seconds, frugal):
                    self._price(way, shares, bound, seconds)

    def _least(self, group: Group, start: Layout) -> float:
        """No layout of a group with this recomputation is faster."""
        steps = [self._parts.step(start, sharing=sharing) for sharing, _ in self._kinds(group)]
        return min(step.total - step.bubble for step in steps)

    def _ways(self, group: Group, start: Layout) -> list[tuple[float, Layout, list[Share]]]:
        """(bound of the seconds, what is not shared, ways to share) of each schedule, best first."""
        ways = []
        for name, chunks in group.schedules:
            way = with_changes(start, schedule=name, chunks=chunks)
            refused = refuse_layout(self._request, way)
            if refused is not None and not way.zero:
                self._reject(refused.reason)
                continue
            for sharing, shares in self._kinds(group):
                ways.append((self._parts.least(way, sharing), way, shares))
        return sorted(ways, key=lambda way: way[0])

    def _frugal(self, group: Group, start: Layout) -> float | None:
        """Bytes of a group's most frugal choices together with this recomputation, None if they do not fit; the least
        that was seen is kept."""
        num_bytes = self._parts.bytes
        shares = [with_changes(start, zero=zero, shard=shard) for zero, shard in _most_shared(group.shares)]
        frugal = min(shares, key=num_bytes)
        names = group.schedules[:1] if group.schedules[0][0] == "1f1b" else group.schedules
        frugal = min(
            (with_changes(frugal, schedule=name, chunks=chunks) for name, chunks in names), key=num_bytes
        )
        least = num_bytes(frugal)
        if self._smallest is None or least < self._smallest.bytes:
            self._smallest = Priced(frugal, self._parts.step(frugal).total, least)
        if least > self._request.usable_bytes and not self._wanted.exhaustive:
            self._reject(DOES_NOT_FIT)
            return None
        return least

    def _price(self, start: Layout, shares: list[Share], bound: Bound, least: float) -> None:
        """All ways to share, unless the most frugal ones do not fit or do not matter."""
        if not self._wanted.exhaustive:
            frugal = (with_changes(start, zero=zero, shard=shard) for zero, shard in _most_shared(shares))
            num_bytes = min(self._parts.bytes(layout) for layout in frugal)
            if num_bytes > self._request.usable_bytes:
                self._reject(DOES_NOT_FIT, len(shares))
                return
            if not self._may_matter(bound, least, num_bytes):
                return
        for zero, shard in shares:
            self._consider(with_changes(start, zero=zero, shard=shard), bound, least)

    def _consider(self, layout: Layout, bound: Bound, least: float) -> None:
        refused = refuse_layout(self._request, layout)
        if refused is not None:
            self._reject(refused.reason)
            return
        num_bytes = self._parts.bytes(layout)
        if num_bytes > self._request.usable_bytes:
            self._reject(DOES_NOT_FIT)
            return
        if not self._may_matter(bound, least, num_bytes):
            return
        item = Priced(layout, self._parts.step(layout).total, num_bytes)
        self._num_priced += 1
        runs = bound.may_run and not why_not_trainable(self._request.work, layout)
        self._standing.add(item, is_beaten=bound.is_beaten, runs=runs)

    def _reject(self, reason: str, count: int = 1) -> None:
        self._rejected[reason] = self._rejected.get(reason, 0) + count


def _first(group: Group) -> Layout:
    """A group's layout with the recomputation that takes the least time."""
    return with_changes(group.start, recompute=group.recomputes[0])


def _most_shared(shares: Sequence[Share]) -> list[Share]:
    """One of these takes the least memory: a later stage of ZeRO shares more, but the last one gathers weights."""
    most = max(zero for zero, _ in shares)
    firsts: dict[int, Share] = {}
    for share in shares:
        if share[0] >= most - 1:
            firsts.setdefault(share[0], share)
    return list(firsts.values())
