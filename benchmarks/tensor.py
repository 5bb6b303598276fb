"""Tensor parallelism raced against DTensor (`parallelize_module`), with and without sequence parallelism.

Ours is the product's own `train_step` on an unmodified module split by `plan.tp`, with clipping, metrics and the
watchdog on. DTensor gets a fused AdamW, column and row splits of every block, and with "vocabulary" also of the
embedding, the head and the loss; its best variant of a kind is the peer.

    python benchmarks/tensor.py a --rounds 15
    python benchmarks/tensor.py a --candidates "dtensor,meshwright tp,meshwright tp shm,meshwright tp limit"

"limit" is the same local work with collectives that only copy what this rank has: what no transport can beat.
"""

from __future__ import annotations

import argparse
import tempfile
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from data_parallel import HYPER, Nothing, Step, loss_of, mean_loss
from harness import WORKLOADS, Timing, Workload, launch, race

from meshwright.comm.log import CommLog, ring_path
from meshwright.comm.mesh import Mesh, World
from meshwright.comm.transports.base import Work
from meshwright.comm.watchdog import Watchdog
from meshwright.layout.check import PlanRequest, make_plan
from meshwright.training.assemble import shard_model
from meshwright.training.layouts import Example
from meshwright.training.metrics import MetricsWriter, StepRecord
from meshwright.training.optimizer import OptimizerSpec, ShardedOptimizer
from meshwright.training.state import TrainState
from meshwright.training.step import train_step

NAMES = [
    "one process",
    "dtensor",
    "dtensor vocabulary",
    "meshwright tp",
    "meshwright tp shm",
    "meshwright tp derived shm",
    "meshwright tp limit",
    "dtensor sp",
    "meshwright sp",
    "meshwright sp shm",
]


class Own(Nothing):
    """Collectives of ranks that all have what this one has."""

    def all_gather(self, output: torch.Tensor, source: torch.Tensor) -> Work:
        output.view(self._size, -1).copy_(source.view(1, -1).expand(self._size, -1))
        return Work(())

    def reduce_scatter(self, output: torch.Tensor, source: torch.Tensor) -> Work:
        output.copy_(source[: output.numel()])
        return Work(())


def ours(workload: Workload, rank: int, size: int, words: list[str]) -> Step:
    transport = next((word for word in words if word in ("gloo", "shm")), "gloo")
    request = PlanRequest(
        tp=size,
        sequence_parallel="sp" in words,
        transport=transport,
        layout=(("*", "derived"),) if "derived" in words else (),
    )
    plan = make_plan(request, world_size=size, global_batch=workload.samples)
    folder = Path(tempfile.mkdtemp(prefix="meshwright-bench-"))
    log = CommLog(rank, size, ring_path(folder / "events", rank))
    Watchdog(log, limit_seconds=300, folder=folder, world_size=size).__enter__()
    mesh = Mesh.of_plan(plan, World(rank=rank, size=size), log=log, device=torch.device("cpu"))
    groups = mesh.data_groups()
    if "limit" in words:
        assert groups.model is not None
        own = replace(groups.model, transport=Own(size))
        groups = replace(groups, model=own, tensor=own)
    batch = workload.batch(0)
    samples = [{key: value[number] for key, value in batch.items()} for number in range(workload.samples)]
    engine = shard_model(
        workload.model(),
        plan,
        groups,
        device=torch.device("cpu"),
        initialiser=None,
        dropout="stateless",
        example=Example(loss_of(workload), samples, workload.samples, plan.precision),
    )
    state = TrainState(engine, ShardedOptimizer(OptimizerSpec("adamw", **HYPER), engine.shards))
    loss, writer = loss_of(workload), MetricsWriter(folder, tensorboard=False)

    def step() -> float:
        result = train_step(
            state, lambda _: batch, loss=loss, num_microbatches=1, lr=HYPER["lr"], clip_norm=1e9
        )
        record = StepRecord(
            state.step, result.loss, result.grad_norm, HYPER["lr"], state.tokens, 1.0, 1.0, None, None
        )
        writer.step(record)
        return result.loss

    return step


