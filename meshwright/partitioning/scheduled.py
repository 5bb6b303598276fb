"""Stages for a schedule that is given: the most even cut for each number of places, replicas and micro-batches, and of
these the one that is through first when the schedule is run event by event.

Owns what is tried and the memory of a place: what is in flight is counted by walking the schedule. A whole backward is
halved where the schedule splits it. The bound is that no place can be through before its part of all work.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from meshwright.errors import DoesNotFitError, PlanError
from meshwright.partitioning.partition import Partition, partition_chain
from meshwright.partitioning.search import CostsAt, Searched
from meshwright.partitioning.stage_costs import Problem, StageCosts
from meshwright.schedule.action import Schedule
from meshwright.schedule.catalogue import make_schedule
from meshwright.schedule.timing import Durations, makespan


@dataclass(frozen=True)
class Given:
    """A schedule by name, with the stages that each place of it holds; None: as many as the schedule has itself."""

    name: str
    chunks: int | None = None


def search_schedule(
    costs_at: CostsAt,
    problem: Problem,
    given: Given,
    *,
    batch: int,
    num_microbatches: Sequence[int],
    least_samples: int = 1,
) -> Searched:
    """The least seconds of a step under this schedule, all stages with as many replicas.

    Args:
        costs_at: costs of a micro-batch of so many samples on one device.
        problem: devices and rules; `stages` counts places. Its shares, objective and micro-batches are replaced.
        given: the schedule.
        batch: samples of a step.
        num_microbatches: what to try.
        least_samples: of a micro-batch on one device.

    Raises:
        DoesNotFitError: E270 where nothing fits; it says what lacks least.
        PlanError: E271 as `partition_chain`, or what the schedule refuses.
    """
    best: Searched | None = None
    bound, failures, excess = math.inf, list[PlanError](), math.inf
    for places, replicas, count in _tried(problem, batch, num_microbatches, least_samples):
        try:
            schedule = make_schedule(given.name, places, count, num_chunks=given.chunks)
            found = _evenest(costs_at, problem, schedule, batch // count // replicas, replicas)
        except PlanError as error:
            failures.append(error)
            continue
        lacking = max(stage.memory_bytes for stage in found.partition.stages) - problem.groups[0].memory_bytes
        if lacking > 0:
            excess = min(excess, lacking)
            continue
        bound = min(bound, found.bound)
        if best is None or found.step_seconds < best.step_seconds:
            best = found
    if best is not None:
        return dataclasses.replace(best, bound=min(bound, best.step_seconds), num_tried=len(num_microbatches))
    if excess < math.inf:
        limit = problem.groups[0].memory_bytes
        raise DoesNotFitError(
            "E270",
            f"no plan fits into {limit:,.0f} bytes a device: the best of all lacks {excess:,.0f} bytes on its fullest "
            f"device. Give that much more memory, or more devices, more micro-batches, or another schedule.",
        )
    if failures:
        raise failures[-1]
    raise PlanError(
        "E271",
        f"{problem.stages[0]} to {problem.stages[1]} places with as many replicas each do not use exactly "
        f"{problem.num_devices} devices with equal parts of {batch} samples",
    )


def _tried(
    problem: Problem, batch: int, num_microbatches: Sequence[int], least_samples: int
) -> Iterator[tuple[int, int, int]]:
    """Places, replicas and micro-batches that use all devices and divide the batch."""
    for places in range(problem.stages[0], problem.stages[1] + 1):
        replicas, left = divmod(problem.num_devices, places)
        for count in num_microbatches:
            if not left and batch % (count * replicas) == 0 and batch // count // replicas >= least_samples:
                yield places, replicas, count


def _evenest(
    costs_at: CostsAt, problem: Problem, schedule: Schedule, samples: int, replicas: int
) -> Searched:
    """The cut whose longest stage is shortest, timed."""
    num, count = schedule.num_stages, schedule.num_microbatches
    group = dataclasses.replace(problem.groups[0], count=num * replicas, memory_bytes=math.inf)
    asked = dataclasses.replace(
        problem,
        shares={replicas: costs_at(samples)},
        groups=(group,),
        stages=(num, num),
        objective="maxfb",
        num_microbatches=count,
    )
    found = partition_chain(asked)
    costs = StageCosts(asked)
    forward = tuple(stage.forward_seconds for stage in found.stages)
    half = tuple(stage.backward_seconds / 2 for stage in found.stages)
    after = costs.gradient_seconds(replicas)
    seconds = [float(after[stage.first, stage.last + 1]) for stage in found.stages]
    places = _places(schedule)
    updates = max(sum(seconds[stage] for stage in held) for held in places)
    memory = _memory(costs, schedule, found, replicas)
    stages = tuple(
        dataclasses.replace(
            stage, memory_bytes=max(m for m, held in zip(memory, places, strict=True) if n in held)
        )
        for n, stage in enumerate(found.stages)
    )
    work = count * sum(stage.forward_seconds + stage.backward_seconds for stage in found.stages)
    total = makespan(schedule, Durations(forward, half, half)) + updates
    return Searched(dataclasses.replace(found, stages=stages), total, work / schedule.num_ranks, 1)


def _places(schedule: Schedule) -> list[set[int]]:
    """The stages of each place."""
    return [
        {stage for placement in schedule.placement for stage, at in enumerate(placement) if at == rank}
        for rank in range(schedule.num_ranks)
    ]


def _memory(costs: StageCosts, schedule: Schedule, found: Partition, replicas: int) -> list[float]:
    """Bytes of a device of each place: state, and the most that is kept for backward at once."""
    problem = costs.problem
    chain = problem.shares[replicas]
    ends = [(stage.first, stage.last + 1) for stage in found.stages]
    state = problem.resident + problem.sharded / replicas
    taken = []
    for program, held in zip(schedule.programs, _places(schedule), strict=True):
        kept = most = 0.0
        splits = {(a.stage, a.microbatch) for a in program if a.op == "W"}
        for action in program:
            at = (action.stage, action.microbatch)
            if action.op == "F":
                kept += float(chain.activations[ends[action.stage]])
            elif action.op in ("B", "W") or (action.op == "I" and at not in splits):
                kept -= float(chain.activations[ends[action.stage]])
            most = max(most, kept)
        taken.append(sum(float(chain.params[ends[stage]]) for stage in held) * state + most)
    return taken
