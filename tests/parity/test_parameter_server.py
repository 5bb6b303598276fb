"""Training with synchronous parameter servers equals one process, and moves the bytes of the formulas."""

from __future__ import annotations

import itertools

import pytest

from tests.parity.harness import Case, candidate, compare, reference

# Workers, servers.
SIZES = tuple(itertools.product((1, 2, 3), (1, 2)))
_DEFAULT = {("mlp", 2, 1, 3, "adamw"), ("awkward", 3, 2, 1, "sgd"), ("gpt", 1, 2, 1, "adamw")}
CASES = [
    pytest.param(
        Case(model, "parameter_server", workers + servers, accumulate, optimizer, servers=servers),
        marks=() if (model, workers, servers, accumulate, optimizer) in _DEFAULT else pytest.mark.parity,
        id=f"{model}-{workers}workers-{servers}servers-acc{accumulate}-{optimizer}",
    )
    for model in ("gpt", "llama", "mlp", "awkward")
    for workers, servers in SIZES
    for accumulate in (1, 3)
    for optimizer in ("adamw", "sgd")
]


@pytest.mark.parametrize("case", CASES)
def test_equals_one_process(ranks, case: Case) -> None:
    comparison = compare(case, ranks.run(candidate, case.world, case), reference(case))
    assert comparison.compared > 50
