"""What a rank of this host takes for parts of a training step: measured on ranks that all work at the same time.

Owns the timing. Blocks are our own modules in plain torch with a rank's share of heads and channels; collectives go
through the transport that training takes; what a step costs beside its model comes from a run. All times are
processor seconds of the rank: on an idle host those of the clock, and elsewhere not those of other programs.
Simplifications: one thread a rank; float32; a model of transformers is taken for ours of its family.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshwright.comm import ops
from meshwright.comm.log import CommLog
from meshwright.comm.mesh import Mesh, World, connect, disconnect
from meshwright.comm.ops import Group
from meshwright.launching.measure_order import Order
from meshwright.launching.measuring_parts import (
    as_a_step,
    attend_time,
    block_time,
    head_time,
    make_block,
    seconds_between,
    seconds_of,
)
from meshwright.launching.messages import WorkerContext
from meshwright.mesh import MeshSpec
from meshwright.presets.host import BlockTime, CollectiveTime, PartTime
from meshwright.simulation.host_keys import BlockShape, HeadShape
from meshwright.training.config import load_config
from meshwright.training.console import Console
from meshwright.training.loop import Run
from meshwright.training.metrics import peak_memory_bytes

# Bytes of a whole tensor.
SIZES = (1 << 14, 1 << 18, 1 << 21, 1 << 23)
_REPEATS = 5
_SMALL, _TOKENS = 64, 128
_TINY = (
    *(f"model.dim={_SMALL}", "model.num_heads=2", "model.num_kv_heads=2", f"model.ffn_dim={4 * _SMALL}"),
    f"data.seq_len={_TOKENS}",
)
_DIM, _LAYERS, _FEW_TOKENS = 256, 4, 8
_LARGE = (
    *(f"model.dim={_DIM}", "model.num_heads=4", "model.num_kv_heads=4", f"model.ffn_dim={4 * _DIM}"),
    f"data.seq_len={_FEW_TOKENS}",
)


@dataclass(frozen=True)
class Found:
    """What one rank measured; `step` has fields of a `HostProfile` by name, and is None where it was not asked for."""

    blocks: tuple[BlockTime, ...]
    parts: tuple[PartTime, ...]
    collectives: tuple[CollectiveTime, ...]
    step: Mapping[str, float] | None


def measure_on_rank(order: Order, world: World, _context: WorkerContext) -> Found:
    """The target of local workers."""
    torch.set_num_threads(1)
    resident = _resident_bytes() if order.has_steps else 0
    connect(world, device=torch.device("cpu"), timeout_seconds=120)
    try:
        collectives = _collectives(world) if order.has_collectives else ()
        gather = _gather_seconds(world) if order.has_steps and world.size > 1 else 0.0
    finally:
        disconnect()
    blocks = tuple(block_time(shape, micro) for shape in order.blocks for micro in order.micro_batches)
    heads = [head_time(shape, micro) for shape in order.heads for micro in order.micro_batches]
    attends = [attend_time(shape, micro) for shape in order.attends for micro in order.micro_batches]
    one = {"process_bytes": resident, "gather_seconds": gather}
    step = {**_step_seconds(), **one} if order.has_steps else None
    return Found(blocks, (*heads, *attends), collectives, step)


# Collectives.


def _collectives(world: World) -> tuple[CollectiveTime, ...]:
    """Of all ranks, in memory that travels and in other, and messages to a neighbour."""
    mesh = Mesh(
        MeshSpec.of(dp_shard=world.size),
        world,
        log=CommLog(world.rank, world.size),
        device=torch.device("cpu"),
        axis_sets={"dp": ("dp_shard",)},
        transport="auto",
    )
    with closing(mesh):
        group = mesh.group("dp")
        return tuple(
            CollectiveTime(op, world.size, size, seconds)
            for size in SIZES
            for op, seconds in _of_size(group, size).items()
        )


def _of_size(group: Group, num_bytes: int) -> dict[str, float]:
    numel = num_bytes // 4 // group.size * group.size
    part = numel // group.size
    transport: Any = group.transport
    found: dict[str, float] = {}
    kinds: tuple[tuple[str, Callable[[int], Tensor]], ...] = (
        ("", torch.zeros),
        ("shared ", partial(_shared, transport)),
    )
    for word, make in kinds:
        whole, own = make(numel), make(part)
        between = as_a_step(whole, own)
        calls: dict[str, Callable[[], Any]] = {
            "all_reduce": partial(ops.all_reduce, whole, group, cause="measure"),
            "all_gather": partial(ops.all_gather, whole, own, group, cause="measure"),
            "reduce_scatter": partial(ops.reduce_scatter, own, whole, group, cause="measure"),
        }
        if not word:
            calls = {
                name: partial(call, whole, own, group)
                for name, call in (
                    ("all_reduce", _reduced),
                    ("all_gather", _gathered),
                    ("reduce_scatter", _scattered),
                    ("all_to_all", _exchanged),
                    ("message", _passed_on),
                )
            }
        for op, call in calls.items():
            found[word + op] = seconds_between(partial(_to_its_end, call), between)
    return found


def _to_its_end(call: Callable[[], Any]) -> None:
    call().wait()


def _shared(transport: Any, numel: int) -> Tensor:
    memory = transport.allocate(numel, torch.float32)
    return torch.zeros(numel) if memory is None else memory


class _Pair:
    """Two handles as one."""

    def __init__(self, *handles: Any) -> None:
        self._handles = handles

    def wait(self) -> None:
        """For both."""
        for handle in self._handles:
            handle.wait()


# Activations travel into new memory each time.


def _reduced(whole: Tensor, _own: Tensor, group: Group) -> Any:
    return ops.all_reduce(whole.clone(), group, cause="measure")


def _gathered(whole: Tensor, own: Tensor, group: Group) -> Any:
    return ops.all_gather(torch.empty_like(whole), own, group, cause="measure")


def _scattered(whole: Tensor, own: Tensor, group: Group) -> Any:
    return ops.reduce_scatter(torch.empty_like(own), whole, group, cause="measure")


def _exchanged(whole: Tensor, _own: Tensor, group: Group) -> Any:
    return ops.all_to_all(torch.empty_like(whole), whole, group, cause="measure")


def _passed_on(whole: Tensor, _own: Tensor, group: Group) -> _Pair:
    """A message to the next rank and one from the rank before: the cost of one sent and one received."""
    here, size = group.index, group.size
    sent = ops.send(whole, group, index=(here + 1) % size, cause="measure")
    into = torch.empty_like(whole)
    return _Pair(sent, ops.receive(into, group, index=(here - 1) % size, cause="measure"))


# A step beside its model.


def _step_seconds() -> dict[str, float]:
    """Seconds of a step, of a micro-batch and its blocks, of a parameter's update and of adding to its gradient."""
    tiny = {layers: [_whole_step(_TINY, layers, samples) for samples in (1, 3)] for layers in (1, 3)}
    block = block_time(BlockShape("gpt", _SMALL, 2, 2, _SMALL // 2, 4 * _SMALL, _TOKENS), 1)
    head = head_time(HeadShape(_SMALL, 256, _TOKENS), 1)
    plain = block.forward + block.inputs + block.weights
    micro = {layers: (three - one) / 2 for layers, (one, three) in tiny.items()}
    layer = max((micro[3] - micro[1]) / 2 - plain, 0.0)
    beside = max(micro[1] - layer - plain - head.forward - head.backward, 0.0)
    large = block_time(BlockShape("gpt", _DIM, 4, 4, _DIM // 4, 4 * _DIM, _FEW_TOKENS), 1)
    one, three = (_whole_step(_LARGE, _LAYERS, samples) for samples in (1, 3))
    of_blocks = _LAYERS * (layer + large.forward + large.inputs + large.weights)
    update, numel = _update_seconds()
    return {
        "step_seconds": max(tiny[1][0] - micro[1], 0.0),
        "microbatch_seconds": beside,
        "layer_seconds": layer,
        "update_seconds": update / numel,
        "accumulate_seconds": max((three - one) / 2 - of_blocks - beside, 0.0) / numel,
    }


def _gather_seconds(world: World) -> float:
    """What zero3 adds to a block and micro-batch beside the bytes that it moves: gathers, releases, reductions."""
    found = {}
    for zero in (0, 3):
        for layers in (1, 5):
            run, _ = _run(_TINY, layers, world.size, world=world, zero=zero)
            with closing(run.mesh):
                found[zero, layers] = _seconds_of_step(run)
    return max(0.0, (found[3, 5] - found[3, 1] - found[0, 5] + found[0, 1]) / 4)


def _seconds_of_step(run: Run) -> float:
    """Processor seconds of a step between computation; all ranks make as many."""
    counter = iter(range(10**9))
    return seconds_between(lambda: run.make_step(next(counter)), as_a_step(), in_a_group=2)


def _update_seconds() -> tuple[float, int]:
    """Of a large model: seconds of norm, clip and update; its parameters."""
    run, numel = _run(_LARGE, _LAYERS, 1)
    with closing(run.mesh):
        engine, optimizer = run.state.engine, run.state.optimizer

        def update() -> None:
            engine.start_step()
            engine.norm_squared()
            engine.scale_gradients(0.5)
            optimizer.step(lr=1e-4, used=frozenset(engine.parameter_names), parts=engine.updating())
            engine.finish_step()

        run.make_step(0)  # gradients and the optimizer's state
        return seconds_of(update), numel


def _resident_bytes() -> int:
    """Of a process that has trained a model of no size, with what libraries keep for the products of a block."""
    run, _ = _run(_TINY, 1, 1)
    with closing(run.mesh):
        for number in range(2):
            run.make_step(number)
    before = peak_memory_bytes(torch.device("cpu"))
    shape = BlockShape("gpt", _DIM, 4, 4, _DIM // 4, 4 * _DIM, 256)
    block, x = make_block(shape), torch.randn(1, shape.seq_len, _DIM)
    for _ in range(4):
        block(x).sum().backward()
    own = 2 * sum(parameter.nbytes for parameter in block.parameters()) + 16 * x.nbytes
    grown = peak_memory_bytes(torch.device("cpu")) - before
    return before + max(0, grown - own)


def _whole_step(model: Sequence[str], layers: int, samples: int) -> float:
    run, _ = _run(model, layers, samples)
    with closing(run.mesh):
        return _seconds_of_step(run)


_ALONE = World(rank=0, size=1, local_rank=0, local_size=1)


def _run(
    model: Sequence[str], layers: int, samples: int, *, world: World = _ALONE, zero: int = 0
) -> tuple[Run, int]:
    """A run, by default of this process alone, and its parameters."""
    settings = [
        "model.source=preset:gpt-nano",
        *model,
        f"model.num_layers={layers}",
        f"train.global_batch={samples}",
        "train.stop_at=1000000 steps",
        "plan.micro_batch=1",
        f"plan.zero={zero}",
    ]
    config = load_config(None, settings).config
    folder = Path(tempfile.mkdtemp(prefix="meshwright-"))
    run = Run(
        config,
        world,
        run_dir=folder,
        console=Console(None),
        device=torch.device("cpu"),
        log=CommLog(world.rank, world.size),
    )
    run.task.model.train()
    return run, sum(p.numel() for p in run.task.model.parameters())
