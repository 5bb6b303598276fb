"""The simulator equals closed forms on balanced pipelines, and sees links, cores and memory."""

from __future__ import annotations

import itertools
import json
import random

import pytest

from meshwright.schedule.catalogue import SCHEDULE_NAMES, make_schedule
from meshwright.schedule.lower import Extras, lower
from meshwright.schedule.replicas import replicas_of
from meshwright.schedule.timing import Durations, makespan
from meshwright.simulation.machinery import Machinery, Wire
from meshwright.simulation.timeline import memory_curves, simulate
from meshwright.simulation.trace import as_trace


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
@pytest.mark.parametrize(("p", "m"), [(1, 1), (1, 4), (2, 4), (4, 3), (4, 8), (8, 16)])
def test_equal_to_the_schedule_without_a_network(name, p, m):
    schedule = make_schedule(name, p, m)
    times = Durations.equal(schedule.num_stages)
    assert simulate(lower(schedule), Machinery(times)).seconds == pytest.approx(makespan(schedule, times))


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_equal_to_the_schedule_of_unequal_stages_with_latency(name):
    """Two ways to the same times: the walk over the schedule, and the events of its lowered form."""
    rng = random.Random(name)
    for p, m in ((2, 3), (3, 7), (5, 4)):
        schedule = make_schedule(name, p, m)
        rows = [tuple(rng.uniform(0.5, 3.0) for _ in range(schedule.num_stages)) for _ in range(3)]
        times = Durations(*rows, transfer=rng.uniform(0.0, 2.0))
        timeline = simulate(lower(schedule), Machinery(times, Wire(latency=times.transfer)))
        assert timeline.seconds == pytest.approx(makespan(schedule, times))


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (8, 32)])
def test_closed_form_with_messages(p, m):
    """1F1B: every message on the way of the first and the last micro-batch adds its time."""
    times = Durations.equal(p)
    latency = Machinery(times, Wire(latency=0.25))
    filled = simulate(lower(make_schedule("gpipe", p, m)), latency).seconds
    assert filled == pytest.approx(3 * (m + p - 1) + 2 * (p - 1) * 0.25)
    bubble = simulate(lower(make_schedule("1f1b", p, m)), Machinery(times)).bubble
    assert bubble == pytest.approx((p - 1) / (m + p - 1))


def test_unequal_stages_wait_for_the_slowest():
    times = Durations((1.0, 3.0), (1.0, 3.0), (1.0, 3.0))
    seconds = simulate(lower(make_schedule("1f1b", 2, 8)), Machinery(times)).seconds
    assert seconds == pytest.approx(
        1 + 8 * 9 + 2
    )  # the first forward, the slow stage's work, the last backward


def test_a_shared_link_is_taken_in_turns():
    lowered = lower(make_schedule("gpipe", 3, 4))
    times = Durations.equal(3)
    own = simulate(lowered, Machinery(times, Wire(seconds=2.0)))
    shared = {(a, b): "switch" for a in range(3) for b in range(3)}
    together = simulate(lowered, Machinery(times, Wire(seconds=2.0), links=shared))
    assert together.seconds > own.seconds
    sent = sorted((item.start, item.end) for line in together.messages for item in line)
    assert all(first[1] <= second[0] + 1e-9 for first, second in itertools.pairwise(sent))


def test_ranks_that_share_cores():
    """Four ranks on two cores: all work in half the ranks' time at best."""
    lowered, times = lower(make_schedule("gpipe", 4, 8)), Durations.equal(4)
    alone = simulate(lowered, Machinery(times)).seconds
    shared = simulate(lowered, Machinery(times, cores=2))
    assert shared.seconds >= 4 * 8 * 3 / 2
    assert shared.seconds > alone
    starts = sorted((i.start, i.end) for line in shared.compute for i in line if i.end > i.start)
    for start, _ in starts:
        assert sum(1 for a, b in starts if a <= start < b) <= 2


def test_gathers_and_reductions_take_time():
    times = Durations.equal(2)
    lowered = lower(make_schedule("1f1b", 2, 2), Extras("once"))
    plain = simulate(lowered, Machinery(times)).seconds
    slow = simulate(lowered, Machinery(times, gather=(0.5, 0.5), reduce=(0.25, 0.25))).seconds
    assert slow == pytest.approx(plain + 0.5 + 0.25)  # the second gather hides behind the first forward


