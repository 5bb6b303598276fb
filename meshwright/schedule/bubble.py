"""How long a step of equal stages takes beyond its computations, in closed form: the longest paths through a schedule.

The end of a step is the longest path of computations that wait for one another, and a path's length is a number of
forwards, of gradients of inputs and of gradients of weights. Of each schedule only a few paths can be the longest,
whatever these take; each is written here as what it has more (or less) than one rank's own work.
`meshwright/schedule/timing.py` runs the order itself and is what the tests compare with. In the paper (Qi et al., ICLR
2024) a rank that is done begins the next step at once, its update being validated later: ranks are then shifted in
time, and the ramp at the start of a step costs nothing (`joined`).

Simplifications: stages take equally long; messages are free; of dualpipe only a few paths are known.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import lru_cache

from meshwright.schedule.catalogue import make_schedule
from meshwright.schedule.check import gives, needs_of
from meshwright.schedule.timing import Durations, makespan, run

# Forward, gradients of inputs, gradients of weights of a transformer's stage, in proportion.
_TRANSFORMER = (1.0, 1.3, 0.8)
# Of a path: forwards, gradients of inputs, gradients of weights.
_Path = tuple[int, int, int]


def extra_seconds(
    name: str,
    num_ranks: int,
    num_microbatches: int,
    seconds: tuple[float, float, float],
    *,
    chunks: int = 1,
    joined: bool = False,
) -> float:
    """Seconds of a step beyond the micro-batches of one rank.

    Args:
        name: of a schedule, as in `SCHEDULE_NAMES`, but for searched.
        num_ranks: ranks of the pipeline.
        num_microbatches: micro-batches of a step.
        seconds: all that a rank does of one micro-batch: forward, gradients of inputs, gradients of weights.
        chunks: stages a rank (interleaved).
        joined: whether a rank begins a step while others end the one before; it makes no difference but to zero bubble,
            and with fewer micro-batches than fill the pipeline it is not counted.
    """
    p, m = num_ranks, num_microbatches
    if p == 1:
        return 0.0
    whole = sum(seconds)
    if name == "serial":
        return (p - 1) * whole * m
    if name == "dualpipe":
        return _bidirectional(p, m, seconds)
    if name not in _PATHS:
        return (p - 1) * whole / chunks
    if name == "zb-v" and p + 1 < m < 2 * p:
        # Its order is that of 2p micro-batches with some left out: irregular, so it is run.
        return _run(name, p, m, seconds)
    parts = 2 if name == "zb-v" else 1
    forward, inputs, weights = (part / parts for part in seconds)
    paths = _PATHS[name](p, m)
    if joined and m >= _FULL[name] * p - (name == "zb-h2"):
        paths = _JOINED[name](p)
    return max(f * forward + i * inputs + w * weights for f, i, w in paths)


def _run(name: str, p: int, m: int, seconds: tuple[float, float, float]) -> float:
    schedule = make_schedule(name, p, m)
    forward, inputs, weights = (part * p / schedule.num_stages for part in seconds)
    times = Durations.equal(
        schedule.num_stages, forward=forward, input_gradient=inputs, weight_gradient=weights
    )
    return makespan(schedule, times) - m * sum(seconds)


def _bidirectional(p: int, m: int, seconds: tuple[float, float, float]) -> float:
    """Its order is searched for and has no pattern in p: what is longest for a transformer's stages is taken from the
    order itself. Where gradients of inputs take more than the mean of the rest, each two micro-batches add to it."""
    if p % 2 or m % 2 or m < 2 * p:
        return _run("dualpipe", p, m, seconds)
    forward, inputs, weights = seconds
    ramp = (p // 2 - 1) * (forward + inputs - weights)
    f, i, w = _longest(p, 2 * p)
    more = (m - 2 * p) // 2 * min(2, p // 2 - 1)
    steep = (f - more) * forward + (i + 2 * more) * inputs + (w - more) * weights
    return max(0.0, ramp, steep)


@lru_cache(maxsize=64)
def _longest(p: int, m: int) -> _Path:
    """The longest path of dualpipe beyond one rank's own work, by going back from the last end."""
    schedule, times = make_schedule("dualpipe", p, m), _TRANSFORMER
    lines = run(
        schedule,
        Durations.equal(p, forward=times[0], input_gradient=times[1], weight_gradient=times[2]),
    )
    made = {gives(item.action): item for line in lines for item in line}
    before = {item.action: earlier for line in lines for earlier, item in itertools.pairwise(line)}
    counts, item = dict.fromkeys("FIW", 0), max((line[-1] for line in lines), key=lambda last: last.end)
    while True:
        ops = ("I", "W") if item.action.op == "B" else (item.action.op,)
        for op in ops:
            counts[op] += 1
        waited = [made[need] for need in needs_of(item.action, schedule.num_stages)]
        waited += [before[item.action]] if item.action in before else []
        if not waited:
            break
        item = max(waited, key=lambda earlier: earlier.end)
    return counts["F"] - m, counts["I"] - m, counts["W"] - m


