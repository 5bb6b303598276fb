"""The schedules by name, as in `plan.schedule`. A new one is a file with a maker and a line here.

Owns E230 for names and numbers that no schedule has.
"""

from __future__ import annotations

import difflib

from meshwright.errors import PlanError
from meshwright.schedule.action import Schedule
from meshwright.schedule.bidirectional import bidirectional
from meshwright.schedule.gpipe import gpipe
from meshwright.schedule.one_forward_one_backward import interleaved, one_forward_one_backward
from meshwright.schedule.relay import serial
from meshwright.schedule.searched import searched
from meshwright.schedule.timing import Durations
from meshwright.schedule.zero_bubble import zb_h1, zb_h2, zb_v

_MAKERS = {
    "serial": serial,
    "gpipe": gpipe,
    "1f1b": one_forward_one_backward,
    "zb-h1": zb_h1,
    "zb-h2": zb_h2,
    "zb-v": zb_v,
    "dualpipe": bidirectional,
}
SCHEDULE_NAMES = (*_MAKERS, "interleaved", "searched")
DEFAULT_CHUNKS = 2


def make_schedule(
    name: str,
    num_ranks: int,
    num_microbatches: int,
    *,
    num_chunks: int | None = None,
    durations: Durations | None = None,
    keep: int | None = None,
) -> Schedule:
    """The schedule called `name`.

    Args:
        name: one of `SCHEDULE_NAMES`.
        num_ranks: ranks of the pipeline.
        num_microbatches: micro-batches of a step.
        num_chunks: stages a rank (interleaved, searched); None: 2 of interleaved, else 1.
        durations: of each stage (searched); None: all alike.
        keep: most stage activations that a rank may keep (searched); None: any.

    Raises:
        PlanError: E230 for an unknown name, numbers below 1, or a choice that the schedule has not; E234.
    """
    if name not in SCHEDULE_NAMES:
        near = difflib.get_close_matches(name, SCHEDULE_NAMES, 1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise PlanError("E230", f"unknown schedule {name!r}; known: {', '.join(SCHEDULE_NAMES)}.{hint}")
    if min(num_ranks, num_microbatches, num_chunks or 1) < 1:
        raise PlanError(
            "E230",
            f"{num_ranks} ranks, {num_microbatches} micro-batches, {num_chunks or 1} chunks: each is at least 1",
        )
    if keep is not None and name != "searched":
        raise PlanError(
            "E230", f"{name} has no choice of activations to keep, and {keep} were asked for; searched has."
        )
    if name == "interleaved":
        return interleaved(num_ranks, num_microbatches, num_chunks or DEFAULT_CHUNKS)
    if name == "searched":
        times = durations or Durations.equal(num_ranks * (num_chunks or 1))
        limits = None if keep is None else (keep,) * num_ranks
        return searched(num_ranks, num_microbatches, times, limits=limits).schedule
    if num_chunks not in (None, {"zb-v": 2}.get(name, 1)):
        raise PlanError(
            "E230", f"{name} has no choice of chunks, and {num_chunks} were asked for; interleaved has."
        )
    return _MAKERS[name](num_ranks, num_microbatches)