def test_memory_curve_peaks_where_the_schedule_says():
    lowered = lower(make_schedule("1f1b", 4, 8))
    machinery = Machinery(Durations.equal(4), activation_bytes=(100,) * 4)
    curves = memory_curves(simulate(lowered, machinery), machinery)
    assert [max(held for _, held in curve) for curve in curves] == [400, 300, 200, 100]
    assert all(curve[-1][1] == 0 for curve in curves)


def test_memory_curve_of_one_stage():
    """Two chunks on a rank: the curves of its stages add up to its own, at each of its changes."""
    lowered = lower(make_schedule("interleaved", 2, 4), Extras("each"))
    machinery = Machinery(
        Durations.equal(4),
        activation_bytes=(5, 7, 11, 13),
        weight_bytes=(100, 200, 300, 400),
        gather=(0.1,) * 4,
    )
    timeline = simulate(lowered, machinery)
    whole = memory_curves(timeline, machinery)
    parts = [memory_curves(timeline, machinery, stage=stage) for stage in range(4)]
    for rank in range(2):
        changes = sorted(
            (time, held - before)
            for curves in parts
            for (_, before), (time, held) in itertools.pairwise(curves[rank])
        )
        assert changes == [(t, b - a) for (_, a), (t, b) in itertools.pairwise(whole[rank])]
        assert [len(parts[stage][rank]) > 1 for stage in range(4)] == [s % 2 == rank for s in range(4)]
    assert max(held for _, held in parts[0][0]) == 100 + 4 * 5  # all four run before a backward is back


def test_reductions_run_beside_computations():
    """The second chunk's gradients are ready first; its reduction hides behind the first chunk's backward."""
    times = Durations.equal(4)
    lowered = lower(make_schedule("interleaved", 2, 4))
    plain = simulate(lowered, Machinery(times))
    slow = simulate(lowered, Machinery(times, reduce=(0.0, 0.0, 1.0, 1.0)))
    assert slow.seconds == plain.seconds
    assert [item.action.stage for item in slow.collectives[0]] == [2, 0]
    assert slow.compute == plain.compute


def test_replicas_that_share_a_stage_evenly_are_one_fast_rank():
    """Durations are those of the largest part, so without a network nothing changes."""
    for name in SCHEDULE_NAMES:
        schedule = make_schedule(name, 3, 4)
        times = Durations.equal(schedule.num_stages, forward=1.5)
        ranks = {place: team for place, team in enumerate(([0], [1, 2], [3, 4, 5, 6]))}
        stage_ranks = [ranks[place] for place in schedule.placement[0]]
        lowered = lower(schedule, replicas=replicas_of(schedule, stage_ranks, samples=8))
        assert simulate(lowered, Machinery(times)).seconds == pytest.approx(makespan(schedule, times))


def test_uneven_parts_take_their_share():
    """Seven samples on two ranks, 4 and 3: the first sets the pace, the second idles a quarter."""
    schedule = make_schedule("gpipe", 2, 5)
    lowered = lower(schedule, replicas=replicas_of(schedule, [[0, 1], [2]], samples=7))
    timeline = simulate(lowered, Machinery(Durations.equal(2)))
    assert timeline.seconds == pytest.approx(3 * (5 + 1))
    busy = [sum(item.end - item.start for item in line) for line in timeline.compute]
    assert busy == pytest.approx([15, 15 * 3 / 4, 15])


def test_a_redistributed_message_takes_its_part_of_the_wire():
    """One rank sends a micro-batch in two halves over two links at once; over one shared link in turns."""
    schedule = make_schedule("gpipe", 2, 1)
    lowered = lower(schedule, replicas=replicas_of(schedule, [[0], [1, 2]], samples=4))
    wire, both = Wire(latency=0.5, seconds=2.0), {(0, 1): "out", (0, 2): "out", (1, 0): "in", (2, 0): "in"}
    own = simulate(lowered, Machinery(Durations.equal(2), wire))
    assert own.seconds == pytest.approx(6 + 2 * (0.5 + 1.0))
    # The second half leaves a second later, and its gradient comes back a second later, when the link is free.
    shared = simulate(lowered, Machinery(Durations.equal(2), wire, links=both))
    assert shared.seconds == pytest.approx(6 + 2 * (0.5 + 1.0) + 1.0)


