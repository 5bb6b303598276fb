"""Tied weights together or copied; the order of unlike devices."""

from __future__ import annotations

import pytest

from meshwright.errors import DoesNotFitError
from meshwright.partitioning.alternatives import best_order, best_ties
from meshwright.partitioning.chain import Block, Tie, chain_of, shares_of
from meshwright.partitioning.stage_costs import Group, Problem


@pytest.mark.parametrize(("size", "together"), [(1.0, ()), (100.0, (0,))])
def test_a_heavy_tie_stays_in_one_stage(size, together):
    """Copied, stages are equal (4 + 4); together, one has three of the four blocks."""
    chain = chain_of([Block(1, 1)] * 4, ties=[Tie((0, 2), size)])
    given = Problem(shares_of(chain, 2), (Group(2, bandwidth=10.0),), (2, 2), "maxfb")
    found, kept = best_ties(given)
    assert kept == together
    assert [(s.first, s.last) for s in found.stages] == ([(0, 2), (3, 3)] if together else [(0, 1), (2, 3)])


def test_large_blocks_stand_on_fast_devices():
    chain = chain_of([Block(8, 0), Block(2, 0), Block(2, 0)])
    given = Problem(shares_of(chain, 2), (Group(1, speed=1.0), Group(1, speed=2.0)), (2, 2), "maxfb")
    found, order = best_order(given)
    assert (order, found.value) == ((1, 0), 4)


def test_what_fits_nowhere():
    chain = chain_of([Block(1, 1, 9.0), Block(1, 1, 9.0)], ties=[Tie((0, 1), 1.0)])
    given = Problem(shares_of(chain, 2), (Group(1, memory_bytes=5), Group(1, memory_bytes=6)), (2, 2))
    for question in (best_ties, best_order):
        with pytest.raises(DoesNotFitError, match="E270"):
            question(given)
