"""Bidirectional: micro-batches enter the pipeline at both ends, so both ends work from the start.

Every stage exists twice: rank p holds stage p for the even micro-batches and stage P-1-p for the odd ones, which is
twice the weights. The order is made by list scheduling with 1F1B's limits for each direction.
Sources: Chimera, Li and Hoefler, SC 2021 (arXiv 2107.06925); DualPipe, DeepSeek-V3 (arXiv 2412.19437).
"""

from __future__ import annotations

from meshwright.schedule.action import Action, Schedule
from meshwright.schedule.listing import Shop, list_schedule
from meshwright.schedule.timing import Durations


def bidirectional(num_ranks: int, num_microbatches: int) -> Schedule:
    """Each of `num_ranks` ranks holds one stage of each direction; at most P + 1 activations are kept."""
    down, up = tuple(range(num_ranks)), tuple(reversed(range(num_ranks)))
    shop = Shop(
        num_stages=num_ranks,
        num_microbatches=num_microbatches,
        placement=(down, up),
        durations=Durations.equal(num_ranks),
        limits=(num_ranks + 1,) * num_ranks,
        splits_backward=True,
    )
    programs = list_schedule(shop, _rule)
    assert programs is not None, (
        f"bidirectional over {num_ranks} ranks and {num_microbatches} micro-batches stops"
    )
    return Schedule("dualpipe", num_ranks, num_microbatches, shop.placement, programs)


def _rule(action: Action) -> tuple[float, ...]:
    """Input gradients first, then forwards, and weight gradients when nothing else is ready; older ones first."""
    return ({"I": 0, "F": 1, "W": 2}[action.op], action.microbatch, -action.stage)
