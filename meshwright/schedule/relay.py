"""Serial relay: a micro-batch goes forward and back through all stages before the next starts; one rank computes."""

from __future__ import annotations

from meshwright.schedule.action import Action, Schedule


def serial(num_ranks: int, num_microbatches: int) -> Schedule:
    """Each of `num_ranks` ranks holds one stage; at any time all but one wait."""
    programs = [
        tuple(Action(op, rank, m) for m in range(num_microbatches) for op in ("F", "B"))
        for rank in range(num_ranks)
    ]
    return Schedule("serial", num_ranks, num_microbatches, (tuple(range(num_ranks)),), tuple(programs))
