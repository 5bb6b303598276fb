"""Kernels, collectives and steps: what must hold whatever the constants are."""

from dataclasses import replace

import pytest

from meshwright.errors import ConfigError
from meshwright.presets import find_machine, find_model
from meshwright.presets.calibration import calibration_of
from meshwright.presets.machines import MACHINES
from meshwright.simulation.collectives import bus_bytes_per_second, collective_seconds, message_seconds
from meshwright.simulation.job import Layout, Workload, check_job
from meshwright.simulation.kernels import matmul_seconds
from meshwright.simulation.layers import layer_seconds
from meshwright.simulation.prediction import predict
from meshwright.simulation.reading import make_cluster
from meshwright.simulation.step import (
    exposed_seconds,
    pieces_of,
    sharing_seconds,
    stage_layers,
    step_seconds,
)

A100 = find_machine("a100")
FIT = calibration_of(A100)
GPT3 = Workload(find_model("gpt3-175b"), 2048, 1536)
PLAN = Layout(dp=16, tp=8, pp=8, zero=1, schedule="1f1b", recompute="full", attention="unfused")
CLUSTER = make_cluster(A100, 1024)


def seconds(layout=PLAN, cluster=CLUSTER, work=GPT3, fit=None):
    return step_seconds(work, layout, cluster, fit).total


def test_a_row_of_tiles_more_costs_as_much_as_a_full_one():
    # 108 multiprocessors, tiles of 256 x 128: 12 x 9 tiles are one wave; one column more begins a second.
    full = matmul_seconds(A100, FIT, (12 * 256, 9 * 128, 4096))
    more = matmul_seconds(A100, FIT, (12 * 256, 9 * 128 + 8, 4096))
    assert more > 1.3 * full
    assert matmul_seconds(A100, FIT, (12 * 256 - 64, 9 * 128 - 64, 4096)) == full


def test_large_products_reach_the_fitted_fraction_of_the_peak_and_never_more():
    size = 16384
    reached = 2 * size**3 / matmul_seconds(A100, FIT, (size, size, size)) / A100.flops["bf16"]
    assert 0.9 * FIT.matmul < reached < FIT.matmul


def test_rows_that_do_not_begin_on_16_bytes_take_twice_as_long():
    aligned = matmul_seconds(A100, FIT, (2048, 2048, 112), batch=64)
    assert matmul_seconds(A100, FIT, (2048, 2048, 108), batch=64) > 1.7 * aligned


def test_a_thin_product_takes_the_time_of_the_memory():
    weights = 2 * 8192 * 8192
    assert matmul_seconds(A100, FIT, (1, 8192, 8192)) >= weights / A100.memory_bandwidth


def test_groups_of_a_node_share_its_cards():
    across = bus_bytes_per_second(CLUSTER, FIT, ranks=16, stride=8)
    together = bus_bytes_per_second(CLUSTER, FIT, ranks=128, stride=1)
    assert together == pytest.approx(8 * across)
    assert bus_bytes_per_second(CLUSTER, FIT, ranks=8, stride=1) == pytest.approx(300e9 * FIT.node)


def test_beyond_a_pod_oversubscription_divides_the_rate():
    pods = replace(CLUSTER, pod_devices=256, oversubscription=7.0)
    ratio = bus_bytes_per_second(CLUSTER, FIT, ranks=128, stride=8) / bus_bytes_per_second(
        pods, FIT, ranks=128, stride=8
    )
    assert ratio == pytest.approx(7.0)
    assert bus_bytes_per_second(pods, FIT, ranks=32, stride=8) == bus_bytes_per_second(
        CLUSTER, FIT, ranks=32, stride=8
    )


def test_small_collectives_have_a_floor_and_one_rank_needs_none():
    assert collective_seconds(CLUSTER, FIT, 1e9, ranks=1) == 0
    tiny = collective_seconds(CLUSTER, FIT, 8, ranks=8, passes=2)
    assert 4e-5 < tiny < 1e-4
    assert collective_seconds(CLUSTER, FIT, 8, ranks=1024, passes=2) > tiny


