"""Whether a lowered schedule runs on a transport that blocks, and computes what it should.

Programs are run on marks. `blocking`: a send ends when its receive is reached and the other way round, one message
after the other, and a collective ends when all its ranks have reached it: the strictest network there is. `posted`:
sends and reductions do not block; receives are matched in order for each pair and direction, collectives for each set
of ranks, as NCCL does on a communicator each. In both a message is known by its place in the order, never by a
tag: an order that only tags would save is rejected.

What a rank has of a value is a set of samples, kept as the bits of an integer; without replicas it has one sample.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from typing import Literal

from meshwright.schedule.action import COMPUTE, RECEIVES, SENDS, Action, Schedule
from meshwright.schedule.check import carried_by, gives, needs_of

Transport = Literal["blocking", "posted"]
_Value = tuple[str, int, int]


def problem_of_lowered(schedule: Schedule, transport: Transport) -> str | None:
    """What is wrong, in words; None when every rank ends with the right gradients."""
    machine = _Machine(schedule, transport)
    return machine.run() or machine.incomplete()


class _Machine:
    def __init__(self, schedule: Schedule, transport: Transport) -> None:
        self._schedule = schedule
        self._blocking = transport == "blocking"
        self._position = [0] * schedule.num_ranks
        self._parts = _bits_of_parts(schedule)
        # What a rank has: (kind, stage, micro-batch) of what it computed or received, and of which samples.
        self._has: list[dict[_Value, int]] = [defaultdict(int) for _ in schedule.programs]
        self._ran: list[set[_Value]] = [set() for _ in schedule.programs]
        self._wires: dict[tuple[int, int], deque[_Value]] = defaultdict(deque)
        # (F, I or W, stage, micro-batch) to the samples that were computed, and how many with repetitions.
        self._computed: dict[_Value, tuple[int, int]] = defaultdict(lambda: (0, 0))
        self._weights: list[Counter[int]] = [Counter() for _ in schedule.programs]
        self._needs_weights = any(a.op == "gather" for program in schedule.programs for a in program)
        self._reduced: list[Counter[int]] = [Counter() for _ in schedule.programs]
        self._collectives = _Collectives(schedule, blocking=self._blocking)
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
        if stuck:
            return "deadlock: " + ", ".join(f"rank {rank} in {self._next(rank)}" for rank in stuck)
        for (source, target), wire in self._wires.items():
            if wire:
                return f"rank {target} never receives what rank {source} sent"
        return self._collectives.unfinished()

    def incomplete(self) -> str | None:
        """Computations that are missing or doubled, and reductions before the last gradient."""
        schedule, every = self._schedule, sum(self._parts[rank] for rank in self._schedule.team_at(0))
        for stage in range(schedule.num_stages):
            for m in range(schedule.num_microbatches):
                for kind in ("F", "I", "W"):
                    done, count = self._computed[kind, stage, m]
                    if done != every or count != every.bit_count():
                        what = {"F": "forward", "I": "input gradient", "W": "weight gradient"}[kind]
                        return f"stage {stage}, micro-batch {m}: {what} of {count} samples, needed {every.bit_count()}"
        return self._late or self._unreduced()

    def _unreduced(self) -> str | None:
        if not any(self._reduced):
            return None
        for ranks in self._schedule.placement:
            for stage, place in enumerate(ranks):
                for rank in self._schedule.team_at(place):
                    if self._reduced[rank][stage] != 1:
                        return f"stage {stage} on rank {rank} is reduced {self._reduced[rank][stage]} times"
        return None

    def _next(self, rank: int) -> Action | None:
        program = self._schedule.programs[rank]
        return program[self._position[rank]] if self._position[rank] < len(program) else None

    def _step(self, rank: int, action: Action) -> str | None:
        """Run one action: None when done, an empty text when it must wait, else what is wrong."""
        if action.op in SENDS or action.op in RECEIVES:
            return self._message(rank, action)
        wrong = self._compute(rank, action) if action.op in COMPUTE else self._whole(rank, action)
        if wrong is None:
            self._position[rank] += 1
        return wrong

    def _compute(self, rank: int, action: Action) -> str | None:
        mine = self._parts[rank]
        for need in needs_of(action, self._schedule.num_stages):
            kind, stage, m = need
            there = need in self._ran[rank] if stage == action.stage else not mine & ~self._has[rank][need]
            if not there:
                return f"rank {rank}: {action} needs {stage}{kind}{m}, which is not there"
        if self._needs_weights and not self._weights[rank][action.stage]:
            return f"rank {rank}: {action} uses weights that are not gathered"
        for kind in "IW" if action.op == "B" else action.op:
            done, count = self._computed[kind, action.stage, action.microbatch]
            self._computed[kind, action.stage, action.microbatch] = (done | mine, count + mine.bit_count())
        self._has[rank][gives(action)] |= mine
        self._ran[rank].add(gives(action))
        if self._reduced[rank][action.stage] and action.op in ("B", "W"):
            self._late = f"rank {rank}: {action} comes after the reduction of stage {action.stage}"
        return None

    def _whole(self, rank: int, action: Action) -> str | None:
        if action.op == "release":
            self._weights[rank][action.stage] -= 1
            return None
        posted, wrong = self._collectives.post(rank, action)
        if posted and action.op == "reduce":
            self._reduced[rank][action.stage] += 1
        if wrong is None and action.op == "gather":
            self._weights[rank][action.stage] += 1
        return wrong

    def _message(self, rank: int, action: Action) -> str | None:
        if action.op in RECEIVES:
            if self._blocking:
                return ""  # whoever sends moves both
            wire = self._wires[action.peer, rank]
            return self._deliver(rank, action, wire.popleft()) if wire else ""
        sent = carried_by(action)
        piece = self._parts[rank] & self._parts[action.peer]
        if not piece or piece & ~self._has[rank][sent]:
            return f"rank {rank}: {action} sends {sent[1]}{sent[0]}{sent[2]}, which is not there"
        if not self._blocking:
            self._wires[rank, action.peer].append(sent)
            self._position[rank] += 1
            return None
        other = self._next(action.peer)
        if other is None or other.op not in RECEIVES or other.peer != rank or action.peer == rank:
            return ""
        wrong = self._deliver(action.peer, other, sent)
        if wrong is None:
            self._position[rank] += 1
        return wrong

    def _deliver(self, rank: int, receive: Action, sent: _Value) -> str | None:
        if carried_by(receive) != sent:
            return f"rank {rank}: {receive} gets {sent[1]}{sent[0]}{sent[2]} from rank {receive.peer}"
        self._has[rank][sent] |= self._parts[rank] & self._parts[receive.peer]
        self._position[rank] += 1
        return None


class _Collectives:
    """Gathers and reductions, matched by their place in the order of each set of ranks."""

    def __init__(self, schedule: Schedule, *, blocking: bool) -> None:
        self._schedule = schedule
        self._blocking = blocking
        self._log: dict[tuple[int, ...], list[Action]] = defaultdict(list)
        self._posts: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
        self._in: dict[int, Action] = {}  # rank to the collective that it has posted and waits in

    def post(self, rank: int, action: Action) -> tuple[bool, str | None]:
        """Whether `rank` comes to it now; and as of `_Machine._step`."""
        group = self._schedule.group_of(action)
        log, posts = self._log[group], self._posts[group]
        is_new = rank not in self._in
        if is_new:
            if len(log) == posts[rank]:
                log.append(action)
            first = log[posts[rank]]
            if rank not in group or (first.op, first.stage) != (action.op, action.stage):
                return False, f"rank {rank}: {action} where others of ranks {list(group)} are in {first}"
            posts[rank] += 1
            self._in[rank] = action
        waits = self._blocking or action.op == "gather"
        if waits and any(posts[member] < posts[rank] for member in group):
            return is_new, ""
        del self._in[rank]
        return is_new, None

    def unfinished(self) -> str | None:
        """A reduction that some of its ranks never come to."""
        for group, log in self._log.items():
            for member in group:
                if self._posts[group][member] < len(log):
                    return f"rank {member} never comes to {log[self._posts[group][member]]}"
        return None


def _bits_of_parts(schedule: Schedule) -> list[int]:
    if schedule.replicas is None:
        return [1] * schedule.num_ranks
    return [sum(1 << sample for sample in part) for part in schedule.replicas.parts()]
