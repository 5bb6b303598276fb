"""Schedules of recomputation: the published table, brute force over all trees, and closed forms."""

from __future__ import annotations

import itertools
import random

import pytest

from meshwright.partitioning.checkpointing import (
    Layer,
    Mode,
    Redo,
    Save,
    Span,
    choose_modes,
    constant,
    cost_of,
    every,
    forwards_of,
    keep_all,
    optimal,
    reruns_of,
    square_root_length,
)

ALIKE = [Layer(forward=1, backward=2, output=1, saved=3)] * 8
# Limit of memory to least time, for eight layers of forward 1, backward 2, output 1, saved 3 (rotor's published code).
PUBLISHED = {6: 52, 7: 38, 8: 34, 9: 32, 10: 31, 12: 30, 14: 29, 16: 28, 18: 27, 22: 26, 24: 25, 26: 24}


@pytest.mark.parametrize(("limit", "seconds"), PUBLISHED.items())
def test_the_published_table_is_reproduced(limit: int, seconds: int) -> None:
    found = optimal(ALIKE, input_bytes=1, limit=limit, slots=limit, rules="rotor")
    assert found is not None
    cost = cost_of(found, ALIKE, input_bytes=1)
    assert cost.seconds == seconds
    assert cost.peak <= limit


def trees(first: int, stop: int):
    """All schedules over layers first..stop-1 that end by saving: to put off the last layer frees nothing."""
    if first + 1 == stop:
        yield (Save(first),)
        return
    for rest in trees(first + 1, stop):
        yield (Save(first), *rest)
    for cut in range(first + 1, stop):
        inner = list(trees(first, cut))
        for rest in trees(cut, stop):
            for items in inner:
                yield (Redo(Span(items)), *rest)


def any_layer(rng: random.Random) -> Layer:
    output = rng.randint(1, 4)
    return Layer(
        rng.randint(1, 9),
        rng.randint(1, 9),
        output,
        output + rng.randint(0, 8),
        rng.randint(0, 2),
        rng.randint(0, 2),
    )


def check_against_brute_force(seed: int, num_layers: int) -> None:
    rng = random.Random(seed)
    layers, input_bytes = [any_layer(rng) for _ in range(num_layers)], rng.randint(1, 4)
    costs = [cost_of(Span(items), layers, input_bytes=input_bytes) for items in trees(0, num_layers)]
    for limit in range(input_bytes + 1, 70, 3):
        found = optimal(layers, input_bytes=input_bytes, limit=limit, slots=limit)
        best = min((cost.seconds for cost in costs if cost.peak <= limit), default=None)
        assert (found is None) == (best is None), (seed, limit)
        if found is not None:
            cost = cost_of(found, layers, input_bytes=input_bytes)
            assert cost.peak <= limit
            assert cost.seconds == best, (seed, limit)


@pytest.mark.parametrize("seed", range(12))
def test_optimal_is_the_best_of_all_trees(seed: int) -> None:
    check_against_brute_force(seed, num_layers=1 + seed % 6)


@pytest.mark.parity
@pytest.mark.parametrize("num_layers", [7, 8, 9])
def test_optimal_is_the_best_of_all_trees_of_long_chains(num_layers: int) -> None:
    check_against_brute_force(num_layers, num_layers)


def pareto(layers: list[Layer], input_bytes: float, limit: int) -> float | None:
    """Least time by another way: for every part and every room, memoised without a table of slots."""
    inputs = [input_bytes, *(layer.output for layer in layers)]
    last_layer = len(layers) - 1
    known: dict[tuple[int, int, float], float] = {}

    def least(first: int, last: int, room: float) -> float:
        key = (first, last, room)
        if key not in known:
            known[key] = work_out(first, last, room)
        return known[key]

    def work_out(first: int, last: int, room: float) -> float:
        layer = layers[first]
        waiting = 0 if last == last_layer else inputs[last + 1]
        best = float("inf")
        forward = layer.saved + layer.forward_extra + waiting
        if room >= max(forward, layer.saved + layer.backward_extra + layer.output):
            own = layer.forward + layer.backward
            best = own + (0 if first == last else least(first + 1, last, room - layer.saved))
        for cut in range(first + 1, last + 1):
            needs = [
                (0 if q == first else inputs[q]) + inputs[q + 1] + layers[q].forward_extra + waiting
                for q in range(first, cut)
            ]
            if room >= max(needs) and room >= inputs[cut]:
                moved = sum(layers[q].forward for q in range(first, cut))
                later = least(cut, last, room - inputs[cut])
                best = min(best, moved + later + least(first, cut - 1, room))
        return best

    found = least(0, last_layer, limit - input_bytes)
    return None if found == float("inf") else found


