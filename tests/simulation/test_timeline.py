"""The simulator equals closed forms on balanced pipelines, and sees links, cores and memory."""

from __future__ import annotations

import itertools
import json

import pytest

from meshwright.schedule.catalogue import SCHEDULE_NAMES, make_schedule
from meshwright.schedule.lower import Extras, lower
from meshwright.schedule.timing import Durations, makespan
from meshwright.simulation.timeline import Machinery, Wire, as_trace, memory_curves, simulate


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
@pytest.mark.parametrize(("p", "m"), [(1, 1), (1, 4), (2, 4), (4, 3), (4, 8), (8, 16)])
def test_equal_to_the_schedule_without_a_network(name, p, m):
    schedule = make_schedule(name, p, m)
    times = Durations.equal(schedule.num_stages)
    assert simulate(lower(schedule), Machinery(times)).seconds == pytest.approx(makespan(schedule, times))


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


def test_trace_opens_in_perfetto():
    timeline = simulate(lower(make_schedule("zb-h1", 2, 3)), Machinery(Durations.equal(2), Wire(seconds=0.1)))
    events = json.loads(as_trace(timeline, "zb-h1"))["traceEvents"]
    assert sum(event["ph"] == "X" for event in events) == sum(map(len, timeline.compute + timeline.messages))
    assert {"ph", "name", "pid", "tid", "ts", "dur"} <= next(
        event for event in events if event["ph"] == "X"
    ).keys()


def test_a_large_pipeline_loses_nothing():
    timeline = simulate(lower(make_schedule("1f1b", 64, 64)), Machinery(Durations.equal(64), Wire(0.1, 0.01)))
    assert all(len(line) == 2 * 64 + 1 for line in timeline.compute)
