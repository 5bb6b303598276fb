"""A planned step in Chrome's trace format, which Perfetto (ui.perfetto.dev) opens.

A process a rank, with tracks for each of its streams; an arrow from each message to the computation that it is for;
counters of the activations that are kept, and of memory where its bytes are known. Times are microseconds from the
start of the step.
Source: the Trace Event Format, as Perfetto reads it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace

from meshwright.schedule.action import Action, Schedule
from meshwright.schedule.check import carried_by, needs_of
from meshwright.schedule.timing import Timed
from meshwright.simulation.machinery import Machinery
from meshwright.simulation.timeline import Timeline, memory_curves

# Numbers of tracks: messages that are under way together need one each, from the last on.
_COMPUTE, _COLLECTIVES, _MESSAGES = range(3)
_Event = dict[str, object]


def as_trace(lowered: Schedule, timeline: Timeline, machinery: Machinery) -> str:
    """JSON of the step that `simulate` made of `lowered`."""
    events: list[_Event] = []
    stages = _stages_by_rank(lowered)
    for rank in range(lowered.num_ranks):
        name = f"rank {rank} (stage {', '.join(map(str, stages[rank]))})"
        events.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": name}})
        events.append({"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}})
        events += _track("compute", timeline.compute[rank], rank, _COMPUTE)
        events += _track("gathers and reductions", timeline.collectives[rank], rank, _COLLECTIVES)
        for number, lane in enumerate(_lanes(timeline.messages[rank])):
            events += _track("messages", lane, rank, _MESSAGES + number)
    events += _arrows(lowered, timeline)
    counted = replace(machinery, activation_bytes=(1,) * lowered.num_stages, weight_bytes=())
    events += _counters("activations kept", "count", memory_curves(timeline, counted))
    if machinery.activation_bytes or machinery.weight_bytes:
        events += _counters("memory", "bytes", memory_curves(timeline, machinery))
    facts = {"schedule": lowered.name, "seconds": timeline.seconds, "bubble": timeline.bubble}
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": facts})


def _counters(name: str, unit: str, curves: list[list[tuple[float, int]]]) -> Iterator[_Event]:
    for rank, curve in enumerate(curves):
        for time, held in curve:
            yield {"ph": "C", "name": name, "pid": rank, "ts": time * 1e6, "args": {unit: held}}


def _stages_by_rank(lowered: Schedule) -> list[list[int]]:
    held: list[set[int]] = [set() for _ in lowered.programs]
    for ranks in lowered.placement:
        for stage, place in enumerate(ranks):
            for rank in lowered.team_at(place):
                held[rank].add(stage)
    return [sorted(stages) for stages in held]


def _lanes(messages: Sequence[Timed]) -> list[list[Timed]]:
    """Messages in as few lines as hold them without overlap: a track shows one thing at a time."""
    lanes: list[list[Timed]] = []
    for item in sorted(messages, key=lambda item: (item.start, item.end)):
        lane = next((lane for lane in lanes if lane[-1].end <= item.start), None)
        if lane is None:
            lanes.append([item])
        else:
            lane.append(item)
    return lanes


def _track(title: str, line: Sequence[Timed], rank: int, track: int) -> Iterator[_Event]:
    yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": track, "args": {"name": title}}
    for item in line:
        yield _slice(item, rank, track)


def _slice(item: Timed, rank: int, track: int) -> _Event:
    action = item.action
    args = {"stage": action.stage}
    if action.microbatch >= 0:
        args["microbatch"] = action.microbatch
    if action.peer >= 0:
        args["peer"] = action.peer
    return {
        "ph": "X",
        "name": str(action),
        "cat": action.op,
        "pid": rank,
        "tid": track,
        "ts": item.start * 1e6,
        "dur": (item.end - item.start) * 1e6,
        "args": args,
    }


def _arrows(lowered: Schedule, timeline: Timeline) -> Iterator[_Event]:
    """From the start of each message to the start of the computation that needs it."""
    users = [_users(line, lowered.num_stages) for line in timeline.compute]
    number = 0
    for rank, messages in enumerate(timeline.messages):
        lanes = enumerate(_lanes(messages))
        for lane, item in ((lane, item) for lane, line in lanes for item in line):
            target = item.action.peer
            user = users[target][carried_by(item.action)]
            arrow = {"name": "message", "cat": item.action.op, "id": number}
            yield {**arrow, "ph": "s", "pid": rank, "tid": _MESSAGES + lane, "ts": item.start * 1e6}
            yield {**arrow, "ph": "f", "bp": "e", "pid": target, "tid": _COMPUTE, "ts": user.start * 1e6}
            number += 1


def _users(line: Sequence[Timed], num_stages: int) -> dict[tuple[str, int, int], Timed]:
    """Each value to the computation that needs it from another stage."""
    found: dict[tuple[str, int, int], Timed] = {}
    for item in line:
        for need in _foreign(item.action, num_stages):
            found[need] = item
    return found


def _foreign(action: Action, num_stages: int) -> list[tuple[str, int, int]]:
    if action.op not in ("F", "B", "I"):
        return []
    return [need for need in needs_of(action, num_stages) if need[1] != action.stage]
