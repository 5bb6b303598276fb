"""From a whole model and a plan to this rank's stages: recorded, cut, and everything else taken away.

Owns the order; called between the split over tp and the sharding over dp.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from meshwright.adapt.context_parallel import no_attention
from meshwright.comm.ops import PipelineGroups
from meshwright.errors import PlanError
from meshwright.layout.plan import TrainPlan
from meshwright.pipeline.cut import Cut, balanced_cut, make_stages, named_cut, uneven_warning
from meshwright.pipeline.prune import holders_of, prune
from meshwright.pipeline.record import Loss, Twin
from meshwright.schedule.action import Replicas, Schedule
from meshwright.schedule.catalogue import make_schedule
from meshwright.schedule.lower import Extras, lower


@dataclass(frozen=True, eq=False)
class PipelinePlan:
    """A model cut for a pipeline, the same on every rank.

    Attributes:
        twin: the whole model without memory.
        cut: where stages begin.
        schedule: lowered.
        holders: parameter or buffer to the places in the pipeline that have it.
        opened: modules that are not called.
        warnings: W202.
    """

    twin: Twin
    cut: Cut
    schedule: Schedule
    holders: dict[str, tuple[int, ...]]
    opened: frozenset[str]
    warnings: tuple[str, ...]


def plan_pipeline(
    model: nn.Module,
    loss: Loss,
    batch: Any,
    plan: TrainPlan,
    *,
    device: torch.device,
    compute_dtype: torch.dtype | None = None,
) -> PipelinePlan:
    """Record the loss on a micro-batch and cut it.

    Args:
        model: whole and as the user built it, with parameters of the masters' type.
        loss: (model, batch) -> (sum, count).
        batch: a micro-batch; the same on all ranks, or of as many samples.
        plan: of the run.
        device: where ranks compute.
        compute_dtype: of forward and backward, where that is another than the parameters have.

    Raises:
        PlanError: E202, E260 for stages that do not fit; E261, E262, E263 for a model that cannot be followed; E230;
            E254 for one without attention whose sequences are cut;
            E265 for running statistics where several ranks run a stage.
    """
    cp = plan.mesh.size("cp")
    twin = Twin(model, device, compute_dtype, cuts_sequences=cp > 1)
    tape = twin.record(loss, batch, training=True)
    if cp > 1 and not tape.num_attentions:
        raise no_attention(cp)
    name = type(model).__name__
    warnings: tuple[str, ...] = ()
    schedule = schedule_of(plan, plan.num_microbatches)
    if plan.stages:
        cut = named_cut(tape, plan.stages, model=name)
    else:
        num_ranks = (
            [len(plan.stage_ranks[place]) for place in schedule.placement[0]] if plan.stage_ranks else []
        )
        cut, costs = balanced_cut(tape, plan.num_stages, model=name, num_ranks=num_ranks)
        text = uneven_warning(costs, name, num_ranks=num_ranks)
        warnings = () if text is None else (text,)
    stages = make_stages(tape, cut)
    by_stage = holders_of(tape, stages, model)
    at = [tuple(sorted({ranks[s] for ranks in schedule.placement})) for s in range(schedule.num_stages)]
    if any(len(places) > 1 for places in at):
        _check_no_statistics(model, plan.schedule)
    holders = {n: tuple(sorted({place for s in held for place in at[s]})) for n, held in by_stage.items()}
    return PipelinePlan(twin, cut, schedule, holders, tape.opened, warnings)


def _check_no_statistics(model: nn.Module, schedule: str) -> None:
    """E265: ranks that run a stage for other micro-batches would each update running statistics by their own alone."""
    for name, module in model.named_modules():
        if (
            isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d)
            and module.track_running_stats
        ):
            raise PlanError(
                "E265",
                f'plan.schedule = "{schedule}" runs each stage on two ranks, for other micro-batches, and {name!r} of '
                f"{type(model).__name__} has running statistics, which each would update by its own alone. Choose "
                f'another schedule, e.g. plan.schedule="1f1b".',
            )


def schedule_of(plan: TrainPlan, num_microbatches: int) -> Schedule:
    """The lowered schedule of a step of so many micro-batches; stages are at the same places for any number."""
    made = make_schedule(plan.schedule, plan.mesh.size("pp"), num_microbatches, num_chunks=plan.chunks)
    teams = plan.stage_ranks
    replicas = Replicas(teams, plan.global_batch // plan.num_microbatches) if teams else None
    return lower(made, Extras(reduces=False), replicas=replicas)


def keep_stages(model: nn.Module, pipeline: PipelinePlan, groups: PipelineGroups) -> dict[str, str]:
    """Leave `model` what this rank's stages use; which of it other places hold too, by a word for these."""
    return keep_place(model, pipeline.holders, groups.place)


def keep_place(model: nn.Module, holders: Mapping[str, tuple[int, ...]], place: int) -> dict[str, str]:
    """As `keep_stages`, for any place of the pipeline."""
    prune(model, {name for name, places in holders.items() if place in places})
    return {
        name: "shared by " + ",".join(map(str, places))
        for name, places in holders.items()
        if len(places) > 1 and place in places
    }
