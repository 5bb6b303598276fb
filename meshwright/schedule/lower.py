"""From computations to everything a rank does: messages, gathers, reductions, in one order that all ranks share.

The schedule is run with equal times; what happens is one global sequence, and every rank's program is its part of it.
A message stands in its sender's and its receiver's program at the same place of that sequence, right after it was
made, so ranks that block in every message, one after the other, never wait in a circle; and between two ranks messages
are received in the order in which they are sent, as NCCL demands, which has no tags. A receive far ahead of its use
is posted early and waited for late.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from meshwright.schedule.action import Action, Op, Program, Schedule
from meshwright.schedule.timing import Durations, Timed, run

Gathers = Literal["none", "once", "each"]


@dataclass(frozen=True)
class Extras:
    """What a step does besides computing and messages.

    Attributes:
        gathers: weights of a stage are gathered never, once before its first use, or before each use and released
            after it (zero3).
        reduces: whether a stage's gradients are reduced over data-parallel ranks after its last backward.
    """

    gathers: Gathers = "none"
    reduces: bool = True


def lower(schedule: Schedule, extras: Extras | None = None) -> Schedule:
    """The schedule with messages, gathers, releases and reductions; it must be right.

    Cost: one sort of all actions.
    """
    extras = extras or Extras()
    timed = run(schedule, Durations.equal(schedule.num_stages))
    last_use = _last_uses(timed)
    events = []
    for rank, line in enumerate(timed):
        for position, item in enumerate(line):
            # At one time messages come before computations, which need them; what is made at the same time is taken
            # from the last rank up, so gradients do not queue behind activations.
            events.append((item.start, 1, -rank, position, item))
            events.append((item.end, 0, -rank, position, item))
    programs: list[list[Action]] = [[] for _ in schedule.programs]
    gathered: set[tuple[int, int]] = set()
    for _, computes, minus_rank, position, item in sorted(events, key=lambda event: event[:4]):
        rank, action = -minus_rank, item.action
        key, is_last = (action.slot, action.stage), last_use[action.slot, action.stage] == (rank, position)
        if not computes:
            _add_messages(schedule, action, rank, programs)
            if extras.reduces and is_last:  # behind the message: somebody waits for that
                programs[rank].append(_whole("reduce", action))
            continue
        if extras.gathers == "each" or (extras.gathers == "once" and key not in gathered):
            programs[rank].append(_whole("gather", action))
            gathered.add(key)
        programs[rank].append(action)
        if extras.gathers == "each" or (extras.gathers == "once" and is_last):
            programs[rank].append(_whole("release", action))
    return replace(schedule, programs=tuple(map(tuple, programs)))


def _add_messages(schedule: Schedule, action: Action, rank: int, programs: list[list[Action]]) -> None:
    for send, receive, stage in _made(action, schedule.num_stages):
        there = schedule.placement[action.slot][stage]
        if there != rank:
            message = Action(send, stage, action.microbatch, there, action.slot)
            programs[rank].append(message)
            programs[there].append(replace(message, op=receive, peer=rank))


def computations(program: Program) -> Program:
    """The actions of a lowered program that compute."""
    return tuple(action for action in program if action.op in ("F", "B", "I", "W"))


def _whole(op: Op, action: Action) -> Action:
    return Action(op, action.stage, slot=action.slot)


def _made(action: Action, num_stages: int) -> list[tuple[Op, Op, int]]:
    """What others need of `action`: (send, receive, the stage that needs it)."""
    if action.op == "F" and action.stage + 1 < num_stages:
        return [("send_activation", "receive_activation", action.stage + 1)]
    if action.op in ("B", "I") and action.stage > 0:
        return [("send_gradient", "receive_gradient", action.stage - 1)]
    return []


def _last_uses(timed: list[list[Timed]]) -> dict[tuple[int, int], tuple[int, int]]:
    """(slot, stage) to the rank and position of the last action that uses it."""
    return {
        (item.action.slot, item.action.stage): (rank, position)
        for rank, line in enumerate(timed)
        for position, item in enumerate(line)
    }
