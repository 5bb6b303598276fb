"""Closed forms of what a step takes beyond its computations, against the order itself run."""

import random
from dataclasses import replace

import pytest

from meshwright.schedule.bubble import extra_seconds
from meshwright.schedule.catalogue import make_schedule
from meshwright.schedule.timing import Durations, makespan

ALL = ("serial", "gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v")


def times(seed, count):
    """Forward, gradients of inputs, gradients of weights; far apart, as what a formula overlooks would be."""
    rng = random.Random(seed)
    return [tuple(10 ** rng.uniform(-1, 1) for _ in range(3)) for _ in range(count)]


def durations(schedule, seconds):
    names = ("forward", "input_gradient", "weight_gradient")
    return Durations.equal(schedule.num_stages, **dict(zip(names, seconds, strict=True)))


def repeated(schedule, count):
    """The same step `count` times, no rank waiting for the others in between."""
    m = schedule.num_microbatches
    programs = tuple(
        tuple(
            replace(action, microbatch=action.microbatch + turn * m)
            for turn in range(count)
            for action in line
        )
        for line in schedule.programs
    )
    return replace(schedule, num_microbatches=count * m, programs=programs)


def compare(name, p, m, seconds, *, joined=False):
    schedule = make_schedule(name, p, m)
    per_rank = schedule.num_stages // p
    own = m * per_rank * sum(seconds)
    if joined:
        few, more = (makespan(repeated(schedule, n), durations(schedule, seconds)) for n in (3, 4))
        took = more - few
    else:
        took = makespan(schedule, durations(schedule, seconds))
    whole = tuple(per_rank * part for part in seconds)
    extra = extra_seconds(name, p, m, whole, chunks=per_rank, joined=joined)
    assert own + extra == pytest.approx(took, rel=1e-9), (name, p, m, seconds)


@pytest.mark.parametrize("name", ALL)
def test_a_step_takes_what_the_closed_form_says(name):
    for p in (2, 3, 4, 5):
        for m in range(1, 2 * p + 3):
            if name != "interleaved" or m % p == 0:
                for seconds in times(100 * p + m, 3):
                    compare(name, p, m, seconds)


@pytest.mark.parity
@pytest.mark.parametrize("name", ALL)
def test_a_step_of_deep_pipelines_takes_what_the_closed_form_says(name):
    for p in (6, 7, 8, 12, 16):
        for m in (*range(1, 2 * p + 3), 3 * p, 5 * p):
            if name != "interleaved" or m % p == 0:
                for seconds in times(100 * p + m, 2):
                    compare(name, p, m, seconds)


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v"])
def test_steps_that_do_not_wait_for_one_another_lose_no_ramp(name):
    for p in (2, 3, 4):
        for m in (2 * p, 3 * p):
            for seconds in times(p + m, 3):
                compare(name, p, m, seconds, joined=True)


def test_the_bidirectional_order_is_met_for_the_stages_of_a_transformer():
    rng = random.Random(0)
    for p in (2, 4, 6, 8):
        for m in (2 * p, 3 * p, 4 * p):
            for _ in range(3):
                seconds = (1.0, rng.uniform(1.0, 1.6), rng.uniform(0.6, 1.0))
                schedule = make_schedule("dualpipe", p, m)
                took = makespan(schedule, durations(schedule, seconds))
                priced = m * sum(seconds) + extra_seconds("dualpipe", p, m, seconds)
                assert priced == pytest.approx(took, rel=0.01), (p, m, seconds)
    # Fewer or odd numbers of micro-batches are run.
    compare("dualpipe", 4, 5, (1.0, 1.3, 0.8))


def test_more_micro_batches_than_fill_the_pipeline_add_nothing_and_fewer_cost():
    even = (1.0, 1.0, 1.0)
    for name, full in (("zb-h1", 8), ("zb-h2", 15), ("zb-v", 16)):
        assert extra_seconds(name, 8, full, even) == extra_seconds(name, 8, 10 * full, even)
        assert extra_seconds(name, 8, 1, even) == pytest.approx(14.0)
    assert extra_seconds("zb-h2", 8, 64, even, joined=True) == 0
    # The ramp of forwards cannot be filled where all ranks wait for one another at the end of a step.
    assert extra_seconds("zb-h2", 8, 64, even) == 7.0
    assert extra_seconds("dualpipe", 1, 8, even) == 0
