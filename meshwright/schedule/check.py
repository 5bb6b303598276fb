"""Whether a schedule is right: complete, ordered, free of deadlock; and what it keeps in memory.

Programs are run on marks, in any order that they allow: since a program's order is fixed, every order gives the same
result, and what cannot go on in one cannot in any. Simplification: times play no part; see `simulation/timeline.py`.
"""

from __future__ import annotations

from collections import Counter

from meshwright.schedule.action import COMPUTE, Action, Schedule


def problem_of(schedule: Schedule) -> str | None:
    """What is wrong with the order of computations, in words; None when it is right."""
    wrong = _incomplete(schedule)
    return wrong if wrong is not None else _stuck(schedule)


def _incomplete(schedule: Schedule) -> str | None:
    """Every stage has one forward and one whole backward for each micro-batch, on the rank of its placement."""
    seen: Counter[tuple[str, int, int]] = Counter()
    slots: dict[int, set[int]] = {}
    for rank, program in enumerate(schedule.programs):
        for action in program:
            if action.op not in COMPUTE:
                continue
            if not (0 <= action.stage < schedule.num_stages and 0 <= action.slot < len(schedule.placement)):
                return f"rank {rank}: {action} is of no stage or slot of this schedule"
            if schedule.rank_of(action) != rank:
                return f"rank {rank}: {action} belongs to rank {schedule.rank_of(action)}"
            seen[action.op, action.stage, action.microbatch] += 1
            slots.setdefault(action.microbatch, set()).add(action.slot)
    mixed = [m for m, used in slots.items() if len(used) > 1]
    if mixed:
        return f"micro-batch {mixed[0]} runs in slots {sorted(slots[mixed[0]])}"
    for stage in range(schedule.num_stages):
        for m in range(schedule.num_microbatches):
            f, b, i, w = (seen.pop((op, stage, m), 0) for op in COMPUTE)
            if f != 1 or (b, i, w) not in ((1, 0, 0), (0, 1, 1)):
                found = f"{f} F, {b} B, {i} I, {w} W"
                return f"stage {stage}, micro-batch {m} has {found}; needed are F and B, or F, I and W"
    if seen:
        op, stage, m = next(iter(seen))
        return f"{stage}{op}{m} is of a micro-batch beyond the {schedule.num_microbatches} of this schedule"
    return None


def needs_of(action: Action, num_stages: int) -> list[tuple[str, int, int]]:
    """What must be done before `action`, as (kind, stage, micro-batch); kind `G` is B or I."""
    stage, m = action.stage, action.microbatch
    if action.op == "F":
        return [("F", stage - 1, m)] if stage else []
    if action.op == "W":
        return [("G", stage, m)]
    return [("F", stage, m), *([("G", stage + 1, m)] if stage < num_stages - 1 else [])]


def gives(action: Action) -> tuple[str, int, int]:
    """What `action` makes, as `needs_of` names it."""
    return ("G" if action.op in ("B", "I") else action.op, action.stage, action.microbatch)


def carried_by(message: Action) -> tuple[str, int, int]:
    """What a message carries, as `needs_of` names it; the stage of a message is the one that needs it."""
    if message.op in ("send_activation", "receive_activation"):
        return ("F", message.stage - 1, message.microbatch)
    return ("G", message.stage + 1, message.microbatch)


def _stuck(schedule: Schedule) -> str | None:
    done: set[tuple[str, int, int]] = set()
    position = [0] * schedule.num_ranks
    waiting: dict[tuple[str, int, int], list[int]] = {}
    ready = list(range(schedule.num_ranks))
    while ready:
        rank = ready.pop()
        program = schedule.programs[rank]
        while position[rank] < len(program):
            action = program[position[rank]]
            missing = next((n for n in needs_of(action, schedule.num_stages) if n not in done), None)
            if missing is not None:
                waiting.setdefault(missing, []).append(rank)
                break
            done.add(gives(action))
            ready += waiting.pop(gives(action), [])
            position[rank] += 1
    for rank, program in enumerate(schedule.programs):
        if position[rank] < len(program):
            action = program[position[rank]]
            missing = next(n for n in needs_of(action, schedule.num_stages) if n not in done)
            return f"rank {rank} waits for ever before {action}: {missing[1]}{missing[0]}{missing[2]} never comes"
    return None


def peak_in_flight(schedule: Schedule) -> list[int]:
    """For each rank the most stage activations that it keeps at once: from a forward to the end of its backward."""
    peaks = []
    for program in schedule.programs:
        kept = peak = 0
        for action in program:
            if action.op == "F":
                kept += 1
                peak = max(peak, kept)
            elif action.op in ("B", "W"):
                kept -= 1
        peaks.append(peak)
    return peaks
