"""The exact search: published small cases, all plans of random ones, bounds, and what must not change a plan."""

from __future__ import annotations

import dataclasses
import math
import random

import pytest

from meshwright.partitioning.chain import Block, Tie, chain_of, shares_of
from meshwright.partitioning.exact import solve_exact
from meshwright.partitioning.least_memory import least_excess
from meshwright.partitioning.scalar import solve_scalar
from meshwright.partitioning.stage_costs import Group, Problem, StageCosts
from tests.partitioning.brute import best, random_problem


def problem(
    forward, backward, stages, devices, *, output=0.0, params=0.0, memory=math.inf, **rules
) -> Problem:
    n = len(forward)
    outputs = output if isinstance(output, list) else [output] * n
    weights = params if isinstance(params, list) else [params] * n
    blocks = [Block(f, b, p, 0.0, o) for f, b, p, o in zip(forward, backward, weights, outputs, strict=True)]
    bandwidth = rules.pop("bandwidth", math.inf)
    return Problem(
        shares_of(chain_of(blocks), devices),
        (Group(devices, 1.0, memory, bandwidth),),
        (stages, stages),
        **rules,
    )


def shape(choices) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Cuts and replicas."""
    return tuple(c.first for c in choices[1:]), tuple(c.devices for c in choices)


def test_g1_has_several_best_plans():
    found = solve_exact(problem(range(1, 9), range(2, 17, 2), 3, 3))
    assert found.value == found.bound == 45
    assert shape(found.choices)[0] in ((3, 6), (4, 6), (5, 6), (5, 7))


@pytest.mark.parametrize(("replicas", "value", "devices"), [("any", 6, (3, 3)), ("pow2", 9, (2, 4))])
def test_g2_replicas(replicas, value, devices):
    found = solve_exact(problem([6, 6], [12, 12], 2, 6, replicas=replicas))
    assert found.value == value
    assert sorted(shape(found.choices)[1]) == sorted(devices)


@pytest.mark.parametrize(("cut", "value"), [(1, 38), (2, 64), (3, 40)])
def test_g3_messages_count_on_both_sides(cut, value):
    given = problem([4] * 4, [8] * 4, 2, 2, output=[1.0, 20.0, 2.0, 0.0], bandwidth=1.0)
    others = frozenset({1, 2, 3} - {cut})
    assert solve_exact(dataclasses.replace(given, forbidden=others)).value == value
    assert solve_exact(given).value == 38


@pytest.mark.parametrize(
    ("replicas", "value", "plan"), [("any", 20, ((1,), (1, 3))), ("pow2", 30, ((1,), (2, 2)))]
)
def test_g4_memory_forces_the_cut(replicas, value, plan):
    given = problem(
        [4, 4, 8, 8], [8, 8, 16, 16], 2, 4, params=[10.0, 1.0, 1.0, 1.0], memory=10, replicas=replicas
    )
    found = solve_exact(given)
    assert found.value == value
    assert shape(found.choices) == plan


@pytest.mark.parametrize(
    ("forward", "backward", "replicas", "scalar", "exact", "devices"),
    [([9, 5, 9], [5, 7, 3], "any", 16, 14, (1, 2, 1)), ([2, 3, 1], [4, 1, 4], "pow2", 7, 6, (1, 2, 1))],
    ids=["g5", "g6"],
)
def test_one_number_a_state_is_not_enough(forward, backward, replicas, scalar, exact, devices):
    given = problem(forward, backward, 3, 4, replicas=replicas)
    faithful = solve_scalar(given, 3)
    assert StageCosts(given).value(faithful) == scalar
    found = solve_exact(given)
    assert (found.value, shape(found.choices)[1]) == (exact, devices)


def test_g5_by_the_longest_stage():
    found = solve_exact(problem([9, 5, 9], [5, 7, 3], 3, 4, objective="maxfb"))
    assert (found.value, shape(found.choices)[1]) == (12, (2, 1, 1))


def test_g7_the_longest_stage_not_the_spread():
    found = solve_exact(problem([2, 5, 3, 3], [0] * 4, 3, 3, objective="maxfb"))
    assert (found.value, shape(found.choices)[0]) == (6, (1, 2))


@pytest.mark.parametrize("order", sorted(set(__import__("itertools").permutations([1.0, 1.0, 2.0, 2.0]))))
def test_g8_devices_of_two_speeds(order):
    given = problem([3, 3, 3, 3, 3, 3, 2, 2], [0] * 8, 4, 4, objective="maxfb")
    groups = tuple(Group(1, speed) for speed in order)
    assert solve_exact(dataclasses.replace(given, groups=groups)).value == 4.5


def check_random(seed: int, num_cases: int) -> int:
    """Compare with all plans; returns how many cases had one."""
    rng, feasible = random.Random(seed), 0
    for case in range(num_cases):
        given = random_problem(rng)
        value, excess = best(given)
        found = solve_exact(given)
        assert found.value == pytest.approx(value, rel=1e-9), case
        assert found.bound == found.value, case
        if value < math.inf:
            feasible += 1
            assert StageCosts(given).value(found.choices) == pytest.approx(value, rel=1e-9), case
            assert sum(choice.devices for choice in found.choices) == given.num_devices
        assert least_excess(given) == pytest.approx(excess, abs=1e-6), case
    return feasible


def test_random_cases_equal_the_best_of_all_plans():
    assert check_random(1, 300) > 150


@pytest.mark.parity
def test_three_thousand_random_cases_equal_the_best_of_all_plans():
    assert check_random(0, 3000) > 1500


def test_more_never_hurts_and_scale_does_not_matter():
    rng = random.Random(5)
    for _ in range(100):
        given = random_problem(rng)
        value = solve_exact(given).value
        richer = [
            dataclasses.replace(g, memory_bytes=2 * g.memory_bytes, bandwidth=2 * g.bandwidth)
            for g in given.groups
        ]
        assert solve_exact(dataclasses.replace(given, groups=tuple(richer))).value <= value * (1 + 1e-9)
        slower = [dataclasses.replace(g, speed=g.speed / 4, bandwidth=g.bandwidth / 4) for g in given.groups]
        scaled = solve_exact(dataclasses.replace(given, groups=tuple(slower)))
        assert scaled.value == pytest.approx(4 * value, rel=1e-9)


def test_a_block_in_two_halves_is_never_worse():
    rng = random.Random(6)
    for _ in range(100):
        n, devices = rng.randint(1, 6), rng.randint(1, 5)
        halves = [rng.randint(1, 9) for _ in range(n)]
        whole = [2 * half for half in halves]
        twice = [half for half in halves for _ in range(2)]
        given = dataclasses.replace(problem(whole, whole, 1, devices), stages=(1, n))
        finer = dataclasses.replace(problem(twice, twice, 1, devices), stages=(1, n))
        assert solve_exact(finer).value <= solve_exact(given).value * (1 + 1e-12)


def test_a_search_that_is_stopped_gives_a_proven_bound():
    rng = random.Random(3)
    forward = [rng.randint(1, 9) for _ in range(24)]
    backward = [rng.randint(1, 9) for _ in range(24)]
    given = dataclasses.replace(problem(forward, backward, 1, 12, output=3.0, bandwidth=1.0), stages=(1, 12))
    whole = solve_exact(given)
    assert whole.bound == whole.value
    stopped = solve_exact(given, most_states=50)
    assert stopped.bound <= whole.value <= stopped.value


def test_tied_weights_count_once_in_a_stage_and_again_in_another():
    blocks = [Block(1, 1, 4.0 if 0 < i < 5 else 0.0) for i in range(6)]
    chain = chain_of(blocks, ties=[Tie((0, 5), 10.0)])
    assert chain.params[0, 6] == 26
    assert chain.params[0, 3] == chain.params[3, 6] == 18


def test_a_search_of_all_stage_counts_is_the_best_of_each():
    rng = random.Random(8)
    for _ in range(50):
        given = random_problem(rng)
        each = [
            solve_exact(dataclasses.replace(given, stages=(s, s))).value
            for s in range(given.stages[0], given.stages[1] + 1)
        ]
        assert solve_exact(given).value == pytest.approx(min(each), rel=1e-9)


def test_faithful_shortfalls_on_random_cases():
    """RaNNC's recurrence loses on some cases, and on none where backward is proportional to forward."""
    rng = random.Random(0)
    worse, worst = 0, 1.0
    for case in range(300):
        n, devices = rng.randint(3, 6), rng.randint(3, 6)
        forward = [rng.randint(1, 9) for _ in range(n)]
        backward = [rng.randint(1, 9) for _ in range(n)]
        if case % 2:
            backward = [2 * f for f in forward]
        given = problem(forward, backward, 3, devices)
        ratio = StageCosts(given).value(solve_scalar(given, 3)) / solve_exact(given).value
        assert ratio >= 1 - 1e-12
        if case % 2:
            assert ratio == pytest.approx(1)
        worse, worst = worse + (ratio > 1 + 1e-9), max(worst, ratio)
    assert 0 < worse < 30
    assert worst < 1.35
