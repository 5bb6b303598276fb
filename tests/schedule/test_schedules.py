"""Every schedule is complete, ordered and free of deadlock; bubbles and activations are those of the formulas."""

from __future__ import annotations

import pytest

from meshwright.errors import PlanError
from meshwright.schedule.action import Schedule, read_programs, to_text
from meshwright.schedule.catalogue import SCHEDULE_NAMES, make_schedule
from meshwright.schedule.check import peak_in_flight, problem_of
from meshwright.schedule.reading import read_schedule
from meshwright.schedule.timing import Durations, bubble_of, makespan, run

SIZES = [(p, m) for p in range(1, 9) for m in (1, 2, 3, 4, 5, 7, 8, 9, 13, 16, 24, 32)]
ALL_SIZES = [(p, m) for p in range(1, 9) for m in range(1, 33)]
FEW = [(p, m) for p in (1, 2, 3, 4, 8) for m in (1, 2, 4, 7, 8, 16, 32)]


def chunks_of(name: str) -> tuple[int | None, ...]:
    return (1, 2, 3, 4) if name == "interleaved" else (None,)


@pytest.mark.parametrize("name", [name for name in SCHEDULE_NAMES if name != "searched"])
def test_sizes_are_right(name):
    for p, m in SIZES:
        for chunks in chunks_of(name):
            schedule = make_schedule(name, p, m, num_chunks=chunks)
            assert problem_of(schedule) is None, (name, p, m, chunks)


@pytest.mark.parity
@pytest.mark.parametrize("name", [name for name in SCHEDULE_NAMES if name != "searched"])
def test_every_size_is_right(name):
    for p, m in ALL_SIZES:
        for chunks in chunks_of(name):
            assert problem_of(make_schedule(name, p, m, num_chunks=chunks)) is None, (name, p, m, chunks)


def test_searched_is_right():
    for p, m in [(p, m) for p in (1, 2, 3, 5, 8) for m in (1, 2, 5, 16)]:
        assert problem_of(make_schedule("searched", p, m)) is None, (p, m)


@pytest.mark.parametrize("sizes", [SIZES, pytest.param(ALL_SIZES, marks=pytest.mark.parity)])
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_bubble_of_gpipe_and_1f1b(name, sizes):
    for p, m in sizes:
        schedule, times = make_schedule(name, p, m), Durations.equal(p)
        ideal = 3 * m
        assert makespan(schedule, times) / ideal - 1 == pytest.approx((p - 1) / m)
        assert bubble_of(schedule, times) == pytest.approx((p - 1) / (m + p - 1))


@pytest.mark.parametrize("sizes", [SIZES, pytest.param(ALL_SIZES, marks=pytest.mark.parity)])
@pytest.mark.parametrize("chunks", [1, 2, 3, 4])
def test_bubble_of_interleaved(chunks, sizes):
    for p, m in [(p, m) for p, m in sizes if m % p == 0]:
        schedule, times = make_schedule("interleaved", p, m, num_chunks=chunks), Durations.equal(p * chunks)
        assert makespan(schedule, times) / (3 * m * chunks) - 1 == pytest.approx((p - 1) / (chunks * m))
        assert bubble_of(schedule, times) == pytest.approx((p - 1) / (chunks * m + p - 1))


@pytest.mark.parametrize(("f", "i", "w"), [(1, 1, 1), (1, 1.2, 0.8), (2, 2, 1), (1, 1, 0.5), (1, 1.5, 1)])
@pytest.mark.parametrize("p", [2, 3, 4, 8])
def test_zero_bubble_makespans(p, f, i, w):
    """Exact for at least 2P micro-batches: H1 and H2 as published, V with half-size stages."""
    times = Durations.equal(p, forward=f, input_gradient=i, weight_gradient=w)
    halves = Durations.equal(2 * p, forward=f / 2, input_gradient=i / 2, weight_gradient=w / 2)
    for m in (2 * p, 2 * p + 1, 4 * p):
        ideal = m * (f + i + w)
        assert makespan(make_schedule("zb-h1", p, m), times) == pytest.approx(ideal + (p - 1) * (f + i - w))
        h2 = make_schedule("zb-h2", p, m)
        assert makespan(h2, times) == pytest.approx(ideal + (p - 1) * max(f, f + i - 2 * w))
        first = run(h2, times)[0]  # from its own start to its own end: the published bubble
        assert first[-1].end - first[0].start - ideal == pytest.approx(
            (p - 1) * max(0, f + i - 2 * w), abs=1e-9
        )
        assert makespan(make_schedule("zb-v", p, m), halves) == pytest.approx(ideal + (p - 1) * max(f, i) / 2)


def test_bidirectional_bubble():
    for p in (2, 4, 6, 8):
        for m in (2 * p, 32):
            times = Durations.equal(p)
            assert makespan(make_schedule("dualpipe", p, m), times) - 3 * m == pytest.approx(p / 2 - 1)


