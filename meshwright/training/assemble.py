"""From a module to a sharded one that trains by a plan: the one way, for `train`, own loops and the run under `verify`.

Owns the order: compare over ranks, split over tp, shard over dp, adapt. Must not know where the module comes from, nor
optimizers or data.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import nn

from meshwright.adapt import context_hf, registry
from meshwright.adapt.context_parallel import ContextScope, check_model
from meshwright.adapt.dropout import DropoutKind
from meshwright.adapt.tensor_parallel import split_model
from meshwright.comm.ops import DataGroups
from meshwright.layout.plan import TrainPlan
from meshwright.partitioning.checkpointing import Span
from meshwright.pipeline.build import keep_stages
from meshwright.sharding.engine import ShardingEngine
from meshwright.sharding.memory import Initialiser
from meshwright.training.layouts import Example, deriver
from meshwright.training.precision import COMPUTE_DTYPES
from meshwright.training.saving import whole_model
from meshwright.training.stages import Pipeline
from meshwright.training.task import check_same_model


def context_scope(plan: TrainPlan, groups: DataGroups) -> ContextScope | None:
    """What computes attention over the ranks that share sequences; None where there are none."""
    return None if groups.context is None else ContextScope(groups.context, plan.cp_kind)


def shard_model(  # noqa: PLR0913 - where all parts of a run meet
    model: nn.Module,
    plan: TrainPlan,
    groups: DataGroups,
    *,
    device: torch.device,
    initialiser: Initialiser | None,
    dropout: DropoutKind,
    schedules: Mapping[str, Span] = MappingProxyType({}),
    example: Example | None = None,
    pipeline: Pipeline | None = None,
) -> ShardingEngine:
    """Shard `model` in place over `groups`, and swap the calls that would depend on the mesh.

    Args:
        model: the same on every rank, with parameters of the plan's master type.
        plan: its policy, precision and offload.
        groups: the data-parallel ranks.
        device: where this rank computes.
        initialiser: values of parameters on the meta device.
        dropout: `stateless` or `native`.
        schedules: of chains whose recomputation has a budget, by the name of their first module.
        example: what tp reads the graph of a model with of which no layout is known.
        pipeline: leaves this rank its stages of `model`.

    Raises:
        PlanError: E113 when ranks built different models; E201, E226, E227, E229, E290, E291 for a model that tp cannot
            split; what sharding and adapting refuse.
    """
    check_same_model(model, groups.everyone, device=device)
    if groups.context is not None:
        check_model(model, groups.context.size)
        context_hf.install(model)
    layout = None
    whole = None if pipeline is None else whole_model(model)
    if groups.tensor is not None:
        derive = None if example is None else deriver(model, example)
        layout, initialiser = split_model(
            model,
            groups.tensor,
            initialiser,
            dict(plan.layout),
            derive,
            sequence_parallel=plan.sequence_parallel,
        )
    apart: Mapping[str, str] = {}
    if pipeline is not None and groups.pipeline is not None:
        apart = keep_stages(model, pipeline.plan, groups.pipeline)
    engine = ShardingEngine(
        model,
        policy=plan.policy,
        groups=groups,
        device=device,
        initialiser=initialiser,
        compute_dtype=COMPUTE_DTYPES[plan.precision],
        offload=plan.offload == "optimizer",
        tensor_layout=layout,
        apart=apart,
    )
    engine.whole = whole
    registry.install(
        model,
        engine,
        dropout_kind=dropout,
        recompute=plan.recompute,
        schedules=schedules,
        deferral=None if pipeline is None else pipeline.deferral,
    )
    return engine
