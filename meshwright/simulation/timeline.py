"""Event simulation of a lowered schedule: unequal stages, messages on links that are shared, ranks that share cores.

Every rank has three streams. Compute runs its computations in program order. A message starts when it was made and its
link is free (messages of one link and direction take turns, in the order of the programs), and a computation waits
for those that it needs; receives are posted ahead. A gather or a reduction starts when all its ranks have come to it
and are done with their collective before; computations wait for gathers, and run beside reductions. Where ranks share
cores, a rank computes only while it holds one of `cores`, and takes turns for whole actions.

Simplifications: compute, messages and collectives do not slow each other; a send's memory is free at once; gathers are
not issued ahead of the computation before; of uneven parts of a micro-batch each takes its share of the time.
Cost: one heap operation an action; 64 stages x 512 micro-batches are about 195,000 actions.
"""

from __future__ import annotations

import heapq
import itertools
from dataclasses import dataclass

from meshwright.schedule.action import COMPUTE, RECEIVES, SENDS, Action, Schedule
from meshwright.schedule.check import carried_by, gives, needs_of
from meshwright.schedule.timing import Timed
from meshwright.simulation.machinery import Machinery
from meshwright.simulation.streams import Collectives, Network

_Value = tuple[str, int, int]


@dataclass(frozen=True)
class Timeline:
    """What a step does and when.

    Attributes:
        compute: for each rank its computations and releases of weights, in order.
        messages: for each rank the messages that it sent: from when the link takes them to when they have arrived.
        collectives: for each rank its gathers and reductions, in order.
        seconds: until the last rank is done.
    """

    compute: tuple[tuple[Timed, ...], ...]
    messages: tuple[tuple[Timed, ...], ...]
    collectives: tuple[tuple[Timed, ...], ...]
    seconds: float

    @property
    def bubble(self) -> float:
        """The part of the ranks' time in which they do not compute."""
        busy = sum(item.end - item.start for line in self.compute for item in line)
        return 1.0 - busy / (self.seconds * len(self.compute)) if self.seconds else 0.0


def simulate(lowered: Schedule, machinery: Machinery) -> Timeline:
    """Run a right, lowered schedule."""
    return _Simulation(lowered, machinery).run()


