"""A pipeline of 2 stages and 8 micro-batches on 2 ranks of one thread: ours against torch's, and against its bound.

All candidates train the same GPT in the same processes in turn. The bound is the schedule run with the measured times
of each stage and free messages. Bars: 1.05 x torch's 1F1B, and at most 1.03 x the bound.

    python benchmarks/pipeline.py [--rounds 9] [--inner 1] [--schedules 1f1b gpipe zb-h1] [--json FILE]
    python benchmarks/pipeline.py --tiny                a smoke run of seconds
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness import WORKLOADS, Workload, launch, race
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from meshwright.comm.log import CommLog
from meshwright.comm.mesh import Mesh, World
from meshwright.layout.check import PlanRequest, make_plan
from meshwright.models.loss import language_model_loss, summed_cross_entropy
from meshwright.pipeline.executor import PipelineExecutor
from meshwright.schedule.catalogue import make_schedule
from meshwright.schedule.timing import Durations
from meshwright.schedule.timing import run as timed
from meshwright.sharding.engine import ShardingEngine
from meshwright.training.assemble import shard_model
from meshwright.training.stages import make_pipeline

RANKS, MICROBATCHES = 2, 8


class Rows:
    """A step's samples as a dataset."""

    def __init__(self, batch: dict[str, torch.Tensor]) -> None:
        self.batch = batch

    def __len__(self) -> int:
        return len(self.batch["tokens"])

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {name: x[index] for name, x in self.batch.items()}


class HalfGPT(nn.Module):
    """A rank's stage for torch's schedule, cut by hand where ours cuts."""

    def __init__(self, model: Any, rank: int, cut: int) -> None:
        super().__init__()
        self.is_first = rank == 0
        self.blocks = model.blocks[:cut] if self.is_first else model.blocks[cut:]
        if self.is_first:
            self.tokens, self.positions = model.token_embedding, model.position_embedding
        else:
            self.norm, self.head = model.final_norm, model.head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_first:
            x = self.tokens(x) + self.positions(torch.arange(x.shape[1]))
        for block in self.blocks:
            x = block(x)
        return x if self.is_first else self.head(self.norm(x))


@dataclass(frozen=True, eq=False)
class Ours:
    """Our pipeline on one rank; `cut` is the block with which the second stage begins."""

    step: Callable[[], float]
    executor: PipelineExecutor
    engine: ShardingEngine
    mesh: Mesh
    cut: int


def ours(rank: int, workload: Workload, schedule: str, transport: Any) -> Ours:
    """Our pipeline by `schedule`."""
    batch = workload.batch(0)
    ranks = dist.get_world_size()
    request = PlanRequest(
        pp=ranks, schedule=schedule, transport=transport, micro_batch=workload.samples // MICROBATCHES
    )
    plan = make_plan(request, world_size=ranks, global_batch=workload.samples)
    world, device = World(rank=rank, size=ranks), torch.device("cpu")
    mesh = Mesh.of_plan(plan, world, log=CommLog(rank, ranks), device=device)
    groups, model = mesh.data_groups(), workload.model()
    pipeline = make_pipeline(model, language_model_loss, Rows(batch), plan, groups, device=device)
    assert pipeline is not None, "a plan with pp has a pipeline"
    engine = shard_model(
        model, plan, groups, device=device, initialiser=None, dropout="native", pipeline=pipeline
    )
    executor = pipeline.executor(engine)
    parts = [{k: x.chunk(MICROBATCHES)[m] for k, x in batch.items()} for m in range(MICROBATCHES)]

    def step() -> float:
        engine.start_step()
        tally = executor.run(engine, lambda m: parts[m], divisor=1.0, step=0)
        return float(tally[0])

    cut = int(pipeline.plan.cut.starts[0].removeprefix("blocks."))
    return Ours(step, executor, engine, mesh, cut)


