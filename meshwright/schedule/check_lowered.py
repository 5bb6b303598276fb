"""Whether a lowered schedule runs on a transport that blocks, and computes what it should.

Programs are run on marks. `blocking`: a send ends when its receive is reached and the other way round, one message
after the other, the strictest network there is. `posted`: sends do not block, and receives are matched in order for
each pair and direction, as NCCL does on a communicator a direction. In both a message is known by its place in the
order, never by a tag: an order that only tags would save is rejected.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from typing import Literal

from meshwright.schedule.action import COMPUTE, RECEIVES, SENDS, Action, Schedule
from meshwright.schedule.check import carried_by, gives, needs_of

Transport = Literal["blocking", "posted"]


def problem_of_lowered(schedule: Schedule, transport: Transport) -> str | None:
    """What is wrong, in words; None when every rank ends with the right gradients."""
    machine = _Machine(schedule, transport)
    return machine.run() or machine.incomplete()


class _Machine:
    def __init__(self, schedule: Schedule, transport: Transport) -> None:
        self._schedule = schedule
        self._blocking = transport == "blocking"
        self._position = [0] * schedule.num_ranks
        # What a rank has: (kind, stage, micro-batch) of what it computed or received; doubled ones are wrong.
        self._has: list[set[tuple[str, int, int]]] = [set() for _ in schedule.programs]
        self._wires: dict[tuple[int, int], deque[tuple[str, int, int]]] = defaultdict(deque)
        self._computed: Counter[tuple[str, int, int]] = Counter()
        self._weights: list[Counter[tuple[int, int]]] = [Counter() for _ in schedule.programs]
        self._needs_weights = any(a.op == "gather" for program in schedule.programs for a in program)
        self._reduced: Counter[tuple[int, int]] = Counter()
        self._late: str | None = None

    def run(self) -> str | None:
        """To the end; a reason when it cannot get there, or computes something wrong."""
        moved = True
        while moved:
            moved = False
            for rank in range(self._schedule.num_ranks):
                while (action := self._next(rank)) is not None:
                    wrong = self._step(rank, action)
                    if wrong == "":
                        break
                    if wrong is not None:
                        return wrong
                    moved = True
        stuck = [rank for rank in range(self._schedule.num_ranks) if self._next(rank) is not None]
        if not stuck:
            left = [pair for pair, wire in self._wires.items() if wire]
            return f"rank {left[0][1]} never receives what rank {left[0][0]} sent" if left else None
        waits = ", ".join(f"rank {rank} in {self._next(rank)}" for rank in stuck)
        return f"deadlock: {waits}"

    def incomplete(self) -> str | None:
        """Computations that are missing or doubled, and reductions before the last gradient."""
        schedule = self._schedule
        for stage in range(schedule.num_stages):
            for m in range(schedule.num_microbatches):
                f, b, i, w = (self._computed[op, stage, m] for op in COMPUTE)
                if f != 1 or (b, i, w) not in ((1, 0, 0), (0, 1, 1)):
                    return f"stage {stage}, micro-batch {m}: {f} F, {b} B, {i} I, {w} W"
        return self._late or self._unreduced()

    def _unreduced(self) -> str | None:
        if not self._reduced:
            return None
        for slot, ranks in enumerate(self._schedule.placement):
            for stage, rank in enumerate(ranks):
                used = any(
                    a.op in COMPUTE and (a.slot, a.stage) == (slot, stage)
                    for a in self._schedule.programs[rank]
                )
                if used and self._reduced[slot, stage] != 1:
                    return f"stage {stage} on rank {rank} is reduced {self._reduced[slot, stage]} times"
        return None

    def _next(self, rank: int) -> Action | None:
        program = self._schedule.programs[rank]
        return program[self._position[rank]] if self._position[rank] < len(program) else None

    def _step(self, rank: int, action: Action) -> str | None:
        """Run one action: None when done, an empty text when it must wait, else what is wrong."""
        if action.op in SENDS or action.op in RECEIVES:
            return self._message(rank, action)
        if action.op in COMPUTE:
            wrong = self._compute(rank, action)
            if wrong:
                return wrong
        else:
            self._whole(rank, action)
        self._position[rank] += 1
        return None

    def _compute(self, rank: int, action: Action) -> str | None:
        needs = needs_of(action, self._schedule.num_stages)
        missing = [need for need in needs if need not in self._has[rank]]
        if missing:
            kind, stage, m = missing[0]
            return f"rank {rank}: {action} needs {stage}{kind}{m}, which is not there"
        if self._needs_weights and not self._weights[rank][action.slot, action.stage]:
            return f"rank {rank}: {action} uses weights that are not gathered"
        self._computed[action.op, action.stage, action.microbatch] += 1
        self._has[rank].add(gives(action))
        if self._reduced[action.slot, action.stage] and action.op in ("B", "W"):
            self._late = f"rank {rank}: {action} comes after the reduction of stage {action.stage}"
        return None

    def _whole(self, rank: int, action: Action) -> None:
        key = (action.slot, action.stage)
        if action.op == "gather":
            self._weights[rank][key] += 1
        elif action.op == "release":
            self._weights[rank][key] -= 1
        elif action.op == "reduce":
            self._reduced[key] += 1

    def _message(self, rank: int, action: Action) -> str | None:
        if action.op in RECEIVES:
            if self._blocking:
                return ""  # whoever sends moves both
            wire = self._wires[action.peer, rank]
            return self._deliver(rank, action, wire.popleft()) if wire else ""
        sent = carried_by(action)
        if sent not in self._has[rank]:
            return f"rank {rank}: {action} sends {sent[1]}{sent[0]}{sent[2]}, which is not there"
        if not self._blocking:
            self._wires[rank, action.peer].append(sent)
            self._position[rank] += 1
            return None
        other = self._next(action.peer) if 0 <= action.peer < self._schedule.num_ranks else None
        if other is None or other.op not in RECEIVES or other.peer != rank or action.peer == rank:
            return ""
        wrong = self._deliver(action.peer, other, sent)
        if wrong is None:
            self._position[rank] += 1
        return wrong

    def _deliver(self, rank: int, receive: Action, sent: tuple[str, int, int]) -> str | None:
        if carried_by(receive) != sent:
            return f"rank {rank}: {receive} gets {sent[1]}{sent[0]}{sent[2]} from rank {receive.peer}"
        self._has[rank].add(sent)
        self._position[rank] += 1
        return None
