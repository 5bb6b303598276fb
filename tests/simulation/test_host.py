"""Prices of plans on a measured host, from figures that are easy to add up."""

from dataclasses import replace

import pytest

from meshwright.comm.transports.shared_messages import NUM_PIECES, PIECE_BYTES
from meshwright.planner.request import make_request
from meshwright.planner.search import Wanted, search
from meshwright.presets import find_model
from meshwright.presets.counts import num_parameters
from meshwright.presets.host import BlockTime, CollectiveTime, HostProfile, Learned, PartTime
from meshwright.simulation.host import host_step, stage_blocks
from meshwright.simulation.host_keys import attend_of, block_of, head_of
from meshwright.simulation.host_peak import RING_PIECE_BYTES, RING_PIECES, host_peak
from meshwright.simulation.job import Layout, Workload, on_host
from meshwright.simulation.prediction import predict
from meshwright.simulation.reading import parse_cluster

WORK = Workload(find_model("gpt-nano"), 128, 32)
OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "message")


def host(work=WORK, *, layer=0.0, **changes):
    """One core-second of a block is a millisecond a sequence, divided by tp and cp; collectives take no time."""
    layouts = [
        Layout(tp=tp, cp=cp, cp_kind=kind)
        for tp in (1, 2, 4)
        for cp in (1, 2, 4)
        for kind in ("ring", "ulysses", "allgather")
    ]
    rows = {}
    for layout in layouts:
        part = layout.tp * layout.cp
        one = 1e-3 / part
        rows[block_of(work, layout).key] = BlockTime(
            block_of(work, layout).key, 1, one, one, one, one / 4, one / 4
        )
    parts = {}
    for layout in layouts:
        for shape in (head_of(work, layout), attend_of(work, layout)):
            if shape is not None:
                parts[shape.key] = PartTime(
                    shape.key, 1, 1e-3 / 4 / layout.tp / layout.cp, 1e-3 / 4 / layout.tp / layout.cp
                )
    free = tuple(
        CollectiveTime(kind + op, ranks, size, 0.0)
        for kind in ("", "shared ")
        for op in OPS
        for ranks in (2, 4)
        for size in (1, 1 << 20)
    )
    values = {
        "name": "here",
        "cores": 2,
        "memory_bytes": 8 << 30,
        "process_bytes": 250 << 20,
        "step_seconds": 0.0,
        "microbatch_seconds": 0.0,
        "layer_seconds": layer,
        "gather_seconds": 0.0,
        "accumulate_seconds": 0.0,
        "update_seconds": 0.0,
        "collectives": free,
        "blocks": tuple(rows.values()),
        "parts": tuple(parts.values()),
    }
    return HostProfile(**{**values, **changes})


def place(layout, profile, **changes):
    """Where a layout runs: one host by default."""
    return replace(on_host(parse_cluster(f"{layout.num_devices}xcpu"), profile), **changes)


def step_of(layout, **changes):
    return host_step(WORK, layout, place(layout, host(), **changes))


def seconds(layout, profile=None):
    return host_step(WORK, layout, place(layout, profile or host())).total


# 32 sequences through 4 blocks of 3 ms and a head of 0.5 ms.
ALONE = 32 * (4 * 3e-3 + 0.5e-3)


@pytest.mark.parametrize(
    "layout",
    [
        Layout(dp=2, micro_batch=16),
        Layout(dp=2, micro_batch=4, zero=3),
        Layout(tp=2, micro_batch=8),
        Layout(cp=2, micro_batch=8),
        Layout(dp=4, micro_batch=8),
        Layout(dp=2, tp=2, micro_batch=8),
    ],
)
def test_without_messages_two_cores_take_half_of_the_time(layout):
    assert seconds(layout) == pytest.approx(ALONE / 2)


def test_ranks_that_outnumber_cores_take_turns():
    three = Layout(dp=3, micro_batch=1)
    work = replace(WORK, global_batch=30)
    alone = 30 * (4 * 3e-3 + 0.5e-3)
    assert host_step(work, three, place(three, host())).total == pytest.approx(alone / 2)
    assert host_step(work, three, place(three, host(cores=4))).total == pytest.approx(alone / 3)


