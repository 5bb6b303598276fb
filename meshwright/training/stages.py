"""A run's pipeline: planned on its first micro-batch, and made into what runs the micro-batches of a step.

Owns what a pipeline needs of a run: a batch to record, the loss on one rank's sequences, random numbers and scopes.
Must not know how stages are cut or run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from meshwright.adapt.linear import Deferral
from meshwright.comm.ops import DataGroups
from meshwright.data.batches import Batches, MapStyle
from meshwright.data.index_law import BatchGeometry
from meshwright.errors import PlanError
from meshwright.layout.plan import TrainPlan
from meshwright.pipeline.build import PipelinePlan, plan_pipeline, schedule_of
from meshwright.pipeline.executor import PipelineExecutor
from meshwright.pipeline.micro_batch import Reader
from meshwright.pipeline.part import Part
from meshwright.pipeline.ties import SharedParameters
from meshwright.sharding.engine import ShardingEngine
from meshwright.training.precision import COMPUTE_DTYPES, MASTER_DTYPES
from meshwright.training.step import Loss
from meshwright.training.tree import cast_batch


@dataclass(frozen=True, eq=False)
class Pipeline:
    """A model cut for a pipeline, and what is shared by whoever assembles it.

    Attributes:
        plan: of the stages.
        of_run: the plan of the run.
        reader: makes micro-batches.
        deferral: of weight gradients, which are added up past autograd.
    """

    plan: PipelinePlan
    of_run: TrainPlan
    reader: Reader
    deferral: Deferral

    def executor(self, engine: ShardingEngine, *, num_microbatches: int | None = None) -> PipelineExecutor:
        """What runs the stages of `engine`, the sharded part of the model; None: the plan's micro-batches."""
        groups, schedule = engine.groups.pipeline, self.plan.schedule
        assert groups is not None, "a pipeline has ranks along it"
        if num_microbatches is not None:
            schedule = schedule_of(self.of_run, num_microbatches)
        self.reader.layout = engine.tensor_layout
        shared = {n: p for n, p in self.plan.holders.items() if len(p) > 1}
        return PipelineExecutor(
            self.reader,
            groups=groups,
            schedule=schedule,
            engine=engine,
            shared=SharedParameters(engine, groups, shared),
            deferral=self.deferral,
        )


def make_pipeline(
    model: nn.Module,
    loss: Loss,
    data: MapStyle,
    plan: TrainPlan,
    groups: DataGroups,
    *,
    device: torch.device,
    cut_batch: Callable[[Any], Part] = Part,
) -> Pipeline | None:
    """The pipeline of a run; None where the plan has none.

    Args:
        model: whole and not adapted.
        loss: of (model, batch), on whatever of a batch one rank has.
        data: of training; its first micro-batch is recorded.
        plan: of the run.
        groups: of this rank.
        device: where it computes.
        cut_batch: this rank's part of a batch.

    Raises:
        PlanError: see `plan_pipeline`; E267 for tied weights with whole owners.
    """
    if groups.pipeline is None:
        return None
    # The first reader's samples on every rank: where lengths differ, their own would cut the model elsewhere.
    num_readers = 1 if groups.has_teams else groups.num_readers
    geometry = BatchGeometry(plan.global_batch, plan.num_microbatches, num_readers, 0)
    batch = cast_batch(
        Batches(data, geometry, seed=0).micro_batch(0, 0), MASTER_DTYPES[plan.precision], device
    )
    return pipeline_of(model, loss, cut_batch(batch).batch, plan, groups, device=device)


def pipeline_of(
    model: nn.Module,
    loss: Loss,
    batch: Any,
    plan: TrainPlan,
    groups: DataGroups,
    *,
    device: torch.device,
) -> Pipeline:
    """As `make_pipeline`, cut by what the loss does with this rank's part of a micro-batch."""
    dtype = COMPUTE_DTYPES[plan.precision]
    made = plan_pipeline(model, loss, batch, plan, device=device, compute_dtype=dtype)
    _check_owners(plan, made.holders)
    along, placement = groups.pipeline, made.schedule.placement
    assert along is not None, "a pipeline has ranks along it"
    reader = Reader(made.twin, made.cut, loss, groups=along, placement=placement)
    return Pipeline(made, plan, reader, Deferral())


def _check_owners(plan: TrainPlan, holders: Mapping[str, tuple[int, ...]]) -> None:
    shared = [name for name, places in holders.items() if len(places) > 1]
    if shared and plan.policy.ownership == "whole" and plan.mesh.size("dp_shard", "cp") > 1:
        raise PlanError(
            "E267",
            f'plan.ownership = "whole" with plan.pp = {plan.mesh.size("pp")}: {shared[0]!r} is on several stages, and '
            f"each would have another owner of it. Leave plan.ownership out, or set plan.dp=1.",
        )


def evaluated(executor: PipelineExecutor) -> Loss:
    """The loss of a batch for whoever has no gradients to take: on the last stage; zeros elsewhere."""
    return lambda _model, batch: executor.evaluate(batch)