class _Simulation:
    def __init__(self, lowered: Schedule, machinery: Machinery) -> None:
        self._lowered = lowered
        self._machinery = machinery
        num = lowered.num_ranks
        self._position = [0] * num
        self._compute: list[list[Timed]] = [[] for _ in range(num)]
        self._free_at = [0.0] * num
        self._network = Network(lowered, machinery)
        self._collectives = Collectives(lowered, machinery)
        # When what a computation needs is on a rank, of how many messages it waits, and who sleeps until it is known.
        self._arrives: dict[tuple[int, _Value], float] = {}
        self._pieces: dict[tuple[int, _Value], int] = {}
        self._asleep: set[tuple[int, _Value]] = set()
        self._is_one_rank = lowered.replicas is None  # in each place of the pipeline
        self._idle_cores = machinery.cores if machinery.cores is not None else num
        self._waiting: list[tuple[float, int, int]] = []  # ranks without a core: since when, order, rank
        self._order = itertools.count()
        self._events: list[tuple[float, int, int, bool]] = [
            (0.0, next(self._order), r, False) for r in range(num)
        ]

    def run(self) -> Timeline:
        """Until nothing is left to happen."""
        while self._events:
            now, _, rank, ends = heapq.heappop(self._events)
            if ends:
                self._finish(rank, now)
            self._advance(rank, now)
        lines = [*self._compute, *self._network.messages, *self._collectives.lines]
        assert self._position == [len(program) for program in self._lowered.programs], "a schedule that stops"
        seconds = max((item.end for line in lines for item in line[-1:]), default=0.0)
        made = (self._compute, self._network.messages, self._collectives.lines)
        compute, messages, collectives = (tuple(map(tuple, streams)) for streams in made)
        return Timeline(compute, messages, collectives, seconds)

    def _wake(self, time: float, rank: int, *, ends: bool = False) -> None:
        heapq.heappush(self._events, (time, next(self._order), rank, ends))

    def _advance(self, rank: int, now: float) -> None:
        """Go on until a computation starts, or something that is not there yet is needed."""
        program = self._lowered.programs[rank]
        while self._free_at[rank] <= now and self._position[rank] < len(program):
            action = program[self._position[rank]]
            if action.op in COMPUTE:
                self._start(rank, action, now)
                return
            if action.op in SENDS:
                self._make(action.peer, carried_by(action), self._network.send(rank, action, now))
            elif action.op == "release":
                self._compute[rank].append(Timed(action, now, now))
            elif action.op not in RECEIVES:
                self._come(rank, action, now)
                if action.op == "gather":
                    self._position[rank] += 1
                    return
            self._position[rank] += 1

    def _come(self, rank: int, action: Action, now: float) -> None:
        """`rank` has come to a collective; the last one starts it."""
        end = self._collectives.come(rank, action, now)
        if action.op != "gather":
            return
        if end is None:
            self._free_at[rank] = float("inf")
            return
        for member in self._lowered.group_of(action):
            self._free_at[member] = end
            self._wake(end, member)

    def _make(self, rank: int, what: _Value, time: float) -> None:
        """A part of `what`, or all of it, is on `rank` from `time` on."""
        key = (rank, what)
        if not self._is_one_rank:
            time = max(time, self._arrives.get(key, 0.0))
            self._pieces[key] = self._pieces.get(key, 0) + 1
        self._arrives[key] = time
        if key in self._asleep:
            self._asleep.remove(key)
            self._wake(time, rank)

    def _is_whole(self, rank: int, action: Action, need: _Value) -> bool:
        """Whether all messages of what `action` needs are on their way."""
        there = self._lowered.placement[action.slot][need[1]]
        return self._pieces[rank, need] == self._network.num_pieces(
            rank, self._lowered.rank_of(action), there
        )

    def _start(self, rank: int, action: Action, now: float) -> None:
        ready = now
        for need in needs_of(action, self._lowered.num_stages):
            arrives = self._arrives.get((rank, need))
            if arrives is None or not (self._is_one_rank or self._is_whole(rank, action, need)):
                self._asleep.add((rank, need))
                return
            ready = max(ready, arrives)
        if ready > now:  # what it needs is on its way
            self._wake(ready, rank)
            return
        if self._idle_cores == 0:
            heapq.heappush(self._waiting, (now, next(self._order), rank))
            return
        self._idle_cores -= 1
        end = now + self._machinery.durations.of(action) * self._network.shares[rank]
        self._compute[rank].append(Timed(action, now, end))
        self._free_at[rank] = end
        self._position[rank] += 1
        self._wake(end, rank, ends=True)

    def _finish(self, rank: int, now: float) -> None:
        self._make(rank, gives(self._compute[rank][-1].action), now)
        self._idle_cores += 1
        if self._waiting:
            _, _, waiting = heapq.heappop(self._waiting)
            self._wake(now, waiting)


def memory_curves(
    timeline: Timeline, machinery: Machinery, *, stage: int | None = None
) -> list[list[tuple[float, int]]]:
    """For each rank (seconds, bytes of activations and gathered weights) at each change, in order of time.

    With `stage`, of this stage alone.
    """
    curves = []
    for lines in zip(timeline.compute, timeline.collectives, strict=True):
        changes = []
        for item in (item for line in lines for item in line):
            if stage is None or item.action.stage == stage:
                time = item.start if item.action.op in ("F", "gather") else item.end
                changes.append((time, _change(item, machinery)))
        held, curve = 0, [(0.0, 0)]
        for time, change in sorted(changes):
            if change:
                held += change
                curve.append((time, held))
        curves.append(curve)
    return curves


def _change(item: Timed, machinery: Machinery) -> int:
    stage = item.action.stage
    activation = machinery.activation_bytes[stage] if machinery.activation_bytes else 0
    weights = machinery.weight_bytes[stage] if machinery.weight_bytes else 0
    return {"F": activation, "B": -activation, "W": -activation, "gather": weights, "release": -weights}.get(
        item.action.op, 0
    )
