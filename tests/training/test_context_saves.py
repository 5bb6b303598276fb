"""Checkpoints of runs over cut sequences: nothing saved is cut by positions, and any layout goes on from it."""

from __future__ import annotations

import pytest

from tests.training.resaved import SIZES, assert_same_run, assert_same_to_the_bit
from tests.training.test_checkpoints import auto, train


def test_a_run_goes_on_at_other_context_parallel_sizes(ranks, tmp_path):
    """cp 2 beside dp 2, then cp 3 with padding, then tp 2 x cp 2; against one device."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    ranks.run(train, 1, whole, [*SIZES, "save.every=end"])
    ranks.run(train, 4, parts, [*SIZES, "plan.cp=2", "plan.zero=3"], None, 3)
    ranks.run(train, 3, parts, [*SIZES, "plan.cp=3", "plan.zero=1"], auto(parts), 5)
    found = ranks.run(
        train, 4, parts, [*SIZES, "plan.cp=2", "plan.tp=2", "plan.cp_kind=ulysses"], auto(parts)
    )
    assert "step 4, saved on 3 ranks" in found[0]["text"]
    assert_same_run(parts, whole)


MESHES = {
    "cp 1": (1, ["plan.zero=0"]),
    "cp 2 dp 2": (4, ["plan.cp=2", "plan.zero=3"]),
    "cp 3": (3, ["plan.cp=3", "plan.zero=1"]),
    "cp 2 copies": (4, ["plan.cp=2", "plan.zero=2", "plan.hsdp=2"]),
    "cp 2 whole": (2, ["plan.cp=2", "plan.zero=2", "plan.ownership=whole"]),
    "cp 2 tp 2": (4, ["plan.cp=2", "plan.tp=2", "plan.zero=2"]),
}


@pytest.mark.parity
@pytest.mark.parametrize("second", MESHES)
@pytest.mark.parametrize("first", MESHES)
def test_what_another_layout_loads_and_saves_is_the_same_to_the_bit(ranks, tmp_path, first, second):
    assert_same_to_the_bit(ranks, tmp_path, MESHES, first, second)
