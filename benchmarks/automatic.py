"""Automatic plans on 2 ranks of one thread: against the equal-layer split, and against all cuts into two stages.

Models of unequal layers: a U-Net, a ResNet and a perceptron. All candidates train the same model with `train_step` in
the same processes in turn. Bars: the automatic cut beats the one with as many units in both stages, and is within 5 %
of the best of all cuts. The plan that is found with nothing fixed (replicas, micro-batches) runs along.

    python benchmarks/automatic.py [--models unet resnet mlp] [--rounds 7] [--json FILE]
    python benchmarks/automatic.py --tiny               a smoke run of seconds
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness import launch, race
from torch import Tensor, nn
from torch.nn import functional as F

from meshwright.comm.log import CommLog
from meshwright.comm.mesh import Mesh, World, share_values
from meshwright.data.index_law import BatchGeometry
from meshwright.layout.plan import TrainPlan
from meshwright.models.loss import classification_loss
from meshwright.partitioning.unit_costs import UnitCosts
from meshwright.schedule.action import Action
from meshwright.training.agreeing import measure_rank
from meshwright.training.assemble import shard_model
from meshwright.training.config import RunConfig, load_config
from meshwright.training.deciding import Decision, decide, decided
from meshwright.training.flops import FlopsPerSample
from meshwright.training.measured import Measured, agreed
from meshwright.training.optimizer import OptimizerSpec, ShardedOptimizer
from meshwright.training.passes import loss_of_rank, surround_passes
from meshwright.training.planning import plan_of
from meshwright.training.randomness import StatelessDraws
from meshwright.training.stages import make_pipeline
from meshwright.training.state import TrainState
from meshwright.training.step import train_step
from meshwright.training.task import Task

RANKS = 2


class Double(nn.Module):
    """Two convolutions with batch statistics."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.first, self.second = (
            nn.Conv2d(inputs, outputs, 3, padding=1),
            nn.Conv2d(outputs, outputs, 3, padding=1),
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(outputs) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norms[0](self.first(x)))
        return F.relu(self.norms[1](self.second(x)))


