"""Closed forms of memory against the paper's models, its bars, and the pipeline schedules themselves."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest

from meshwright.presets import find_model
from meshwright.schedule.catalogue import make_schedule
from meshwright.schedule.check import peak_in_flight
from meshwright.simulation.memory import (
    Split,
    layer_activation_bytes,
    micro_batches_in_flight,
    stage_memory,
)

GIB, SEQ = 2**30, 2048


def shape(layers: int, dim: int, heads: int):
    sizes = {"num_layers": layers, "dim": dim, "num_heads": heads, "ffn_dim": 4 * dim, "max_seq_len": SEQ}
    return find_model("gpt3-175b").with_changes(**sizes)


# Model, how it is cut, sequences of a micro-batch: table 3 of arXiv 2205.05198.
PAPER = {
    "22B": (shape(48, 6144, 64), Split(8, 1, 1), 4),
    "175B": (find_model("gpt3-175b"), Split(8, 8, 3), 1),
    "530B": (shape(105, 20480, 128), Split(8, 35, 3), 1),
    "1T": (find_model("gpt-1t"), Split(8, 64, 1), 1),
}
# GiB of the first stage: states, activations, activations with selective recomputation and sequence parallelism.
STAGES = {
    "22B": (45.5625, 59.25, 9.5625),
    "175B": (45.5625, 66.84375, 12.3515625),
    "530B": (31.640625, 114.0234375, 23.076171875),
    "1T": (32.958984375, 131.25, 26.5625),
}
# Per cent of plain tensor parallelism: sequence parallelism, selective, both, full; bars of the paper's figure 7.
BARS = {
    "22B": (66.84, 49.42, 16.18, 7.64),
    "175B": (62.04, 56.53, 18.49, 8.71),
    "530B": (58.31, 62.04, 20.27, 9.42),
    "1T": (58.31, 62.04, 20.27, 9.42),
}


@pytest.mark.parametrize("name", STAGES)
def test_the_first_stage_of_the_papers_models(name: str) -> None:
    preset, split, batch = PAPER[name]
    plain = stage_memory(preset, split, seq_len=SEQ, micro_batch=batch)
    lean = stage_memory(
        preset, replace(split, sequence_parallel=True), seq_len=SEQ, micro_batch=batch, kept="selective"
    )
    found = [x / GIB for x in (plain.states, plain.activations, lean.activations)]
    assert found == pytest.approx(STAGES[name], rel=0, abs=1e-6)
    assert lean.states == plain.states


@pytest.mark.parametrize("name", BARS)
def test_what_remains_of_plain_tensor_parallelism(name: str) -> None:
    preset, split, batch = PAPER[name]
    sequence = replace(split, sequence_parallel=True)
    ways = ((sequence, "none"), (split, "selective"), (sequence, "selective"), (split, "full"))
    sizes = {"seq_len": SEQ, "micro_batch": batch}
    plain = layer_activation_bytes(preset, split=split, **sizes)
    shares = [layer_activation_bytes(preset, split=cut, kept=kept, **sizes) / plain for cut, kept in ways]
    scores = Fraction(5 * preset.num_heads * SEQ, 8 * preset.dim)
    exact = [Fraction(17, 4) + scores, Fraction(13), Fraction(17, 4), Fraction(2)]
    assert shares == pytest.approx([float(x / (13 + scores)) for x in exact], rel=1e-12)
    # The bars are of a drawing: read to about a tenth of a per cent.
    assert [100 * share for share in shares] == pytest.approx(BARS[name], rel=0, abs=0.15)


def test_sequence_parallelism_splits_all_that_a_layer_keeps() -> None:
    preset = find_model("gpt3-175b")
    whole = layer_activation_bytes(preset, seq_len=SEQ, micro_batch=1)
    assert whole == 34 * SEQ * preset.dim + 5 * preset.num_heads * SEQ * SEQ
    for kept in ("none", "selective", "full"):
        alone = layer_activation_bytes(preset, seq_len=SEQ, micro_batch=1, kept=kept)
        cut = Split(tensor=8, sequence_parallel=True)
        assert layer_activation_bytes(preset, seq_len=SEQ, micro_batch=1, split=cut, kept=kept) == alone / 8


@pytest.mark.parametrize(("stages", "chunks"), [(1, 1), (4, 1), (8, 1), (4, 2), (8, 3), (3, 4)])
def test_what_is_in_flight_is_what_the_schedules_hold(stages: int, chunks: int) -> None:
    name = "interleaved" if chunks > 1 else "1f1b"
    schedule = make_schedule(name, stages, 4 * stages, num_chunks=chunks if chunks > 1 else None)
    split = Split(stages=stages, chunks=chunks)
    counted = [micro_batches_in_flight(split, stage=stage) * chunks for stage in range(stages)]
    assert counted == pytest.approx(peak_in_flight(schedule), rel=1e-12)


def test_other_families_are_refused() -> None:
    with pytest.raises(AssertionError, match="llama-nano is a llama: the formulas are of a gpt"):
        layer_activation_bytes(find_model("llama-nano"), seq_len=8, micro_batch=1)
