"""The pipeline of a priced plan, event by event: its schedule with seconds of each stage, run by the simulator.

What `meshwright/simulation/step.py` gives in closed form for equal stages is here with stages as they are cut: unlike
numbers of layers, and the head on the last one. The step's end (gradients, optimizer) is not in it.
Simplifications: a message takes its time and holds nobody up; ranks of a stage are one.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.presets.calibration import calibration_of
from meshwright.schedule.action import Schedule
from meshwright.schedule.catalogue import make_schedule
from meshwright.schedule.lower import Extras, lower
from meshwright.schedule.timing import Durations
from meshwright.simulation.host import host_pipeline
from meshwright.simulation.job import Cluster, Layout, Workload, num_microbatches
from meshwright.simulation.machinery import Machinery, Wire
from meshwright.simulation.step import passes_seconds, pieces_of, weights_seconds
from meshwright.simulation.timeline import Timeline, simulate


@dataclass(frozen=True)
class TimedSchedule:
    """Attributes: the order; seconds of its stages."""

    schedule: Schedule
    durations: Durations


@dataclass(frozen=True)
class PlannedPipeline:
    """Attributes: the order; the order with messages; seconds of stages and messages; what happens when."""

    schedule: Schedule
    lowered: Schedule
    machinery: Machinery
    timeline: Timeline


def planned_pipeline(work: Workload, layout: Layout, cluster: Cluster) -> PlannedPipeline:
    """Run the pipeline of a plan with more than one stage, by formulas."""
    assert layout.pp > 1, "one stage is no pipeline"
    made = _by_formulas(work, layout, cluster)
    fit = calibration_of(cluster.machine)
    machinery = Machinery(made.durations, Wire(latency=pieces_of(work, layout, cluster, fit).message))
    lowered = lower(made.schedule, Extras(reduces=False))
    return PlannedPipeline(made.schedule, lowered, machinery, simulate(lowered, machinery))


def pipeline_of(work: Workload, layout: Layout, cluster: Cluster) -> TimedSchedule:
    """The order of a plan's micro-batches with seconds of each stage, of this host where it was measured; of one stage
    too."""
    if cluster.host is None:
        return _by_formulas(work, layout, cluster)
    schedule, durations = host_pipeline(work, layout, cluster)
    return TimedSchedule(schedule, durations)


def _by_formulas(work: Workload, layout: Layout, cluster: Cluster) -> TimedSchedule:
    fit = calibration_of(cluster.machine)
    pieces = pieces_of(work, layout, cluster, fit)
    schedule = make_schedule(
        layout.schedule,
        layout.pp,
        num_microbatches(work, layout),
        num_chunks=layout.chunks if layout.schedule == "interleaved" else None,
    )
    counts = layers_of_stages(work.model.num_layers, schedule.num_stages, halves=layout.half_layers)
    heads = (*(0.0 for _ in counts[1:]), pieces.head)
    weights = weights_seconds(layout, fit, pieces.layer, pieces.sharing)
    stages = [
        passes_seconds(pieces.layer, pieces.sharing, weights, part)
        for part in zip(counts, heads, strict=True)
    ]
    forward, inputs, weight_gradients = zip(*stages, strict=True)
    return TimedSchedule(schedule, Durations(forward, inputs, weight_gradients))


def layers_of_stages(num_layers: int, num_stages: int, *, halves: bool = False) -> tuple[float, ...]:
    """Layers of each stage, as `stage_layers` counts: equal, or one less at both ends, or the rest on the first."""
    if halves:
        return tuple(count / 2 for count in layers_of_stages(2 * num_layers, num_stages))
    if num_layers % num_stages == 0:
        return (float(num_layers // num_stages),) * num_stages
    if (num_layers + 2) % num_stages == 0:
        full = float((num_layers + 2) // num_stages)
        return (full - 1, *(full for _ in range(num_stages - 2)), full - 1)
    small, more = divmod(num_layers, num_stages)
    return tuple(float(small + (stage < more)) for stage in range(num_stages))
