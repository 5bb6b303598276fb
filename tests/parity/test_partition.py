"""Plans of two large models for 32 devices: certified, and what the search took."""

from __future__ import annotations

import time

import pytest

from meshwright.capture.capture import capture
from meshwright.partitioning.graph_costs import GraphCosts, Roofline
from meshwright.partitioning.model_plan import plan_model
from meshwright.partitioning.stage_costs import Group, Problem
from tests.parity.partition_models import bert, resnet152x8

pytestmark = pytest.mark.parity


@pytest.mark.parametrize(
    ("make", "parameters", "batch"),
    [(bert, 4.9e9, 256), (resnet152x8, 3.73e9, 128)],
    ids=["bert", "resnet152x8"],
)
def test_large_models_for_32_devices(make, parameters, batch):
    graph = capture(*make())
    assert graph.num_parameters() == pytest.approx(parameters, rel=0.01)
    started = time.process_time()
    costs = GraphCosts(graph, Roofline(15.7e12 / 2, 900e9, 5e-6))
    group = Group(32, memory_bytes=0.9 * 32 * 2**30, bandwidth=20 * 2**30)
    found = plan_model(costs, Problem({}, (group,), (1, 32), resident=4.0), batch=batch)
    plan = found.partition
    print(
        f"{graph.name}: {time.process_time() - started:.1f} s, {plan.num_blocks} blocks, "
        f"stages {[(s.first, s.last, s.devices) for s in plan.stages]}, M {plan.num_microbatches}, "
        f"step {found.step_seconds:.4g} s, gap {plan.gap:.2%}, of the step {found.gap:.2%}, "
        f"imbalance {plan.imbalance:.2%}"
    )
    assert sum(stage.devices for stage in plan.stages) == 32
    assert all(stage.memory_bytes <= group.memory_bytes for stage in plan.stages)
    assert plan.gap == 0 or plan.imbalance <= 0.03
    assert found.gap < 0.02
