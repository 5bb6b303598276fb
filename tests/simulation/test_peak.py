"""Memory of any layout: closed forms to 1e-6, and peaks that were measured."""

from dataclasses import replace

import pytest

from meshwright.presets import find_model
from meshwright.simulation.job import Layout, Workload
from meshwright.simulation.peak import in_flight, kept_layer_bytes, peak_bytes, state_bytes, whole_layer_bytes

GB = 1e9
GPT = Workload(find_model("gpt3-175b"), 2048, 64)


@pytest.mark.parametrize(
    ("zero", "shards", "published"),
    # Rajbhandari et al. 2020, table 1: 7.5, 128 and 1000 billion parameters; 4 + 12/N, 2 + 14/N, 16/N bytes.
    [
        (1, 1, (120, 2048, 16000)),
        (1, 4, (52.5, 896, 7000)),
        (1, 16, (35.625, 608, 4750)),
        (1, 64, (31.40625, 536, 4187.5)),
        (2, 4, (41.25, 704, 5500)),
        (2, 16, (21.5625, 368, 2875)),
        (2, 1024, (15.1025390625, 257.75, 2013.671875)),
        (3, 4, (30, 512, 4000)),
        (3, 64, (1.875, 32, 250)),
        (3, 1024, (0.1171875, 2, 15.625)),
    ],
)
def test_states_are_those_of_zero(zero, shards, published):
    for billions, expected in zip((7.5, 128, 1000), published, strict=True):
        found = sum(state_bytes(billions * GB, zero=zero, shards=shards, gradient=2)) / GB
        assert found == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    # Megatron-LM's distributed optimizer: 6 + 12/d and 4 + 16/d bytes, 8 + 8/d in float32.
    [((2, 4, 12), 6 + 12 / 8), ((2, 2, 16), 4 + 16 / 8), ((4, 4, 8), 8 + 8 / 8)],
)
def test_states_are_those_of_the_distributed_optimizer(sizes, expected):
    weight, gradient, optimizer = sizes
    found = sum(state_bytes(1, zero=1, shards=8, weight=weight, gradient=gradient, optimizer=optimizer))
    assert found == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("recompute", "tp", "sequence_parallel", "gib"),
    # Korthikanti et al. 2022, table 2, one layer of the 175B model.
    [
        ("none", 1, False, 2.671875),
        ("none", 8, False, 0.5390625),
        ("none", 8, True, 0.333984375),
        ("selective", 8, False, 0.3046875),
        ("selective", 8, True, 0.099609375),
        ("full", 8, False, 0.046875),
    ],
)
def test_a_layer_keeps_what_the_paper_says(recompute, tp, sequence_parallel, gib):
    layout = Layout(
        dp=1, tp=tp, recompute=recompute, sequence_parallel=sequence_parallel, attention="unfused"
    )
    assert kept_layer_bytes(GPT, layout) / 2**30 == pytest.approx(gib, rel=1e-6)


def test_stages_hold_as_many_micro_batches_as_their_schedule_needs():
    layout = Layout(pp=8)
    assert [in_flight(layout, stage, 64) for stage in (0, 7)] == [8, 1]
    assert in_flight(replace(layout, schedule="gpipe"), 0, 64) == 64
    assert in_flight(replace(layout, schedule="interleaved", chunks=3), 0, 64) == pytest.approx(8 + 7 / 3)
    assert in_flight(replace(layout, schedule="zb-h2"), 0, 64) == 15
    assert in_flight(replace(layout, schedule="dualpipe"), 3, 64) == 9


def test_a_step_of_few_micro_batches_holds_no_more_than_those():
    few = peak_bytes(replace(GPT, global_batch=2), Layout(tp=8, pp=8, attention="unfused"))
    many = peak_bytes(replace(GPT, global_batch=64), Layout(tp=8, pp=8, attention="unfused"))
    assert few.activations < 0.5 * many.activations


def test_recomputation_orders_what_is_kept():
    llama = Workload(find_model("llama-3.1-8b"), 8192, 16)
    none, half, full = (kept_layer_bytes(llama, Layout(recompute=word)) for word in ("none", "half", "full"))
    assert full < half < none == whole_layer_bytes(llama, Layout())


@pytest.mark.parametrize(
    ("layout", "batch", "gib"),
    # torchtitan paper (arXiv 2410.06511), table 1: Llama-3.1-8B on 8 and 128 H100 of 96 GB, compiled.
    [
        (Layout(dp=8, zero=3, recompute="half", micro_batch=2, logit_bytes=14), 16, 77.0),
        (Layout(dp=128, zero=3, recompute="half", micro_batch=2, logit_bytes=14), 256, 62.1),
    ],
)
def test_published_peaks_are_met(layout, batch, gib):
    found = peak_bytes(Workload(find_model("llama-3.1-8b"), 8192, batch), layout)
    assert (found.peak - found.reserve) / 2**30 == pytest.approx(gib, rel=0.06)


def test_parts_add_up():
    found = peak_bytes(GPT, Layout(dp=8, zero=3))
    assert found.peak == sum(vars(found).values())
    assert found.gathered > 0
    assert peak_bytes(GPT, Layout(dp=8, zero=2)).gathered == 0