def test_measured_all_reduces_of_one_node_are_met():
    """Bus bandwidths of 8 A100 in GB/s by MiB (vTrain's table): 16: 126, 64: 203, 256: 217, 1024: 229."""
    for mebibytes, published in ((16, 126e9), (64, 203e9), (256, 217e9), (1024, 229e9)):
        size = mebibytes * 2**20
        found = size * 2 * 7 / 8 / collective_seconds(CLUSTER, FIT, size, ranks=8, passes=2)
        assert found == pytest.approx(published, rel=0.25)


def test_messages_inside_a_node_are_faster():
    assert message_seconds(CLUSTER, FIT, 1e8, stride=4) < message_seconds(CLUSTER, FIT, 1e8, stride=8)


def test_a_better_machine_is_never_slower():
    faster = replace(A100, memory_bandwidth=2 * A100.memory_bandwidth)
    assert seconds(cluster=replace(CLUSTER, machine=faster), fit=FIT) < seconds()
    stronger = replace(A100, flops={name: 2 * peak for name, peak in A100.flops.items()})
    assert seconds(cluster=replace(CLUSTER, machine=stronger), fit=FIT) < seconds()
    wired = replace(CLUSTER, nic_bytes_per_second=2 * CLUSTER.nic_bytes_per_second)
    assert seconds(cluster=wired) < seconds()


def test_parts_add_up_and_recomputation_is_a_part_of_computing():
    step = step_seconds(GPT3, PLAN, CLUSTER)
    parts = step.compute + step.bubble + step.tensor + step.context + step.pipeline + step.weights
    assert step.total == parts + step.gradients + step.optimizer
    assert 0 < step.recompute < step.compute / 3
    assert step_seconds(GPT3, replace(PLAN, recompute="none"), CLUSTER).recompute == 0


def test_bubbles_of_schedules_stand_in_their_order():
    bubbles = {
        name: step_seconds(GPT3, replace(PLAN, schedule=name, chunks=chunks), CLUSTER).bubble
        for name, chunks in (("1f1b", 1), ("interleaved", 3), ("zb-h1", 1), ("zb-h2", 1))
    }
    assert bubbles["zb-h2"] < bubbles["zb-h1"] < bubbles["1f1b"]
    assert bubbles["interleaved"] == pytest.approx(bubbles["1f1b"] / 3)


def test_the_bubble_of_equal_stages_is_its_closed_form():
    work = replace(GPT3, global_batch=16 * 32)
    step = step_seconds(work, PLAN, CLUSTER)
    ends = step.compute + step.tensor
    # (P-1)/M of the mean stage: the head makes the last one 3 % longer than the mean.
    assert step.bubble / ends == pytest.approx(7 / 32, rel=0.04)


def test_zero3_with_small_micro_batches_on_many_devices_scales_badly():
    """As in Narayanan et al. 2021, table 2 (there from 144 to 44 TFLOP/s, on software of 2021)."""
    shared = Layout(
        dp=384,
        zero=3,
        recompute="full",
        attention="unfused",
        fused=False,
        micro_batch=4,
        overlap_gradients=False,
    )
    few = seconds(shared, make_cluster(A100, 384))
    many = seconds(replace(shared, dp=1536, micro_batch=1), make_cluster(A100, 1536))
    assert few / many < 0.8 * 1536 / 384
    plain = seconds(replace(PLAN, dp=16, pp=12, overlap_gradients=False), make_cluster(A100, 1536))
    assert many > plain


def test_embedding_and_head_take_the_place_of_layers_where_that_divides():
    assert stage_layers(96, 8) == (12, 12)
    assert stage_layers(70, 12) == (6, 5)
    assert stage_layers(22, 8) == (3, 2)
    assert stage_layers(11, 4) == (3, 2)


def test_gpt3_takes_about_a_month_on_1024_a100():
    """Narayanan et al. 2021: 300 billion tokens in 34 days, with everything computed again."""
    layout = replace(PLAN, zero=0, overlap_gradients=False)
    days = 300e9 / (1536 * 2048) * seconds(layout) / 86400
    assert 30 < days < 38


