"""The fastest layouts that fit, by bound and stop, with a certificate.

Groups of layouts (`space.py`) stand in the order of a bound that no layout of theirs can beat: its computation without
recomputation, no bubble, no exchange of gradients. The search prices one group after the other and stops where the
next bound is above what is still wanted; so the best of all is found, and what is left out is certified to be slower.
What is wanted: the best, and for the front of time and memory every layout up to `slack` times its time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from meshwright.planner.request import Request
from meshwright.planner.rules import refuse_layout
from meshwright.planner.runnable import why_not_trainable
from meshwright.planner.space import Group, groups
from meshwright.presets.calibration import Calibration, calibration_of
from meshwright.simulation.job import Layout, Schedule, data_stride
from meshwright.simulation.layers import LayerSeconds, head_seconds, layer_seconds
from meshwright.simulation.peak import peak_bytes
from meshwright.simulation.step import StepSeconds, step_seconds

# The front reaches to plans that are slower than the best by this factor.
DEFAULT_SLACK = 1.1
DOES_NOT_FIT = "does not fit in memory"


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
        )


@dataclass(frozen=True)
class Found:
    """What a search found.

    Attributes:
        best: None where nothing fits.
        by_mesh: for each mesh with a priced layout that fits, its best; best first.
        front: no other has less time and less memory, up to `slack`; fastest first.
        smallest: of those that were priced, the one with the least memory, fitting or not.
        bound: no layout that fits is faster than this.
        num_priced: layouts with a price.
        num_bounded: groups that were left out by their bound.
        rejected: how many were refused, by reason.
    """

    best: Priced | None
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


def search(
    request: Request,
    *,
    trainable: bool = False,
    slack: float = DEFAULT_SLACK,
    exhaustive: bool = False,
    first: bool = False,
) -> Found:
    """Search the whole space.

    Args:
        request: the question.
        trainable: only layouts that training runs today.
        slack: the front reaches to this factor of the best's time; 1: the best only.
        exhaustive: price every layout and ignore bounds; what tests compare with.
        first: stop at the first group with a layout that fits; its best need not be the best of all.
    """
    return _Search(request, trainable=trainable, slack=slack, exhaustive=exhaustive).run(first=first)


class _Search:
    """One search: what it has found so far."""

    def __init__(self, request: Request, *, trainable: bool, slack: float, exhaustive: bool) -> None:
        self._request = request
        self._trainable = trainable
        self._slack = slack
        self._exhaustive = exhaustive
        self._parts = _Parts(request, calibration_of(request.cluster.machine))
        self._rejected: dict[str, int] = {}
        self._fitting: list[Priced] = []
        self._best: Priced | None = None
        self._smallest: Priced | None = None
        self._num_priced = 0
        self._num_bounded = 0

    def run(self, *, first: bool) -> Found:
        """All groups in the order of their bounds, up to the first that cannot matter."""
        request = self._request
        found = groups(request, self._rejected, every=self._trainable)
        if self._trainable:
            # What stands in the way of 1F1B without sharing stands in the way of all of a group.
            found = (group for group in found if not why_not_trainable(request.work, group.start))
        bounded = sorted(((self._bound(group), group) for group in found), key=lambda pair: pair[0])
        for at, (bound, group) in enumerate(bounded):
            if self._is_out(bound) or (first and self._best is not None):
                self._num_bounded += len(bounded) - at
                break
            if self._exhaustive or self._may_matter(group):
                self._price(group)
        best = self._best
        limit = best.seconds * self._slack if best else math.inf
        return Found(
            best,
            _by_mesh(self._fitting),
            _front([item for item in self._fitting if item.seconds <= limit]),
            self._smallest,
            best.seconds if best else math.inf,
            self._num_priced,
            self._num_bounded,
            self._rejected,
        )

    def _is_out(self, bound: float) -> bool:
        best = self._best
        return best is not None and not self._exhaustive and bound > best.seconds * self._slack

    def _bound(self, group: Group) -> float:
        """No layout of the group is faster: neither bubble nor what data-parallel ranks exchange is in it."""
        start = _with(group.start, recompute=group.recomputes[0], zero=0, shard=0)
        step = self._parts.step(start)
        return step.total - step.bubble - step.gradients - step.optimizer

    def _least(self, layout: Layout, schedule: Schedule, chunks: int) -> float:
        """No layout with this recomputation and schedule is faster, whatever is shared."""
        layout = _with(layout, schedule=schedule, chunks=chunks, zero=0, shard=0)
        if refuse_layout(self._request, layout) is not None:
            return math.inf
        step = self._parts.step(layout)
        return step.total - step.gradients - step.optimizer * (1 - 1 / (layout.dp * layout.cp))

    def _may_matter(self, group: Group) -> bool:
        """Whether some schedule may be fast enough and the most frugal choices together fit."""
        start = _with(group.start, recompute=group.recomputes[0])
        if all(self._is_out(self._least(start, name, chunks)) for name, chunks in group.schedules):
            self._num_bounded += 1
            return False
        return self._may_fit(group)

    def _may_fit(self, group: Group) -> bool:
        """Whether the group's most frugal choices together fit; the least that was seen is kept."""
        start = group.start
        if not group.shares or not group.schedules:
            return False
        shares = [_with(start, zero=zero, shard=shard) for zero, shard in group.shares]
        frugal = min(_most_shared(shares), key=self._bytes)
        words = [_with(frugal, recompute=recompute) for recompute in group.recomputes]
        frugal = min(words, key=self._bytes)
        names = group.schedules[:1] if group.schedules[0][0] == "1f1b" else group.schedules
        frugal = min((_with(frugal, schedule=name, chunks=chunks) for name, chunks in names), key=self._bytes)
        least = self._bytes(frugal)
        if self._smallest is None or least < self._smallest.bytes:
            self._smallest = Priced(frugal, self._parts.step(frugal).total, least)
        if least > self._request.usable_bytes:
            self._reject(DOES_NOT_FIT)
            return False
        return True

    def _bytes(self, layout: Layout) -> float:
        return peak_bytes(self._request.work, layout, self._request.cluster).peak

    def _price(self, group: Group) -> None:
        for recompute in group.recomputes:
            start = _with(group.start, recompute=recompute)
            for schedule, chunks in group.schedules:
                if self._exhaustive or not self._is_out(self._least(start, schedule, chunks)):
                    self._consider_all(_with(start, schedule=schedule, chunks=chunks), group.shares)

    def _consider_all(self, start: Layout, shares: tuple[tuple[int, int], ...]) -> None:
        """All ways to share, unless the most frugal ones do not fit."""
        found = [_with(start, zero=zero, shard=shard) for zero, shard in shares]
        limit = self._request.usable_bytes
        if not self._exhaustive and found:
            refused = refuse_layout(self._request, found[-1])
            if refused is not None and start.dp * start.cp > 1:
                self._reject(refused.reason)
                return
            if all(self._bytes(layout) > limit for layout in _most_shared(found)):
                self._reject(DOES_NOT_FIT, len(found))
                return
        for layout in found:
            self._consider(layout)

    def _consider(self, layout: Layout) -> None:
        refused = refuse_layout(self._request, layout)
        if refused is not None:
            self._reject(refused.reason)
            return
        num_bytes = self._bytes(layout)
        if num_bytes > self._request.usable_bytes:
            self._reject(DOES_NOT_FIT)
            return
        seconds = self._parts.step(layout).total
        self._num_priced += 1
        if self._is_out(seconds) or (self._trainable and why_not_trainable(self._request.work, layout)):
            return
        priced = Priced(layout, seconds, num_bytes)
        self._fitting.append(priced)
        if self._best is None or priced.order < self._best.order:
            self._best = priced

    def _reject(self, reason: str, count: int = 1) -> None:
        self._rejected[reason] = self._rejected.get(reason, 0) + count


