"""Counted traffic equals the formulas."""

from __future__ import annotations

import pytest

from meshwright.exchange.catalogue import ALGORITHMS, make_exchange
from meshwright.exchange.cost import count, formula
from meshwright.presets.machines import Link

NUMEL = 2**4 * 3**2 * 5 * 7 * 11  # divides by every number of chunks below
CASES = [
    (algorithm.name, collective, n)
    for algorithm in ALGORITHMS
    for collective in algorithm.collectives
    for n in range(1, 10)
]


def options_of(algorithm: str, n: int) -> list[dict[str, int]]:
    if algorithm == "hierarchical":
        return [{"ranks_per_node": k} for k in range(1, n + 1) if n % k == 0]
    if algorithm == "parameter_server":
        return [{"num_servers": k} for k in (1, 2, 3)]
    return [{}]


@pytest.mark.parametrize(("algorithm", "collective", "n"), CASES)
def test_counted_equals_formula(algorithm, collective, n):
    for options in options_of(algorithm, n):
        counted = count(make_exchange(algorithm, collective, n, **options), NUMEL, 4)
        stated = formula(algorithm, collective, n, NUMEL * 4, **options)
        assert counted.steps == stated.steps
        assert counted.of_a_worker == pytest.approx(stated.of_a_worker, abs=1e-6)
        assert counted.busiest == pytest.approx(stated.busiest, abs=1e-6)


@pytest.mark.parametrize("n", range(2, 65))
def test_a_ring_sends_less_than_twice_the_buffer(n):
    assert formula("ring", "all_reduce", n, 1.0).busiest == pytest.approx(2 * (n - 1) / n)
    assert formula("ring", "all_reduce", n, 1.0).busiest < 2
    assert formula("parameter_server", "all_reduce", n, 1.0).busiest == n
    assert formula("parameter_server", "all_reduce", n, 1.0, num_servers=4).busiest == max(n / 4, 1)


def test_sizes_that_do_not_divide_lose_no_byte():
    counted = count(make_exchange("ring", "all_gather", 4), 1_000_003, 1)
    assert sum(counted.sent) == 3 * 1_000_003


def test_seconds_weigh_steps_against_bytes():
    slow_start, slow_wire = Link(1e-3, 1e12), Link(1e-9, 1e6)
    ring, halving = (formula(name, "all_reduce", 64, 1e6) for name in ("ring", "halving"))
    tree = formula("tree", "all_reduce", 64, 1e6)
    assert ring.seconds(slow_start) == pytest.approx(126e-3, rel=1e-3)
    assert tree.seconds(slow_start) < ring.seconds(slow_start) / 10
    assert tree.seconds(slow_wire) > 5 * halving.seconds(slow_wire)
