"""What a user's own loop costs over the loop of `train`: the same step, called in three ways in one race.

`train` is `train_step` with dropout's scope and a line of metrics, as `meshwright train` runs it; `model.step` and
`accumulate` are the two ways of `meshwright.job()`. All three make the same numbers. Target: at most 2 % over `train`.

    python benchmarks/api_overhead.py [a c] [--policy ddp zero3] [--rounds 15] [--inner 4] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from data_parallel import HYPER, loss_of
from harness import WORKLOADS, Workload, launch, race

from meshwright.adapt import registry
from meshwright.comm.log import CommLog, ring_path
from meshwright.comm.mesh import Mesh, World
from meshwright.data.index_law import BatchGeometry
from meshwright.layout.plan import TrainPlan
from meshwright.layout.policy import find_policy
from meshwright.mesh import MeshSpec
from meshwright.sharding.engine import ShardingEngine
from meshwright.training.metrics import MetricsWriter, StepRecord
from meshwright.training.optimizer import OptimizerSpec, ShardedOptimizer, parameter_groups
from meshwright.training.own_build import Site, build_model
from meshwright.training.own_loop import ShardedModel
from meshwright.training.own_optimizer import make_own_optimizer
from meshwright.training.own_step import LoopRules
from meshwright.training.randomness import stateless_randomness
from meshwright.training.state import TrainState
from meshwright.training.step import StepResult, train_step

Step = Callable[[], float]
CLIP = 1e9  # the norm is computed, and changes nothing


class Rank:
    """What the three loops of one rank share: mesh, batch, metrics."""

    def __init__(self, workload: Workload, policy: str, rank: int, world_size: int) -> None:
        folder = Path(tempfile.mkdtemp(prefix="meshwright-bench-"))
        self.workload, self.policy = workload, policy
        self.log = CommLog(rank, world_size, ring_path(folder / "events", rank))
        world = World(rank=rank, size=world_size)
        spec = MeshSpec.of(dp_shard=world_size)
        self.mesh = Mesh(spec, world, log=self.log, device=torch.device("cpu"))
        self.batch, self.loss = workload.batch(rank), loss_of(workload)
        self.writer = MetricsWriter(folder, tensorboard=False)

    def record(self, step: int, result: StepResult) -> float:
        self.writer.step(
            StepRecord(step, result.loss, result.grad_norm, HYPER["lr"], 0, 1.0, 1.0, None, None)
        )
        return result.loss

    def train(self) -> Step:
        engine = ShardingEngine(
            self.workload.model(),
            policy=find_policy(self.policy),
            groups=self.mesh.data_groups(),
            device=torch.device("cpu"),
        )
        registry.install(engine.model, engine)
        state = TrainState(engine, ShardedOptimizer(OptimizerSpec("adamw", **HYPER), engine.shards))
        group = self.mesh.group("dp")
        geometry = BatchGeometry(self.workload.samples * group.size, dp_size=group.size, dp_rank=group.index)
        state.randomness = stateless_randomness(geometry, seed=0)

        def step() -> float:
            result = train_step(
                state,
                lambda _: self.batch,
                loss=self.loss,
                num_microbatches=1,
                lr=HYPER["lr"],
                clip_norm=CLIP,
            )
            return self.record(state.step, result)

        return step

    def own(self) -> tuple[ShardedModel, torch.optim.Optimizer]:
        size, samples = self.mesh.world.size, self.workload.samples
        plan = TrainPlan(self.mesh.spec, find_policy(self.policy), samples * size, samples, 1)
        site = Site(plan, self.mesh, LoopRules(clip_norm=CLIP))
        model = build_model(self.workload.model, site, loss=self.loss, siblings=[], say=print)
        shapes = {name: tuple(p.shape) for name, p in model.module.named_parameters()}
        spec = OptimizerSpec("adamw", **HYPER)
        decays = {
            list(shapes)[i]: decay
            for members, decay in parameter_groups(spec, list(shapes.values()))
            for i in members
        }
        options = {key: value for key, value in HYPER.items() if key != "weight_decay"}
        optimizer = make_own_optimizer(
            model, torch.optim.AdamW, options, only=None, groups=lambda n: {"weight_decay": decays[n]}
        )
        return model, optimizer

    def model_step(self) -> Step:
        model, optimizer = self.own()

        def step() -> float:
            model.step(self.batch)
            optimizer.step()
            assert model.result is not None
            return self.record(model.state.step, model.result)

        return step

    def accumulate(self) -> Step:
        model, optimizer = self.own()

        def step() -> float:
            with model.accumulate():
                total, count = self.loss(model, self.batch)
                model.backward(total, count)
            optimizer.step()
            assert model.result is not None
            return self.record(model.state.step, model.result)

        return step


def compare(rank: int, world_size: int, name: str, policy: str, rounds: int, inner: int) -> dict[str, Any]:
    here = Rank(WORKLOADS[name], policy, rank, world_size)
    steps = {"train": here.train(), "model.step": here.model_step(), "accumulate": here.accumulate()}
    losses = {key: [step() for _ in range(2)][-1] for key, step in steps.items()}
    timings = race(steps, rounds=rounds, inner=inner)
    base = timings["train"]
    return {
        "workload": WORKLOADS[name].about,
        "policy": policy,
        "milliseconds": {key: timing.median for key, timing in timings.items()},
        # Of the same round: what slows one slows the others.
        "over_train": {
            key: float(torch.tensor([a / b for a, b in zip(timing.wall, base.wall, strict=True)]).median())
            - 1
            for key, timing in timings.items()
        },
        "cpu_over_train": {key: sum(timing.cpu) / sum(base.cpu) - 1 for key, timing in timings.items()},
        "loss_after_2": losses,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("workloads", nargs="*", default=["a", "c"])
    parser.add_argument("--policy", nargs="+", default=["ddp", "zero3"])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--inner", type=int, default=4)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    results = []
    for name in arguments.workloads:
        for policy in arguments.policy:
            result = launch(
                compare, arguments.ranks, name, policy, arguments.rounds, arguments.inner, pin=True
            )
            results.append(result)
            print(f"{result['workload']}   {policy} on {arguments.ranks} ranks")
            for key, milliseconds in result["milliseconds"].items():
                print(
                    f"  {key:11} {milliseconds:8.2f} ms   wall {result['over_train'][key]:+.2%}   "
                    f"CPU {result['cpu_over_train'][key]:+.2%}   loss {result['loss_after_2'][key]:.9f}"
                )
    if arguments.out:
        arguments.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
