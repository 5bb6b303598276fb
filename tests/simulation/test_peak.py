"""Memory of any layout: closed forms to 1e-6, and peaks that were measured."""

from dataclasses import replace

import pytest

from meshwright.presets import find_machine, find_model
from meshwright.schedule.catalogue import make_schedule
from meshwright.schedule.check import peak_in_flight
from meshwright.simulation.job import Cluster, Layout, Workload
from meshwright.simulation.peak import (
    context_bytes,
    in_flight,
    kept_layer_bytes,
    peak_bytes,
    state_bytes,
    states_of,
    whole_layer_bytes,
)
from meshwright.simulation.prediction import predict
from meshwright.simulation.step import layers_of_stages

GB = 1e9
GPT = Workload(find_model("gpt3-175b"), 2048, 64)
LLAMA = Workload(find_model("llama-3.1-8b"), 8192, 16)
# nanotron's benchmark: 24 layers of 2048, a feed-forward part of 4096, tied embeddings of 50,257 words.
SMALL = replace(
    find_model("llama-3.1-8b"), num_layers=24, dim=2048, num_kv_heads=32, ffn_dim=4096, vocab_size=50257
)


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


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v"])
def test_every_stage_holds_what_its_lowered_schedule_holds(name):
    """pitfall: later stages of zero-bubble schedules hold as much as the first, for their weights' gradients wait."""
    made = make_schedule(name, 4, 16)
    chunks = made.num_stages // 4
    layout = Layout(pp=4, schedule=name, chunks=chunks)
    found = [in_flight(layout, stage, 16) for stage in range(4)]
    assert found == [count / chunks for count in peak_in_flight(made)]


def test_a_searched_schedule_holds_what_it_may():
    assert in_flight(Layout(pp=8, schedule="zb-h2", keeps=16), 3, 64) == 16


def test_scores_that_are_written_out_count_in_any_family():
    """pitfall: without selective recomputation's scores a gated layer kept less than nothing."""
    fused, written = (Layout(attention=kind) for kind in ("flash", "unfused"))
    scores = 5 * 32 * 8192 * 8192
    assert whole_layer_bytes(LLAMA, written) - whole_layer_bytes(LLAMA, fused) == pytest.approx(scores)
    selective = kept_layer_bytes(LLAMA, replace(written, recompute="selective"))
    assert selective == pytest.approx(kept_layer_bytes(LLAMA, fused))


def test_libraries_of_8_bits_keep_inputs_of_products_in_them():
    """Results of both norms, of attention and of the feed-forward part's middle: one byte less an element."""
    wide, narrow = (Layout(attention="engine", precision=word) for word in ("bf16", "fp8"))
    model = LLAMA.model
    saved = whole_layer_bytes(LLAMA, wide) - whole_layer_bytes(LLAMA, narrow)
    assert saved == LLAMA.seq_len * (3 * model.dim + model.ffn_dim)
    other = replace(narrow, attention="flash")
    assert whole_layer_bytes(LLAMA, other) == whole_layer_bytes(LLAMA, wide)


@pytest.mark.parametrize(("tp", "measured"), [(1, 38.4), (2, 21.2), (4, 12.65), (8, 8.36)])
def test_a_layer_that_is_not_fused_keeps_what_was_measured(tp, measured):
    """nanotron, first stages of pipelines: growth of peaks with tokens, in bytes of a token's stream."""
    work = Workload(SMALL, 4096, 1024)
    layout = Layout(tp=tp, sequence_parallel=True, fused=False, keeps_gathered=True)
    assert whole_layer_bytes(work, layout) / (4096 * 2048) == pytest.approx(measured, rel=0.02)
    parts = replace(layout, keeps_gathered=False)
    more = whole_layer_bytes(work, layout) - whole_layer_bytes(work, parts)
    assert more == pytest.approx(4 * 4096 * 2048 * (1 - 1 / tp))


def test_stages_cut_by_cost_count_the_head():
    """nanotron: 7 of 24 layers on the first of four stages, as the weights that it held say; 14 of two, 4 of eight."""
    work = Workload(SMALL, 4096, 1024)
    for pp, full in ((2, 14), (4, 7), (8, 4)):
        assert layers_of_stages(work, Layout(pp=pp, counts_head=True))[0] == full
        assert layers_of_stages(work, Layout(pp=pp)) == (24 / pp, 24 / pp)


def test_logits_are_gone_when_a_layer_runs_again():
    few, many = (peak_bytes(LLAMA, Layout(recompute="full", micro_batch=2, logit_bytes=n)) for n in (1, 14))
    assert few.logits == 0
    assert many.logits == 14 * 2 * 8192 * 128256
    assert many.activations < few.activations


def test_an_uneven_pipeline_is_fullest_behind_its_embedding():
    """70 layers on 12 stages: 5 and the embedding on the first, 6 on the second, which holds one micro-batch less."""
    work = replace(GPT, model=replace(GPT.model, num_layers=70), global_batch=512)
    layout = Layout(pp=12, tp=8)
    kept = kept_layer_bytes(work, layout)
    working = peak_bytes(work, layout).activations - 11 * 6 * kept
    assert 0 < working < kept
    assert peak_bytes(work, layout, of_first_stage=True).activations == pytest.approx(12 * 5 * kept + working)


def test_stages_that_hold_gathered_weights_hold_sums_of_gradients_too():
    layout = Layout(dp=8, pp=4, zero=3, holds_stage=True)
    whole = states_of(GPT, replace(layout, zero=0)).weights / 2
    assert states_of(GPT, layout).gathered == 6 * whole
    assert states_of(GPT, replace(layout, holds_stage=False)).gathered < 0.1 * whole * 6


def test_contexts_differ_by_device():
    for name, mib in (("v100", 1113), ("v100-16", 1113), ("a100-80", 1573)):
        assert context_bytes(Cluster(find_machine(name), 8, 8, 1e9)) == mib * 2**20
    assert context_bytes(None) == 1573 * 2**20


def test_what_lies_in_pieces_does_not_serve():
    """A run whose parts fill usable memory to the last percent runs out of it."""
    cluster = Cluster(find_machine("a100-80"), 1, 8, 1e9)
    found = predict(GPT, Layout(tp=1), cluster)
    held = found.memory.peak - found.memory.reserve

    def fits(bytes_of_device):
        machine = replace(cluster.machine, memory_bytes=int(bytes_of_device / 0.99))
        return predict(GPT, Layout(tp=1), replace(cluster, machine=machine)).fits

    assert not fits(found.memory.peak + 0.02 * held)
    assert fits(found.memory.peak + 0.04 * held)
