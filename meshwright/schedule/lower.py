"""From computations to everything a rank does: messages, gathers, reductions, in one order that all ranks share.

The schedule is run with equal times; what happens is one global sequence, and every rank's program is its part of it.
A message stands in its sender's and its receiver's program at the same place of that sequence, right after it was
made, so ranks that block in every message, one after the other, never wait in a circle; and between two ranks messages
are received in the order in which they are sent, as NCCL demands, which has no tags. A receive far ahead of its use
is posted early and waited for late.

Where stages have replicas, the members of a team run the same computations, and between teams of r and q ranks each
micro-batch is redistributed: every pair of ranks that share samples has a message of them. Gathers and reductions are
collectives; they too stand at one place of the sequence in the programs of all their ranks.
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass, replace
from typing import Literal

from meshwright.schedule.action import Action, Op, Program, Replicas, Schedule
from meshwright.schedule.timing import Durations, Timed, run

Gathers = Literal["none", "once", "each"]


@dataclass(frozen=True)
class Extras:
    """What a step does besides computing and messages.

    Attributes:
        gathers: weights of a stage are gathered never, once before its first use, or before each use and released
            after it (zero3).
        reduces: whether a stage's gradients are reduced over the ranks that hold it after its last backward.
    """

    gathers: Gathers = "none"
    reduces: bool = True


def lower(schedule: Schedule, extras: Extras | None = None, *, replicas: Replicas | None = None) -> Schedule:
    """The schedule with messages, gathers, releases and reductions; it must be right.

    Args:
        schedule: of a pipeline.
        extras: what is done besides; None: reductions only.
        replicas: the ranks in the place of each rank of the pipeline, see `replicas_of`; None: that rank alone.

    Cost: one sort of all actions.
    """
    return _Lowering(replace(schedule, replicas=replicas), extras or Extras()).run()


class _Lowering:
    def __init__(self, schedule: Schedule, extras: Extras) -> None:
        self._schedule = schedule
        self._extras = extras
        self._timed = run(schedule, Durations.equal(schedule.num_stages))
        self._teams = [schedule.team_at(place) for place in range(schedule.num_ranks)]
        self._programs: list[list[Action]] = [[] for team in self._teams for _ in team]
        self._routes = _routes(schedule, self._teams)
        self._last_use = _last_uses(self._timed)
        self._left = Counter(item.action.stage for line in self._timed for item in line)
        self._gathered: set[tuple[int, int]] = set()

    def run(self) -> Schedule:
        """Everything in its order."""
        events = []
        for place, line in enumerate(self._timed):
            for position, item in enumerate(line):
                # At one time messages come before computations, which need them; what is made at the same time is
                # taken from the last rank up, so gradients do not queue behind activations.
                events.append((item.start, 1, -place, position))
                events.append((item.end, 0, -place, position))
        events.sort()
        for _, starts, minus_place, position in events:
            action = self._timed[-minus_place][position].action
            if starts:
                self._compute(action, -minus_place, position)
            else:
                self._after(action, -minus_place)
        return replace(self._schedule, programs=tuple(map(tuple, self._programs)))

    def _compute(self, action: Action, place: int, position: int) -> None:
        gathers, key = self._extras.gathers, (place, action.stage)
        before, after = gathers == "each", gathers == "each"
        if gathers == "once":
            before, after = key not in self._gathered, self._last_use[key] == position
            self._gathered.add(key)
        if before:
            self._add_whole("gather", action, self._teams[place])
        for rank in self._teams[place]:
            self._programs[rank].append(action)
        if after:
            self._add_whole("release", action, self._teams[place])

    def _after(self, action: Action, place: int) -> None:
        """Messages of what was made; the reduction behind them, as somebody waits for those."""
        made = _made(action, self._schedule.num_stages)
        if made is not None:
            send, receive, stage = made
            there = self._schedule.placement[action.slot][stage]
            if there != place:
                m, slot, programs = action.microbatch, action.slot, self._programs
                for source, target in self._routes[place, there]:
                    programs[source].append(Action(send, stage, m, target, slot))
                    programs[target].append(Action(receive, stage, m, source, slot))
        self._left[action.stage] -= 1
        if self._extras.reduces and not self._left[action.stage]:
            for slot, ranks in enumerate(self._schedule.placement):
                if ranks[action.stage] not in [
                    earlier[action.stage] for earlier in self._schedule.placement[:slot]
                ]:
                    self._add_whole("reduce", replace(action, slot=slot), self._teams[ranks[action.stage]])

    def _add_whole(self, op: Op, action: Action, team: tuple[int, ...]) -> None:
        for rank in team:
            self._programs[rank].append(Action(op, action.stage, slot=action.slot))


def computations(program: Program) -> Program:
    """The actions of a lowered program that compute."""
    return tuple(action for action in program if action.op in ("F", "B", "I", "W"))


def _made(action: Action, num_stages: int) -> tuple[Op, Op, int] | None:
    """What another stage needs of `action`: send, receive, that stage."""
    if action.op == "F" and action.stage + 1 < num_stages:
        return "send_activation", "receive_activation", action.stage + 1
    if action.op in ("B", "I") and action.stage > 0:
        return "send_gradient", "receive_gradient", action.stage - 1
    return None


def _routes(schedule: Schedule, teams: list[tuple[int, ...]]) -> dict[tuple[int, int], list[tuple[int, int]]]:
    """For two neighbours of the pipeline the pairs of ranks that share samples, in order of the samples."""
    neighbours = {
        pair
        for ranks in schedule.placement
        for a, b in itertools.pairwise(ranks)
        for pair in ((a, b), (b, a))
    }
    if schedule.replicas is None:
        return {pair: [pair] for pair in neighbours}
    parts = schedule.replicas.parts()
    return {
        (a, b): [(s, t) for s in teams[a] for t in teams[b] if overlap(parts[s], parts[t])]
        for a, b in neighbours
    }


def overlap(one: range, other: range) -> range:
    """What two ranges of samples share."""
    return range(max(one.start, other.start), min(one.stop, other.stop))


def _last_uses(timed: list[list[Timed]]) -> dict[tuple[int, int], int]:
    """Rank of the pipeline and stage to the position of the last action there that uses it."""
    return {
        (place, item.action.stage): position
        for place, line in enumerate(timed)
        for position, item in enumerate(line)
    }
