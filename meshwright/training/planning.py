"""From a configuration to a plan, without torch: the launcher checks it before it starts any process."""

from __future__ import annotations

from types import MappingProxyType

from meshwright.errors import PlanError
from meshwright.layout.check import PlanRequest, make_plan
from meshwright.layout.plan import TrainPlan
from meshwright.layout.recompute import parse_recompute
from meshwright.layout.sequence import DEFAULT_CP_KIND, check_heads
from meshwright.layout.sync import num_servers
from meshwright.layout.tensor_layout import too_many_ranks
from meshwright.presets import find_model
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
        PlanError: see `make_plan`; E201 for more tp ranks than heads; E204 where the optimizer needs whole
            parameters; E223 for what an asynchronous run
            cannot do.
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
        servers=config.plan.servers,
        staleness=config.plan.staleness,
        tp=config.plan.tp,
        pp=config.plan.pp,
        schedule=config.plan.schedule,
        chunks=config.plan.chunks,
        stages=tuple(config.plan.stages or ()),
        stage_ranks=config.plan.stage_ranks or (),
        layout=tuple(config.plan.layout.items()),
        cp=config.plan.cp,
        cp_kind=config.plan.cp_kind,
        sequence_parallel=config.plan.sequence_parallel,
    )
    plan = make_plan(
        request, world_size=world_size, global_batch=config.train.global_batch, world_source=world_source
    )
    if plan.staleness is not None:
        _check_asynchronous(config)
    if config.plan.tp > 1:
        _check_tensor_parallel(config)
    if config.plan.cp > 1:
        _check_context_parallel(config)
    parts = (
        plan.policy.shards_optimizer and plan.policy.ownership == "flat" and plan.mesh.size("dp_shard") > 1
    )
    check_optimizer(_CLASSES[config.train.optimizer.name], holds_whole=not parts)
    return plan


def num_workers_of(config: RunConfig, world_size: int) -> int:
    """Of `world_size` processes how many have samples of their own: one a pp x cp x tp group; E222 as `make_plan`."""
    chosen = config.plan
    if chosen.stage_ranks:
        return max(map(len, chosen.stage_ranks), default=1)
    servers = num_servers(chosen.sync, chosen.servers, chosen.staleness, world_size=world_size)
    return max(1, (world_size - servers) // (chosen.cp * chosen.tp * chosen.pp))


def local_world_size(config: RunConfig, *, num_gpus: int) -> int:
    """Local processes of a run: plan.processes, else tp x cp x pp x (plan.dp, one a GPU or one) and servers."""
    if config.plan.processes:
        return config.plan.processes
    if config.plan.stage_ranks:
        return sum(map(len, config.plan.stage_ranks))
    servers = config.plan.servers or 1 if config.plan.sync == "parameter_server" else 0
    shared = config.plan.tp * config.plan.cp * config.plan.pp
    ranks = config.plan.dp or max(1, num_gpus // shared)
    return ranks * shared + servers


def _check_asynchronous(config: RunConfig) -> None:
    """E223 for what needs one step of all ranks together, where workers are at different steps."""
    train, save = config.train, config.save
    refused = {
        f"train.stop_at = {train.stop_at}": (
            train.stop_at.unit == "seconds",
            "stop at steps, tokens or epochs",
        ),
        f"train.eval_every = {train.eval_every}": (train.eval_every.num_steps is not None, 'set it to "end"'),
        f"save.every = {save.every}": (
            save.every is not None and save.every.unit != "end",
            'set it to "end"',
        ),
        "plan.precision = fp16": (config.plan.precision == "fp16", "take bf16, which needs no loss scale"),
        "plan.offload": (config.plan.offload != "none", "leave it out: workers hold no optimizer state"),
    }
    for what, (is_asked, instead) in refused.items():
        if is_asked:
            raise PlanError(
                "E223",
                f"{what} with plan.staleness = {config.plan.staleness}: workers are at different steps, so there is "
                f"none that all have made before the end. {instead[0].upper()}{instead[1:]}, or leave plan.staleness "
                f"out.",
            )


def _check_context_parallel(config: RunConfig) -> None:
    """E255 for what is not built with cp; E252 for a known architecture."""
    if any(kept.kind == "budget" for _, kept in parse_recompute(config.plan.recompute).rules):
        raise PlanError(
            "E255",
            f'plan.recompute = "{config.plan.recompute}" with plan.cp = {config.plan.cp} is not built: what a layer '
            f"keeps is counted for whole sequences. Choose full, selective, every:k or constant, or set plan.cp=1.",
        )
    if config.model.source.startswith("preset:"):
        preset = find_model(config.model.source.removeprefix("preset:"))
        heads = config.model.num_heads or preset.num_heads
        if heads:
            check_heads(config.plan.cp, heads // config.plan.tp, config.plan.cp_kind or DEFAULT_CP_KIND)


def _check_tensor_parallel(config: RunConfig) -> None:
    """E201 for a known architecture."""
    if config.model.source.startswith("preset:"):
        preset = find_model(config.model.source.removeprefix("preset:"))
        heads = config.model.num_heads or preset.num_heads
        if heads and config.plan.tp > heads:
            raise too_many_ranks(config.plan.tp, heads, f"heads of {preset.name}")
