"""Rules between two fields of a plan: world size against axes, batch against data parallelism."""

from __future__ import annotations

from dataclasses import dataclass, replace

from meshwright.errors import PlanError
from meshwright.layout.plan import Offload, Precision, TrainPlan, TransportName
from meshwright.layout.policy import Ownership, ShardingPolicy, find_policy
from meshwright.layout.recompute import NOTHING_AGAIN, RecomputePlan
from meshwright.layout.sequence import DEFAULT_CP_KIND, CpKind, check_kind
from meshwright.layout.sync import check_sync, num_servers
from meshwright.mesh import MeshSpec


@dataclass(frozen=True)
class PlanRequest:
    """What a user fixed of a plan; None is derived.

    Attributes:
        policy: `ddp`, `zero1` ... or a ZeRO stage.
        tp: tensor-parallel ranks, which hold one copy of the model together.
        layout: roles of layers under tp.
        sequence_parallel: whether tp ranks have a part of the tokens between the products that they share.
        dp: data-parallel size; None takes what the other axes leave of the world.
        micro_batch: samples a rank and micro-step; None makes one micro-step.
        precision: element type of forward and backward.
        offload: what lives in host memory.
        bucket_bytes: bucket target; None keeps the policy's.
        hsdp: ranks that share one copy of the model; None: all.
        ownership: `flat` shards cut anywhere, or `whole` parameters on one owner.
        sync: which algorithms carry out the collectives.
        transport: what carries them.
        recompute: what is computed again in backward.
        servers: ranks that hold the parameters (sync `parameter_server`); None: 1 there.
        staleness: steps a worker may be ahead of the slowest (the same sync); None: steps are made together.
        cp: context-parallel ranks, over which sequences are cut.
        cp_kind: how attention sees the whole sequence; None: a ring.
        pp: ranks along the depth of the model.
        schedule: order of forwards and backwards over its stages; None: 1f1b.
        chunks: stages a rank; None: as the schedule has them.
        stages: modules with which stages begin, without the first.
        stage_ranks: the ranks of each place of the pipeline, where they are not equally many; empty: all alike.
    """

    policy: str | int = "ddp"
    dp: int | None = None
    micro_batch: int | None = None
    precision: Precision = "fp32"
    offload: Offload = "none"
    bucket_bytes: int | None = None
    hsdp: int | None = None
    ownership: Ownership = "flat"
    sync: str = "native"
    transport: TransportName = "auto"
    recompute: RecomputePlan = NOTHING_AGAIN
    servers: int | None = None
    staleness: int | None = None
    tp: int = 1
    layout: tuple[tuple[str, str], ...] = ()
    sequence_parallel: bool = False
    cp: int = 1
    cp_kind: CpKind | None = None
    pp: int = 1
    schedule: str | None = None
    chunks: int | None = None
    stages: tuple[str, ...] = ()
    stage_ranks: tuple[tuple[int, ...], ...] = ()

    @property
    def num_model_ranks(self) -> int:
        """Ranks that share the samples of one data-parallel rank."""
        return self.tp * self.cp * self.pp


