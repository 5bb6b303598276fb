"""Event simulation of a lowered schedule: unequal stages, messages on links that are shared, ranks that share cores.

Every rank has a compute stream, which runs its computations, gathers and reductions in program order, and messages,
which run beside it: a message starts when it was made and its link is free (messages of one link and direction take
turns, in the order of the programs), and a computation waits for those that it needs; receives are posted ahead. Where
ranks share cores, a rank computes only while it holds one of `cores`, and takes turns for whole actions.

Simplifications: compute and messages do not slow each other; a send's memory is free at once; a gather or reduction
takes its own time, whatever the peers of its group do.
Cost: one heap operation an action; 64 stages x 512 micro-batches are about 260,000.
"""

from __future__ import annotations

import heapq
import itertools
import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from meshwright.schedule.action import COMPUTE, RECEIVES, SENDS, Action, Schedule
from meshwright.schedule.check import carried_by, gives, needs_of
from meshwright.schedule.timing import Durations, Timed


@dataclass(frozen=True)
class Wire:
    """One link between ranks, in one direction.

    Attributes:
        latency: seconds before the first byte arrives; messages may overlap in it.
        seconds: of the bytes of one message; messages take turns.
    """

    latency: float = 0.0
    seconds: float = 0.0


@dataclass(frozen=True)
class Machinery:
    """What the schedule runs on.

    Attributes:
        durations: seconds of computations; its `transfer` is not used.
        activation: the wire of an activation between two ranks; also of gradients.
        links: (source rank, target rank) to the name of a shared link; pairs that are left out have their own.
        gather: seconds to gather a stage's weights, by stage.
        reduce: seconds to reduce a stage's gradients, by stage.
        cores: ranks that can compute at a time; None: all.
        activation_bytes: memory that a forward keeps until its backward ends, by stage.
        weight_bytes: memory of gathered weights, by stage.
    """

    durations: Durations
    activation: Wire = Wire()
    links: Mapping[tuple[int, int], str] = field(default_factory=dict, hash=False)
    gather: tuple[float, ...] = ()
    reduce: tuple[float, ...] = ()
    cores: int | None = None
    activation_bytes: tuple[int, ...] = ()
    weight_bytes: tuple[int, ...] = ()


