"""Masters: what 16 bits would lose is kept, on any mesh, under any policy, on the device or in host memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwright.layout.accounting import declared_calls, declared_wire_bytes
from meshwright.training.optimizer import OptimizerSpec, ShardedOptimizer
from tests.sharding.harness import (
    POLICIES,
    Pieces,
    accumulate,
    assemble,
    make_engine,
    make_state,
    parameter_pieces,
)

BF16 = torch.bfloat16
LR = 2.0**-10  # below what a bf16 weight of 1 can take up, and exact in float32
STEPS, MICRO_BATCHES = 3, 4


class Rows(nn.Module):
    """Blocks whose gradients do not depend on weights, and are small integers: exact in bf16."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.gain = nn.Parameter(torch.ones(5))
        with torch.no_grad():
            for number, parameter in enumerate(self.parameters()):
                # Not bf16 numbers, but sums of few powers of two: float32 holds them and all updates exactly.
                parameter.copy_(
                    1 + 2.0**-9 + torch.arange(parameter.numel()).view(parameter.shape) * 2.0**-12
                )
                parameter.mul_(1 if number % 2 else -1)

    def forward(self, x: Tensor) -> Tensor:
        return sum(block(x).sum() for block in self.blocks) + (self.gain * x.sum()).sum()


def _input(rank: int, microbatch: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * rank + microbatch)
    return torch.randint(-2, 3, (2, 8), generator=generator).to(BF16)


def _loss(model: Any, rank: int, microbatch: int) -> Tensor:
    return model(_input(rank, microbatch))


def _expected(world: int) -> dict[str, Tensor]:
    """Parameters after the steps, by float32 arithmetic in which nothing is rounded."""
    model = Rows()
    for _ in range(STEPS):
        for rank in range(world):
            for microbatch in range(MICRO_BATCHES):
                model(_input(rank, microbatch).float()).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(LR * parameter.grad)
                parameter.grad = None
    return {name: parameter.detach().flatten() for name, parameter in model.named_parameters()}


def _train(
    mesh: Any, policy: str, offload: bool, family: dict[str, Any]
) -> tuple[Pieces, dict[str, Tensor], list[str]]:
    engine = make_engine(
        mesh, Rows(), policy, compute_dtype=BF16, offload=offload, bucket_bytes=256, **family
    )
    optimizer = ShardedOptimizer(OptimizerSpec("sgd", lr=LR, weight_decay=0.0), engine.shards)
    for _ in range(STEPS):
        accumulate(engine, _loss, mesh.rank, MICRO_BATCHES)
        optimizer.step(lr=LR, used={shard.name for shard in engine.shards}, parts=engine.updating())
        engine.finish_step()
    computed = {}
    with engine.evaluation():
        # Weights of a unit can be read while its module runs.
        for name, block in engine.model.blocks.named_children():
            block.register_forward_pre_hook(
                lambda module, *_, name=name: computed.update(
                    {f"blocks.{name}.{key}": p.detach().clone() for key, p in module.named_parameters()}
                )
            )
        engine.model(_input(0, 0))
        computed["gain"] = engine.model.gain.detach().clone()
    return parameter_pieces(engine), computed, sorted({str(s.parameter.dtype) for s in engine.shards})


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize(
    ("policy", "world", "family"),
    [
        *((name, world, {}) for name in POLICIES for world in (1, 3)),
        ("zero3", 3, {"ownership": "whole"}),
        ("zero1", 4, {"copies": 2}),
        ("zero2", 4, {"copies": 2, "ownership": "whole"}),
    ],
)
def test_masters_take_up_what_bf16_would_lose(
    ranks, policy: str, world: int, family: dict[str, Any], offload: bool
) -> None:
    results = ranks.run(_train, world, policy, offload, family)
    expected = _expected(world)
    held = assemble([pieces for pieces, _, _ in results])
    assert held.keys() == expected.keys()
    for name, values in expected.items():
        assert torch.equal(held[name], values), name
        for _, computed, dtypes in results:
            assert computed[name].dtype == BF16
            assert dtypes == ["torch.float32"]
            assert torch.equal(computed[name].flatten(), values.to(BF16)), name


def _count_to(mesh: Any, policy: str, num_microbatches: int) -> set[float]:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    engine = make_engine(mesh, model, policy, compute_dtype=BF16)
    accumulate(engine, lambda m, *_: m[0].weight.sum() + m[1].weight.sum(), mesh.rank, num_microbatches)
    return {float(x) for shard in engine.shards for x in shard.gradient.flatten()}


@pytest.mark.parametrize("policy", ["ddp", "zero1", "zero2"])
def test_gradients_are_summed_in_float32(ranks, policy: str) -> None:
    """bf16 counts to 256 and stays there."""
    assert ranks.run(_count_to, 2, policy, 150) == [{300.0}, {300.0}]


def _wire(mesh: Any, policy: str) -> tuple[Any, ...]:
    engine = make_engine(mesh, Rows(), policy, compute_dtype=BF16, bucket_bytes=256)
    log = engine.group.log
    log.reset_counters()
    accumulate(engine, _loss, mesh.rank, MICRO_BATCHES)
    engine.finish_step()
    declared = (
        dict(declared_calls(engine.policy, engine.units, num_microbatches=MICRO_BATCHES)),
        declared_wire_bytes(engine.policy, engine.units, num_microbatches=MICRO_BATCHES),
    )
    dtypes = {event.op: event.dtype for event in log.events()}
    return declared, dict(log.calls), dict(log.bytes), dtypes


