"""Which algorithms serve which policy, and that they exist."""

from __future__ import annotations

import pytest

from meshwright.errors import PlanError
from meshwright.exchange.catalogue import ALGORITHMS
from meshwright.layout.check import PlanRequest, make_plan
from meshwright.layout.policy import find_policy
from meshwright.layout.sync import SYNC_ALGORITHMS, collectives_of


def test_every_named_algorithm_carries_out_its_collective():
    known = {algorithm.name: algorithm.collectives for algorithm in ALGORITHMS}
    for algorithms in SYNC_ALGORITHMS.values():
        for collective, name in algorithms.items():
            assert collective in known[name]


def test_what_policies_ask_for():
    assert collectives_of(find_policy("ddp"), has_copies=False) == {"all_reduce"}
    assert collectives_of(find_policy("zero3"), has_copies=False) == {"reduce_scatter", "all_gather"}
    assert collectives_of(find_policy("zero3"), has_copies=True) == {
        "reduce_scatter",
        "all_gather",
        "all_reduce",
    }
    whole = find_policy("zero2", ownership="whole")
    assert collectives_of(whole, has_copies=False) == {"reduce", "broadcast"}


@pytest.mark.parametrize(
    ("request_", "text"),
    [
        (
            PlanRequest("zero1", sync="tree"),
            "no all_gather and no reduce_scatter, which zero1 needs.*native, ring;",
        ),
        (PlanRequest("zero3", sync="hierarchical"), "hierarchical.*take plan.zero=0 with hierarchical"),
        (PlanRequest("zero1", ownership="whole", sync="ring"), "which whole zero1 needs.*native, tree;"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(request_, text):
    with pytest.raises(PlanError, match=text) as caught:
        make_plan(request_, world_size=4, global_batch=8)
    assert caught.value.code == "E221"


def test_a_plan_says_its_algorithms():
    plan = make_plan(PlanRequest("zero3", sync="ring"), world_size=2, global_batch=8)
    assert plan.describe() == "zero3x2 · micro 4 x accumulate 1 · fp32 · sync ring"
