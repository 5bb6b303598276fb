"""The search is never worse than a named schedule, exact on tiny cases, and keeps its limits."""

from __future__ import annotations

import itertools
import random

import pytest

from meshwright.errors import PlanError
from meshwright.schedule.action import Action, Schedule
from meshwright.schedule.catalogue import make_schedule
from meshwright.schedule.check import peak_in_flight, problem_of
from meshwright.schedule.searched import searched
from meshwright.schedule.timing import Durations, makespan

NUM_INSTANCES = 500
FEW = 50


def random_durations(rng: random.Random, num_stages: int) -> Durations:
    def times() -> tuple[float, ...]:
        return tuple(float(rng.choice((1, 2, 3, 5))) for _ in range(num_stages))

    return Durations(times(), times(), times(), transfer=rng.choice((0.0, 0.5, 2.0)))


@pytest.mark.parametrize("num_instances", [FEW, pytest.param(NUM_INSTANCES, marks=pytest.mark.parity)])
def test_never_worse_than_a_named_schedule(num_instances):
    rng = random.Random(3)
    for _ in range(num_instances):
        p, m = rng.randrange(1, 6), rng.randrange(1, 9)
        names = rng.choice((("serial", "gpipe", "1f1b", "zb-h1", "zb-h2"), ("interleaved",), ("zb-v",)))
        named = [make_schedule(name, p, m) for name in names]
        times = random_durations(rng, named[0].num_stages)
        limits = rng.choice((None, [rng.randrange(2, 2 * p + 2)] * p))
        found = searched(p, m, times, placement=named[0].placement[0], limits=limits, max_nodes=300)
        assert problem_of(found.schedule) is None
        assert makespan(found.schedule, times) == pytest.approx(found.seconds)
        for schedule in named:
            if limits is None or max(peak_in_flight(schedule)) <= limits[0]:
                assert found.seconds <= makespan(schedule, times) + 1e-9


def orders(rank: int, m: int, limit: int | None) -> list[tuple[Action, ...]]:
    actions = [Action(op, rank, k) for k in range(m) for op in ("F", "I", "W")]
    found = []
    for order in itertools.permutations(actions):
        at = {(a.op, a.microbatch): i for i, a in enumerate(order)}
        ordered = all(at["F", k] < at["I", k] < at["W", k] for k in range(m))
        alike = rank or all(at["F", k] < at["F", k + 1] for k in range(m - 1))
        kept = list(itertools.accumulate({"F": 1, "W": -1}.get(a.op, 0) for a in order))
        if ordered and alike and (limit is None or max(kept) <= limit):
            found.append(order)
    return found


def brute_force(p: int, m: int, times: Durations, limits: tuple[int, ...] | None) -> float:
    best = float("inf")
    for programs in itertools.product(*(orders(r, m, limits[r] if limits else None) for r in range(p))):
        schedule = Schedule("all", p, m, (tuple(range(p)),), programs)
        if problem_of(schedule) is None:
            best = min(best, makespan(schedule, times))
    return best


@pytest.mark.parametrize(
    "seed", [*range(6), *(pytest.param(s, marks=pytest.mark.parity) for s in range(6, 60))]
)
def test_equal_to_brute_force_on_tiny_cases(seed):
    rng = random.Random(seed)
    times = random_durations(rng, 2)
    limits = rng.choice((None, (1, 1), (2, 1), (1, 2)))
    found = searched(2, 2, times, limits=limits)
    assert found.is_optimal
    assert found.seconds == pytest.approx(brute_force(2, 2, times, limits))


def test_limits_are_kept():
    for limits in ((1, 1, 1, 1), (2, 2, 2, 2), (4, 3, 2, 1), (7, 7, 7, 7)):
        found = searched(4, 8, Durations.equal(4), limits=limits)
        assert all(peak <= limit for peak, limit in zip(peak_in_flight(found.schedule), limits, strict=True))
    assert (
        searched(4, 8, Durations.equal(4), limits=(7, 7, 7, 7)).seconds == 27.0
    )  # no bubble but the first fill


def test_a_limit_that_nothing_keeps():
    with pytest.raises(
        PlanError, match=r"keeps at most \[1\] activations by rank; a rank keeps at least one"
    ) as caught:
        searched(1, 2, Durations.equal(2), placement=(0, 0), limits=(1,))
    assert caught.value.code == "E234"