def test_relay_on_two_devices():
    """Four layers on two devices: one micro-batch leaves each idle half the time, four a fifth."""
    times = Durations.equal(2)
    assert bubble_of(make_schedule("serial", 2, 1), times) == pytest.approx(1 / 2)
    assert bubble_of(make_schedule("serial", 2, 4), times) == pytest.approx(1 / 2)
    assert bubble_of(make_schedule("gpipe", 2, 4), times) == pytest.approx(1 / 5)


@pytest.mark.parametrize("sizes", [FEW, pytest.param(ALL_SIZES, marks=pytest.mark.parity)])
def test_activations_in_flight(sizes):
    for p, m in sizes:
        check_activations(p, m)


def check_activations(p: int, m: int) -> None:
    peaks = {name: peak_in_flight(make_schedule(name, p, m)) for name in SCHEDULE_NAMES if name != "searched"}
    assert peaks["serial"] == [1] * p
    assert peaks["gpipe"] == [m] * p
    assert peaks["1f1b"] == [min(m, p - rank) for rank in range(p)]
    assert peaks["zb-h1"] == [min(m, p)] * p
    assert peaks["zb-h2"] == [min(m, 2 * p - 1)] * p
    assert peaks["zb-v"] == [min(2 * m, m + rank + 1, 2 * p) for rank in range(p)]
    assert max(peaks["dualpipe"]) <= p + 1
    if m % p == 0:
        for chunks in (1, 2, 3, 4):
            found = peak_in_flight(make_schedule("interleaved", p, m, num_chunks=chunks))
            stated = [(chunks - 1) * p + 2 * (p - rank - 1) + 1 for rank in range(p)]
            assert found == [min(chunks * m, peak) for peak in stated]


def test_text_comes_back():
    for name in SCHEDULE_NAMES:
        schedule = make_schedule(name, 4, 6)
        for csv in (False, True):
            assert read_programs(to_text(schedule, csv=csv)) == schedule.programs
    assert to_text(make_schedule("1f1b", 2, 2)) == "0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1"
    with pytest.raises(ValueError, match=r"line 2: '1X0' is no action"):
        read_programs("0F0 0B0\n1X0")


def test_foreign_csv_with_idle_cells():
    programs = read_programs("0F0,0F1,,,0B0,0B1\n,1F0,1B0,1F1,1B1,")
    schedule = Schedule("read", 2, 2, ((0, 1),), programs)
    assert problem_of(schedule) is None


@pytest.mark.parametrize(
    ("programs", "text"),
    [
        ("0F0 0B0\n1B0 1F0", "rank 0 waits for ever before 0B0: 1G0 never comes"),
        ("0F0 0B0\n1F0", "stage 1, micro-batch 0 has 1 F, 0 B, 0 I, 0 W; needed are F and B, or F, I and W"),
        ("0F0 0F0 0B0\n1F0 1B0", "stage 0, micro-batch 0 has 2 F"),
        ("0F0 0B0 1F0\n1B0", "rank 0: 1F0 belongs to rank 1"),
        ("0F0 0B0 0F1 0B1\n1F0 1B0 1F1 1B1", "of a micro-batch beyond the 1"),
    ],
)
def test_what_is_wrong_is_named(programs, text):
    found = problem_of(Schedule("wrong", 2, 1, ((0, 1),), read_programs(programs)))
    assert found is not None
    assert text in found


def test_a_schedule_is_read_with_its_placement():
    for name in SCHEDULE_NAMES:
        schedule = make_schedule(name, 3, 4)
        read = read_schedule(to_text(schedule, csv=True), name=name)
        assert read == schedule


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0 0B0\n1X0", r"own: line 2: '1X0' is no action; write e.g. 0F0"),
        ("0F0 0B0\n2F0 2B0", "own: no rank runs stage 1"),
        ("0F0 0B0\n0F1 0B1", r"own: 0F1 is on rank 1, and stage 0 is on rank 0 too; .* e.g. 0F0/1"),
        ("0F0 0B0 1F1/1 1B1/1\n1F0 1B0", "own: no rank runs stage 0 in slot 1"),
        ("0F0 0B0\n1B0 1F0", "own: rank 0 waits for ever before 0B0"),
        ("", "own: no rank runs stage 0"),
    ],
)
def test_a_wrong_file_is_refused(text, message):
    with pytest.raises(PlanError, match=message) as caught:
        read_schedule(text, name="own")
    assert caught.value.code == "E233"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("1f1d", 4, 4), "unknown schedule '1f1d'.*Did you mean '1f1b'"),
        (("1f1b", 0, 4), "each is at least 1"),
    ],
)
def test_refused_by_name(arguments, text):
    with pytest.raises(PlanError, match=text) as caught:
        make_schedule(*arguments)
    assert caught.value.code == "E230"


def test_chunks_of_a_schedule_without():
    with pytest.raises(PlanError, match="1f1b has no choice of chunks"):
        make_schedule("1f1b", 2, 2, num_chunks=2)