@pytest.mark.parametrize("seed", range(6))
def test_optimal_equals_a_memoised_search_up_to_twelve_layers(seed: int) -> None:
    rng = random.Random(100 + seed)
    layers, input_bytes = [any_layer(rng) for _ in range(12)], 2
    for limit in (14, 20, 30, 45, 70):
        found = optimal(layers, input_bytes=input_bytes, limit=limit, slots=limit)
        seconds = None if found is None else cost_of(found, layers, input_bytes=input_bytes).seconds
        assert seconds == pareto(layers, input_bytes, limit), (seed, limit)


def test_sizes_that_are_no_multiples_of_a_slot_still_fit() -> None:
    rng = random.Random(3)
    layers = [
        Layer(rng.random(), rng.random(), output := rng.random() * 1e6, output + rng.random() * 5e6)
        for _ in range(20)
    ]
    for limit in (8e6, 12e6, 20e6):
        found = optimal(layers, input_bytes=7e5, limit=limit, slots=100)
        assert found is None or cost_of(found, layers, input_bytes=7e5).peak <= limit
    assert optimal(layers, input_bytes=7e5, limit=7e5) is None


@pytest.mark.parametrize("num_layers", range(1, 17))
def test_constant_runs_by_its_closed_form_and_keeps_one_input(num_layers: int) -> None:
    layers = ALIKE[:1] * num_layers
    cost = cost_of(constant(num_layers), layers, input_bytes=1)
    assert cost.forwards == num_layers + num_layers * (num_layers + 1) // 2
    assert sum(forwards_of(constant(num_layers))) == cost.forwards
    assert cost.peak <= cost_of(constant(2), layers[:1] * 2, input_bytes=1).peak


def test_forwards_of_policies() -> None:
    assert forwards_of(keep_all(5)) == (1,) * 5
    assert forwards_of(every(5, 1)) == forwards_of(every(5, 2)) == (2,) * 5
    assert forwards_of(constant(4)) == (5, 4, 3, 2)
    assert str(every(5, 2)) == "(0 1) (2 3) (4)"
    assert [square_root_length(n) for n in (1, 4, 10, 96)] == [1, 2, 3, 10]


def test_square_root_segments_keep_less_than_other_lengths() -> None:
    layers = ALIKE[:1] * 64
    peaks = {k: cost_of(every(64, k), layers, input_bytes=1).peak for k in (1, 2, 4, 8, 16, 32, 64)}
    # Inputs kept 64/k, and one segment saved, 3k: least near √(64/3).
    assert min(peaks, key=peaks.__getitem__) == 4
    assert peaks[4] < peaks[1] < peaks[32]


def test_reruns_name_who_runs_when_a_backward_begins() -> None:
    assert reruns_of(keep_all(3)) == {}
    assert reruns_of(every(3, 1)) == {0: (0,), 1: (1,), 2: (2,)}
    assert reruns_of(every(5, 2)) == {1: (0, 1), 3: (2, 3), 4: (4,)}
    assert reruns_of(constant(3)) == {2: (0, 1, 2), 1: (0, 1), 0: (0,)}
    for schedule in (every(7, 3), constant(6), optimal(ALIKE, input_bytes=1, limit=7, slots=7)):
        assert schedule is not None
        counted = [0] * schedule.stop
        for ran in reruns_of(schedule).values():
            for layer in ran:
                counted[layer] += 1
        assert [1 + count for count in counted] == list(forwards_of(schedule))


@pytest.mark.parametrize("seed", range(8))
def test_modes_are_the_best_of_all_choices(seed: int) -> None:
    rng = random.Random(seed)
    layers = [
        [Mode(str(i), rng.randint(0, 9), rng.randint(1, 9)) for i in range(rng.randint(1, 4))]
        for _ in range(6)
    ]
    for limit in (10, 20, 30):
        found = choose_modes(layers, limit=limit)
        best = min(
            (
                sum(m.seconds for m in chosen)
                for chosen in itertools.product(*layers)
                if sum(m.held for m in chosen) <= limit
            ),
            default=None,
        )
        assert (found is None) == (best is None)
        if found is not None:
            assert sum(mode.seconds for mode in found) == best
            assert sum(mode.held for mode in found) <= limit
