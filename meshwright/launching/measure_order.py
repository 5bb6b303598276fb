"""What ranks are asked to measure, as plain data that a launcher without torch makes."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.simulation.host_keys import AttendShape, BlockShape, HeadShape


@dataclass(frozen=True)
class Order:
    """What to measure.

    Attributes:
        has_collectives: whether they are asked for.
        has_steps: whether it is asked what a step costs beside its model.
        blocks, heads, attends: shapes.
        micro_batches: sequences of each.
    """

    has_collectives: bool = False
    has_steps: bool = False
    blocks: tuple[BlockShape, ...] = ()
    heads: tuple[HeadShape, ...] = ()
    attends: tuple[AttendShape, ...] = ()
    micro_batches: tuple[int, ...] = (1, 4)
