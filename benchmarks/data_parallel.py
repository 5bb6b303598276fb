"""Data parallelism raced against its peers: torch DDP, ZeroRedundancyOptimizer, FSDP2, and DeepSpeed where installed.

Ours is the product's own `train_step` on an unmodified module, with gradient clipping, per-step metrics and the
watchdog on. Peers are tuned (fused AdamW, gradient_as_bucket_view, static_graph, FSDP2 per block with prefetch) and do
neither clip nor log.

    python benchmarks/data_parallel.py a --rounds 15           race workload a
    python benchmarks/data_parallel.py b --only ddp            one family, where memory does not hold all
    python benchmarks/data_parallel.py b --memory              peak resident memory, one candidate a process pair

Ours runs over Gloo, and over shared memory ("shm"). "limit" is the same local work, sharded optimizer included, with
collectives that do nothing: what no transport can beat.

DeepSpeed joins where it is installed (pip install --no-deps deepspeed; hjson msgpack ninja py-cpuinfo einops).
"""

from __future__ import annotations

import argparse
import logging
import os
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness import WORKLOADS, Timing, Workload, launch, race, resident_peak_mb

from meshwright.adapt import linear
from meshwright.comm.log import CommLog, ring_path
from meshwright.comm.mesh import Mesh, World
from meshwright.comm.ops import DataGroups, Group
from meshwright.comm.transports.base import Work
from meshwright.comm.watchdog import Watchdog
from meshwright.layout.policy import find_policy
from meshwright.mesh import MeshSpec
from meshwright.models.loss import classification_loss, language_model_loss
from meshwright.sharding.engine import ShardingEngine
from meshwright.training.metrics import MetricsWriter, StepRecord
from meshwright.training.optimizer import OptimizerSpec, ShardedOptimizer, parameter_groups
from meshwright.training.state import TrainState
from meshwright.training.step import train_step

HYPER = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}
FAMILIES = {
    "ddp": ["torch ddp", "meshwright ddp", "meshwright ddp shm", "meshwright ddp limit"],
    "zero1": [
        "zero redundancy optimizer",
        "deepspeed zero1",
        "meshwright zero1",
        "meshwright zero1 shm",
        "meshwright zero1 limit",
    ],
    "zero3": [
        "fsdp2",
        "deepspeed zero3",
        "meshwright zero3",
        "meshwright zero3 shm",
        "meshwright zero3 limit",
    ],
}
PEERS = {"ddp": "torch ddp", "zero1": "zero redundancy optimizer", "zero3": "fsdp2"}
Step = Callable[[], float]


def loss_of(workload: Workload) -> Any:
    return classification_loss if workload.seq_len == 0 else language_model_loss


class Nothing:
    """A transport that communicates nothing; sums are as if every rank had what this one has, for the step's few."""

    name = "nothing"
    scratch_bytes = 0

    def __init__(self, size: int) -> None:
        self._size = size

    def all_reduce(self, tensor: torch.Tensor) -> Work:
        if tensor.dtype == torch.float64:
            tensor.mul_(self._size)
        return Work(())

    def allocate(self, numel: int, dtype: torch.dtype) -> None:
        return None

    allocate_common = allocate

    def nothing(self, *_: object) -> Work:
        return Work(())

    reduce = reduce_scatter = all_gather = broadcast = all_to_all = nothing
    send = receive = barrier = nothing

    def lowered(self, op: str, nbytes: int, index: int = 0) -> Counter[str]:
        return Counter()


def without_communication(groups: DataGroups) -> DataGroups:
    held = {name: group for name, group in vars(groups).items() if isinstance(group, Group)}
    return replace(
        groups,
        **{name: replace(group, transport=Nothing(group.size)) for name, group in held.items()},
    )