def test_degrees_that_do_not_fill_the_cluster_are_refused():
    with pytest.raises(
        ConfigError, match=r"dp=16 x tp=8 x pp=8 x cp=1 = 1024 devices, the cluster has 512"
    ) as found:
        check_job(GPT3, PLAN, make_cluster(A100, 512))
    assert found.value.code == "E280"


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"tp": 5, "dp": 1, "pp": 1}, r"plan.tp=5 does not divide 96; take one of .*4, 6, 8"),
        ({"cp": 3, "tp": 1, "dp": 1, "pp": 1}, r"plan.cp=3 does not divide 2048; take one of 1, 2, 4"),
        ({"pp": 100, "tp": 1, "dp": 1}, r"plan.pp=100 x chunks=1 exceeds 96 layers"),
    ],
)
def test_sizes_that_do_not_divide_are_refused(changes, text):
    layout = replace(PLAN, **changes)
    with pytest.raises(ConfigError, match=text) as found:
        check_job(GPT3, layout, make_cluster(A100, layout.num_devices))
    assert found.value.code == "E281"


def test_a_prediction_is_one_entry_of_plans():
    found = predict(GPT3, PLAN, CLUSTER).to_json()
    assert found["mesh"] == {"pp": 8, "dp": 16, "cp": 1, "tp": 8}
    assert found["num_microbatches"] == 96
    assert {
        "step_seconds",
        "mfu",
        "hfu",
        "memory_bytes",
        "zero",
        "schedule",
        "recompute",
        "micro_batch",
    } <= set(found)
    assert found["hfu"] == pytest.approx(found["mfu"] * 4 / 3)


def test_a_machine_without_runs_says_so():
    assert calibration_of(find_machine("h100")).fitted
    assert not calibration_of(find_machine("b200")).fitted


@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.name)
def test_every_machine_prices_a_plan_below_its_peak(machine):
    cluster = make_cluster(machine, 8)
    found = predict(Workload(find_model("gpt2-124m"), 1024, 64), Layout(dp=8, zero=1, micro_batch=4), cluster)
    assert 0.02 < found.mfu < calibration_of(machine).matmul


def test_measured_ceilings_scale_what_a_machine_takes_from_another():
    """MI300X: 668 of 1,307 TFLOP/s in the best of large products, H100: 794 of 989."""
    near, own = calibration_of(find_machine("h100")), calibration_of(find_machine("mi300x"))
    assert own.matmul / near.matmul == pytest.approx(0.511 / 0.803)
    assert calibration_of(find_machine("cpu")).num_units == 1


def test_sums_of_gradients_cost_each_micro_step_but_where_ranks_keep_parts():
    """A layer's 12 x 12288^2 elements over 8 ranks, 6 bytes each, beside products that a larger micro-batch shares."""
    own = sharing_seconds(GPT3, PLAN, CLUSTER, FIT).sums
    numel = 12 * 12288**2 / 8
    assert own == pytest.approx(6 * numel / (A100.memory_bandwidth * FIT.memory), rel=0.01)
    apart = replace(PLAN, accumulator_bytes=2)
    assert sharing_seconds(GPT3, apart, CLUSTER, FIT).sums == pytest.approx(2 * own, rel=0.01)
    parts = replace(PLAN, zero=2)
    assert sharing_seconds(GPT3, parts, CLUSTER, FIT).sums < 0.1 * own
    free = replace(pieces_of(GPT3, PLAN, CLUSTER, FIT).sharing, sums=0.0)
    pieces = replace(pieces_of(GPT3, PLAN, CLUSTER, FIT), sharing=free)
    without = step_seconds(GPT3, PLAN, CLUSTER, FIT, pieces=pieces).compute
    # 12 layers and 96 micro-batches.
    assert step_seconds(GPT3, PLAN, CLUSTER, FIT).compute - without == pytest.approx(12 * 96 * own)


