"""What this machine's ranks reach besides computing a model: messages, sums of gradients, updates of weights.

Owns the measurement, for `plan.mode = "auto"`. All ranks of a run measure at the same time. Must not know models.
Simplifications: messages are timed between the first two ranks; the least of a few times counts, so that who else is
on the machine matters little. An update has the passes over weights of one row's forward and backward in it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass

import torch
from torch import nn

from meshwright.comm import ops
from meshwright.comm.log import CommLog
from meshwright.comm.mesh import Mesh, World
from meshwright.comm.ops import DataGroups, Group, alone
from meshwright.layout.plan import TransportName
from meshwright.layout.policy import find_policy
from meshwright.mesh import MeshSpec
from meshwright.pipeline.bench import seconds_here
from meshwright.sharding.engine import ShardingEngine
from meshwright.training.optimizer import OptimizerSpec, ShardedOptimizer
from meshwright.training.state import TrainState
from meshwright.training.step import train_step

_SMALL, _LARGE = 1 << 10, 1 << 20  # elements of float32
_TIMES = 7
_WIDTH, _LAYERS = 512, 4


@dataclass(frozen=True)
class Rates:
    """Of the ranks of a run.

    Attributes:
        message_seconds: of an empty message.
        message_bytes_per_second: of what is added to it.
        gradient_bytes_per_second: that pass each rank in a sum over all of them: 2 (n - 1) / n of what is summed.
        update_seconds_per_byte: of weights: gradients are forgotten, measured and clipped, weights updated.
    """

    message_seconds: float
    message_bytes_per_second: float
    gradient_bytes_per_second: float
    update_seconds_per_byte: float


def measure_rates(
    world: World, spec: OptimizerSpec, *, device: torch.device, transport: TransportName
) -> Rates:
    """What the connected ranks of `world` reach; every rank calls.

    Args:
        world: all ranks.
        spec: the optimizer.
        device: where this rank computes.
        transport: as in `plan.transport`.
    """
    log = CommLog(world.rank, world.size)
    mesh = Mesh(MeshSpec.of(dp_shard=world.size), world, log=log, device=device, transport=transport)
    with closing(mesh):
        group = mesh.data_groups().all
        update = _update_seconds(group, spec, device)
        if group.size == 1:
            return Rates(0.0, 0.0, 0.0, update)
        small, large = (torch.zeros(numel, device=device) for numel in (_SMALL, _LARGE))
        there = [_least(lambda x=x: _exchange(x, group), device) / 2 for x in (small, large)]  # type: ignore[misc]
        summed = [
            _least(lambda x=x: ops.all_reduce(x, group, cause="rates").wait(), device)  # type: ignore[misc]
            for x in (small, large)
        ]
        moved = 4 * (_LARGE - _SMALL)
        share = 2 * (group.size - 1) / group.size
        return Rates(
            there[0],
            moved / max(there[1] - there[0], 1e-9),
            share * moved / max(summed[1] - summed[0], 1e-9),
            update,
        )


def _exchange(x: torch.Tensor, group: Group) -> None:
    """The first rank's message to the second, and its answer."""
    if group.index == 0:
        ops.send(x, group, index=1, cause="rates").wait()
        ops.receive(x, group, index=1, cause="rates").wait()
    elif group.index == 1:
        ops.receive(x, group, index=0, cause="rates").wait()
        ops.send(x, group, index=0, cause="rates").wait()


def _least(call: Callable[[], None], device: torch.device) -> float:
    found = []
    for _ in range(_TIMES):
        _wait(device)
        started = time.perf_counter()
        call()
        _wait(device)
        found.append(time.perf_counter() - started)
    return min(found)


def _update_seconds(group: Group, spec: OptimizerSpec, device: torch.device) -> float:
    """For a byte of weights: a step of this rank alone on one row."""
    model = nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(_LAYERS))).to(device)
    groups = DataGroups.of(alone("dp", group))
    engine = ShardingEngine(model, policy=find_policy("ddp"), groups=groups, device=device)
    state = TrainState(engine, ShardedOptimizer(spec, engine.shards))
    rows = torch.ones(1, _WIDTH, device=device)
    found = []
    for _ in range(_TIMES):
        started = seconds_here(device)
        train_step(
            state,
            lambda _: rows,
            loss=lambda m, x: (m(x).square().sum(), len(x)),
            num_microbatches=1,
            lr=1e-6,
            clip_norm=1e-6,
        )
        found.append(seconds_here(device) - started)
    return min(found) / sum(4 * p.numel() for p in model.parameters())


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
