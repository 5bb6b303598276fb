"""Numbers between the sizes that were measured."""

from __future__ import annotations

import pytest

from meshwright.partitioning.unit_costs import on_line


@pytest.mark.parametrize(("count", "seconds"), [(2, 2.0), (3, 2.5), (8, 7.0), (16, 15.0), (1, 1.5)])
def test_seconds_lie_on_a_line_between_measured_samples(count, seconds):
    assert on_line((2, 4, 8), (2.0, 3.0, 7.0), count) == seconds


def test_seconds_of_one_size_are_proportional():
    assert on_line((4,), (2.0,), 6) == 3.0


def test_noise_is_no_negative_slope():
    assert on_line((2, 4), (1.0, 0.5), 8) == 0.5
