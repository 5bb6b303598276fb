"""Checkpoints of tensor-parallel runs: any other layout goes on from them, to the bit."""

from __future__ import annotations

import pytest

from tests.training.resaved import SIZES, assert_same_run, assert_same_to_the_bit
from tests.training.test_checkpoints import auto, train


def test_a_run_goes_on_at_other_tensor_parallel_sizes(ranks, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    ranks.run(train, 1, whole, [*SIZES, "save.every=end"])
    ranks.run(train, 4, parts, [*SIZES, "plan.tp=4", "plan.zero=1"], None, 3)
    ranks.run(train, 4, parts, [*SIZES, "plan.tp=2", "plan.zero=3"], auto(parts), 5)
    found = ranks.run(train, 3, parts, [*SIZES, "plan.tp=3", "plan.zero=0"], auto(parts))
    assert "step 4, saved on 4 ranks" in found[0]["text"]
    assert_same_run(parts, whole)


MESHES = {
    "tp 1": (1, ["plan.zero=0"]),
    "zero 3": (4, ["plan.zero=3"]),
    "tp 2 zero 3": (4, ["plan.tp=2", "plan.zero=3"]),
    "tp 3": (3, ["plan.tp=3", "plan.zero=1"]),
    "tp 4 tokens": (4, ["plan.tp=4", "plan.zero=2", "plan.sequence_parallel=true"]),
    "tp 2 copies": (4, ["plan.tp=2", "plan.zero=2", "plan.hsdp=2"]),
    "tp 2 whole": (4, ["plan.tp=2", "plan.zero=2", "plan.ownership=whole"]),
    "tp 2 offload": (4, ["plan.tp=2", "plan.zero=1", "plan.offload=optimizer"]),
}


PAIRS = [("tp 4 tokens", "tp 2 zero 3"), ("tp 2 copies", "tp 3"), ("tp 3", "tp 2 whole")]


@pytest.mark.parametrize(
    ("first", "second"),
    [*PAIRS]
    + [
        pytest.param(first, second, marks=pytest.mark.parity)
        for first in MESHES
        for second in MESHES
        if first != second and (first, second) not in PAIRS
    ],
)
def test_what_another_layout_loads_and_saves_is_the_same_to_the_bit(ranks, tmp_path, first, second):
    assert_same_to_the_bit(ranks, tmp_path, MESHES, first, second)
