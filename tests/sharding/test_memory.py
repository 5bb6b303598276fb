"""Bytes that the engine holds equal the formulas at four moments, and nothing large is held beside them."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from meshwright.layout.accounting import MemoryBytes, memory_bytes, optimizer_bytes
from meshwright.layout.bucket import Unit
from meshwright.layout.policy import ShardingPolicy, find_policy
from meshwright.models.gpt import GPT, GPTConfig
from meshwright.models.initial import initialise
from meshwright.models.loss import language_model_loss
from meshwright.sharding.engine import ShardingEngine
from meshwright.sharding.units import plan_units
from meshwright.training.optimizer import OptimizerSpec
from meshwright.training.step import train_step
from tests.sharding.harness import POLICIES, make_state

CONFIG = GPTConfig(num_layers=4, dim=24, num_heads=3, ffn_dim=53, vocab_size=31, max_seq_len=7)
BUCKET_BYTES = 8192
MOMENTS = ("after step", "after forward", "peak backward", "after accumulation")
SPEC = OptimizerSpec("adamw", lr=0.01)
Numbers = dict[str, int]


def _batch(rank: int, microbatch: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(10 * rank + microbatch)
    tokens = torch.randint(CONFIG.vocab_size, (2, CONFIG.max_seq_len + 1), generator=generator)
    return {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}


class _Moments:
    """Storage bytes of an engine, read before and after everything that changes them in a step."""

    def __init__(self, engine: ShardingEngine) -> None:
        self._engine = engine
        self.seen: dict[str, Numbers] = {}
        self._in_backward = False
        for owner, name in [
            (engine.gradients, "_take"),
            (engine.gradients, "_reduce"),
            (engine._gatherer, "_start_gather"),
            (engine._gatherer, "_release"),
        ]:
            if owner is not None:
                setattr(owner, name, self._around(getattr(owner, name)))
        self._backward, self._finish = engine.start_backward, engine.finish_microbatch
        engine.start_backward, engine.finish_microbatch = self._start_backward, self._finish_microbatch

    def _around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*arguments: Any) -> Any:
            self._peak()
            result = call(*arguments)
            self._peak()
            return result

        return watched

    def _peak(self) -> None:
        now = self._engine.storage_bytes()
        if self._in_backward and sum(now.values()) > sum(self.seen.get("peak backward", {}).values()):
            self.seen["peak backward"] = now

    def _start_backward(self) -> None:
        self.seen["after forward"] = self._engine.storage_bytes()
        self._in_backward = True
        self._backward()

    def _finish_microbatch(self) -> None:
        self._finish()
        self._in_backward = False
        self.seen["after accumulation"] = self._engine.storage_bytes()


def _live_tensor_bytes(least: int) -> int:
    """Bytes of all distinct storages of at least `least` bytes that any Python object refers to."""
    gc.collect()
    storages = {}
    for candidate in gc.get_objects():
        if issubclass(type(candidate), Tensor) and not candidate.is_meta:
            storage = candidate.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(nbytes for nbytes in storages.values() if nbytes >= least)


def _train(
    mesh: Any, policy: str, num_microbatches: int, least: int | None = None, **changes: Any
) -> dict[str, Any]:
    """`least`: take a census of live storages of at least so many bytes. `changes`: see `make_state`."""
    before = 0 if least is None else _live_tensor_bytes(least)
    model = GPT(CONFIG)
    initialise(model, 1)
    state = make_state(mesh, model, policy, SPEC, bucket_bytes=BUCKET_BYTES, **changes)
    engine = state.engine
    moments = _Moments(engine)
    for _ in range(3):  # pools have grown to their full size after the first step
        moments.seen.clear()
        train_step(
            state,
            lambda k: _batch(mesh.rank, k),
            loss=language_model_loss,
            num_microbatches=num_microbatches,
            lr=SPEC.lr,
            clip_norm=1.0,
        )
    moments.seen["after step"] = engine.storage_bytes()
    return {
        "seen": moments.seen,
        "policy": engine.policy,
        "units": engine.units,
        "optimizer": state.optimizer.state_bytes(),
        "live": None if least is None else _live_tensor_bytes(least) - before,
        "smallest": min(bucket.shard_numel(0) * 4 for unit in engine.units for bucket in unit.buckets),
    }


def _train_with_census(mesh: Any, policy: str, options: dict[str, Any]) -> dict[str, Any]:
    return _train(mesh, policy, 2, 1, **options)


def _without_communication(numbers: Numbers) -> Numbers:
    return {name: value for name, value in numbers.items() if name != "communication"}


def _as_numbers(memory: MemoryBytes) -> Numbers:
    return {name: getattr(memory, name) for name in MemoryBytes.__dataclass_fields__}


def _train_accumulating_1_and_2(mesh: Any, policy: str, options: dict[str, Any]) -> list[dict[str, Any]]:
    return [_train(mesh, policy, num_microbatches, **options) for num_microbatches in (1, 2)]


BF16 = {"compute_dtype": torch.bfloat16}
OFFLOAD = {"offload": True}


@pytest.mark.parametrize(
    ("world", "options"),
    [
        pytest.param(1, {}, marks=pytest.mark.parity),
        pytest.param(2, {}, marks=pytest.mark.parity),
        (3, {}),
        pytest.param(1, BF16, marks=pytest.mark.parity),
        pytest.param(3, BF16, marks=pytest.mark.parity),
        (2, OFFLOAD),
        (3, BF16 | OFFLOAD),
    ],
)
@pytest.mark.parametrize("policy", POLICIES)
def test_storage_at_four_moments(ranks, policy: str, world: int, options: dict[str, Any]) -> None:
    results = ranks.run(_train_accumulating_1_and_2, world, policy, options)
    offload = options.get("offload", False)
    for index, result in [(index, result) for index, pair in enumerate(results) for result in pair]:
        row, units, seen = result["policy"], result["units"], result["seen"]
        assert len([bucket for unit in units for bucket in unit.buckets]) >= 4
        for moment in MOMENTS:
            assert _without_communication(seen[moment]) == _as_numbers(
                memory_bytes(row, units, offload=offload)
            ), moment
        assert result["optimizer"] == optimizer_bytes(row, units, optimizer="adamw", index=index)
        assert (seen["after step"]["communication"] > 0) == (world > 1 and policy != "ddp")


def _train_family(mesh: Any, policy: str, copies: int, options: dict[str, Any]) -> dict[str, Any]:
    result = _train(mesh, policy, 2, copies=copies, ownership="whole", **options)
    spec = OptimizerSpec("muon", lr=0.01)
    state = make_state(mesh, GPT(CONFIG), policy, spec, copies=copies, ownership="whole")
    train_step(
        state,
        lambda k: _batch(mesh.rank, k),
        loss=language_model_loss,
        num_microbatches=1,
        lr=spec.lr,
        clip_norm=None,
    )
    index = mesh.rank % (mesh.world.size // copies)
    return result | {"index": index, "muon": (state.optimizer.state_bytes(), state.engine.units)}


@pytest.mark.parametrize(
    ("world", "copies", "options"), [(2, 1, {}), (3, 1, BF16 | OFFLOAD), (4, 2, {}), (4, 2, BF16)]
)
@pytest.mark.parametrize("policy", ["zero1", "zero2", "zero3"])
def test_storage_of_whole_owners_and_copies(
    ranks, policy: str, world: int, copies: int, options: dict[str, Any]
) -> None:
    offload = options.get("offload", False)
    for result in ranks.run(_train_family, world, policy, copies, options):
        row, units, index = result["policy"], result["units"], result["index"]
        for moment in MOMENTS:
            held = _without_communication(result["seen"][moment])
            assert held == _as_numbers(memory_bytes(row, units, index=index, offload=offload)), moment
        assert result["optimizer"] == optimizer_bytes(row, units, optimizer="adamw", index=index)
        held, muon_units = result["muon"]
        assert held == optimizer_bytes(row, muon_units, optimizer="muon", index=index)


@pytest.mark.parametrize("options", [{}, BF16, OFFLOAD], ids=["fp32", "bf16", "offload"])
@pytest.mark.parametrize("policy", POLICIES)
def test_no_hidden_copy_of_anything(ranks, policy: str, options: dict[str, Any]) -> None:
    for result in ranks.run(_train_with_census, 2, policy, options):
        accounted = sum(result["seen"]["after step"].values()) + result["optimizer"]
        # The census also finds what is small: masks, step counts, the ranks' own bookkeeping.
        assert accounted - result["smallest"] < result["live"] < accounted + result["smallest"]


def _units_of(name: str, shards: int, *, dim: int) -> tuple[int, ShardingPolicy, tuple[Unit, ...]]:
    config = GPTConfig(
        num_layers=12,
        dim=dim,
        num_heads=12,
        ffn_dim=4 * dim,
        vocab_size=8192,
        max_seq_len=1024,
        tied_embedding=False,
    )
    with torch.device("meta"):
        model = GPT(config)
    policy = find_policy(name)
    return sum(p.numel() for p in model.parameters()), policy, plan_units(model, policy, shards)


@pytest.mark.parametrize("shards", [2, 4, 8])
@pytest.mark.parametrize(
    ("name", "formula"),
    [
        ("ddp", lambda n, p: 16 * n),
        ("zero1", lambda n, p: 8 * n + 8 * n / p),
        ("zero2", lambda n, p: 4 * n + 12 * n / p),
        ("zero3", lambda n, p: 16 * n / p),
    ],
)
def test_padding_is_within_two_percent_on_98_million_parameters(name: str, formula, shards: int) -> None:
    num_parameters, policy, units = _units_of(name, shards, dim=768)
    assert 98e6 < num_parameters < 99e6
    held = memory_bytes(policy, units)
    buffers = held.pool + (held.weights if policy.shards_parameters else 0)
    for index in range(shards):
        total = held.total - buffers + optimizer_bytes(policy, units, optimizer="adamw", index=index)
        assert total == pytest.approx(formula(num_parameters, shards), rel=0.02)
    largest = sorted(
        b.numel * b.itemsize for u in units if not u.is_root or name == "zero2" for b in u.buckets
    )[-1:]
    root = units[0].buckets[0].numel * 4 if name == "zero3" else 0
    assert held.pool == (2 * largest[0] + root if policy.shards_gradients else 0)
    if policy.shards_parameters:
        assert held.weights == held.pool  # two units and the root, gathered