def ours(
    policy: str,
    workload: Workload,
    rank: int,
    world_size: int,
    *,
    transport: str = "gloo",
    bucket_bytes: int | None = None,
) -> Step:
    folder = Path(tempfile.mkdtemp(prefix="meshwright-bench-"))
    log = CommLog(rank, world_size, ring_path(folder / "events", rank))
    Watchdog(log, limit_seconds=300, folder=folder, world_size=world_size).__enter__()
    mesh = Mesh(
        MeshSpec.of(dp_shard=world_size),
        World(rank=rank, size=world_size),
        log=log,
        device=torch.device("cpu"),
        transport="gloo" if transport == "limit" else transport,
    )
    groups = mesh.data_groups()
    engine = ShardingEngine(
        workload.model(),
        policy=find_policy(policy, bucket_bytes=bucket_bytes),
        groups=without_communication(groups) if transport == "limit" else groups,
        device=torch.device("cpu"),
    )
    linear.install(engine.model, engine)
    state = TrainState(engine, ShardedOptimizer(OptimizerSpec("adamw", **HYPER), engine.shards))
    batch, loss, writer = workload.batch(rank), loss_of(workload), MetricsWriter(folder, tensorboard=False)

    def step() -> float:
        result = train_step(
            state, lambda _: batch, loss=loss, num_microbatches=1, lr=HYPER["lr"], clip_norm=1e9
        )
        writer.step(
            StepRecord(
                state.step, result.loss, result.grad_norm, HYPER["lr"], state.tokens, 1.0, 1.0, None, None
            )
        )
        return result.loss

    return step


def mean_loss(workload: Workload, model: Any, batch: Any) -> torch.Tensor:
    total, count = loss_of(workload)(model, batch)
    return total / count


def groups_of(model: Any) -> list[dict[str, Any]]:
    """Parameter groups as ours: matrices decay, vectors do not."""
    parameters = list(model.parameters())
    groups = parameter_groups(OptimizerSpec("adamw", **HYPER), [tuple(p.shape) for p in parameters])
    return [{"params": [parameters[i] for i in members], "weight_decay": decay} for members, decay in groups]


def adamw(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups_of(model), fused=True, **HYPER)


def torch_ddp(workload: Workload, rank: int, *, sharded: bool) -> Step:
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    # A static graph delays the first reductions past the optimizer wrapper's view of the parameters.
    model = DistributedDataParallel(workload.model(), gradient_as_bucket_view=True, static_graph=not sharded)
    if sharded:
        optimizer: Any = ZeroRedundancyOptimizer(groups_of(model), torch.optim.AdamW, fused=True, **HYPER)
    else:
        optimizer = adamw(model)
    return torch_step(workload, model, optimizer, rank)


def fsdp2(workload: Workload, rank: int, world_size: int) -> Step:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (world_size,))
    model: Any = workload.model()
    blocks = list(model.blocks)
    for block in blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for i, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(blocks[i + 1 : i + 2])
        block.set_modules_to_backward_prefetch(blocks[i - 1 : i] if i else [])
    return torch_step(workload, model, adamw(model), rank)


