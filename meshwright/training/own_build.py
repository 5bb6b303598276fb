"""From a user's function to a sharded model of a user's own loop.

Owns the build under the seed, and what is said about it; sharding is `assemble.py`'s. Must not know optimizers, data or
scripts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from meshwright.adapt import registry
from meshwright.comm.mesh import Mesh
from meshwright.data.batches import MapStyle
from meshwright.layout.plan import TrainPlan
from meshwright.pipeline.part import Part
from meshwright.training.assemble import context_scope, shard_model
from meshwright.training.initialise import call_build, first_values
from meshwright.training.loss_scale import LossScale
from meshwright.training.optimizer import OptimizerSpec, ShardedOptimizer
from meshwright.training.own_loop import ShardedModel
from meshwright.training.own_stages import OwnStages, plan_own_stages
from meshwright.training.own_step import LoopRules
from meshwright.training.precision import to_master, warnings_of
from meshwright.training.sequences import cutter
from meshwright.training.state import TrainState


@dataclass(frozen=True)
class Site:
    """Where models of a job are built.

    Attributes:
        plan: its policy and precision; batches have plans of their own.
        mesh: connected ranks.
        rules: of the loops.
    """

    plan: TrainPlan
    mesh: Mesh
    rules: LoopRules


def build_model(
    build: Callable[[], Any],
    site: Site,
    *,
    loss: Callable[[Any, Any], Any] | None,
    siblings: list[ShardedModel],
    say: Callable[[str], None],
    data: MapStyle | None = None,
) -> ShardedModel:
    """What `Job.build` does.

    Args:
        build: () -> nn.Module, the same on every rank.
        site: where.
        loss: of `model.step`.
        siblings: the job's models.
        say: is told warnings.
        data: samples, for a model in stages.
    """
    rules, mesh, plan = site.rules, site.mesh, site.plan
    torch.manual_seed(rules.seed)
    module = call_build(build)
    to_master(module, plan.precision)
    initialiser = first_values(build, module, rules.seed)
    groups = mesh.data_groups()
    workers = groups.num_workers
    texts = registry.warnings_of(module, dropout_kind=rules.dropout, num_ranks=workers, num_microbatches=1)
    for text in [*warnings_of(plan, mesh.device), *texts]:
        say(text)
    context = context_scope(plan, groups)
    cut_batch = Part if context is None else cutter(context)
    pipeline = plan_own_stages(module, loss, data, plan, mesh, cut_batch=cut_batch)
    for text in () if pipeline is None else pipeline.plan.warnings:
        say(text)
    engine = shard_model(
        module,
        plan,
        groups,
        device=mesh.device,
        initialiser=initialiser,
        dropout=rules.dropout,
        pipeline=pipeline,
    )
    # Optimizers come later, and each is tied to the model by its hooks.
    scale = LossScale() if plan.precision == "fp16" else None
    state = TrainState(engine, ShardedOptimizer(OptimizerSpec(), []), loss_scale=scale)
    stages = None if pipeline is None else OwnStages(pipeline, engine)
    return ShardedModel(state, rules=rules, loss=loss, siblings=siblings, context=context, stages=stages)