@pytest.mark.parametrize("policy", POLICIES)
def test_gradients_travel_in_float32_and_weights_in_bf16(ranks, policy: str) -> None:
    world = 3
    for (calls, wire_bytes), issued, issued_bytes, dtypes in ranks.run(_wire, world, policy):
        assert {op: count for (op, _), count in issued.items()} == calls
        factor = {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1}
        sent = sum(factor[op] * nbytes * (world - 1) // world for (op, _), nbytes in issued_bytes.items())
        assert sent == wire_bytes
        for op, dtype in dtypes.items():
            assert dtype == ("bfloat16" if op == "all_gather" else "float32"), op


def _adam(mesh: Any, policy: str, offload: bool, dtype: torch.dtype | None) -> list[Tensor]:
    torch.manual_seed(3)
    state = make_state(
        mesh,
        nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8), nn.LayerNorm(8)),
        policy,
        OptimizerSpec("adamw", lr=0.01),
        offload=offload,
        compute_dtype=dtype,
        bucket_bytes=256,
    )
    engine = state.engine
    for _ in range(2):
        accumulate(
            engine, lambda m, *_: m(_input(mesh.rank, 0).to(dtype or torch.float32)).pow(2).sum(), 0, 2
        )
        used = {shard.name for shard in engine.shards} - {"2.bias"}
        engine.scale_gradients(0.5)
        state.optimizer.step(lr=0.01, used=used, parts=engine.updating())
        engine.finish_step()
    assert [s.name for s in engine.shards if s.parameter.grad is None] == [
        s.name for s in engine.shards if s.name == "2.bias"
    ]
    moments = [
        state.optimizer.torch_optimizer.state[s.parameter].get(key, torch.zeros(()))
        for s in engine.shards
        for key in ("step", "exp_avg", "exp_avg_sq")
    ]
    return [*(s.parameter.detach().clone() for s in engine.shards), *moments]


@pytest.mark.parametrize("dtype", [None, BF16])
@pytest.mark.parametrize("policy", POLICIES)
def test_offload_changes_no_bit(ranks, policy: str, dtype: torch.dtype | None) -> None:
    there = ranks.run(_adam, 2, policy, False, dtype)
    here = ranks.run(_adam, 2, policy, True, dtype)
    for a, b in zip(there, here, strict=True):
        assert len(a) == len(b)
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def _load(mesh: Any, policy: str, offload: bool) -> bool:
    engine = make_engine(mesh, Rows(), policy, compute_dtype=BF16, offload=offload)
    accumulate(engine, _loss, mesh.rank)
    engine.finish_step()
    with torch.no_grad():
        for shard in engine.shards:
            shard.parameter.fill_(3.0)
    engine.publish_masters()
    seen = []
    engine.model.blocks[1].register_forward_pre_hook(lambda m, *_: seen.append(m.weight.detach().clone()))
    with engine.evaluation():
        engine.model(_input(0, 0))
        seen.append(engine.model.gain.detach().clone())
    return all(bool((weight == 3.0).all()) for weight in seen) and len(seen) == 2


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
def test_published_masters_are_the_weights(ranks, policy: str, offload: bool) -> None:
    assert ranks.run(_load, 2, policy, offload) == [True, True]


def test_normalisation_parameters_and_buffers_stay_float32(ranks) -> None:
    assert ranks.run(_mixed, 2) == [_MIXED] * 2


_MIXED = {
    "0.weight": "bfloat16",
    "0.bias": "bfloat16",
    "1.weight": "float32",
    "1.bias": "float32",
    "1.running_mean": "float32",
    "1.running_var": "float32",
    "1.num_batches_tracked": "int64",
    "2.weight": "bfloat16",  # frozen
    "2.bias": "bfloat16",
}


def _mixed(mesh: Any) -> dict[str, str]:
    model = nn.Sequential(nn.Conv1d(2, 4, 1), nn.BatchNorm1d(4), nn.Conv1d(4, 2, 1))
    model[2].requires_grad_(False)
    engine = make_engine(mesh, model, "zero1", compute_dtype=BF16)
    assert len(engine.memories) == 2, "one bucket of each type, not one a change of type"
    return {name: str(t.dtype).removeprefix("torch.") for name, t in model.state_dict().items()}


def _draw(_name: str, start: int, stop: int, dtype: torch.dtype) -> Tensor:
    return 1 + torch.arange(start, stop, dtype=dtype) * 2.0**-12


def _drawn(mesh: Any, policy: str) -> Pieces:
    with torch.device("meta"):
        model = Rows()
    return parameter_pieces(make_engine(mesh, model, policy, initialiser=_draw, compute_dtype=BF16))


@pytest.mark.parametrize("policy", POLICIES)
def test_drawn_masters_are_not_rounded(ranks, policy: str) -> None:
    held = assemble(ranks.run(_drawn, 2, policy))
    assert torch.equal(held["blocks.1.weight"], 1 + torch.arange(64) * 2.0**-12)