class _Parts:
    """Seconds of a layer and of the head, computed once for all layouts that share them."""

    def __init__(self, request: Request, fit: Calibration) -> None:
        self._request = request
        self._fit = fit
        self._found: dict[tuple[object, ...], tuple[LayerSeconds, float]] = {}

    def step(self, layout: Layout) -> StepSeconds:
        """The step of a layout."""
        request, fit = self._request, self._fit
        own = layout
        key = (
            own.tp,
            own.cp,
            own.micro_batch,
            own.sequence_parallel,
            own.recompute,
            own.cp_kind,
            data_stride(own),
        )
        parts = self._found.get(key)
        if parts is None:
            parts = (
                layer_seconds(request.work, layout, request.cluster, fit),
                head_seconds(request.work, layout, request.cluster, fit),
            )
            self._found[key] = parts
        return step_seconds(request.work, layout, request.cluster, fit, parts=parts)


def _with(layout: Layout, **changes: object) -> Layout:
    """As `dataclasses.replace`, which takes most of a search's time."""
    return Layout(**{**vars(layout), **changes})  # type: ignore[arg-type]


def _most_shared(found: list[Layout]) -> list[Layout]:
    """One of these takes the least memory: a later stage of ZeRO shares more, but the last one gathers weights."""
    most = max(layout.zero for layout in found)
    last = [layout for layout in found if layout.zero >= most - 1]
    return [next(layout for layout in last if layout.zero == zero) for zero in {one.zero for one in last}]


def _by_mesh(fitting: list[Priced]) -> tuple[Priced, ...]:
    best: dict[tuple[int, ...], Priced] = {}
    for item in fitting:
        own = item.layout
        mesh = (own.tp, own.pp, own.cp, own.dp)
        if mesh not in best or item.order < best[mesh].order:
            best[mesh] = item
    return tuple(sorted(best.values(), key=lambda item: item.order))


def _front(fitting: list[Priced]) -> tuple[Priced, ...]:
    front: list[Priced] = []
    for item in sorted(fitting, key=lambda item: item.order):
        if not front or item.bytes < front[-1].bytes:
            front.append(item)
    return tuple(front)