def torchs(rank: int, workload: Workload, cut: int) -> Any:
    """torch.distributed.pipelining's 1F1B."""
    module = HalfGPT(workload.model(), rank, cut)
    stage = PipelineStage(module, rank, RANKS, torch.device("cpu"))
    schedule = Schedule1F1B(
        stage, MICROBATCHES, loss_fn=lambda y, t: summed_cross_entropy(y, t)[0], scale_grads=False
    )
    batch = workload.batch(0)

    def step() -> float:
        module.zero_grad()
        losses: list[torch.Tensor] = []
        if rank == 0:
            schedule.step(batch["tokens"])
        else:
            schedule.step(target=batch["labels"], losses=losses)
        return float(sum(x.detach() for x in losses))

    return step


def stage_seconds(rank: int, workload: Workload, cut: int) -> Durations:
    """Measured times of both stages, one rank computing while the other does too."""
    module = HalfGPT(workload.model(), rank, cut)
    batch = {k: x.chunk(MICROBATCHES)[0] for k, x in workload.batch(0).items()}
    x = batch["tokens"]
    if rank:
        x = torch.randn(*x.shape, workload.config.dim, requires_grad=True)
    forwards, backwards = [], []
    for _ in range(15):
        dist.barrier()
        start = time.perf_counter()
        y = module(x)
        total = y if rank == 0 else summed_cross_entropy(y, batch["labels"])[0]
        middle = time.perf_counter()
        total.backward(torch.ones_like(total))
        forwards.append(middle - start)
        backwards.append(time.perf_counter() - middle)
    mine = torch.tensor([statistics.median(forwards), statistics.median(backwards)], dtype=torch.float64)
    every = [torch.zeros_like(mine) for _ in range(RANKS)]
    dist.all_gather(every, mine)
    forward = tuple(float(x[0]) for x in every)
    half = tuple(float(x[1]) / 2 for x in every)
    return Durations(forward, half, half)


def bound_ms(schedule: str, times: Durations) -> float | None:
    """The step of a schedule with these times and free messages; None where its stages are not these."""
    made = make_schedule(schedule, RANKS, MICROBATCHES)
    if made.num_stages != RANKS:
        return None
    lines = timed(made, times)
    return max(line[-1].end for line in lines) * 1e3


def on_rank(rank: int, _size: int, workload: Workload, options: argparse.Namespace) -> dict[str, Any]:
    candidates, meshes, losses = {}, [], {}
    cut = len(workload.model().blocks) // 2
    for schedule in options.schedules:
        for transport in ("gloo", "shm"):
            made = ours(rank, workload, schedule, transport)
            candidates[f"{schedule} {transport}"] = made.step
            meshes.append(made.mesh)
            cut = made.cut if made.executor.schedule.num_stages == RANKS else cut
    candidates["torch 1f1b"] = torchs(rank, workload, cut)
    for name, step in candidates.items():
        losses[name] = torch.tensor(step(), dtype=torch.float64)
        dist.broadcast(losses[name], RANKS - 1)
    timings = race(candidates, rounds=options.rounds, inner=options.inner)
    times = stage_seconds(rank, workload, cut)
    for mesh in meshes:
        with closing(mesh):
            pass
    return {
        "workload": workload.about,
        "blocks_of_first_stage": cut,
        "stage_ms": {"forward": times.forward, "backward": tuple(2 * x for x in times.input_gradient)},
        "step_ms": {name: timing.median for name, timing in timings.items()},
        "bound_ms": {schedule: bound_ms(schedule, times) for schedule in options.schedules},
        "losses": {name: float(value) for name, value in losses.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--inner", type=int, default=1)
    parser.add_argument("--schedules", nargs="+", default=["1f1b", "gpipe", "zb-h1"])
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.tiny:
        options.rounds, options.schedules = 1, ["1f1b"]
    result = launch(on_rank, RANKS, WORKLOADS["a"], options, pin=not options.tiny)
    reference = result["step_ms"]["torch 1f1b"]
    for name, milliseconds in result["step_ms"].items():
        bound = result["bound_ms"].get(name.split()[0])
        against = "" if bound is None else f"   {milliseconds / bound:.3f} x its bound of {bound:.1f} ms"
        print(f"{name:<16} {milliseconds:8.1f} ms   {reference / milliseconds:.3f} x torch{against}")
    if options.json:
        options.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
