"""A pipeline that runs: one model on two ranks by a schedule, against one process and against the picture of it.

The executor tells a clock of every computation. A picture has the same computations with the medians of their times
and free messages, so what a run takes beyond it is messages, and ranks that share a machine.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.comm.mesh import Mesh
from meshwright.layout.check import PlanRequest, make_plan
from meshwright.schedule.catalogue import make_schedule
from meshwright.schedule.timing import Durations, makespan
from meshwright.testing.ranks import RankPool
from meshwright.training.assemble import shard_model
from meshwright.training.stages import make_pipeline

RANKS, MICROBATCHES, ROWS, DIM, LAYERS = 2, 4, 64, 384, 8
_TOLERANCE, _WIDTH = 1e-12, 72
Seen = tuple[str, float, float]  # a computation as `1F2`, seconds of the clock at its start and end


@dataclass(frozen=True)
class Relay:
    """What a run showed: the computations of each rank, and the worst relative error of a gradient."""

    lines: Sequence[Sequence[Seen]]
    worst: float

    @property
    def seconds(self) -> float:
        """From the first computation to the end of the last one."""
        return max(line[-1][2] for line in self.lines) - min(line[0][1] for line in self.lines)

    def text(self, schedule: str) -> str:
        """The picture, and the line below it."""
        drawn = makespan(make_schedule(schedule, RANKS, MICROBATCHES), self._medians())
        took = f"drawn {1e3 * drawn:.1f} ms, ran {1e3 * self.seconds:.1f} ms"
        return f"{self._picture()}\n  ✓ {schedule} = 1 process, worst {self.worst:.1e}   {took}\n"

    def _medians(self) -> Durations:
        """Of the computations of each stage; a whole backward is drawn as two halves."""
        found: dict[str, list[float]] = {}
        for what, start, end in (seen for line in self.lines for seen in line):
            found.setdefault(what[:2], []).append(end - start)
        times = {kind: statistics.median(values) for kind, values in found.items()}
        of = {
            op: tuple(times.get(f"{stage}{op}", times.get(f"{stage}B", 0.0) / 2) for stage in range(RANKS))
            for op in "FIW"
        }
        return Durations(of["F"], of["I"], of["W"])

    def _picture(self) -> str:
        """A line a rank; a computation is its letter for as long as it took."""
        begin, scale = min(line[0][1] for line in self.lines), _WIDTH / self.seconds
        drawn = []
        for rank, line in enumerate(self.lines):
            cells = ["·"] * _WIDTH
            for what, start, end in line:
                first = min(_WIDTH - 1, int((start - begin) * scale))
                last = max(first + 1, int((end - begin) * scale))
                cells[first:last] = what[1] * (min(last, _WIDTH) - first)
            drawn.append(f"  rank {rank}  {''.join(cells[:_WIDTH])}")
        return "\n".join(drawn)


def run_relay(pool: RankPool, schedule: str) -> Relay:
    """Run a step on ranks and alone; assert that gradients agree to 1e-12 and computations come as drawn."""
    ranks = pool.run(_on_rank, RANKS, schedule)
    model, batch = _model(), torch.arange(float(MICROBATCHES * ROWS), dtype=torch.float64)
    _loss(model, batch)[0].backward()
    errors = []
    for name, parameter in model.named_parameters():
        wanted = parameter.grad
        (found,) = [gradients[name] for _, gradients in ranks if name in gradients]
        assert wanted is not None, f"{name} takes part in the loss"
        errors.append(float((found - wanted).norm() / wanted.norm()))
    assert max(errors) <= _TOLERANCE, f"{schedule} differs by {max(errors):.3g}"
    for (seen, _), program in zip(ranks, make_schedule(schedule, RANKS, MICROBATCHES).programs, strict=True):
        assert [what for what, *_ in seen] == [str(action) for action in program]
    return Relay([seen for seen, _ in ranks], max(errors))


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh()) for _ in range(LAYERS)]
    return nn.Sequential(*layers).double()


def _loss(model: nn.Module, rows: Tensor) -> tuple[Tensor, int]:
    x = torch.sin(rows[:, None] * torch.arange(DIM, dtype=torch.float64))
    return model(x).square().sum(), len(rows)


def _on_rank(world: Any, schedule: str) -> tuple[list[Seen], dict[str, Tensor]]:
    """The second step of a rank: its computations, and the gradients of its stage."""
    request = PlanRequest(pp=RANKS, schedule=schedule, micro_batch=ROWS, precision="fp64", transport="gloo")
    plan = make_plan(request, world_size=RANKS, global_batch=MICROBATCHES * ROWS)
    rows = torch.arange(float(plan.global_batch), dtype=torch.float64)
    mesh = Mesh.of_plan(plan, world.world, log=world.log, device=world.device)
    groups, model = mesh.data_groups(), _model()
    pipeline = make_pipeline(model, _loss, rows, plan, groups, device=world.device)
    assert pipeline is not None, "the plan has a pipeline"
    options = {"device": world.device, "initialiser": None, "dropout": "native", "pipeline": pipeline}
    engine = shard_model(model, plan, groups, **options)
    executor, parts = pipeline.executor(engine), rows.chunk(MICROBATCHES)
    seen: list[Seen] = []
    executor.clock = lambda action, start, end, _cpu: seen.append((str(action), start, end))
    for step in range(2):
        seen.clear()
        engine.start_step()
        executor.run(engine, parts.__getitem__, divisor=1.0, step=step)
    return seen, {shard.name: shard.gradient.detach().clone() for shard in engine.shards}
