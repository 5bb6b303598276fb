"""Runs a lowered schedule on whole numbers, one coroutine a rank: the truth that the checker must meet.

A model of one number a stage, y = w·x; the loss weighs the output of each sample. Python's integers are exact, so a
gradient that misses, doubles or mixes anything differs. Independent of the checker: values flow here, not marks.
"""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Iterator

from meshwright.schedule.action import Action, Schedule

Values = dict[int, int]  # by sample


class _FaultError(Exception):
    """A computation without what it needs."""


class _Job:
    """What all ranks share: the model, the samples and the network."""

    def __init__(self, schedule: Schedule, *, blocking: bool, seed: int) -> None:
        rng = random.Random(seed)

        def number() -> int:
            return rng.randrange(3, 1 << 20)

        self.schedule, self.blocking = schedule, blocking
        self.num_samples = 1 if schedule.replicas is None else schedule.replicas.samples
        sizes = range(schedule.num_microbatches), range(self.num_samples)
        self.weights = [number() for _ in range(schedule.num_stages)]
        self.samples = [[number() for _ in sizes[1]] for _ in sizes[0]]
        self.marks = [[number() for _ in sizes[1]] for _ in sizes[0]]
        self.gathers = any(a.op == "gather" for program in schedule.programs for a in program)
        self.reduces = any(a.op == "reduce" for program in schedule.programs for a in program)
        self.wires: dict[tuple[int, int], deque[Values]] = defaultdict(deque)
        self.taken: dict[tuple[int, int], int] = defaultdict(int)
        self.collectives: dict[tuple[int, ...], list[_Collective]] = defaultdict(list)
        self.progress = 0

    def wanted(self) -> list[int]:
        product = 1
        for weight in self.weights:
            product *= weight
        pairs = zip(self.samples, self.marks, strict=True)
        total = sum(x * mark for xs, marks in pairs for x, mark in zip(xs, marks, strict=True))
        return [total * product // weight for weight in self.weights]


class _Collective:
    """One gather or reduction: who came, and the sum of what they brought."""

    def __init__(self, what: tuple[str, int]) -> None:
        self.what, self.total = what, 0
        self.came: list[_Rank] = []


class _Rank:
    def __init__(self, job: _Job, rank: int, part: range) -> None:
        self.job, self.rank, self.part = job, rank, part
        self.received: dict[tuple[str, int, int], Values] = defaultdict(dict)
        self.made: dict[tuple[str, int, int], Values] = defaultdict(dict)
        self.kept: dict[tuple[int, int], Values] = {}
        self.stored: dict[tuple[int, int], tuple[Values, Values]] = {}
        self.gradient: dict[int, int] = defaultdict(int)
        self.reduced: dict[int, int] = defaultdict(int)
        self.here: dict[int, int] = defaultdict(int)
        self.given: dict[int, int] = defaultdict(int)
        self.posts: dict[tuple[int, ...], int] = defaultdict(int)
        self.ran: dict[tuple[str, int, int, int], int] = defaultdict(int)

    def value(self, key: tuple[str, int, int], samples: range) -> Values:
        found = {s: self.made[key].get(s, self.received[key].get(s)) for s in samples}
        if not found or None in found.values():
            raise _FaultError(key)
        return found


def is_right(schedule: Schedule, *, blocking: bool, seed: int) -> bool:
    """Whether every rank finishes with the gradients of the whole model, each reduced once."""
    job = _Job(schedule, blocking=blocking, seed=seed)
    parts = [range(1)] * schedule.num_ranks if schedule.replicas is None else schedule.replicas.parts()
    ranks = [_Rank(job, rank, part) for rank, part in enumerate(parts)]
    try:
        if not _run(job, ranks):
            return False
    except _FaultError:
        return False
    return _gradients_are_right(job, ranks) and _ran_once(ranks)


def _gradients_are_right(job: _Job, ranks: list[_Rank]) -> bool:
    wanted = job.wanted()
    if not job.reduces:
        return all(sum(rank.gradient[stage] for rank in ranks) == value for stage, value in enumerate(wanted))
    return all(
        rank.reduced[stage] == wanted[stage]
        for placed in job.schedule.placement
        for stage, place in enumerate(placed)
        for rank in (ranks[number] for number in job.schedule.team_at(place))
    )


def _ran_once(ranks: list[_Rank]) -> bool:
    total: dict[tuple[str, int, int, int], int] = defaultdict(int)
    for rank in ranks:
        for key, times in rank.ran.items():
            total[key] += times
    return all(times == 1 for times in total.values())


def _run(job: _Job, ranks: list[_Rank]) -> bool:
    loops = {rank.rank: _loop(job, rank, ranks) for rank in ranks}
    before = -1
    while loops:
        if job.progress == before:
            return False
        before = job.progress
        for number in list(loops):
            if next(loops[number], "done") == "done":
                job.progress += 1
                del loops[number]
    came = all(len(c.came) == len(group) for group, line in job.collectives.items() for c in line)
    return came and not any(job.wires.values())


def _loop(job: _Job, rank: _Rank, ranks: list[_Rank]) -> Iterator[None]:
    for action in job.schedule.programs[rank.rank]:
        if action.op.startswith("send"):
            yield from _send(job, rank, action, ranks[action.peer].part)
        elif action.op.startswith("receive"):
            wire = (action.peer, rank.rank)
            while not job.wires[wire]:
                yield
            job.taken[wire] += 1
            rank.received[_key(action)].update(job.wires[wire].popleft())
        elif action.op in ("gather", "reduce"):
            yield from _collective(job, rank, action)
        elif action.op == "release":
            rank.here[action.stage] -= 1
        else:
            _compute(rank, action)
        job.progress += 1


def _key(message: Action) -> tuple[str, int, int]:
    if message.op.endswith("activation"):
        return ("F", message.stage - 1, message.microbatch)
    return ("G", message.stage + 1, message.microbatch)


def _send(job: _Job, rank: _Rank, action: Action, there: range) -> Iterator[None]:
    shared = range(max(rank.part.start, there.start), min(rank.part.stop, there.stop))
    wire = (rank.rank, action.peer)
    job.wires[wire].append(rank.value(_key(action), shared))
    rank.given[action.peer] += 1
    goal = rank.given[action.peer]
    while job.blocking and job.taken[wire] < goal:
        yield


def _collective(job: _Job, rank: _Rank, action: Action) -> Iterator[None]:
    group = job.schedule.group_of(action)
    line, place = job.collectives[group], rank.posts[group]
    if len(line) == place:
        line.append(_Collective((action.op, action.stage)))
    collective = line[place]
    if rank.rank not in group or collective.what != (action.op, action.stage):
        raise _FaultError(action)
    rank.posts[group] += 1
    job.progress += 1
    collective.came.append(rank)
    collective.total += rank.gradient[action.stage]
    if action.op == "reduce" and len(collective.came) == len(group):
        for member in collective.came:
            member.reduced[action.stage] += collective.total
    while (job.blocking or action.op == "gather") and len(collective.came) < len(group):
        yield
    if action.op == "gather":
        rank.here[action.stage] += 1


def _compute(rank: _Rank, action: Action) -> None:
    stage, m = action.stage, action.microbatch
    if rank.job.gathers and rank.here[stage] == 0:
        raise _FaultError(action)
    for part in {"B": "IW"}.get(action.op, action.op):
        for sample in rank.part:
            rank.ran[part, stage, m, sample] += 1
    if action.op == "F":
        _forward(rank, stage, m)
    if action.op in ("I", "B"):
        _input_gradient(rank, stage, m)
    if action.op in ("W", "B"):
        _weight_gradient(rank, stage, m)


def _forward(rank: _Rank, stage: int, m: int) -> None:
    own = rank.job.samples[m]
    x = rank.value(("F", stage - 1, m), rank.part) if stage else {s: own[s] for s in rank.part}
    rank.kept[stage, m] = x
    rank.made["F", stage, m] = {s: rank.job.weights[stage] * value for s, value in x.items()}


def _input_gradient(rank: _Rank, stage: int, m: int) -> None:
    own = rank.job.marks[m]
    last = stage == rank.job.schedule.num_stages - 1
    g = {s: own[s] for s in rank.part} if last else rank.value(("G", stage + 1, m), rank.part)
    if (stage, m) not in rank.kept:
        raise _FaultError((stage, m))
    rank.stored[stage, m] = (rank.kept[stage, m], g)
    rank.made["G", stage, m] = {s: value * rank.job.weights[stage] for s, value in g.items()}


def _weight_gradient(rank: _Rank, stage: int, m: int) -> None:
    if (stage, m) not in rank.stored:
        raise _FaultError((stage, m))
    x, g = rank.stored[stage, m]
    rank.gradient[stage] += sum(x[s] * g[s] for s in x)
