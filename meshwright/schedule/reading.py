"""A schedule of one's own from text or CSV: where its stages run follows from its forwards, and it must be right.

Owns E233. The cells are those of `action.py`, which torch's pipelining writes, too.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from meshwright.errors import PlanError
from meshwright.schedule.action import Program, Schedule, read_programs
from meshwright.schedule.check import problem_of


def read_schedule(text: str, *, name: str) -> Schedule:
    """A line a rank, see `read_programs`.

    Args:
        text: as `to_text` writes it.
        name: of the schedule, for messages and pictures.

    Raises:
        PlanError: E233 for a cell that is no action, and for an order that is incomplete or stands still.
    """
    try:
        programs = read_programs(text)
    except ValueError as error:
        raise PlanError("E233", f"{name}: {error}.") from error
    placement = _placement(programs, name)
    num_microbatches = 1 + max(action.microbatch for program in programs for action in program)
    schedule = Schedule(name, len(placement[0]), num_microbatches, placement, programs)
    wrong = problem_of(schedule)
    if wrong is not None:
        raise PlanError("E233", f"{name}: {wrong}.")
    return schedule


def _placement(programs: Sequence[Program], name: str) -> tuple[tuple[int, ...], ...]:
    found: dict[tuple[int, int], int] = {}
    for rank, program in enumerate(programs):
        for action in program:
            first = found.setdefault((action.slot, action.stage), rank)
            if first != rank:
                raise PlanError(
                    "E233",
                    f"{name}: {action} is on rank {rank}, and stage {action.stage} is on rank {first} too; a stage on "
                    f"two ranks needs a slot for each, e.g. {action.stage}F0/1.",
                )
    slots, stages = {slot for slot, _ in found}, {stage for _, stage in found}
    for slot, stage in itertools.product(range(max(slots, default=0) + 1), range(max(stages, default=0) + 1)):
        if (slot, stage) not in found:
            raise PlanError(
                "E233", f"{name}: no rank runs stage {stage}" + (f" in slot {slot}." if slot else ".")
            )
    return tuple(tuple(found[slot, stage] for stage in sorted(stages)) for slot in sorted(slots))
