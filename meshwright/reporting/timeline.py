"""The figure of a pipeline over time: the order as planned, and where its times were kept, what the newest step did.

Simplifications: messages of the planned order are free; without measured times all stages are equally long, else each
takes the mean of what it took.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean

from meshwright.layout.plan import TrainPlan
from meshwright.reporting.figure import Figure, Missing
from meshwright.reporting.reading import Computed, RunData
from meshwright.reporting.svg import Box, rows_over_time
from meshwright.schedule.action import Schedule
from meshwright.schedule.catalogue import make_schedule
from meshwright.schedule.timing import Durations, bubble_of, run

MOST_BOXES = 4000
_ANCHOR, _TITLE = "schedule", "Schedule of the pipeline, planned"
_MEANING = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}
_Lines = dict[str, list[Computed]]


def schedule(data: RunData) -> Figure | Missing:
    """The order of a pipeline over time."""
    plan = data.plan
    if plan is None:
        return Missing(_ANCHOR, _TITLE, "the folder has no plan.lock.json.")
    ranks = plan.mesh.size("pp")
    if ranks == 1:
        return Missing(_ANCHOR, _TITLE, "this run has no pipeline (plan.pp = 1).")
    made = _made(plan, ranks)
    measured = data.computed if data.result is not None and _is_of(data.computed, made) else ()
    times = _means(measured, made.num_stages) if measured else Durations.equal(made.num_stages)
    planned = [
        [Computed(str(item.action), item.start, item.end) for item in line] for line in run(made, times)
    ]
    shown = _fitting([len(line) * (2 if measured else 1) for line in planned])
    lines: _Lines = {}
    for rank in shown:
        lines[f"{rank} planned" if measured else f"{rank}"] = planned[rank]
        if measured:
            lines[f"{rank} measured"] = list(measured[rank])
    rows = tuple((name, item.action, item.start, item.end) for name, line in lines.items() for item in line)
    boxes = {f"stage rank {name}": [_box(item) for item in line] for name, line in lines.items()}
    left_out = "" if len(shown) == ranks else f" {len(shown)} of {ranks} ranks are drawn."
    return Figure(
        _ANCHOR,
        f"{_TITLE}{' over measured' if measured else ''}: {made.name}",
        "A row a rank of the pipeline, a box a forward (blue), backward (green) or weight gradient (orange); what "
        f"stays empty is the bubble, {_bubbles(measured, bubble_of(made, times))}{left_out}",
        rows_over_time(boxes, label=_TITLE),
        ("rank", "action", "from", "to"),
        rows,
        num_marks=len(rows),
    )


def _made(plan: TrainPlan, ranks: int) -> Schedule:
    chunks = plan.chunks if plan.chunks > 1 else None
    if plan.schedule == "zb-v":
        chunks = None
    return make_schedule(plan.schedule, ranks, plan.num_microbatches, num_chunks=chunks)


def _is_of(computed: Sequence[Sequence[Computed]], made: Schedule) -> bool:
    """Whether these are the computations of this schedule; a split that was not made is a whole backward."""
    return len(computed) == made.num_ranks and all(
        {item.action for item in line} <= _names(program)
        for line, program in zip(computed, made.programs, strict=True)
    )


def _names(program: Sequence[object]) -> set[str]:
    return {str(action) for action in program}


def _op(item: Computed) -> str:
    return next(letter for letter in item.action if letter in _MEANING)


def _means(computed: Sequence[Sequence[Computed]], num_stages: int) -> Durations:
    """What each stage took on average."""
    found: dict[tuple[str, int], list[float]] = defaultdict(list)
    for item in (item for line in computed for item in line):
        op = _op(item)
        found[op, int(item.action.partition(op)[0])].append(item.end - item.start)
    means: Mapping[tuple[str, int], float] = {key: fmean(values) for key, values in found.items()}
    stages = range(num_stages)
    return Durations(
        tuple(means.get(("F", stage), 0.0) for stage in stages),
        tuple(means.get(("I", stage), means.get(("B", stage), 0.0)) for stage in stages),
        tuple(means.get(("W", stage), 0.0) for stage in stages),
    )


def _bubbles(measured: Sequence[Sequence[Computed]], planned: float) -> str:
    if not measured:
        return f"{planned:.1%} with stages of equal length. Times of the run itself were not kept."
    end = max(item.end for line in measured for item in line)
    busy = sum(item.end - item.start for line in measured for item in line)
    waited = 1 - busy / (end * len(measured))
    return (
        f"{planned:.1%} if each stage took its mean time and messages none, {waited:.1%} in the newest step."
    )


def _box(item: Computed) -> Box:
    op = _op(item)
    return Box(op, item.start, item.end, f"{_MEANING[op]} {item.action}")


def _fitting(lengths: Sequence[int]) -> list[int]:
    """As many ranks as may be drawn, from the first and the last inwards."""
    order = sorted(range(len(lengths)), key=lambda rank: (min(rank, len(lengths) - 1 - rank), rank))
    shown, boxes = [order[0]], lengths[order[0]]
    for rank in order[1:]:
        boxes += lengths[rank]
        if boxes > MOST_BOXES:
            break
        shown.append(rank)
    return sorted(shown)
