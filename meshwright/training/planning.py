"""From a configuration to a plan, without torch: the launcher checks it before it starts any process."""

from __future__ import annotations

from types import MappingProxyType

from meshwright.layout.check import PlanRequest, make_plan
from meshwright.layout.plan import TrainPlan
from meshwright.layout.recompute import parse_recompute
from meshwright.training.config import RunConfig
from meshwright.training.optimizer_kinds import check_optimizer

_CLASSES = MappingProxyType({"adamw": "AdamW", "adam": "Adam", "sgd": "SGD", "muon": "Muon"})


def plan_of(config: RunConfig, *, world_size: int, world_source: str = "") -> TrainPlan:
    """The plan that the configuration gives on `world_size` processes.

    Args:
        config: the run.
        world_size: number of processes.
        world_source: the variable it comes from, for the error text.

    Raises:
        PlanError: see `make_plan`; E204 where the optimizer needs whole parameters.
    """
    request = PlanRequest(
        policy=config.plan.zero,
        dp=config.plan.dp,
        micro_batch=config.plan.micro_batch,
        precision=config.plan.precision,
        offload=config.plan.offload,
        bucket_bytes=config.plan.bucket_bytes,
        hsdp=config.plan.hsdp,
        ownership=config.plan.ownership,
        sync=config.plan.sync,
        transport=config.plan.transport,
        recompute=parse_recompute(config.plan.recompute),
    )
    plan = make_plan(
        request, world_size=world_size, global_batch=config.train.global_batch, world_source=world_source
    )
    parts = (
        plan.policy.shards_optimizer and plan.policy.ownership == "flat" and plan.mesh.size("dp_shard") > 1
    )
    check_optimizer(_CLASSES[config.train.optimizer.name], holds_whole=not parts)
    return plan


def local_world_size(config: RunConfig, *, num_gpus: int) -> int:
    """How many local processes a run starts: plan.processes, else plan.dp, else one a GPU, else one."""
    return config.plan.processes or config.plan.dp or max(1, num_gpus)
