"""What a lowered schedule runs on: seconds of stages and messages, links, cores, memory. Numbers only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from meshwright.schedule.timing import Durations


@dataclass(frozen=True)
class Wire:
    """One link between ranks, in one direction.

    Attributes:
        latency: seconds before the first byte arrives; messages may overlap in it.
        seconds: of the bytes of a whole micro-batch; messages take turns, and a part of one takes its part.
    """

    latency: float = 0.0
    seconds: float = 0.0


@dataclass(frozen=True)
class Machinery:
    """What the schedule runs on.

    Attributes:
        durations: seconds of computations, of a stage with replicas for the largest of their parts; its `transfer` is
            not used.
        activation: the wire of an activation between two ranks; also of gradients.
        wires: by border (that of stages s and s + 1 is s), where they differ; else all are `activation`.
        links: (source rank, target rank) to the name of a shared link; pairs that are left out have their own.
        gather: seconds to gather a stage's weights, by stage.
        reduce: seconds to reduce a stage's gradients, by stage.
        cores: ranks that can compute at a time; None: all.
        activation_bytes: memory that a forward keeps until its backward ends, by stage; of the largest part.
        weight_bytes: memory of gathered weights, by stage.
    """

    durations: Durations
    activation: Wire = Wire()
    wires: tuple[Wire, ...] = ()
    links: Mapping[tuple[int, int], str] = field(default_factory=dict, hash=False)
    gather: tuple[float, ...] = ()
    reduce: tuple[float, ...] = ()
    cores: int | None = None
    activation_bytes: tuple[int, ...] = ()
    weight_bytes: tuple[int, ...] = ()
