"""What the engine's tests share: engines over real ranks, and plain gradients to compare with.

A test's model comes from `build()`, its loss is `loss(model, rank, microbatch)`, both module-level functions; the
sum over ranks and micro-batches on one plain model is what the ranks' shards must hold.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.comm.mesh import Mesh
from meshwright.comm.ops import DataGroups
from meshwright.layout.policy import find_policy
from meshwright.mesh import MeshSpec
from meshwright.sharding.engine import ShardingEngine
from meshwright.sharding.memory import Initialiser
from meshwright.training.optimizer import OptimizerSpec, ShardedOptimizer
from meshwright.training.state import TrainState

CPU = torch.device("cpu")
POLICIES = ["ddp", "zero1", "zero2", "zero3"]
RankLoss = Callable[[Any, int, int], Tensor]
Pieces = list[tuple[str, int, int, Tensor]]


def data_groups(mesh: Any, copies: int = 1) -> DataGroups:
    """The ranks of `mesh` as `copies` copies."""
    spec = MeshSpec.of(dp_replicate=copies, dp_shard=mesh.world.size // copies)
    return Mesh(spec, mesh.world, log=mesh.log, device=CPU, transport=mesh.transport).data_groups()


def make_engine(
    mesh: Any,
    model: nn.Module,
    policy: str,
    *,
    copies: int = 1,
    initialiser: Initialiser | None = None,
    compute_dtype: torch.dtype | None = None,
    offload: bool = False,
    **changes: Any,
) -> ShardingEngine:
    """`changes` replace fields of the policy's row."""
    row = dataclasses.replace(find_policy(policy), **changes)
    return ShardingEngine(
        model,
        policy=row,
        groups=data_groups(mesh, copies),
        device=CPU,
        initialiser=initialiser,
        compute_dtype=compute_dtype,
        offload=offload,
    )


def make_state(mesh: Any, model: nn.Module, policy: str, spec: OptimizerSpec, **changes: Any) -> TrainState:
    """`changes`: see `make_engine`."""
    engine = make_engine(mesh, model, policy, **changes)
    return TrainState(engine, ShardedOptimizer(spec, engine.shards))


def accumulate(engine: ShardingEngine, loss: RankLoss, rank: int, num_microbatches: int = 1) -> None:
    """One step's forwards and backwards."""
    engine.start_step()
    for microbatch in range(num_microbatches):
        engine.start_microbatch(last=microbatch == num_microbatches - 1)
        total = loss(engine.model, rank, microbatch)
        engine.start_backward()
        total.backward()
        engine.finish_microbatch()


def gradient_pieces(engine: ShardingEngine) -> Pieces:
    return [(s.name, s.piece.start, s.piece.stop, s.gradient.flatten().clone()) for s in engine.shards]


def parameter_pieces(engine: ShardingEngine) -> Pieces:
    return [
        (s.name, s.piece.start, s.piece.stop, s.parameter.detach().flatten().clone()) for s in engine.shards
    ]


def assemble(ranks: list[Pieces]) -> dict[str, Tensor]:
    """Flat tensors from the ranks' pieces; every element is held, and alike wherever it is held."""
    whole: dict[str, Tensor] = {}
    for name in dict.fromkeys(name for pieces in ranks for name, *_ in pieces):
        parts = [part[1:] for pieces in ranks for part in pieces if part[0] == name]
        flat = torch.full((max(stop for _, stop, _ in parts),), torch.nan, dtype=parts[0][2].dtype)
        for start, stop, values in parts:
            held = flat[start:stop]
            assert bool((held.isnan() | (held == values)).all()), f"ranks differ in {name}"
            held.copy_(values)
        assert not bool(flat.isnan().any()), f"no rank holds some elements of {name}"
        whole[name] = flat
    return whole


def _gradients_on_a_rank(
    mesh: Any,
    build: Callable[[], nn.Module],
    loss: RankLoss,
    policy: str,
    num_microbatches: int,
    changes: dict[str, Any],
) -> Pieces:
    # Tiny buckets, so that small models have several.
    engine = make_engine(mesh, build(), policy, bucket_bytes=512, **changes)
    accumulate(engine, loss, mesh.rank, num_microbatches)
    first = gradient_pieces(engine)
    accumulate(engine, loss, mesh.rank, num_microbatches)  # nothing of the first step is left in the second
    for (name, *_, before), (*_, after) in zip(first, gradient_pieces(engine), strict=True):
        torch.testing.assert_close(after, before, rtol=1e-13, atol=1e-14, msg=f"second step: {name}")
    assert not engine.gathered_units
    return first


def plain_gradients(
    build: Callable[[], nn.Module], loss: RankLoss, *, world: int, num_microbatches: int
) -> dict[str, Tensor]:
    """Flat gradients of the sum over ranks and micro-batches; zeros where a trained parameter gets none."""
    model = build()
    for rank in range(world):
        for microbatch in range(num_microbatches):
            loss(model, rank, microbatch).backward()
    return {
        name: (torch.zeros_like(p) if p.grad is None else p.grad).flatten()
        for name, p in model.named_parameters()
        if p.requires_grad
    }


def check_gradients(
    ranks: Any,
    build: Callable[[], nn.Module],
    loss: RankLoss,
    *,
    policy: str,
    world: int = 2,
    num_microbatches: int = 1,
    **changes: Any,
) -> dict[str, Tensor]:
    """Assert that `world` ranks hold the plain gradients; returns them. `changes`: see `make_engine`."""
    held = assemble(ranks.run(_gradients_on_a_rank, world, build, loss, policy, num_microbatches, changes))
    expected = plain_gradients(build, loss, world=world, num_microbatches=num_microbatches)
    assert held.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(held[name], gradient, rtol=1e-12, atol=1e-13, msg=f"{policy}: {name}")
    return held