def test_recomputation_is_another_forward():
    plain, again = Layout(dp=2, micro_batch=16), Layout(dp=2, micro_batch=16, recompute="full")
    assert seconds(again) - seconds(plain) == pytest.approx(16 * 4 * 1e-3)


def test_a_pipeline_waits_and_zero_bubble_waits_less():
    times = {name: step_of(Layout(pp=2, micro_batch=4, schedule=name)) for name in ("gpipe", "1f1b", "zb-h1")}
    assert all(step.total > ALONE / 2 for step in times.values())
    assert times["zb-h1"].total < times["1f1b"].total
    assert times["1f1b"].bubble > 0
    finer = step_of(Layout(pp=2, micro_batch=1))
    assert finer.total < times["1f1b"].total
    # Four stages on two cores: whoever waits leaves its core to another.
    crowded = step_of(Layout(pp=4, micro_batch=1))
    assert ALONE / 2 < crowded.total < 1.2 * ALONE / 2


def test_stages_are_cut_so_that_the_head_counts():
    assert stage_blocks(4, 2) == (2, 2)
    assert stage_blocks(4, 2, head=1.5) == (3, 1)
    assert stage_blocks(7, 3, head=1.0) == (3, 2, 2)
    assert stage_blocks(4, 1) == (4,)
    assert stage_blocks(2, 4) == (1, 1, 0, 0)  # the last has the head


def test_what_a_micro_batch_and_its_blocks_cost_beside_their_operations():
    profile = host(layer=1e-3, microbatch_seconds=2e-3, accumulate_seconds=0.0)
    change = seconds(Layout(dp=2, micro_batch=1), profile) - seconds(Layout(dp=2, micro_batch=1))
    assert change == pytest.approx(16 * (4 * 1e-3 + 2e-3))


def test_what_runs_taught_multiplies_parts():
    layout = Layout(pp=2, micro_batch=4)
    plain, taught = (
        host_step(WORK, layout, place(layout, host(learned=learned)))
        for learned in (Learned(), Learned(compute=1.5, waiting=0.5))
    )
    assert taught.compute == pytest.approx(1.5 * plain.compute)
    assert taught.bubble == pytest.approx(0.5 * plain.bubble)
    more = host_peak(WORK, layout, host(learned=Learned(memory=1.1))).peak
    assert more == pytest.approx(1.1 * host_peak(WORK, layout, host()).peak)


def test_memory_of_a_plan_is_what_the_ledger_of_a_run_says():
    # `predict_ledger` of gpt-nano, 16 sequences of 128 tokens a rank, MiB (tests/training/test_ledger.py has it exact).
    found = host_peak(WORK, Layout(dp=2, micro_batch=16), host())
    mib = {
        name: getattr(found, name) / 2**20
        for name in ("weights", "gradients", "optimizer", "activations", "logits")
    }
    expected = {"weights": 3.21, "gradients": 3.21, "optimizer": 6.43, "activations": 65.25, "logits": 7.02}
    assert mib == pytest.approx(expected, rel=0.01)
    sharded = host_peak(WORK, Layout(dp=2, micro_batch=16, zero=3), host())
    assert sharded.weights == found.weights / 2
    assert sharded.optimizer == found.optimizer / 2


# gpt-nano of 4 layers and 256, 256 tokens, 12 sequences a step: what the fullest process held, MiB, on a host whose
# processes hold 292.4 MiB before; two measurements differ by 2 to 10 MiB.
HELD = {
    Layout(dp=2, micro_batch=6): 490,
    Layout(dp=2, micro_batch=1): 377,
    Layout(dp=2, zero=2, micro_batch=3): 428,
    Layout(dp=2, zero=3, micro_batch=2): 384,
    Layout(dp=2, micro_batch=3, recompute="full"): 407,
    Layout(tp=2, micro_batch=4): 402,
    Layout(tp=2, micro_batch=6, sequence_parallel=True): 425,
    Layout(pp=2, micro_batch=2): 388,
    Layout(pp=2, schedule="interleaved", chunks=2, micro_batch=2): 405,
    Layout(pp=3, micro_batch=1): 376,
    Layout(cp=2, micro_batch=4): 430,
    Layout(cp=2, cp_kind="ulysses", micro_batch=6): 461,
    Layout(cp=2, tp=2, micro_batch=4): 379,
}


