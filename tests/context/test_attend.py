"""Attention over ranks is attention on one device: every kind, mask, grouping of heads and number of ranks."""

import itertools

import pytest

from meshwright.layout.sequence import factors
from tests.context.harness import Case, masks, worst_errors
from tests.parity.cover import pairwise

LIMIT = 1e-12
# Nothing divides the lengths; some key heads are fewer than ranks, or ranks do not divide them.
HEADS = ((4, 4), (6, 2), (6, 3))
LENGTHS = (16, 19)
FACTORS = {
    "kind": ["ring", "ulysses", "allgather", "2d"],
    "mask": list(masks(LENGTHS[0])),
    "heads": list(HEADS),
    "length": list(LENGTHS),
}


def _possible(cases: list[Case], size: int) -> list[Case]:
    return [case for case in cases if case.kind != "2d" or factors(size)[0] > 1]


@pytest.mark.parametrize("size", [2, 4, *(pytest.param(size, marks=pytest.mark.parity) for size in (1, 3))])
def test_output_and_gradients_are_those_of_one_device(ranks, size) -> None:
    cases = _possible([Case(**case) for case in pairwise(FACTORS)], size)
    cases += [
        Case("ring", "documents", (4, 2), 13, zigzag=False),
        Case("ring", "causal", (2, 2), 17, value_width=6),
    ]
    cases += _possible([Case(kind, "causal", (6, 2), 18, dropout=True) for kind in FACTORS["kind"]], size)
    for errors in ranks.run(worst_errors, size, cases):
        wrong = {case: error for case, error in zip(cases, errors, strict=True) if not error < LIMIT}
        assert wrong == {}


@pytest.mark.parity
@pytest.mark.parametrize("transport", ["gloo", "shm"])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_the_whole_product(ranks, size, transport) -> None:
    """kind x mask x heads x length x order x dropout."""
    every = itertools.product(*FACTORS.values(), (True, False), (False, True))
    cases = _possible([Case(*values) for values in every], size)
    for errors in ranks.run(worst_errors, size, cases, transport=transport, timeout=300.0):
        wrong = {case: error for case, error in zip(cases, errors, strict=True) if not error < LIMIT}
        assert wrong == {}