def test_wires_that_differ_by_border():
    lowered = lower(make_schedule("gpipe", 3, 1))
    wires = (Wire(seconds=1.0), Wire(latency=0.5))
    timeline = simulate(lowered, Machinery(Durations.equal(3), wires=wires))
    assert timeline.seconds == pytest.approx(9 + 2 * (1.0 + 0.5))


def test_a_team_gathers_when_its_last_rank_has_come():
    """Of 3 samples the second of two ranks has 2, so its forward is longer, and both gather when it is done."""
    schedule = make_schedule("gpipe", 1, 2)
    lowered = lower(schedule, Extras("each"), replicas=replicas_of(schedule, [[0, 1]], samples=3))
    timeline = simulate(lowered, Machinery(Durations.equal(1), gather=(0.25,), reduce=(0.5,)))
    assert timeline.collectives[0] == timeline.collectives[1]
    starts = [item.start for item in timeline.collectives[0]]
    assert starts == pytest.approx([0.0, 1.25, 2.5, 4.75, 7.0])  # F, F, B, B, reduction
    assert timeline.seconds == pytest.approx(7.5)


def test_trace_opens_in_perfetto():
    lowered = lower(make_schedule("zb-h1", 2, 3))
    machinery = Machinery(Durations.equal(2), Wire(seconds=0.1), activation_bytes=(10, 20))
    timeline = simulate(lowered, machinery)
    events = json.loads(as_trace(lowered, timeline, machinery))["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    assert len(slices) == sum(map(len, timeline.compute + timeline.messages + timeline.collectives))
    assert {"name", "pid", "tid", "ts", "dur", "args"} <= slices[0].keys()
    assert {e["args"]["name"] for e in events if e["name"] == "process_name"} == {
        "rank 0 (stage 0)",
        "rank 1 (stage 1)",
    }
    starts, ends = ({e["id"]: e for e in events if e["ph"] == kind} for kind in "sf")
    assert starts.keys() == ends.keys()
    assert len(starts) == 2 * 3  # an arrow a message
    at = {(e["pid"], e["tid"], e["ts"]) for e in slices}
    for arrow in [*starts.values(), *ends.values()]:
        assert (arrow["pid"], arrow["tid"], arrow["ts"]) in at  # arrows begin and end on slices
    assert all(starts[number]["ts"] + 1e5 <= ends[number]["ts"] + 1e-3 for number in starts)
    for name, unit, peak in (("memory", "bytes", 20), ("activations kept", "count", 2)):
        curve = [e["args"][unit] for e in events if e["name"] == name and e["pid"] == 0]
        assert (max(curve), curve[-1]) == (peak, 0)


def test_a_track_of_a_trace_shows_one_thing_at_a_time():
    """Messages overlap in their latency and on the way to several ranks; viewers drop slices that overlap."""
    schedule = make_schedule("gpipe", 2, 4)
    lowered = lower(schedule, replicas=replicas_of(schedule, [[0], [1, 2, 3]], samples=3))
    machinery = Machinery(Durations.equal(2), Wire(latency=1.5, seconds=0.3))
    written = json.loads(as_trace(lowered, simulate(lowered, machinery), machinery))["traceEvents"]
    tracks: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in (event for event in written if event["ph"] == "X"):
        tracks.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    assert len([track for track in tracks if track[0] == 0]) > 3  # compute, reductions, several of messages
    for slices in tracks.values():
        assert all(a[1] <= b[0] + 1e-3 for a, b in itertools.pairwise(sorted(slices)))


def test_a_large_pipeline_loses_nothing():
    timeline = simulate(lower(make_schedule("1f1b", 64, 64)), Machinery(Durations.equal(64), Wire(0.1, 0.01)))
    assert all(len(line) == 2 * 64 for line in timeline.compute)
    assert all(len(line) == 1 for line in timeline.collectives)
    assert sum(map(len, timeline.messages)) == 2 * 63 * 64