@pytest.mark.parametrize(
    "layout", HELD, ids=lambda layout: f"dp{layout.dp} tp{layout.tp} pp{layout.pp} cp{layout.cp}"
)
def test_processes_hold_what_was_measured(layout):
    model = replace(
        find_model("gpt-nano"),
        num_layers=4,
        dim=256,
        num_heads=8,
        num_kv_heads=8,
        ffn_dim=1024,
        max_seq_len=256,
    )
    profile = replace(host(), process_bytes=int(292.4 * 2**20))
    found = host_peak(Workload(model, 256, 12), layout, profile)
    assert found.peak / 2**20 == pytest.approx(HELD[layout], rel=0.05)


def test_rings_are_those_of_messages():
    assert (RING_PIECES, RING_PIECE_BYTES) == (NUM_PIECES, PIECE_BYTES)
    found = {pp: host_peak(WORK, Layout(pp=pp, micro_batch=16), host()).communication for pp in (1, 2, 3)}
    # Large messages fill a ring: one to a neighbour and one from it, and a stage in between has two neighbours.
    assert found == {1: 0, 2: 2 * 32 * 2**18, 3: 4 * 32 * 2**18}
    small = host_peak(WORK, Layout(pp=2, micro_batch=1), host()).communication
    assert small == 2 * 32 * 4 * 128 * WORK.model.dim


def test_ulysses_keeps_what_heads_gave_twice():
    """The ledger of such a run says 54.41 MB; of a ring with as many tokens 51.26."""
    model = replace(
        find_model("gpt-nano"),
        num_layers=4,
        dim=256,
        num_heads=8,
        num_kv_heads=8,
        ffn_dim=1024,
        max_seq_len=256,
    )
    work = Workload(model, 256, 12)
    layouts = [Layout(cp=2, cp_kind=kind, micro_batch=6) for kind in ("ulysses", "ring")]
    exchanged, around = (host_peak(work, layout, host()).activations for layout in layouts)
    assert exchanged == pytest.approx(54_411_264, rel=1e-3)
    assert exchanged - around == 4 * 4 * 6 * 128 * 256


def test_a_search_on_a_host_prices_everything_by_what_was_measured():
    cluster = on_host(parse_cluster("2xcpu"), host())
    assert cluster.machine.memory_bytes == 4 << 30
    request = make_request(WORK, cluster, {})
    found = search(request, Wanted(num_meshes=9, ready=True))
    assert found.best.seconds == pytest.approx(predict(WORK, found.best.layout, cluster).step.total)
    assert found.best.seconds == pytest.approx(ALONE / 2)
    assert {(item.layout.dp, item.layout.tp, item.layout.pp, item.layout.cp) for item in found.by_mesh} == {
        (2, 1, 1, 1),
        (1, 2, 1, 1),
        (1, 1, 2, 1),
        (1, 1, 1, 2),
    }


def test_between_hosts_the_network_is_added():
    data, pipe = Layout(dp=2, micro_batch=16), Layout(pp=2, micro_batch=1)
    for layout in (data, pipe):
        apart = {"devices_per_node": 1, "host": host(cores=1)}
        near = step_of(layout, **apart, nic_bytes_per_second=1e15).total
        far = step_of(layout, **apart, nic_bytes_per_second=25e6).total
        assert far > near >= step_of(layout).total
    slow, fast = (
        {
            layout.pp: step_of(
                layout, devices_per_node=1, host=host(cores=1), nic_bytes_per_second=rate
            ).total
            for layout in (data, pipe)
        }
        for rate in (2e6, 1e9)
    )
    # 3.4 MB of weights twice, or 32 sequences of 64 KiB there and back, beside each other and beside computations.
    assert fast[1] < fast[2]
    assert slow[1] == pytest.approx(
        ALONE / 2 + 2 * (1e-4 + 4 * num_parameters(WORK.model) / 2 / 2e6), rel=0.01
    )
