"""When each action of a schedule runs, given how long stages take: every rank goes on as early as it can.

Enough to compare orders; `simulation/timeline.py` adds links that are shared, streams and memory. Cost: one visit an
action.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.schedule.action import Action, Schedule
from meshwright.schedule.check import gives, needs_of


@dataclass(frozen=True)
class Durations:
    """Seconds of each stage for one micro-batch.

    Attributes:
        forward: by stage.
        input_gradient: by stage.
        weight_gradient: by stage; a whole backward takes both.
        transfer: of a message between ranks; nothing inside a rank.
    """

    forward: tuple[float, ...]
    input_gradient: tuple[float, ...]
    weight_gradient: tuple[float, ...]
    transfer: float = 0.0

    @classmethod
    def equal(
        cls,
        num_stages: int,
        *,
        forward: float = 1.0,
        input_gradient: float = 1.0,
        weight_gradient: float = 1.0,
    ) -> Durations:
        """All stages alike, messages free."""
        times = (forward,) * num_stages, (input_gradient,) * num_stages, (weight_gradient,) * num_stages
        return cls(*times)

    def of(self, action: Action) -> float:
        """Seconds of a computation."""
        stage = action.stage
        match action.op:
            case "F":
                return self.forward[stage]
            case "I":
                return self.input_gradient[stage]
            case "W":
                return self.weight_gradient[stage]
            case _:
                return self.input_gradient[stage] + self.weight_gradient[stage]


@dataclass(frozen=True, slots=True)
class Timed:
    """An action and when it runs, in seconds from the start of the step."""

    action: Action
    start: float
    end: float


def run(schedule: Schedule, durations: Durations) -> list[list[Timed]]:
    """The actions of each rank with their times; the schedule must be right."""
    ends: dict[tuple[str, int, int], tuple[float, int]] = {}  # when made, and on which rank
    timed: list[list[Timed]] = [[] for _ in schedule.programs]
    waiting: dict[tuple[str, int, int], list[int]] = {}
    ready = list(range(schedule.num_ranks))
    while ready:
        rank = ready.pop()
        program, line = schedule.programs[rank], timed[rank]
        while len(line) < len(program):
            action = program[len(line)]
            start, missing = (line[-1].end if line else 0.0), None
            for need in needs_of(action, schedule.num_stages):
                made = ends.get(need)
                if made is None:
                    missing = need
                    break
                start = max(start, made[0] + (durations.transfer if made[1] != rank else 0.0))
            if missing is not None:
                waiting.setdefault(missing, []).append(rank)
                break
            end = start + durations.of(action)
            line.append(Timed(action, start, end))
            ends[gives(action)] = (end, rank)
            ready += waiting.pop(gives(action), [])
    return timed


def makespan(schedule: Schedule, durations: Durations) -> float:
    """Seconds until the last rank is done."""
    return max((line[-1].end for line in run(schedule, durations) if line), default=0.0)


def bubble_of(schedule: Schedule, durations: Durations) -> float:
    """Idle part of all ranks' time from the start of the step to its end."""
    timed = run(schedule, durations)
    total = makespan(schedule, durations) * schedule.num_ranks
    busy = sum(item.end - item.start for line in timed for item in line)
    return 1.0 - busy / total if total else 0.0