def dtensor(workload: Workload, size: int, words: list[str]) -> Step:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        PrepareModuleOutput,
        RowwiseParallel,
        SequenceParallel,
        loss_parallel,
        parallelize_module,
    )

    mesh, model = init_device_mesh("cpu", (size,)), workload.model()
    sp, with_vocabulary = "sp" in words, "sp" in words or "vocabulary" in words
    inside: Any = {"output_layouts": Shard(1)} if sp else {}
    for block in model.blocks:
        plan: dict[str, Any] = {
            "attention.query": ColwiseParallel(),
            "attention.key": ColwiseParallel(),
            "attention.value": ColwiseParallel(),
            "attention.output": RowwiseParallel(**inside),
            "feed_forward.up": ColwiseParallel(),
            "feed_forward.down": RowwiseParallel(**inside),
        }
        if sp:
            whole = {"input_layouts": (Shard(1),), "desired_input_layouts": (Replicate(),)}
            plan |= {
                "attention_norm": SequenceParallel(),
                "feed_forward_norm": SequenceParallel(),
                "attention": PrepareModuleInput(**whole),
                "feed_forward": PrepareModuleInput(**whole),
                "residual_dropout": SequenceParallel(),
            }
        parallelize_module(block, mesh, plan)
    if with_vocabulary:
        top: dict[str, Any] = {
            "token_embedding": RowwiseParallel(input_layouts=Replicate()),
            "head": ColwiseParallel(
                input_layouts=Shard(1) if sp else Replicate(),
                output_layouts=Shard(-1),
                use_local_output=False,
            ),
        }
        if sp:
            top["embedding_dropout"] = PrepareModuleOutput(
                output_layouts=Replicate(), desired_output_layouts=Shard(1), use_local_output=False
            )
            top["final_norm"] = SequenceParallel()
        parallelize_module(model, mesh, top)
    parameters = list(model.parameters())
    kinds = {(type(p.data), p.dim() > 1) for p in parameters}
    groups = [[p for p in parameters if (type(p.data), p.dim() > 1) == kind] for kind in kinds]
    # The fused kernel refuses to mix DTensor with Tensor.
    optimizers = [
        torch.optim.AdamW(
            group, fused=True, **{**HYPER, "weight_decay": HYPER["weight_decay"] * (group[0].dim() > 1)}
        )
        for group in groups
    ]
    batch = workload.batch(0)

    def run() -> torch.Tensor:
        if not with_vocabulary:
            loss = mean_loss(workload, model, batch)
            loss.backward()
            return loss
        with loss_parallel():
            logits = model(batch["tokens"])
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
            loss.backward()
        return loss.full_tensor()

    def step() -> float:
        loss = run()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return step


def one_process(workload: Workload) -> Step:
    from data_parallel import torch_step

    model = workload.model()
    return torch_step(workload, model, torch.optim.AdamW(model.parameters(), fused=True, **HYPER), 0)


def make(name: str, workload: Workload, rank: int, size: int) -> Step:
    words = name.split()
    if words[0] == "meshwright":
        return ours(workload, rank, size, words)
    return dtensor(workload, size, words) if words[0] == "dtensor" else one_process(workload)


def run_race(
    rank: int, size: int, workload_name: str, names: list[str], rounds: int, inner: int
) -> tuple[dict[str, Timing], dict[str, float]]:
    warnings.filterwarnings("ignore")
    workload = WORKLOADS[workload_name]
    candidates = {name: make(name, workload, rank, size) for name in names}
    losses = {}
    for name, step in candidates.items():
        for _ in range(3):
            losses[name] = step()
        dist.barrier()
    return race(candidates, rounds=rounds, inner=inner), losses


def print_race(workload: Workload, timings: dict[str, Timing], losses: dict[str, float]) -> None:
    rounds = len(next(iter(timings.values())).wall)
    print(f"\n### {workload.name}: {workload.about}; {rounds} rounds, pinned\n")
    print(
        "| candidate | ms (median) | min..max | CPU ms a rank | MB on loopback | x DTensor | of limit | loss |"
    )
    print("|---|---|---|---|---|---|---|---|")
    limit = timings.get("meshwright tp limit")
    for name, timing in timings.items():
        peers = [
            t for n, t in timings.items() if n.startswith("dtensor") and ("sp" in n) == ("sp" in name.split())
        ]
        ratio = f"{min(p.median for p in peers) / timing.median:.2f}" if peers and "limit" not in name else ""
        over = f"{timing.median / limit.median:.3f}" if limit and name.startswith("meshwright") else ""
        cpu, sent = sorted(timing.cpu)[rounds // 2], sorted(timing.loopback)[rounds // 2]
        print(
            f"| {name} | {timing.median:.1f} | {min(timing.wall):.1f}..{max(timing.wall):.1f} | {cpu:.1f} | "
            f"{sent:.1f} | {ratio} | {over} | {losses[name]:.6f} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("workload", choices=["a", "b"], nargs="?", default="a")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--inner", type=int, default=1)
    parser.add_argument("--candidates", help="exact candidates, separated by commas")
    args = parser.parse_args()
    names = args.candidates.split(",") if args.candidates else NAMES
    timings, losses = launch(run_race, args.ranks, args.workload, names, args.rounds, args.inner, pin=True)
    print_race(WORKLOADS[args.workload], timings, losses)


if __name__ == "__main__":
    main()