class UNet(nn.Module):
    """Three levels down and up with skips; most time at full resolution, most weights at the bottom."""

    def __init__(self) -> None:
        super().__init__()
        self.down0, self.down1, self.down2 = Double(3, 12), Double(12, 24), Double(24, 48)
        self.bottom = Double(48, 96)
        self.up2, self.up1, self.up0 = Double(144, 48), Double(72, 24), Double(36, 12)
        self.head = nn.Conv2d(12, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 3, side, side) to logits of each pixel."""
        zero = self.down0(x)
        one = self.down1(F.max_pool2d(zero, 2))
        two = self.down2(F.max_pool2d(one, 2))
        y = self.bottom(F.max_pool2d(two, 2))
        y = self.up2(torch.cat([two, F.interpolate(y, scale_factor=2)], 1))
        y = self.up1(torch.cat([one, F.interpolate(y, scale_factor=2)], 1))
        return self.head(self.up0(torch.cat([zero, F.interpolate(y, scale_factor=2)], 1)))


class Residual(nn.Module):
    """A basic block."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.one, self.two = nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.one(self.first(x)))
        return F.relu(self.two(self.second(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """Basic blocks at four levels; the first ones take most of the time, the last ones have most weights."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 3, 1, 1, bias=False)
        widths, depths = (32, 48, 64, 96), (2, 2, 3, 2)
        blocks, before = [], 32
        for level, (width, depth) in enumerate(zip(widths, depths, strict=True)):
            for number in range(depth):
                blocks.append(Residual(before, width, 2 if level and not number else 1))
                before = width
        self.blocks, self.head = nn.Sequential(*blocks), nn.Linear(before, 10)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 3, side, side) to logits."""
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


def perceptron() -> nn.Module:
    """Layers of unequal widths."""
    widths = (256, 2048, 512, 1536, 1024, 256, 512, 128, 10)
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return Wrapped(nn.Sequential(*layers[:-1]))


class Wrapped(nn.Module):
    """A chain as the part of a model."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


class Samples:
    """Random inputs and classes, by index."""

    def __init__(self, shape: tuple[int, ...], classes: tuple[int, ...], count: int) -> None:
        self.shape, self.classes, self.count = shape, classes, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        labels = torch.randint(0, self.classes[0], self.classes[1:], generator=generator)
        return {"inputs": torch.randn(self.shape, generator=generator), "labels": labels}


def loss_of_pixels(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    total = F.cross_entropy(model(batch["inputs"]), batch["labels"], reduction="sum")
    return total, batch["labels"].numel()


@dataclass(frozen=True)
class Subject:
    """Attributes: how a model is made, its loss, its samples, a step's and a micro-batch's number of them."""

    build: Callable[[], nn.Module]
    loss: Any
    data: Samples
    batch: int
    micro: int


SUBJECTS = {
    "unet": Subject(UNet, loss_of_pixels, Samples((3, 48, 48), (4, 48, 48), 64), 16, 2),
    "resnet": Subject(ResNet, classification_loss, Samples((3, 32, 32), (10,), 64), 16, 2),
    "mlp": Subject(perceptron, classification_loss, Samples((256,), (10,), 1024), 512, 64),
}


def task_of(name: str) -> Task:
    """The task of a subject, the same on every rank."""
    subject = SUBJECTS[name]
    torch.manual_seed(0)
    return Task(name, subject.build(), subject.loss, subject.data, None, None, FlopsPerSample(0.0, 0.0), {})


def config_of(name: str, *overrides: str) -> RunConfig:
    subject = SUBJECTS[name]
    own = [f"train.global_batch={subject.batch}", "plan.mode=auto", f"plan.processes={RANKS}"]
    return load_config(None, [*own, *overrides]).config


def decision_of(name: str, world: World, *overrides: str) -> tuple[Decision, UnitCosts]:
    """What is decided from costs that both ranks measure at the same time, without the cache."""
    config = config_of(name, *overrides)
    with tempfile.TemporaryDirectory() as folder:
        data = config.data.model_copy(update={"cache_dir": Path(folder)})
        config = config.model_copy(update={"data": data})
        mine = measure_rank(config, task_of(name), world, device=torch.device("cpu"))
        both = agreed([Measured(m.costs, "", m.usable) for m in share_values(mine)])
    assert both.costs is not None, f"{name} cannot be cut: {both.why_not}"
    return decide(config, both, world_size=RANKS), both.costs


class Candidate:
    """A plan that trains a subject on this rank."""

    def __init__(self, name: str, plan: TrainPlan, world: World) -> None:
        self.plan, task, device = plan, task_of(name), torch.device("cpu")
        self.mesh = Mesh.of_plan(plan, world, log=CommLog(world.rank, world.size), device=device)
        groups = self.mesh.data_groups()
        pipeline = make_pipeline(task.model, task.loss, task.train_data, plan, groups, device=device)
        engine = shard_model(
            task.model, plan, groups, device=device, initialiser=None, dropout="stateless", pipeline=pipeline
        )
        self.state = TrainState(engine, ShardedOptimizer(OptimizerSpec("adamw", lr=1e-4), engine.shards))
        self.executor = None if pipeline is None else pipeline.executor(engine)
        self.state.stages = self.executor
        self._loss = loss_of_rank(task.loss, None, self.executor)
        geometry = BatchGeometry(
            plan.global_batch, plan.num_microbatches, groups.num_readers, groups.reader_index
        )
        surround_passes(self.state, StatelessDraws(geometry, seed=0), None, self.executor)
        size, first = plan.micro_batch, groups.reader_index * plan.micro_batch
        rows = [
            [task.train_data[k * size * groups.num_readers + first + i] for i in range(size)]
            for k in range(plan.num_microbatches)
        ]
        self._batches = [{key: torch.stack([row[key] for row in part]) for key in part[0]} for part in rows]

    def step(self) -> float:
        result = train_step(
            self.state,
            lambda k: self._batches[k],
            loss=self._loss,
            num_microbatches=self.plan.num_microbatches,
            lr=1e-4,
            clip_norm=1.0,
        )
        return result.loss

    def stage_milliseconds(self, steps: int) -> dict[str, float]:
        """Median CPU milliseconds of F and B of this rank while it trains."""
        assert self.executor is not None, "a pipeline is timed"
        seen: dict[str, list[float]] = defaultdict(list)

        def clock(action: Action, _since: float, _until: float, cpu: float) -> None:
            seen[action.op].append(1e3 * cpu)

        self.executor.clock = clock
        for _ in range(steps):
            self.step()
        self.executor.clock = None
        return {op: statistics.median(times) for op, times in seen.items() if op in "FB"}


def cuts_of(costs: UnitCosts) -> Iterator[str]:
    """Units with which the second stage can begin."""
    yield from (unit.name for unit in costs.units[1:])


def on_rank(rank: int, _size: int, name: str, options: argparse.Namespace) -> dict[str, Any]:
    world = World(rank=rank, size=RANKS, local_rank=rank, local_size=RANKS)
    subject = SUBJECTS[name]
    fixed = ("plan.pp=2", f"plan.micro_batch={subject.micro}", "plan.schedule=1f1b")
    decision, costs = decision_of(name, world, *fixed)
    free, _ = decision_of(name, world)
    (automatic,) = decision.keys["stages"]  # type: ignore[misc]
    names = list(cuts_of(costs))
    equal = names[len(costs.units) // 2 - 1]
    kept = sorted({automatic, equal, *(names[:1] if options.tiny else names)}, key=names.index)
    expected = {}
    for cut in kept:
        given, _ = _priced(name, costs, (*fixed, f'plan.stages=["{cut}"]'))
        expected[cut] = given
    plans = {
        cut: plan_of(config_of(name, *fixed, f'plan.stages=["{cut}"]'), world_size=RANKS) for cut in kept
    }
    plans["free"] = plan_of(decided(config_of(name), free), world_size=RANKS)
    made = {cut: Candidate(name, plan, world) for cut, plan in plans.items()}
    losses = {cut: candidate.step() for cut, candidate in made.items()}
    steps = {cut: candidate.step for cut, candidate in made.items()}
    timings = race(steps, rounds=options.rounds, inner=options.inner, warmup=1)
    stages = share_values(made[automatic].stage_milliseconds(options.rounds))
    for candidate in made.values():
        with closing(candidate.mesh):
            pass
    dist.barrier()
    return {
        "automatic": automatic,
        "equal": equal,
        "free": plans["free"].describe(),
        "ms": {cut: timing.median for cut, timing in timings.items()},
        "expected_ms": {
            **{cut: 1e3 * s for cut, s in expected.items()},
            "free": 1e3 * (free.step_seconds or 0.0),
        },
        "losses": losses,
        "stage_ms": stages,
        "expected_stages": decision.lines[1:],
    }


def _priced(name: str, costs: UnitCosts, overrides: tuple[str, ...]) -> tuple[float, Decision]:
    found = decide(config_of(name, *overrides), Measured(costs, "", None), world_size=RANKS)
    assert found.step_seconds is not None, "a plan with stages has a price"
    return found.step_seconds, found


def show(name: str, result: dict[str, Any]) -> bool:
    """Print a model's table; whether it meets the bars."""
    ms, marks = result["ms"], {result["automatic"]: "automatic", result["equal"]: "equal split"}
    cuts = [cut for cut in ms if cut != "free"]
    best = min(cuts, key=ms.__getitem__)
    for cut in ms:
        mark = "  ".join(filter(None, (marks.get(cut, ""), "best" if cut == best else "")))
        label = result["free"] if cut == "free" else cut
        print(
            f"{name:<8} {label:<16} {ms[cut]:8.1f} ms   expected {result['expected_ms'][cut]:8.1f}   {mark}"
        )
    for line, seen in zip(result["expected_stages"], result["stage_ms"], strict=True):
        print(f"{line.strip()}   took {seen['F']:.2f} + {seen['B']:.2f} ms of CPU")
    over = ms[result["automatic"]] / ms[best]
    gain = ms[result["equal"]] / ms[result["automatic"]]
    print(
        f"{name}: automatic {over:.3f} x the best of {len(cuts)} cuts, {gain:.3f} x the speed of the equal split\n"
    )
    return over <= 1.05 and (gain > 1 or result["equal"] == result["automatic"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=list(SUBJECTS), choices=list(SUBJECTS))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--inner", type=int, default=1)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.tiny:
        options.rounds, options.models = 1, options.models[:1]
    results = {name: launch(on_rank, RANKS, name, options, pin=not options.tiny) for name in options.models}
    met = [show(name, result) for name, result in results.items()]
    print(f"bars met by {sum(met)} of {len(met)}")
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
