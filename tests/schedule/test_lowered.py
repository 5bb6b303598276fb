"""Lowered schedules run on transports that block; of 10,000 mutants the checker rejects exactly the wrong ones."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from meshwright.errors import PlanError
from meshwright.schedule.action import COMPUTE, Action, Replicas, Schedule
from meshwright.schedule.catalogue import SCHEDULE_NAMES, make_schedule
from meshwright.schedule.check import problem_of
from meshwright.schedule.check_lowered import problem_of_lowered
from meshwright.schedule.lower import Extras, computations, lower
from meshwright.schedule.replicas import replicas_of
from tests.schedule.interpreter import is_right

NUM_MUTANTS = 10_000
SMALL = ((1, 2), (2, 2), (2, 3), (3, 3), (4, 2))
EXTRAS = (Extras(), Extras("once"), Extras("each"), Extras(reduces=False))
# Replicas of each rank of the pipeline, and samples of a micro-batch: alike, growing, shrinking, uneven parts.
TEAMS = (((1,), 1), ((3,), 5), ((1, 2), 2), ((2, 1), 3), ((2, 2), 4), ((2, 3), 6), ((3, 2), 7))
TEAMS += (((1, 2, 1), 2), ((2, 3, 1), 3), ((4, 1, 3, 2), 5), ((2, 2, 4, 1), 4))


def teams_of(sizes: tuple[int, ...], samples: int) -> Replicas:
    """Ranks in order, `sizes[p]` in the place of rank p."""
    starts = [sum(sizes[:p]) for p in range(len(sizes))]
    return Replicas(tuple(tuple(range(a, a + n)) for a, n in zip(starts, sizes, strict=True)), samples)


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


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_replicas_of_stages_are_right_and_compute_the_same(name):
    for sizes, samples in TEAMS:
        for m in (1, 4):
            schedule, replicas = make_schedule(name, len(sizes), m), teams_of(sizes, samples)
            for extras in EXTRAS[1:3]:
                lowered = lower(schedule, extras, replicas=replicas)
                for team, program in zip(replicas.teams, schedule.programs, strict=True):
                    assert all(computations(lowered.programs[rank]) == program for rank in team)
                for transport in ("blocking", "posted"):
                    assert problem_of_lowered(lowered, transport) is None, (name, sizes, m, extras, transport)
                    assert is_right(lowered, blocking=transport == "blocking", seed=2)


@pytest.mark.parity
@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_every_size_lowered(name):
    for p in range(1, 9):
        uneven = teams_of(tuple((1, 3, 2, 4)[place % 4] for place in range(p)), 5)
        for m in range(1, 33):
            for chunks in (1, 2, 3, 4) if name == "interleaved" else (None,):
                schedule = make_schedule(name, p, m, num_chunks=chunks)
                for replicas in (None, uneven):
                    lowered = lower(schedule, Extras("each"), replicas=replicas)
                    for transport in ("blocking", "posted"):
                        assert problem_of_lowered(lowered, transport) is None, (name, p, m, chunks, transport)


def test_a_micro_batch_is_redistributed():
    """Six samples on 2 ranks, then on 3: samples 0 1 2 | 3 4 5 become 0 1 | 2 3 | 4 5."""
    schedule = make_schedule("gpipe", 2, 1)
    lowered = lower(schedule, replicas=replicas_of(schedule, [[0, 1], [2, 3, 4]], samples=6))
    texts = [" ".join(map(str, program)) for program in lowered.programs]
    sends = ["1send_activation0@2 1send_activation0@3", "1send_activation0@3 1send_activation0@4"]
    receives = ["0receive_gradient0@2 0receive_gradient0@3", "0receive_gradient0@3 0receive_gradient0@4"]
    for rank in (0, 1):
        assert texts[rank] == f"0F0 {sends[rank]} {receives[rank]} 0B0 0reduce"
    assert texts[3] == (
        "1receive_activation0@0 1receive_activation0@1 1F0 1B0 0send_gradient0@0 0send_gradient0@1 1reduce"
    )
    assert lowered.replicas is not None
    assert lowered.replicas.parts() == (range(0, 3), range(3, 6), range(0, 2), range(2, 4), range(4, 6))


def test_both_directions_reduce_together():
    """A stage of a schedule in both directions is on two ranks of the pipeline: one collective of both."""
    lowered = lower(make_schedule("dualpipe", 3, 4))
    assert lowered.group_of(Action("reduce", 0)) == (0, 2)
    assert lowered.group_of(Action("reduce", 1)) == (1,)
    reduces = [[a.stage for a in program if a.op == "reduce"] for program in lowered.programs]
    assert reduces[0] == reduces[2]  # in one order
    assert (sorted(reduces[0]), reduces[1]) == ([0, 2], [1])


def test_reductions_in_two_orders_deadlock():
    schedule = make_schedule("interleaved", 2, 2)
    lowered = lower(schedule, replicas=teams_of((2, 1), 2))
    swapped = tuple(replace(a, stage=2 - a.stage) if a.op == "reduce" else a for a in lowered.programs[1])
    assert [a.stage for a in lowered.programs[0] if a.op == "reduce"] == [2, 0]
    wrong = replace(lowered, programs=(lowered.programs[0], swapped, lowered.programs[2]))
    for transport in ("blocking", "posted"):
        found = problem_of_lowered(wrong, transport)
        assert found is not None
        assert "where others of ranks [0, 1] are in" in found
        assert not is_right(wrong, blocking=transport == "blocking", seed=0)


@pytest.mark.parametrize(
    ("stage_ranks", "samples", "code", "text"),
    [
        ([[0], [1]], 4, "E231", "has 4 stages, and ranks are given for 2"),
        ([[0], [1], [0], [2]], 4, "E231", r"stage 3 is on ranks \[2\].* on ranks \[1\]"),
        ([[0], [0], [0], [0]], 4, "E231", "each rank from 0 on belongs to one place"),
        ([[0], [2], [0], [2]], 4, "E231", "each rank from 0 on belongs to one place"),
        ([[0, 1], [], [0, 1], []], 4, "E231", "each stage has a rank"),
        ([[0, 1], [2, 3, 4], [0, 1], [2, 3, 4]], 2, "E232", "2 samples over 3 replicas .* at least 3"),
    ],
)
def test_ranks_that_fit_no_stage(stage_ranks, samples, code, text):
    with pytest.raises(PlanError, match=text) as caught:
        replicas_of(make_schedule("interleaved", 2, 2), stage_ranks, samples=samples)
    assert caught.value.code == code


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
        case "stage" if action.peer < 0:
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


def originals(*, with_replicas: bool) -> list[Schedule]:
    """Right schedules of all kinds, small enough to be run often."""
    made = [make_schedule(name, p, m) for name in SCHEDULE_NAMES for p, m in SMALL]
    if not with_replicas:
        return [lower(schedule, extras) for schedule in made for extras in EXTRAS]
    return [
        lower(make_schedule(name, len(sizes), 2), extras, replicas=teams_of(sizes, samples))
        for name in SCHEDULE_NAMES
        for sizes, samples in TEAMS[1:9]
        for extras in EXTRAS
    ]


@pytest.mark.parametrize(
    ("with_replicas", "num_mutants"),
    [
        (False, NUM_MUTANTS),
        (True, NUM_MUTANTS // 10),
        pytest.param(True, NUM_MUTANTS, marks=pytest.mark.parity),
    ],
)
def test_mutants_are_judged_as_running_them_judges(with_replicas, num_mutants):
    rng = random.Random(11)
    right_ones = originals(with_replicas=with_replicas)
    wrong = right_anyway = 0
    for number in range(num_mutants):
        mutant = mutate(rng.choice(right_ones), rng)
        blocking = number % 2 == 0
        found = problem_of_lowered(mutant, "blocking" if blocking else "posted")
        right = is_right(mutant, blocking=blocking, seed=number)
        assert (found is None) == right, (mutant.name, found, right, mutant)
        wrong += not right
        right_anyway += right
    assert wrong > num_mutants / 2
    assert right_anyway > num_mutants / 50  # orders that differ and are right are not rejected


def test_mutants_before_lowering_are_judged_as_running_them_judges():
    """Orders of computations alone, as one writes them: what the checker accepts, lowers to what is right."""
    rng = random.Random(12)
    whole = [make_schedule(name, p, m) for name in SCHEDULE_NAMES for p, m in SMALL]
    verdicts = {True: 0, False: 0}
    for number in range(NUM_MUTANTS // 5):
        mutant = mutate(rng.choice(whole), rng)
        right = is_right(lower(mutant), blocking=number % 2 == 0, seed=number)
        assert (problem_of(mutant) is None) == right, mutant
        verdicts[right] += 1
    assert min(verdicts.values()) > 100
