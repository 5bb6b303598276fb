"""The pipeline of a plan event by event, beside its price in closed form."""

from dataclasses import replace

import pytest

from meshwright.presets import find_model
from meshwright.simulation.job import Layout, Workload
from meshwright.simulation.pipeline import layers_of_stages, planned_pipeline
from meshwright.simulation.reading import parse_cluster
from meshwright.simulation.step import stage_layers, step_seconds

WORK = Workload(find_model("gpt3-175b"), 2048, 48)
CLUSTER = parse_cluster("128xa100")
PLAN = Layout(tp=8, pp=16, sequence_parallel=True)


@pytest.mark.parametrize(
    ("name", "chunks"),
    [("1f1b", 1), ("interleaved", 2), ("zb-h1", 1), ("zb-h2", 1), ("zb-v", 1), ("gpipe", 1)],
)
def test_the_closed_form_of_a_step_is_what_its_events_take(name, chunks):
    layout = replace(PLAN, schedule=name, chunks=chunks)
    step = step_seconds(WORK, layout, CLUSTER)
    priced = step.total - step.gradients - step.optimizer
    took = planned_pipeline(WORK, layout, CLUSTER).timeline.seconds
    # Messages are hidden where the price adds them; the last stage has the head, the price takes a mean ramp.
    assert took == pytest.approx(priced, rel=0.02)
    assert took > step.compute + step.tensor


def test_weights_that_are_waited_for_and_what_runs_again_are_in_the_stages():
    slow = replace(CLUSTER, nic_bytes_per_second=CLUSTER.nic_bytes_per_second / 50)
    layout = Layout(dp=16, tp=1, pp=8, zero=3, recompute="full")
    step = step_seconds(WORK, layout, slow)
    assert step.weights > 0
    took = planned_pipeline(WORK, layout, slow).timeline.seconds
    assert took == pytest.approx(step.total - step.gradients - step.optimizer, rel=0.03)


@pytest.mark.parametrize(("num_layers", "stages"), [(96, 16), (94, 16), (126, 16), (30, 8), (7, 1), (5, 7)])
@pytest.mark.parametrize("halves", [False, True])
def test_layers_of_stages_are_all_layers_and_agree_with_the_fullest(num_layers, stages, halves):
    found = layers_of_stages(num_layers, stages, halves=halves)
    assert sum(found) == num_layers
    assert len(found) == stages
    assert max(found) == stage_layers(num_layers, stages, halves=halves)[0]


@pytest.mark.parity
def test_gpt3_on_64_stages_of_6_hosts_is_planned_simulated_and_has_its_gap():
    from meshwright.planner.request import make_request
    from meshwright.planner.search import BEST_ONLY, search

    work, cluster = Workload(find_model("gpt3-175b"), 2048, 1536), parse_cluster("3072xa100")
    fixed = {"pp": 64, "dp": 6, "tp": 8, "half_layers": True}
    own = search(make_request(work, cluster, fixed), BEST_ONLY).best
    best = search(make_request(work, cluster, {}), BEST_ONLY).best
    # One and a half layers a stage: attention and feed-forward parts are cut units.
    assert own.layout.half_layers
    assert stage_layers(96, 64, halves=True)[0] == 1.5
    assert 0.10 < own.seconds / best.seconds - 1 < 0.25
    plan = replace(own.layout, schedule="1f1b")
    step = step_seconds(work, plan, cluster)
    took = planned_pipeline(work, plan, cluster)
    assert took.timeline.seconds == pytest.approx(step.total - step.gradients - step.optimizer, rel=0.03)
    assert took.schedule.num_stages == 64
