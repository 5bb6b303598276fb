"""Searched: the best order found for given stage times, messages and limits of memory.

Candidates are the named schedules that keep the limit and list schedules under many rules; for few actions a branch
and bound then looks for a better one until its space or its budget of nodes is used up. The answer is never worse
than a named schedule, and exact when the bound was closed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from meshwright.errors import PlanError
from meshwright.schedule.action import Action, Program, Schedule
from meshwright.schedule.check import gives, needs_of, peak_in_flight
from meshwright.schedule.gpipe import gpipe
from meshwright.schedule.listing import Rule, Shop, list_schedule
from meshwright.schedule.one_forward_one_backward import interleaved, one_forward_one_backward
from meshwright.schedule.relay import serial
from meshwright.schedule.timing import Durations, makespan
from meshwright.schedule.zero_bubble import zb_h1, zb_h2, zb_v

DEFAULT_NODES = 20_000
# Up to this many actions a branch and bound may close; beyond it would only repeat what list scheduling finds.
_MOST_ACTIONS = 40
_EPSILON = 1e-12
_Value = TypeVar("_Value")


@dataclass(frozen=True)
class Found:
    """An order and what is known of it.

    Attributes:
        schedule: its name is `searched`.
        seconds: its makespan.
        is_optimal: whether no order is faster, for the same placement, durations and limits.
        made_by: the candidate it comes from.
    """

    schedule: Schedule
    seconds: float
    is_optimal: bool
    made_by: str


def searched(
    num_ranks: int,
    num_microbatches: int,
    durations: Durations,
    *,
    placement: Sequence[int] | None = None,
    limits: Sequence[int] | None = None,
    max_nodes: int = DEFAULT_NODES,
) -> Found:
    """The order of least makespan that was found.

    Args:
        num_ranks: ranks of the pipeline.
        num_microbatches: micro-batches of a step.
        durations: of each stage; their number is the number of stages.
        placement: rank of each stage; None: stage s on rank s modulo `num_ranks`.
        limits: most stage activations that each rank may keep; None: any.
        max_nodes: budget of the branch and bound.

    Raises:
        PlanError: E234 where no order keeps the limits.
    """
    num_stages = len(durations.forward)
    ranks = tuple(placement) if placement is not None else tuple(s % num_ranks for s in range(num_stages))
    shop = Shop(
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        placement=(ranks,),
        durations=durations,
        limits=tuple(limits) if limits is not None else None,
        splits_backward=True,
    )
    best: Found | None = None
    for name, schedule in _candidates(shop, num_ranks):
        seconds = makespan(schedule, durations)
        if best is None or seconds < best.seconds - _EPSILON:
            best = Found(replace(schedule, name="searched"), seconds, False, name)
    if best is None:
        raise PlanError(
            "E234",
            f"no order of {num_stages} stages on {num_ranks} ranks keeps at most {list(limits or ())} activations by "
            "rank; a rank keeps at least one for each of its stages.",
        )
    if best.seconds <= _least_seconds(shop) + _EPSILON:
        return replace(best, is_optimal=True)
    if num_stages * num_microbatches * 3 > _MOST_ACTIONS:
        return best
    bound = _Search(shop, best.seconds, max_nodes)
    programs = bound.run()
    if programs is not None:
        schedule = replace(best.schedule, programs=programs)
        best = Found(schedule, makespan(schedule, durations), False, "branch and bound")
    return replace(best, is_optimal=bound.closed)


def _least_seconds(shop: Shop) -> float:
    """No order is faster: a rank cannot start before the first micro-batch reaches it, and then has all its work."""
    times, ranks = shop.durations, shop.placement[0]
    reached, least, now = dict[int, float](), 0.0, 0.0
    for stage, rank in enumerate(ranks):
        now += times.transfer if stage and ranks[stage - 1] != rank else 0.0
        reached.setdefault(rank, now)
        now += times.forward[stage]
    for rank, start in reached.items():
        least = max(least, start + sum(times.of(action) for where, action in shop.actions() if where == rank))
    return max(least, _tails(shop)["F", 0])


def _candidates(shop: Shop, num_ranks: int) -> Iterator[tuple[str, Schedule]]:
    m = shop.num_microbatches
    named = [serial(num_ranks, m), gpipe(num_ranks, m), one_forward_one_backward(num_ranks, m)]
    named += [zb_h1(num_ranks, m), zb_h2(num_ranks, m), zb_v(num_ranks, m)]
    if shop.num_stages % num_ranks == 0:
        named.append(interleaved(num_ranks, m, shop.num_stages // num_ranks))
    for schedule in named:
        if schedule.placement == shop.placement and _keeps(schedule, shop):
            yield schedule.name, schedule
    for split, (name, rule) in itertools.product((True, False), _rules(shop).items()):
        programs = list_schedule(replace(shop, splits_backward=split), rule)
        if programs is not None:
            made = Schedule("listed", shop.num_stages, m, shop.placement, programs)
            yield f"list scheduling, {name}{'' if split else ', whole backwards'}", made


def _keeps(schedule: Schedule, shop: Shop) -> bool:
    pairs = zip(peak_in_flight(schedule), shop.limits or (), strict=False)
    return all(peak <= limit for peak, limit in pairs)


def _rules(shop: Shop) -> dict[str, Rule]:
    durations = shop.durations
    tails = _tails(shop)
    kinds = {"F": 1, "I": 0, "B": 0, "W": 2}
    return {
        "gradients first": lambda a: (kinds[a.op], a.microbatch, -a.stage),
        "forwards first": lambda a: ({"F": 0, "I": 1, "B": 1, "W": 2}[a.op], a.microbatch, a.stage),
        "oldest first": lambda a: (a.microbatch, kinds[a.op], -a.stage),
        "deepest first": lambda a: (kinds[a.op], -a.stage, a.microbatch),
        "longest way left": lambda a: (a.op == "W", -tails[a.op, a.stage] + 1e-3 * a.microbatch),
        "longest first": lambda a: (kinds[a.op], -durations.of(a), a.microbatch),
    }


def _tails(shop: Shop) -> dict[tuple[str, int], float]:
    """Seconds from the start of an action to the end of everything that depends on it, messages included."""
    tails: dict[tuple[str, int], float] = {}
    times, ranks, last = shop.durations, shop.placement[0], shop.num_stages - 1
    for stage in range(shop.num_stages):
        hop = times.transfer if stage and ranks[stage] != ranks[stage - 1] else 0.0
        weights = times.weight_gradient[stage]
        before = hop + tails["I", stage - 1] if stage else 0.0
        tails["W", stage] = weights
        tails["I", stage] = times.input_gradient[stage] + max(weights, before)
        tails["B", stage] = times.input_gradient[stage] + max(weights, weights + before if stage else 0.0)
    for stage in reversed(range(shop.num_stages)):
        hop = times.transfer if stage < last and ranks[stage] != ranks[stage + 1] else 0.0
        after = tails["I", stage] if stage == last else hop + tails["F", stage + 1]
        tails["F", stage] = times.forward[stage] + after
    return tails


@dataclass(frozen=True)
class _State:
    """A partial order: what is appended, when ranks are free, what they keep. Nodes share what does not change."""

    programs: tuple[Program, ...]
    free_at: tuple[float, ...]
    kept: tuple[int, ...]
    no_forward: frozenset[int]
    ends: dict[tuple[str, int, int], tuple[float, int]]
    left: tuple[tuple[int, Action], ...]


@dataclass(frozen=True)
class _Option:
    """An action that may be appended to its rank's program, and when it would run."""

    end: float
    start: float
    rank: int
    action: Action


