"""Where the stages of a plan's pipeline begin: the exact best cut of layers and head, by `partitioning/`.

Costs are those of the cost model for one micro-batch; the head and its loss are a block of their own.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.partitioning.chain import Block, chain_of
from meshwright.partitioning.partition import partition_chain
from meshwright.partitioning.stage_costs import Group, Problem
from meshwright.planner.request import Request
from meshwright.presets.calibration import calibration_of
from meshwright.simulation.job import Layout
from meshwright.simulation.layers import head_seconds, layer_seconds


@dataclass(frozen=True)
class StageCut:
    """Attributes: first and last unit (layers, or half layers) of a stage, from 0, last before first where it holds the
    embedding or the head alone; seconds of one micro-batch."""

    first: int
    last: int
    seconds: float


def stage_cuts(request: Request, layout: Layout) -> tuple[StageCut, ...]:
    """The stages of a pipeline, each rank's parts one after the other; empty without one.

    Of the last stage the head is a part that is no unit.
    """
    if layout.pp == 1:
        return ()
    parts = layout.chunks if layout.schedule == "interleaved" else 2 if layout.schedule == "zb-v" else 1
    fit = calibration_of(request.cluster.machine)
    layer = layer_seconds(request.work, layout, request.cluster, fit)
    head = head_seconds(request.work, layout, request.cluster, fit)
    per_layer = 2 if layout.half_layers else 1
    units = request.work.model.num_layers * per_layer
    one = (layer.compute + layer.tensor + layer.context) / per_layer
    third = 1 / 3
    stages = layout.pp * parts
    if stages == units + 2:
        layers = (StageCut(unit, unit, one) for unit in range(units))
        return (StageCut(0, -1, 0.0), *layers, StageCut(units, units - 1, head))
    blocks = [Block(one * third, one * (1 - third)) for _ in range(units)]
    blocks[-1] = Block((one + head) * third, (one + head) * (1 - third))
    found = partition_chain(
        Problem({1: chain_of(blocks)}, (Group(stages),), (stages, stages), objective="maxfb", replicas="any")
    )
    return tuple(
        StageCut(stage.first, stage.last, stage.forward_seconds + stage.backward_seconds)
        for stage in found.stages
    )