def _h1(p: int, m: int) -> tuple[_Path, ...]:
    full = min(m, p)
    return (p - full, p - 1, 0), (p - 1, p - full, 0), (p - 1, p - 1, 1 - full)


def _h2(p: int, m: int) -> tuple[_Path, ...]:
    full = min(m, 2 * p - 1)
    outer: tuple[_Path, ...] = (p - full, p - 1, 0), (p - 1, p - 1, 1 - full)
    half = full // 2
    if full % 2:
        return *outer, (p - 1, p - 1 - half, 0)
    return *outer, (p - 1, p - 1 - half, 0), (p - 2, p - half, 0), (p - 1, p - half, -1)


def _v(p: int, m: int) -> tuple[_Path, ...]:
    """Of half stages."""
    ends = 2 * p - 2
    if m < 2 * p:
        full = min(m, p)
        last = full - 1
        return (
            (2 * (p - full), ends, 0),
            (ends - last, ends - last, 0),
            (ends, ends - 3 * last, -last),
            (ends, ends - 2 * last, -2 * last),
        )
    return (
        (0, 1, p - 2),
        (0, p - 1, 0),
        (0, ends, -ends),
        (1, 0, p - 2),
        (ends - 1, 2 - p, 0),
        (ends - 1, 1, -ends),
        (ends, 1 - p, -1),
        (ends, 0, -ends - 1),
    )


def _joined_h1(p: int) -> tuple[_Path, ...]:
    return (0, 0, 0), (0, p - 1, 0), (p - 1, p - 1, 1 - p)


def _joined_h2(p: int) -> tuple[_Path, ...]:
    return (0, 0, 0), (1 - p, p - 1, 0), (p - 1, p - 1, 2 - 2 * p)


def _joined_v(p: int) -> tuple[_Path, ...]:
    ends = 2 * p - 2
    return (
        (1 - p, 1, p - 2),
        (1 - p, p - 1, 0),
        (2 - p, 0, p - 2),
        (0, ends, -ends),
        (p - 2, 2 - p, 0),
        (ends - 1, 1, -ends),
        (ends, 1 - p, 1 - p),
        (ends, 0, -ends - 1),
    )


# Micro-batches for each rank that fill the pipeline (zb-h2: one less in all).
_FULL = {"zb-h1": 1, "zb-h2": 2, "zb-v": 2}
_JOINED: dict[str, Callable[[int], tuple[_Path, ...]]] = {
    "zb-h1": _joined_h1,
    "zb-h2": _joined_h2,
    "zb-v": _joined_v,
}
_PATHS: dict[str, Callable[[int, int], tuple[_Path, ...]]] = {"zb-h1": _h1, "zb-h2": _h2, "zb-v": _v}
