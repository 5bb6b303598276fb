"""Lowered schedules run on transports that block; of 10,000 mutants the checker rejects exactly the wrong ones."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from meshwright.schedule.action import COMPUTE, Action, Schedule
from meshwright.schedule.catalogue import SCHEDULE_NAMES, make_schedule
from meshwright.schedule.check_lowered import problem_of_lowered
from meshwright.schedule.lower import Extras, computations, lower
from tests.schedule.interpreter import is_right

NUM_MUTANTS = 10_000
EXTRAS = (Extras(), Extras("once"), Extras("each"), Extras(reduces=False))


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_lowered_schedules_are_right_and_compute_the_same(name):
    for p, m in [(1, 1), (1, 3), (2, 1), (2, 4), (3, 5), (4, 4), (4, 9), (8, 8)]:
        schedule = make_schedule(name, p, m)
        for extras in EXTRAS:
            lowered = lower(schedule, extras)
            assert [computations(program) for program in lowered.programs] == list(schedule.programs)
            for transport in ("blocking", "posted"):
                assert problem_of_lowered(lowered, transport) is None, (name, p, m, extras, transport)
                assert is_right(lowered, blocking=transport == "blocking", seed=1)


@pytest.mark.parity
@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_every_size_lowered(name):
    for p in range(1, 9):
        for m in range(1, 33):
            lowered = lower(make_schedule(name, p, m), Extras("each"))
            for transport in ("blocking", "posted"):
                assert problem_of_lowered(lowered, transport) is None, (name, p, m, transport)


def test_messages_of_a_pipeline():
    lowered = lower(make_schedule("1f1b", 3, 4))
    sends = [a for program in lowered.programs for a in program if a.op.startswith("send")]
    assert len(sends) == 2 * 2 * 4  # activations down and gradients up, over two borders, four micro-batches
    assert all(program[-1].op == "reduce" or program[-2].op == "reduce" for program in lowered.programs)


def test_the_order_that_deadlocks_in_public():
    """pytorch#172668: both ends of a border send first; each waits for the other to receive."""
    first = "F0 >0 F1 >1 <0 B0 <1 B1"
    second = "<0 F0 B0 >0 <1 F1 B1 >1"
    schedule = Schedule("naive", 2, 2, ((0, 1),), (_program(0, first), _program(1, second)))
    found = problem_of_lowered(schedule, "blocking")
    assert found == "deadlock: rank 0 in 1send_activation1@1, rank 1 in 0send_gradient0@0"
    assert problem_of_lowered(schedule, "posted") is None
    assert not is_right(schedule, blocking=True, seed=0)


def _program(rank: int, cells: str) -> tuple[Action, ...]:
    other, up = 1 - rank, rank == 1
    made = []
    for cell in cells.split():
        kind, m = cell[0], int(cell[1:])
        if kind in COMPUTE:
            made.append(Action(kind, rank, m))
        elif kind == ">":
            made.append(Action("send_gradient" if up else "send_activation", other, m, other))
        else:
            made.append(Action("receive_activation" if up else "receive_gradient", rank, m, other))
    return tuple(made)


def mutate(schedule: Schedule, rng: random.Random) -> Schedule:
    """One random change in one rank's program."""
    rank = rng.randrange(schedule.num_ranks)
    program = list(schedule.programs[rank])
    where = rng.randrange(len(program))
    action = program[where]
    match rng.choice(("drop", "double", "swap", "swap", "swap", "micro-batch", "stage", "peer", "op")):
        case "drop":
            del program[where]
        case "double":
            program.insert(rng.randrange(where, len(program)), action)
        case "swap":
            other = min(len(program) - 1, where + rng.choice((1, 1, 1, 2, 3)))
            program[where], program[other] = program[other], program[where]
        case "micro-batch" if action.microbatch >= 0:
            program[where] = replace(action, microbatch=rng.randrange(schedule.num_microbatches))
        case "stage" if action.op in COMPUTE:
            mine = sorted({a.stage for a in program if a.slot == action.slot})
            program[where] = replace(action, stage=rng.choice(mine))
        case "peer" if action.peer >= 0:
            program[where] = replace(action, peer=rng.randrange(schedule.num_ranks))
        case "op" if action.op in COMPUTE:
            program[where] = replace(action, op=rng.choice(COMPUTE))
        case _:
            del program[where]
    programs = list(schedule.programs)
    programs[rank] = tuple(program)
    return replace(schedule, programs=tuple(programs))


def test_mutants_are_judged_as_running_them_judges():
    rng = random.Random(11)
    originals = [
        lower(make_schedule(name, p, m), extras)
        for name in SCHEDULE_NAMES
        for p, m in ((1, 2), (2, 2), (2, 3), (3, 3), (4, 2))
        for extras in EXTRAS
    ]
    wrong = right_anyway = 0
    for number in range(NUM_MUTANTS):
        mutant = mutate(rng.choice(originals), rng)
        blocking = number % 2 == 0
        found = problem_of_lowered(mutant, "blocking" if blocking else "posted")
        right = is_right(mutant, blocking=blocking, seed=number)
        assert (found is None) == right, (mutant.name, found, right, mutant)
        wrong += not right
        right_anyway += right
    assert wrong > NUM_MUTANTS / 2
    assert right_anyway > NUM_MUTANTS / 50  # orders that differ and are right are not rejected
