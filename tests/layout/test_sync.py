"""Which algorithms serve which policy, and that they exist."""

from __future__ import annotations

import pytest

from meshwright.errors import PlanError
from meshwright.exchange.catalogue import ALGORITHMS
from meshwright.layout.check import PlanRequest, make_plan
from meshwright.layout.plan import TrainPlan
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


@pytest.mark.parametrize(
    ("request_", "world", "code", "text"),
    [
        (
            PlanRequest("zero1", sync="parameter_server"),
            4,
            "E221",
            "plan.zero = 1 on the ranks that compute. Set plan.zero=0",
        ),
        (
            PlanRequest(servers=2),
            4,
            "E222",
            r'plan.servers = 2 is for plan.sync = "parameter_server", and plan.sync is "native"',
        ),
        (
            PlanRequest(sync="ring", staleness=0),
            4,
            "E222",
            'plan.staleness = 0 is .*and plan.sync is "ring"',
        ),
        (
            PlanRequest(sync="parameter_server", servers=4),
            4,
            "E222",
            "plan.servers = 4 of 4 processes leave no worker.*plan.processes=5",
        ),
        (PlanRequest(sync="parameter_server"), 1, "E222", "plan.servers = 1 of 1 processes"),
        (
            PlanRequest(sync="parameter_server", dp=3),
            3,
            "E200",
            "but 3 processes started, 1 of them servers,.*plan.dp=2, or start 4",
        ),
        (PlanRequest(sync="parameter_server", transport="shm"), 3, "E223", "Set plan.transport=auto"),
        (PlanRequest(sync="parameter_server", hsdp=2), 3, "E210", "plan.hsdp"),
    ],
)
def test_what_servers_do_not_do_is_refused_by_name(request_, world, code, text):
    with pytest.raises(PlanError, match=text) as caught:
        make_plan(request_, world_size=world, global_batch=12)
    assert caught.value.code == code


def test_servers_are_an_appendix_of_the_mesh():
    request = PlanRequest(sync="parameter_server", servers=2, bucket_bytes=4096)
    plan = make_plan(request, world_size=5, global_batch=12)
    assert (plan.mesh.world_size, plan.servers, plan.world_size) == (3, 2, 5)
    assert (plan.micro_batch, plan.policy.name, plan.policy.bucket_bytes) == (4, "parameter_server", 4096)
    assert plan.describe() == "3 workers, 2 parameter servers · micro 4 x accumulate 1 · fp32"
    assert TrainPlan.from_json(plan.to_json()) == plan
    one = make_plan(PlanRequest(sync="parameter_server"), world_size=2, global_batch=4)
    assert one.describe().startswith("1 worker, 1 parameter server · ")


def test_a_plan_says_its_algorithms():
    plan = make_plan(PlanRequest("zero3", sync="ring"), world_size=2, global_batch=8)
    assert plan.describe() == "zero3x2 · micro 4 x accumulate 1 · fp32 · sync ring"