def make_plan(
    request: PlanRequest, *, world_size: int, global_batch: int, world_source: str = ""
) -> TrainPlan:
    """Derive what `request` leaves open and check the result.

    Args:
        request: the fixed parts.
        world_size: number of processes that were started.
        global_batch: samples a step.
        world_source: where the world size comes from, for the error text, e.g. `SLURM_NTASKS`.

    Raises:
        PlanError: E200 (axes against processes), E203 (batch against dp x micro x accumulate), E204 (policy), E210
            (hsdp against dp), E211 (nothing to own), E221 (sync against policy) or E222 (servers, staleness).
    """
    if request.stage_ranks:
        request = with_teams(request, world_size)
    servers = num_servers(request.sync, request.servers, request.staleness, world_size=world_size)
    shared = request.num_model_ranks
    _check_tensor_parallel(request)
    _check_context_parallel(request)
    _check_pipeline(request)
    dp = max(1, (world_size - servers) // shared) if request.dp is None else request.dp
    if dp * shared + servers != world_size and not request.stage_ranks:
        beside = f", {servers} of them servers," if servers else ""
        raise PlanError(
            "E200",
            f"tp {request.tp} x pp {request.pp} x cp {request.cp} x dp {dp} = {shared * dp}, but {world_size} "
            f"processes started{beside} (ep is inside dp x cp, it does not multiply). "
            f"{_other_size(request, world_size - servers)}, or start {dp * shared + servers}."
            + (f" Is a world of {world_size} intended? It came from {world_source}." if world_source else ""),
        )
    micro_batch = request.micro_batch
    if micro_batch is None:
        if global_batch % dp:
            raise _batch_error(global_batch, dp, 1)
        micro_batch = global_batch // dp
    if micro_batch < 1 or global_batch < 1 or global_batch % (dp * micro_batch):
        raise _batch_error(global_batch, dp, max(micro_batch, 1))
    policy = find_policy(request.policy, bucket_bytes=request.bucket_bytes, ownership=request.ownership)
    _check_ownership(policy)
    mesh = _data_mesh(request, policy, dp)
    check_sync(request.sync, policy, has_copies=mesh.size("dp_replicate") > 1)
    if servers:
        _check_transport(request.transport)
        policy = find_policy("parameter_server", bucket_bytes=request.bucket_bytes)
    return TrainPlan(
        mesh=mesh,
        policy=policy,
        global_batch=global_batch,
        micro_batch=micro_batch,
        num_microbatches=global_batch // (dp * micro_batch),
        precision=request.precision,
        offload=request.offload,
        sync=request.sync,
        transport=request.transport,
        recompute=request.recompute,
        servers=servers,
        staleness=request.staleness,
        layout=request.layout,
        sequence_parallel=request.sequence_parallel,
        cp_kind=request.cp_kind or DEFAULT_CP_KIND,
        schedule=_schedule_of(request),
        chunks=_chunks_of(request),
        stages=request.stages,
    )


def with_teams(request: PlanRequest, world_size: int) -> PlanRequest:
    """`request` with the sizes that its `stage_ranks` give; the largest team's is dp.

    Raises:
        PlanError: E231 for ranks that do not fit, E235 for what stages of unlike numbers of ranks cannot be with, E200.
    """
    teams = request.stage_ranks
    mesh, shown = MeshSpec.of_teams(teams), [list(team) for team in teams]
    if request.pp not in (1, len(teams)):
        raise PlanError(
            "E231",
            f"plan.stage_ranks = {shown} has {len(teams)} places, and plan.pp = {request.pp}; give the ranks of each "
            f"place of the pipeline, or leave plan.pp out.",
        )
    if mesh.world_size != world_size:
        raise PlanError(
            "E200",
            f"plan.stage_ranks = {shown} has {mesh.world_size} ranks, but {world_size} processes started. Start "
            f"{mesh.world_size}, or name each rank of 0..{world_size - 1} once.",
        )
    refused = {
        f"plan.tp = {request.tp}": request.tp > 1,
        f"plan.cp = {request.cp}": request.cp > 1,
        f"plan.hsdp = {request.hsdp}": request.hsdp is not None,
        f"plan.dp = {request.dp}": request.dp not in (None, mesh.dp),
        "a single place": len(teams) == 1,
    }
    for what, is_asked in refused.items():
        if is_asked:
            raise PlanError(
                "E235",
                f"plan.stage_ranks = {shown} with {what}: stages of unlike numbers of ranks are data parallel each by "
                f"itself, and nothing else. Leave it out, or give plan.pp and plan.dp instead of plan.stage_ranks.",
            )
    return replace(request, pp=len(teams), dp=mesh.dp)


def _data_mesh(request: PlanRequest, policy: ShardingPolicy, dp: int) -> MeshSpec:
    """Copies of the model over `request.hsdp` neighbouring ranks each."""
    if request.stage_ranks:
        return MeshSpec.of_teams(request.stage_ranks)
    if request.hsdp is None:
        return MeshSpec.of(pp=request.pp, dp_shard=dp, cp=request.cp, tp=request.tp)
    if not policy.shards_optimizer:
        raise PlanError(
            "E210",
            f"plan.hsdp = {request.hsdp} is for plan.zero = 1, 2 or 3, and plan.zero = 0 shards nothing. "
            f"Set plan.zero=3 (or 1, 2), or leave plan.hsdp out.",
        )
    if dp % request.hsdp:
        sizes = ", ".join(str(size) for size in range(1, dp + 1) if dp % size == 0)
        raise PlanError("E210", f"plan.hsdp = {request.hsdp} does not divide dp {dp}. Valid: {sizes}.")
    copies = dp // request.hsdp
    return MeshSpec.of(
        pp=request.pp, dp_replicate=copies, dp_shard=request.hsdp, cp=request.cp, tp=request.tp
    )


def _other_size(request: PlanRequest, num_ranks: int) -> str:
    """The nearest plan for `num_ranks` processes."""
    shared = request.num_model_ranks
    if num_ranks % shared == 0:
        return f"Set plan.dp={num_ranks // shared}"
    if request.pp > 1:
        return f"plan.pp x plan.cp x plan.tp = {shared} does not divide {num_ranks}: change one of them"
    if request.cp > 1:
        return f"plan.cp x plan.tp = {shared} does not divide {num_ranks}: change one of them"
    valid = " ".join(str(size) for size in range(1, num_ranks + 1) if num_ranks % size == 0)
    return f"plan.tp={request.tp} does not divide {num_ranks}: set plan.tp to one of {valid}"


def _check_tensor_parallel(request: PlanRequest) -> None:
    """E229 for tokens that no ranks cut, E228 for what is not built together with tp."""
    if request.tp == 1 and request.sequence_parallel:
        raise PlanError(
            "E229",
            "plan.sequence_parallel = true cuts tokens over tensor-parallel ranks, and plan.tp = 1. Set plan.tp=2 or "
            "more, or leave plan.sequence_parallel out.",
        )
    if request.tp == 1:
        return
    if request.sync == "parameter_server":
        raise PlanError(
            "E228",
            f'plan.sync = "parameter_server" with plan.tp = {request.tp} is not built: a server would have to hold a '
            f"part of every matrix for each tp rank. Set plan.sync=native, with plan.zero=1 for optimizer state on one "
            f"data-parallel rank each; or set plan.tp=1.",
        )


def _check_context_parallel(request: PlanRequest) -> None:
    """E252 for a kind that cp cannot have, E255 for what is not built together with cp."""
    if request.cp == 1:
        return
    check_kind(request.cp, request.cp_kind)
    if request.sync == "parameter_server":
        raise PlanError(
            "E255",
            f'plan.sync = "parameter_server" with plan.cp = {request.cp} is not built. Leave it out, or set plan.cp=1.',
        )


def _schedule_of(request: PlanRequest) -> str:
    """The schedule: 1F1B where nothing is said."""
    if request.pp == 1:
        return "serial"
    return request.schedule or "1f1b"


def _chunks_of(request: PlanRequest) -> int:
    """Stages a rank."""
    if request.pp == 1:
        return 1
    return request.chunks or {"interleaved": 2, "zb-v": 2}.get(_schedule_of(request), 1)


def _check_pipeline(request: PlanRequest) -> None:
    """E260 for stages that are not as many as the plan says, E265 for what is not built together with pp."""
    if request.pp == 1:
        if request.stages:
            raise PlanError(
                "E260",
                f"plan.stages = {list(request.stages)} is for a pipeline, and plan.pp = 1. Set plan.pp.",
            )
        return
    num_stages = request.pp * _chunks_of(request)
    if request.stages and len(request.stages) != num_stages - 1:
        raise PlanError(
            "E260",
            f"plan.stages names {len(request.stages)} modules, and plan.pp = {request.pp} with {_chunks_of(request)} "
            f"chunks has {num_stages} stages: name the {num_stages - 1} modules with which the others than the first "
            f"begin.",
        )
    if request.sync == "parameter_server":
        raise PlanError(
            "E265",
            f'plan.sync = "parameter_server" with plan.pp = {request.pp} is not built. Leave it out, or set plan.pp=1.',
        )


def _check_ownership(policy: ShardingPolicy) -> None:
    if policy.ownership == "whole" and not policy.shards_optimizer:
        raise PlanError(
            "E211",
            'plan.ownership = "whole" says which rank updates a parameter, and with plan.zero = 0 every rank updates '
            "all of them. Set plan.zero=1 (or 2, 3), or leave plan.ownership out.",
        )


def _check_transport(transport: TransportName) -> None:
    if transport == "shm":
        raise PlanError(
            "E223",
            'plan.transport = "shm" with plan.sync = "parameter_server": a server waits for several workers at once, '
            "and talks to them by Gloo. Set plan.transport=auto.",
        )


def _batch_error(global_batch: int, dp: int, micro: int) -> PlanError:
    unit = dp * micro
    lower = global_batch // unit
    choices = [f"{k * unit} (k={k})" for k in (lower, lower + 1) if k >= 1]
    fitting = [m for m in range(1, global_batch // dp + 1) if global_batch % (dp * m) == 0] if dp else []
    micros = (
        f" Or plan.micro_batch = {', '.join(map(str, fitting[-6:]))} for {global_batch}." if fitting else ""
    )
    return PlanError(
        "E203",
        f"global_batch {global_batch} ≠ dp {dp} x micro {micro} x accumulate k. "
        f"Nearest: {', '.join(choices)}.{micros} global_batch is never changed silently.",
    )
