"""Runs a lowered schedule on whole numbers, one coroutine a rank: the truth that the checker must meet.

A model of one number a stage, y = w·x; the loss weighs each micro-batch's output. Python's integers are exact, so a
gradient that misses, doubles or mixes anything differs. Independent of the checker: values flow here, not marks.
"""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Iterator

from meshwright.schedule.action import Action, Schedule


class _FaultError(Exception):
    """A computation without what it needs."""


class _Rank:
    def __init__(self, schedule: Schedule, rank: int, weights: list[int]) -> None:
        self.schedule, self.rank, self.weights = schedule, rank, weights
        self.inputs: dict[tuple[int, int], int] = {}
        self.upstream: dict[tuple[int, int], int] = {}
        self.kept: dict[tuple[int, int], tuple[int, int]] = {}
        self.stored: dict[tuple[int, int], tuple[int, int]] = {}
        self.made: dict[tuple[str, int, int], int] = {}
        self.gradient: dict[tuple[int, int], int] = defaultdict(int)  # by slot and stage
        self.reduced: dict[tuple[int, int], int] = {}
        self.here: dict[tuple[int, int], int] = defaultdict(int)
        self.gathers = any(a.op == "gather" for program in schedule.programs for a in program)
        self.ran: dict[tuple[str, int, int], int] = defaultdict(int)


def is_right(schedule: Schedule, *, blocking: bool, seed: int) -> bool:
    """Whether every rank finishes with the gradients of the whole model, each reduced once."""
    rng = random.Random(seed)
    weights = [rng.randrange(3, 1 << 20) for _ in range(schedule.num_stages)]
    samples = [rng.randrange(3, 1 << 20) for _ in range(schedule.num_microbatches)]
    marks = [rng.randrange(3, 1 << 20) for _ in range(schedule.num_microbatches)]
    ranks = [_Rank(schedule, rank, weights) for rank in range(schedule.num_ranks)]
    try:
        if not _run(ranks, samples, marks, blocking=blocking):
            return False
    except _FaultError:
        return False
    return _gradients_of(ranks) == _wanted(schedule, weights, samples, marks) and _ran_once(ranks)


def _wanted(schedule: Schedule, weights: list[int], samples: list[int], marks: list[int]) -> list[int]:
    product = 1
    for weight in weights:
        product *= weight
    total = sum(sample * mark for sample, mark in zip(samples, marks, strict=True))
    return [total * product // weight for weight in weights]


def _gradients_of(ranks: list[_Rank]) -> list[int]:
    schedule = ranks[0].schedule
    reduces = any(a.op == "reduce" for program in schedule.programs for a in program)
    held = [rank.reduced if reduces else rank.gradient for rank in ranks]
    total = [0] * schedule.num_stages
    for gradients in held:
        for (_, stage), value in gradients.items():
            total[stage] += value
    return total


def _ran_once(ranks: list[_Rank]) -> bool:
    total: dict[tuple[str, int, int], int] = defaultdict(int)
    for rank in ranks:
        for key, times in rank.ran.items():
            total[key] += times
    return all(times == 1 for times in total.values())


def _run(ranks: list[_Rank], samples: list[int], marks: list[int], *, blocking: bool) -> bool:
    wires: dict[tuple[int, int], deque[int]] = defaultdict(deque)
    taken: dict[tuple[int, int], int] = defaultdict(int)
    given: dict[tuple[int, int], int] = defaultdict(int)

    def loop(rank: _Rank) -> Iterator[None]:
        for action in rank.schedule.programs[rank.rank]:
            if action.op.startswith("send"):
                wire = (rank.rank, action.peer)
                wires[wire].append(_sent(rank, action))
                given[wire] += 1
                goal = given[wire]
                while blocking and taken[wire] < goal:
                    yield
            elif action.op.startswith("receive"):
                wire = (action.peer, rank.rank)
                while not wires[wire]:
                    yield
                taken[wire] += 1
                where = rank.inputs if action.op == "receive_activation" else rank.upstream
                where[action.stage, action.microbatch] = wires[wire].popleft()
            else:
                _compute(rank, action, samples, marks)

    loops = {rank.rank: loop(rank) for rank in ranks}
    before = None
    while loops:
        for number in list(loops):
            if next(loops[number], "done") == "done":
                del loops[number]
        now = (len(loops), sum(taken.values()), sum(given.values()))
        if now == before:
            return False
        before = now
    return not any(wires.values())


def _sent(rank: _Rank, action: Action) -> int:
    stage, m = action.stage, action.microbatch
    key = ("F", stage - 1, m) if action.op == "send_activation" else ("G", stage + 1, m)
    received = (
        rank.inputs.get((stage, m)) if action.op == "send_activation" else rank.upstream.get((stage, m))
    )
    value = rank.made.get(key, received)
    if value is None:
        raise _FaultError(action)
    return value


def _compute(rank: _Rank, action: Action, samples: list[int], marks: list[int]) -> None:
    stage, m = action.stage, action.microbatch
    if action.op == "gather":
        rank.here[action.slot, stage] += 1
    elif action.op == "release":
        rank.here[action.slot, stage] -= 1
    elif action.op == "reduce":
        key = (action.slot, stage)
        rank.reduced[key] = rank.reduced.get(key, 0) + rank.gradient[key]
    else:
        if rank.gathers and rank.here[action.slot, stage] == 0:
            raise _FaultError(action)
        for part in {"B": "IW"}.get(action.op, action.op):
            rank.ran[part, stage, m] += 1
        if action.op == "F":
            _forward(rank, stage, m, samples)
        if action.op in ("I", "B"):
            _input_gradient(rank, stage, m, marks)
        if action.op in ("W", "B"):
            _weight_gradient(rank, action.slot, stage, m)


def _forward(rank: _Rank, stage: int, m: int, samples: list[int]) -> None:
    x = samples[m] if stage == 0 else rank.made.get(("F", stage - 1, m), rank.inputs.get((stage, m)))
    if x is None:
        raise _FaultError((stage, m))
    rank.kept[stage, m] = (x, 0)
    rank.made["F", stage, m] = rank.weights[stage] * x


def _input_gradient(rank: _Rank, stage: int, m: int, marks: list[int]) -> None:
    last = stage == rank.schedule.num_stages - 1
    g = marks[m] if last else rank.made.get(("G", stage + 1, m), rank.upstream.get((stage, m)))
    if g is None or (stage, m) not in rank.kept:
        raise _FaultError((stage, m))
    rank.stored[stage, m] = (rank.kept[stage, m][0], g)
    rank.made["G", stage, m] = g * rank.weights[stage]


def _weight_gradient(rank: _Rank, slot: int, stage: int, m: int) -> None:
    if (stage, m) not in rank.stored:
        raise _FaultError((stage, m))
    x, g = rank.stored[stage, m]
    rank.gradient[slot, stage] += x * g