@dataclass(frozen=True)
class Timeline:
    """What a step does and when.

    Attributes:
        compute: for each rank its computations, gathers and reductions, in order.
        messages: for each rank the messages that it sent: from when the link takes them to when they have arrived.
        seconds: until the last rank is done.
    """

    compute: tuple[tuple[Timed, ...], ...]
    messages: tuple[tuple[Timed, ...], ...]
    seconds: float

    @property
    def bubble(self) -> float:
        """Idle part of the ranks' time."""
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
        self._messages: list[list[Timed]] = [[] for _ in range(num)]
        self._free_at = [0.0] * num
        self._link_free: dict[object, float] = defaultdict(float)
        # When what a computation needs is on a rank, and which rank sleeps until it is known.
        self._arrives: dict[tuple[int, tuple[str, int, int]], float] = {}
        self._asleep: dict[tuple[int, tuple[str, int, int]], int] = {}
        self._idle_cores = machinery.cores if machinery.cores is not None else num
        self._waiting: list[tuple[float, int, int]] = []  # ranks without a core: since when, order, rank
        self._order = itertools.count()
        self._events: list[tuple[float, int, int, bool]] = [
            (0.0, next(self._order), r, False) for r in range(num)
        ]

    def run(self) -> Timeline:
        """Until nothing is left to happen."""
        heapq.heapify(self._events)
        while self._events:
            now, _, rank, ends = heapq.heappop(self._events)
            if ends:
                self._finish(rank, now)
            self._advance(rank, now)
        seconds = max((line[-1].end for line in [*self._compute, *self._messages] if line), default=0.0)
        return Timeline(tuple(map(tuple, self._compute)), tuple(map(tuple, self._messages)), seconds)

    def _advance(self, rank: int, now: float) -> None:
        """Pass messages of `rank` until a computation starts, or something that is not there yet is needed."""
        program = self._lowered.programs[rank]
        while self._position[rank] < len(program):
            action = program[self._position[rank]]
            if action.op in SENDS:
                self._send(rank, action, now)
            elif action.op not in RECEIVES:
                if self._free_at[rank] <= now:
                    self._start(rank, action, now)
                return
            self._position[rank] += 1

    def _send(self, rank: int, action: Action, now: float) -> None:
        wire, pair = self._machinery.activation, (rank, action.peer)
        link = self._machinery.links.get(pair, pair)
        start = max(now, self._link_free[link])
        self._link_free[link] = start + wire.seconds
        end = start + wire.latency + wire.seconds
        self._messages[rank].append(Timed(action, start, end))
        self._make(action.peer, carried_by(action), end)

    def _make(self, rank: int, what: tuple[str, int, int], time: float) -> None:
        """`what` is on `rank` from `time` on."""
        self._arrives[rank, what] = time
        if self._asleep.pop((rank, what), None) is not None:
            heapq.heappush(self._events, (time, next(self._order), rank, False))

    def _start(self, rank: int, action: Action, now: float) -> None:
        ready = now
        for need in needs_of(action, self._lowered.num_stages) if action.op in COMPUTE else ():
            arrives = self._arrives.get((rank, need))
            if arrives is None:
                self._asleep[rank, need] = rank
                return
            ready = max(ready, arrives)
        if ready > now:  # what it needs is on its way
            heapq.heappush(self._events, (ready, next(self._order), rank, False))
            return
        if self._idle_cores == 0:
            heapq.heappush(self._waiting, (now, next(self._order), rank))
            return
        self._idle_cores -= 1
        end = now + self._seconds(action)
        self._compute[rank].append(Timed(action, now, end))
        self._free_at[rank] = end
        self._position[rank] += 1
        heapq.heappush(self._events, (end, next(self._order), rank, True))

    def _finish(self, rank: int, now: float) -> None:
        action = self._compute[rank][-1].action
        if action.op in COMPUTE:
            self._make(rank, gives(action), now)
        self._idle_cores += 1
        if self._waiting:
            _, _, waiting = heapq.heappop(self._waiting)
            heapq.heappush(self._events, (now, next(self._order), waiting, False))

    def _seconds(self, action: Action) -> float:
        machinery, stage = self._machinery, action.stage
        if action.op in COMPUTE:
            return machinery.durations.of(action)
        if action.op == "gather":
            return machinery.gather[stage] if machinery.gather else 0.0
        if action.op == "reduce":
            return machinery.reduce[stage] if machinery.reduce else 0.0
        return 0.0


def memory_curves(timeline: Timeline, machinery: Machinery) -> list[list[tuple[float, int]]]:
    """For each rank (seconds, bytes of activations and gathered weights) at each change, in order of time."""
    curves = []
    for line in timeline.compute:
        changes = [
            (item.start if item.action.op in ("F", "gather") else item.end, _change(item, machinery))
            for item in line
        ]
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


def as_trace(timeline: Timeline, name: str) -> str:
    """Chrome's trace format (JSON), which Perfetto opens: a process a rank, a track of compute and one of messages."""
    events: list[dict[str, object]] = []
    for rank, (compute, messages) in enumerate(zip(timeline.compute, timeline.messages, strict=True)):
        events.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}})
        for track, (title, line) in enumerate((("compute", compute), ("messages", messages))):
            events.append(
                {"ph": "M", "name": "thread_name", "pid": rank, "tid": track, "args": {"name": title}}
            )
            events += [
                {
                    "ph": "X",
                    "name": str(item.action),
                    "cat": item.action.op,
                    "pid": rank,
                    "tid": track,
                    "ts": item.start * 1e6,
                    "dur": (item.end - item.start) * 1e6,
                }
                for item in line
            ]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"name": name}})