class _Search:
    """Branch and bound over active orders (Giffler and Thompson, Operations Research 1960).

    Of all actions that could be appended, take the one that would end first; some action of its rank comes next
    there, and each is a branch. A forward that would end first may also have to wait for memory's sake: one more
    branch forbids forwards on that rank until something else ran there. Micro-batches are alike, so they enter in
    order.
    """

    def __init__(self, shop: Shop, best: float, max_nodes: int) -> None:
        self._shop = shop
        self._best = best
        self._nodes = max_nodes
        self._found: tuple[Program, ...] | None = None
        self._tails = _tails(shop)
        self.closed = False

    def run(self) -> tuple[Program, ...] | None:
        """A better order than `best`, or None; `closed` says whether the space was searched through."""
        n = self._shop.num_ranks
        self._branch(_State(((),) * n, (0.0,) * n, (0,) * n, frozenset(), {}, tuple(self._shop.actions())))
        self.closed = self._nodes > 0
        return self._found

    def _branch(self, state: _State) -> None:
        self._nodes -= 1
        if self._nodes <= 0 or self._bound(state) >= self._best - _EPSILON:
            return
        if not state.left:
            self._best, self._found = max(state.free_at), state.programs
            return
        options = self._options(state)
        if not options:  # only forwards are left that the limits forbid
            return
        first = min(options, key=lambda option: option.end)
        for option in sorted((o for o in options if o.rank == first.rank), key=lambda option: option.start):
            self._branch(self._append(state, option))
        if first.action.op == "F" and self._shop.limits is not None:
            self._branch(replace(state, no_forward=state.no_forward | {first.rank}))

    def _options(self, state: _State) -> list[_Option]:
        options, limits = [], self._shop.limits
        entry = state.programs[self._shop.placement[0][0]]
        entered = sum(1 for action in entry if action.op == "F" and action.stage == 0)
        for rank, action in state.left:
            if action.op == "F":
                full = limits is not None and state.kept[rank] >= limits[rank]
                early = action.stage == 0 and action.microbatch != entered
                if full or early or rank in state.no_forward:
                    continue
            needs = [state.ends.get(need) for need in needs_of(action, self._shop.num_stages)]
            start = state.free_at[rank]
            for made in needs:
                if made is None:
                    break
                start = max(start, made[0] + (self._shop.durations.transfer if made[1] != rank else 0.0))
            else:
                options.append(_Option(start + self._shop.durations.of(action), start, rank, action))
        return options

    def _append(self, state: _State, option: _Option) -> _State:
        rank, action = option.rank, option.action
        change = {"F": 1, "I": 0}.get(action.op, -1)
        return _State(
            _with(state.programs, rank, (*state.programs[rank], action)),
            _with(state.free_at, rank, option.end),
            _with(state.kept, rank, state.kept[rank] + change),
            state.no_forward - {rank},
            state.ends | {gives(action): (option.end, rank)},
            tuple(entry for entry in state.left if entry[1] != action),
        )

    def _bound(self, state: _State) -> float:
        """No order that continues `state` ends earlier: ranks' work left, and the longest ways left."""
        ends = list(state.free_at)
        longest = 0.0
        for rank, action in state.left:
            ends[rank] += self._shop.durations.of(action)
            longest = max(longest, state.free_at[rank] + self._tails[action.op, action.stage])
        return max(longest, *ends)


def _with(values: tuple[_Value, ...], index: int, value: _Value) -> tuple[_Value, ...]:
    return (*values[:index], value, *values[index + 1 :])
