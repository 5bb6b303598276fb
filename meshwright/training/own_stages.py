"""The stages of a model in a user's own loop: recorded on a few samples when it is built, run by `model.step`.

Owns E237: what a loop that has only a part of the model on each rank cannot do. Schedules are made for the number of
micro-batches of a step, when it comes. Must not know optimizers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.utils.data import default_collate

from meshwright.comm.mesh import Mesh
from meshwright.data.batches import MapStyle
from meshwright.errors import ConfigError, PlanError
from meshwright.layout.plan import TrainPlan
from meshwright.pipeline.executor import PipelineExecutor
from meshwright.pipeline.part import Part
from meshwright.sharding.engine import ShardingEngine
from meshwright.training.precision import MASTER_DTYPES
from meshwright.training.stages import Pipeline, pipeline_of
from meshwright.training.step import Loss
from meshwright.training.tree import cast_batch

_NUM_RECORDED = 2


class OwnStages:
    """This rank's stages.

    Args:
        pipeline: of the model.
        engine: has this rank's part of it.
    """

    def __init__(self, pipeline: Pipeline, engine: ShardingEngine) -> None:
        self._pipeline, self._engine = pipeline, engine
        self._executors: dict[int, PipelineExecutor] = {}

    def executor(self, num_microbatches: int) -> PipelineExecutor:
        """What runs a step of so many micro-batches."""
        if num_microbatches not in self._executors:
            made = self._pipeline.executor(self._engine, num_microbatches=num_microbatches)
            self._executors[num_microbatches] = made
        return self._executors[num_microbatches]


def plan_own_stages(
    model: nn.Module,
    loss: Callable[[Any, Any], Any] | None,
    data: MapStyle | None,
    plan: TrainPlan,
    mesh: Mesh,
    *,
    cut_batch: Callable[[Any], Part],
) -> Pipeline | None:
    """Cut `model` for the pipeline of `plan`; None where that has none.

    Args:
        model: whole and not adapted.
        loss: of `model.step`.
        data: samples like those of training.
        plan: of the job.
        mesh: connected ranks.
        cut_batch: this rank's part of a batch.

    Raises:
        PlanError: E237 without a loss or data; see `plan_pipeline`.
        ConfigError: E111 for a loss that does not return (sum, count).
    """
    if plan.mesh.size("pp") == 1:
        return None
    if loss is None or data is None:
        missing = "loss" if loss is None else "data"
        raise PlanError(
            "E237",
            f"plan.pp = {plan.mesh.size('pp')} in a loop of your own, and the model was built without {missing}: where "
            f"it can be cut is seen from its loss on samples. Write job.build(build, loss=loss, data=dataset), with a "
            f"loss that returns (sum, count), or set plan.pp=1.",
        )
    batch = default_collate([data[index % len(data)] for index in range(_NUM_RECORDED)])
    batch = cast_batch(batch, MASTER_DTYPES[plan.precision], mesh.device)
    groups = mesh.data_groups()
    return pipeline_of(model, _pair(loss), cut_batch(batch).batch, plan, groups, device=mesh.device)


def check_alike(stage_ranks: Sequence[Sequence[int]] | None) -> None:
    """E237 for places with unlike numbers of ranks."""
    if stage_ranks:
        raise PlanError(
            "E237",
            f"plan.stage_ranks = {[list(team) for team in stage_ranks]} in a loop of your own: batches of your own "
            f"would have to be cut unlike for each place. Give plan.pp and plan.dp, or train by a run file (meshwright "
            f"train run.toml).",
        )


def no_forward(model: nn.Module, num_ranks: int, what: str) -> PlanError:
    """E237 for lines that would run the whole model."""
    return PlanError(
        "E237",
        f"{what} with plan.pp = {num_ranks}: each rank has some layers of {type(model).__name__}, and a schedule runs "
        f"them for all micro-batches of a step in its own order. Train by model.step(batch), evaluate by "
        f"job.evaluate(model, dataset), or set plan.pp=1.",
    )


def _pair(loss: Callable[[Any, Any], Any]) -> Loss:
    """`loss`, where it returns a pair."""

    def checked(model: Any, batch: Any) -> tuple[Any, Any]:
        value = loss(model, batch)
        if isinstance(value, tuple) and len(value) == 2:
            return value
        raise ConfigError(
            "E111",
            "with plan.pp loss_fn(model, batch) must return (sum, count); it returned no pair. A bare mean is not "
            "tried on a model in stages: write e.g. cross_entropy(..., reduction='sum') and its count.",
        )

    return checked
