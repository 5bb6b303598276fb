"""Formulas of memory and volume against the textbook's, with N parameters over P ranks and A micro-batches."""

import dataclasses

import pytest

from meshwright.layout.accounting import (
    declared_calls,
    declared_wire_bytes,
    kept_unit,
    memory_bytes,
    optimizer_bytes,
)
from meshwright.layout.bucket import ParameterSpec, Unit
from meshwright.layout.grouping import Division, group_by_module, group_by_size
from meshwright.layout.policy import find_policy

NUM_BLOCKS, BLOCK, ROOT = 5, 2400, 1200
N = NUM_BLOCKS * BLOCK + ROOT  # every size divides by 1, 2, 3 and 4: nothing is padded
STEP_BYTES = 4


def _units(name: str, shards: int, *, root: bool = True) -> tuple[Unit, ...]:
    specs = [ParameterSpec("embedding", (ROOT,), "float32", 4)] if root else []
    specs += [ParameterSpec(f"blocks.{i}.w", (BLOCK,), "float32", 4) for i in range(NUM_BLOCKS)]
    if not find_policy(name).shards_parameters:
        return group_by_size(specs, Division(shards, 1), bucket_bytes=4 * BLOCK)
    unit_of = {spec.name: spec.name.rpartition(".")[0] for spec in specs}
    return group_by_module(specs, unit_of, Division(shards, 1))


@pytest.mark.parametrize("shards", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("name", "formula"),
    [
        ("ddp", lambda p: 16 * N),
        ("zero1", lambda p: 8 * N + 8 * N / p),
        ("zero2", lambda p: 4 * N + 12 * N / p),
        ("zero3", lambda p: 16 * N / p),
    ],
)
def test_sixteen_bytes_a_parameter(name: str, formula, shards: int) -> None:
    policy, units = find_policy(name), _units(name, shards)
    held = memory_bytes(policy, units)
    for index in range(shards):
        state = optimizer_bytes(policy, units, optimizer="adamw", index=index)
        pieces = [
            piece
            for unit in units
            for bucket in unit.buckets
            for piece in (bucket.owned(index) if policy.shards_optimizer else bucket.owned(0, 1))
        ]
        gathered = held.weights if policy.shards_parameters and shards > 1 else 0
        assert held.total - held.pool - gathered + state - STEP_BYTES * len(pieces) == formula(shards)


def test_open_buffers() -> None:
    assert memory_bytes(find_policy("ddp"), _units("ddp", 2)).pool == 0
    assert memory_bytes(find_policy("zero2"), _units("zero2", 2)).pool == 2 * 4 * BLOCK
    assert memory_bytes(find_policy("zero3"), _units("zero3", 2)).pool == 4 * (2 * BLOCK + ROOT)
    assert memory_bytes(find_policy("zero3"), _units("zero3", 1)).pool == 0


@pytest.mark.parametrize("root", [True, False])
def test_gathered_weights(root: bool) -> None:
    held = memory_bytes(find_policy("zero3"), _units("zero3", 4, root=root))
    assert held.weights == 4 * (2 * BLOCK + (ROOT if root else 0))


def test_a_third_block_is_gathered_where_blocks_run_again() -> None:
    held = memory_bytes(find_policy("zero3"), _units("zero3", 4), gathered_at_once=3)
    assert held.weights == 4 * (3 * BLOCK + ROOT)
    assert held.pool == 4 * (2 * BLOCK + ROOT)


def test_a_parameter_without_gradients_has_no_state() -> None:
    policy, units = find_policy("ddp"), _units("ddp", 2)
    names = [parameter.name for unit in units for bucket in unit.buckets for parameter in bucket.parameters]
    one = [optimizer_bytes(policy, units, optimizer="adamw", used={name}) for name in names]
    assert sum(one) == optimizer_bytes(policy, units, optimizer="adamw")
    assert optimizer_bytes(policy, units, optimizer="adamw", used=()) == 0


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("shards", [2, 3, 4])
def test_volumes(shards: int, accumulate: int) -> None:
    def volume(name: str, **changes) -> float:
        policy = dataclasses.replace(find_policy(name), **changes)
        return declared_wire_bytes(policy, _units(name, shards), num_microbatches=accumulate)

    fraction = (shards - 1) / shards
    assert volume("ddp") == 2 * fraction * 4 * N
    assert volume("zero1") == 2 * fraction * 4 * N
    assert volume("zero2") == (accumulate + 1) * fraction * 4 * N
    assert volume("zero3") == accumulate * fraction * 4 * (3 * N - ROOT)
    assert volume("zero3", keep_last=False) == accumulate * fraction * 4 * 3 * N


@pytest.mark.parametrize("accumulate", [1, 3])
def test_calls(accumulate: int) -> None:
    def calls(name: str, *, root: bool = True, **changes) -> dict[str, int]:
        policy = dataclasses.replace(find_policy(name), **changes)
        return dict(declared_calls(policy, _units(name, 2, root=root), num_microbatches=accumulate))

    num_buckets, num_units = 6, 6
    assert calls("ddp") == {"all_reduce": num_buckets}
    assert calls("zero1") == {"reduce_scatter": num_buckets, "all_gather": num_buckets}
    assert calls("zero2") == {"reduce_scatter": accumulate * num_buckets, "all_gather": num_buckets}
    reduced = accumulate * num_units
    assert calls("zero3") == {"reduce_scatter": reduced, "all_gather": accumulate * (2 * num_units - 1)}
    assert calls("zero3", keep_last=False) == {
        "reduce_scatter": reduced,
        "all_gather": accumulate * 2 * num_units,
    }
    assert calls("zero3", root=False)["all_gather"] == accumulate * (2 * NUM_BLOCKS - 1)


@pytest.mark.parametrize("name", ["ddp", "zero1", "zero2", "zero3"])
def test_one_rank_communicates_nothing(name: str) -> None:
    assert not declared_calls(find_policy(name), _units(name, 1), num_microbatches=2)
    assert declared_wire_bytes(find_policy(name), _units(name, 1), num_microbatches=2) == 0


def test_the_kept_unit_is_the_root_else_the_last_block() -> None:
    policy = find_policy("zero3")
    assert kept_unit(policy, _units("zero3", 2)).name == ""
    assert kept_unit(policy, _units("zero3", 2, root=False)).name == f"blocks.{NUM_BLOCKS - 1}"
    assert kept_unit(dataclasses.replace(policy, keep_last=False), _units("zero3", 2)) is None
    assert kept_unit(find_policy("zero2"), _units("zero2", 2)) is None


def test_optimizer_state_by_kind() -> None:
    units, policy = _units("ddp", 2), find_policy("ddp")
    sizes = {
        name: optimizer_bytes(policy, units, optimizer=name)
        for name in ("adamw", "adam", "sgd", "sgd momentum")
    }
    assert sizes == {
        "adamw": 8 * N + 6 * STEP_BYTES,
        "adam": 8 * N + 6 * STEP_BYTES,
        "sgd": 0,
        "sgd momentum": 4 * N,
    }
