"""GPipe: all forwards, then all backwards; a rank keeps the activations of every micro-batch.

Source: Huang et al., GPipe, NeurIPS 2019 (arXiv 1811.06965).
"""

from __future__ import annotations

from meshwright.schedule.action import Action, Schedule


def gpipe(num_ranks: int, num_microbatches: int) -> Schedule:
    """Each of `num_ranks` ranks holds one stage. Bubble: (P-1)/M of the ideal time, for equal stages."""
    programs = [
        (
            *(Action("F", rank, m) for m in range(num_microbatches)),
            *(Action("B", rank, m) for m in range(num_microbatches)),
        )
        for rank in range(num_ranks)
    ]
    return Schedule("gpipe", num_ranks, num_microbatches, (tuple(range(num_ranks)),), tuple(programs))