def test_launches_that_block_cost_the_same_whatever_a_rank_computes():
    for layout in (PLAN, replace(PLAN, tp=2, dp=64), replace(PLAN, micro_batch=4)):
        own, blocked = (
            layer_seconds(GPT3, replace(layout, blocking_launches=blocks), CLUSTER, FIT).compute
            for blocks in (False, True)
        )
        # Forward twice, gradients of inputs and of weights: 28 launches each, of 50 microseconds.
        assert blocked - own == pytest.approx(4 * 28 * 50e-6)
    none = replace(PLAN, recompute="none", blocking_launches=True)
    assert layer_seconds(GPT3, none, CLUSTER, FIT).again == 0


def test_batched_products_of_rows_off_16_bytes_run_without_tensor_cores():
    """BigScience: 13,824 with 128 heads (108 wide) took 45 ms a layer more than with 64 (tp 4, micro-batch of 2)."""
    slow = matmul_seconds(A100, FIT, (2048, 2048, 108), batch=64)
    assert 2 * 64 * 2048 * 2048 * 108 / slow < A100.flops["fp32"]


def small_layer(**changes):
    layout = Layout(dp=1, tp=8, micro_batch=1, recompute="full", attention="unfused", **changes)
    work = Workload(
        replace(find_model("gpt3-175b"), dim=1024, num_heads=16, num_kv_heads=16, ffn_dim=4096), 1024, 8
    )
    return layer_seconds(work, layout, make_cluster(A100, 8), FIT)


def test_a_small_layer_takes_what_the_host_takes_to_issue_its_kernels():
    found = small_layer()
    # 28 kernels forward, again, and twice backward; two for each of four exchanges and the two that run again.
    host = FIT.launch_seconds * (4 * 28 + 2 * 6)
    assert found.compute + found.tensor == pytest.approx(host)
    assert found.forward - found.again == pytest.approx(0)
    blocked = small_layer(blocking_launches=True)
    assert blocked.compute + blocked.tensor > host


def test_a_large_layer_does_not_wait_for_the_host():
    slow = replace(FIT, launch_seconds=2 * FIT.launch_seconds)
    assert layer_seconds(GPT3, PLAN, CLUSTER, slow) == layer_seconds(GPT3, PLAN, CLUSTER, FIT)


def test_communication_beside_computations_slows_them_by_a_tenth():
    assert exposed_seconds(3.0, 0.0) == 3.0
    assert exposed_seconds(3.0, 5.0) == pytest.approx(0.3)
    assert exposed_seconds(3.0, 1.0) == pytest.approx(2.1)


def test_ranks_that_share_in_a_node_gather_there_and_sum_copies_between_nodes():
    """InternEvo, 7B on 1,024 devices: 3,625 tokens a second where 8 ranks share, 2,271 where all do."""
    layout = Layout(dp=128, zero=1, micro_batch=2)
    work, cluster = Workload(find_model("llama-3.1-8b"), 2048, 1024), make_cluster(A100, 128)
    everywhere, inside = (
        sharing_seconds(work, replace(layout, shard=shard), cluster, FIT) for shard in (0, 8)
    )
    assert inside.spread < 0.7 * everywhere.spread
    assert inside.last > everywhere.last
    hidden, waited = (
        seconds(replace(layout, overlap_weights=beside), cluster, work, FIT) for beside in (True, False)
    )
    assert hidden < waited


def test_zero3_through_one_card_of_a_node_takes_as_many_times_longer_as_there_are_cards():
    layout = Layout(dp=1024, zero=3)
    wide, narrow = (
        sharing_seconds(GPT3, replace(layout, one_card=one), CLUSTER, FIT).gather for one in (False, True)
    )
    assert narrow > 4 * wide
    inside = make_cluster(A100, 8)
    few = Layout(dp=8, zero=3)
    assert sharing_seconds(GPT3, few, inside, FIT) == sharing_seconds(
        GPT3, replace(few, one_card=True), inside, FIT
    )
