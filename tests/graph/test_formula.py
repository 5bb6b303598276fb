"""Polynomials of batch and sequence."""

from __future__ import annotations

from fractions import Fraction

import pytest

from meshwright.graph.formula import BATCH, SEQUENCE, ZERO, as_formula, fit, parse_formula, product


@pytest.mark.parametrize(
    ("formula", "text"),
    [
        (ZERO, "0"),
        (as_formula(7), "7"),
        (BATCH, "b"),
        (BATCH * SEQUENCE * SEQUENCE * 2 + 3 * BATCH + 5, "2*b*s^2 + 3*b + 5"),
        (BATCH * (SEQUENCE - 1), "b*s + -1*b"),
        (SEQUENCE * Fraction(1, 2), "1/2*s"),
    ],
)
def test_text_and_back(formula, text):
    assert str(formula) == text
    assert parse_formula(text) == formula


@pytest.mark.parametrize("text", ["", "b +", "2*x", "b s", "s*b*s"])
def test_other_text_is_refused(text):
    with pytest.raises(ValueError, match="is no formula"):
        parse_formula(text)


def test_values_and_what_they_depend_on():
    cost = product([2, BATCH, SEQUENCE, SEQUENCE]) + 3 * SEQUENCE
    assert cost(3, 5) == 2 * 3 * 25 + 15
    assert cost.uses == {"batch", "sequence"}
    assert (cost - cost).constant == 0
    assert cost.constant is None
    assert as_formula(4).constant == 4


def test_a_fit_finds_the_polynomial_and_refuses_what_is_none():
    assert (
        fit(lambda b, s: 3 * b * s * s + s, (2, 3), (8, 16, 24), (5, 40))
        == 3 * BATCH * SEQUENCE * SEQUENCE + SEQUENCE
    )
    assert fit(lambda b, s: b * (s // 16), (2, 3), (8, 16, 24), (5, 40)) is None
