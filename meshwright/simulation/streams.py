"""What runs beside computations: messages on links, and collectives of the ranks that hold a stage.

Owns when each starts and ends. Knows nothing of what ranks compute.
"""

from __future__ import annotations

from collections import defaultdict

from meshwright.schedule.action import SENDS, Action, Schedule
from meshwright.schedule.lower import overlap
from meshwright.schedule.timing import Timed
from meshwright.simulation.machinery import Machinery, Wire


class Network:
    """Links that carry one message after the other in each direction."""

    def __init__(self, lowered: Schedule, machinery: Machinery) -> None:
        self._machinery = machinery
        self._link_free: dict[object, float] = defaultdict(float)
        self._teams: tuple[tuple[int, ...], ...] = ()
        self._parts: tuple[range, ...] = ()
        self._samples = 1
        self._counts: dict[tuple[int, int], int] = {}
        self.messages: list[list[Timed]] = [[] for _ in lowered.programs]
        # The part of a stage's seconds that each rank takes.
        self.shares = [1.0] * lowered.num_ranks
        if lowered.replicas is not None:
            self._teams, self._samples = lowered.replicas.teams, lowered.replicas.samples
            self._parts = lowered.replicas.parts()
            for team in self._teams:
                largest = max(len(self._parts[rank]) for rank in team)
                for rank in team:
                    self.shares[rank] = len(self._parts[rank]) / largest

    def send(self, rank: int, action: Action, now: float) -> float:
        """When a message that was made at `now` has arrived, in seconds."""
        wire, pair = self._wire(action), (rank, action.peer)
        link = self._machinery.links.get(pair, pair)
        seconds = wire.seconds
        if self._parts:
            seconds *= len(overlap(self._parts[rank], self._parts[action.peer])) / self._samples
        start = max(now, self._link_free[link])
        self._link_free[link] = start + seconds
        end = start + wire.latency + seconds
        self.messages[rank].append(Timed(action, start, end))
        return end

    def _wire(self, action: Action) -> Wire:
        if not self._machinery.wires:
            return self._machinery.activation
        assert action.op in SENDS, f"{action} is no message"
        return self._machinery.wires[action.stage - 1 if action.op == "send_activation" else action.stage]

    def num_pieces(self, rank: int, here: int, there: int) -> int:
        """How many parts of what the ranks at `there` made the rank at `here` needs: its own is one."""
        if here == there:
            return 1
        if (rank, there) not in self._counts:
            mine = self._parts[rank]
            others = (self._parts[other] for other in self._teams[there])
            self._counts[rank, there] = sum(1 for part in others if overlap(mine, part))
        return self._counts[rank, there]


class Collectives:
    """One gather or reduction after the other on each rank, beside its computations."""

    def __init__(self, lowered: Schedule, machinery: Machinery) -> None:
        self._lowered = lowered
        self._machinery = machinery
        self._free_at = [0.0] * lowered.num_ranks
        # Of each set of ranks: how many collectives each has come to, and how many ranks have come to each.
        self._come: dict[tuple[tuple[int, ...], int], int] = defaultdict(int)
        self._arrived: dict[tuple[tuple[int, ...], int], int] = defaultdict(int)
        self.lines: list[list[Timed]] = [[] for _ in lowered.programs]

    def come(self, rank: int, action: Action, now: float) -> float | None:
        """When the collective ends, in seconds, if `rank` is the last of its ranks that come to it; else None."""
        group = self._lowered.group_of(action)
        place = self._come[group, rank]
        self._come[group, rank] += 1
        self._arrived[group, place] += 1
        if self._arrived[group, place] < len(group):
            return None
        del self._arrived[group, place]
        start = max(now, *(self._free_at[member] for member in group))
        by_stage = self._machinery.gather if action.op == "gather" else self._machinery.reduce
        end = start + (by_stage[action.stage] if by_stage else 0.0)
        for member in group:
            self._free_at[member] = end
            self.lines[member].append(Timed(action, start, end))
        return end