def torch_step(workload: Workload, model: Any, optimizer: Any, rank: int) -> Step:
    batch = workload.batch(rank)

    def step() -> float:
        loss = mean_loss(workload, model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return step


def deepspeed(stage: int, workload: Workload, rank: int) -> Step:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    logging.disable(logging.WARNING)
    import deepspeed as package

    package.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
    model = workload.model()
    config = {
        "train_micro_batch_size_per_gpu": workload.samples,
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,
        "steps_per_print": 10**9,
        "zero_optimization": {"stage": stage, "overlap_comm": False, "stage3_param_persistence_threshold": 0},
    }
    optimizer = adamw(model)
    engine, _, _, _ = package.initialize(model=model, optimizer=optimizer, config=config)
    batch = workload.batch(rank)

    def step() -> float:
        loss = mean_loss(workload, engine, batch)
        engine.backward(loss)
        engine.step()
        return loss.item()

    return step


def make(name: str, workload: Workload, rank: int, world_size: int) -> Step:
    if name.startswith("meshwright"):
        _, policy, *rest = name.split()  # e.g. "meshwright ddp shm 8" for buckets of 8 MiB
        transport = next((word for word in rest if not word.isdigit()), "gloo")
        mib = next((int(word) for word in rest if word.isdigit()), None)
        size = mib << 20 if mib else None
        return ours(policy, workload, rank, world_size, transport=transport, bucket_bytes=size)
    if name == "fsdp2":
        return fsdp2(workload, rank, world_size)
    if name.startswith("deepspeed"):
        return deepspeed(int(name[-1]), workload, rank)
    return torch_ddp(workload, rank, sharded=name != "torch ddp")


def run_race(
    rank: int, world_size: int, workload_name: str, names: list[str], rounds: int, inner: int
) -> tuple[dict[str, Timing], dict[str, float]]:
    warnings.filterwarnings("ignore")
    workload = WORKLOADS[workload_name]
    candidates = {name: make(name, workload, rank, world_size) for name in names}
    losses = {}
    for name, step in candidates.items():
        for _ in range(3):
            value = torch.tensor([step()], dtype=torch.float64)
        dist.all_reduce(value)
        losses[name] = float(value) / world_size
    return race(candidates, rounds=rounds, inner=inner), losses


def run_memory(rank: int, world_size: int, workload_name: str, name: str) -> float:
    warnings.filterwarnings("ignore")
    step = make(name, WORKLOADS[workload_name], rank, world_size)
    for _ in range(2):
        step()
    resident_peak_mb(reset=True)
    for _ in range(2):
        step()
    return resident_peak_mb()


def print_race(
    workload: Workload, timings: dict[str, Timing], losses: dict[str, float], pinned: bool
) -> None:
    rounds = len(next(iter(timings.values())).wall)
    print(f"\n### {workload.name}: {workload.about}; {rounds} rounds{', pinned' if pinned else ''}\n")
    print(
        "| candidate | ms (median) | min..max | CPU ms a rank | MB on loopback | times the peer's speed | "
        "times the limit's time | loss |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for name, timing in timings.items():
        policy = name.split()[1] if name.startswith("meshwright") else ""
        peer, limit = timings.get(PEERS.get(policy, "")), timings.get(f"meshwright {policy} limit")
        ratio = f"{peer.median / timing.median:.2f}x" if peer and not name.endswith("limit") else ""
        over = f"{timing.median / limit.median:.2f}" if limit else ""
        cpu, sent = sorted(timing.cpu)[rounds // 2], sorted(timing.loopback)[rounds // 2]
        print(
            f"| {name} | {timing.median:.1f} | {min(timing.wall):.1f}..{max(timing.wall):.1f} | {cpu:.1f} | "
            f"{sent:.1f} | {ratio} | {over} | {losses[name]:.5f} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("workload", choices=list(WORKLOADS), nargs="?", default="c")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--inner", type=int, default=1)
    parser.add_argument("--only", choices=list(FAMILIES), help="one family instead of all")
    parser.add_argument("--candidates", help="exact candidates, separated by commas")
    parser.add_argument("--memory", action="store_true", help="peak resident memory instead of time")
    parser.add_argument("--no-pin", action="store_true", help="do not give each rank a core of its own")
    args = parser.parse_args()
    names = [name for family, members in FAMILIES.items() for name in members if args.only in (None, family)]
    if args.candidates:
        names = args.candidates.split(",")
    try:
        import deepspeed as _  # noqa: F401
    except ImportError:
        names = [name for name in names if not name.startswith("deepspeed")]
    workload = WORKLOADS[args.workload]
    if args.memory:
        for name in names:
            peak = launch(run_memory, args.ranks, args.workload, name, pin=not args.no_pin)
            print(
                f"| {workload.name} | {name} | {peak:.0f} MB peak resident, steady state, rank 0 |",
                flush=True,
            )
        return
    timings, losses = launch(
        run_race, args.ranks, args.workload, names, args.rounds, args.inner, pin=not args.no_pin
    )
    print_race(workload, timings, losses, not args.no_pin)


if __name__ == "__main__":
    main()
