"""Parallel training equals one process: a subset of the full product that covers every pair of choices."""

import pytest

from tests.parity.cover import pairwise
from tests.parity.harness import Case, candidate, compare, reference

FACTORS = {
    "model": ["gpt", "llama", "mlp", "awkward"],
    "policy": ["ddp", "zero1", "zero2", "zero3"],
    "world": [1, 2, 3, 4],
    "accumulate": [1, 3],
    "optimizer": ["adamw", "adam", "sgd"],
    "dtype": ["float64", "float32"],
}


@pytest.mark.parametrize("case", [Case(**choice) for choice in pairwise(FACTORS)], ids=str)
def test_equals_one_process(ranks, case: Case) -> None:
    comparison = compare(case, ranks.run(candidate, case.world, case), reference(case))
    assert comparison.compared > 50
