"""Which parameters share buckets and units, by size, module, kind and device; who owns whole parameters."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from meshwright.layout.accounting import owner_imbalance
from meshwright.layout.bucket import ParameterSpec
from meshwright.layout.grouping import Division, assign_owners, group_by_module, group_by_size


def _spec(
    name: str, *shape: int, dtype: str = "float32", trainable: bool = True, device: str = ""
) -> ParameterSpec:
    return ParameterSpec(name, shape, dtype, {"float32": 4, "float64": 8}[dtype], trainable, device)


def test_reducer_example_reverse_order_in_two_buckets() -> None:
    specs = [_spec(str(i), 10) for i in range(4)]
    (unit,) = group_by_size(specs, Division(2, 1), bucket_bytes=80)
    assert unit.is_root
    names = {bucket.name: [p.name for p in bucket.parameters] for bucket in unit.buckets}
    assert names == {"bucket 0": ["3", "2"], "bucket 1": ["1", "0"]}


def test_a_large_parameter_closes_its_bucket_and_one_bucket_can_hold_all() -> None:
    specs = [_spec("a", 1), _spec("big", 1000), _spec("c", 1)]
    (unit,) = group_by_size(specs, Division(1, 1), bucket_bytes=400)
    assert [[p.name for p in b.parameters] for b in unit.buckets] == [["c", "big"], ["a"]]
    (unit,) = group_by_size(specs, Division(1, 1), bucket_bytes=1 << 20)
    assert [[p.name for p in b.parameters] for b in unit.buckets] == [["c", "big", "a"]]


def test_by_size_separates_element_types_and_leaves_frozen_parameters_out() -> None:
    specs = [
        _spec("a", 4, dtype="float64"),
        _spec("frozen", 4, trainable=False),
        _spec("b", 4),
        _spec("c", 4),
    ]
    (unit,) = group_by_size(specs, Division(2, 1), bucket_bytes=1 << 20)
    assert [[p.name for p in b.parameters] for b in unit.buckets] == [["c", "b"], ["a"]]
    assert [bucket.itemsize for bucket in unit.buckets] == [4, 8]


def test_by_module_the_root_first_and_a_bucket_for_each_kind() -> None:
    specs = [
        _spec("blocks.0.w", 4),
        _spec("blocks.0.frozen", 4, trainable=False),
        _spec("head", 3),
        _spec("blocks.1.w", 4),
    ]
    unit_of = {s.name: s.name.rpartition(".")[0] for s in specs}
    units = group_by_module(specs, unit_of, Division(2, 1))
    assert [unit.name for unit in units] == ["", "blocks.0", "blocks.1"]
    assert [[bucket.name for bucket in unit.buckets] for unit in units] == [
        ["root"],
        ["blocks.0 float32", "blocks.0 float32 frozen"],
        ["blocks.1"],
    ]
    assert [bucket.trainable for bucket in units[1].buckets] == [True, False]
    assert units[0].buckets[0].numel == 4  # 3, padded to 2 ranks


def test_no_root_without_parameters_outside_of_blocks() -> None:
    units = group_by_module([_spec("blocks.0.w", 4)], {"blocks.0.w": "blocks.0"}, Division(2, 1))
    assert [unit.is_root for unit in units] == [False]


def test_buckets_and_units_separate_devices() -> None:
    specs = [_spec("a", 4, device="cuda:0"), _spec("b", 4, device="cuda:1"), _spec("c", 4, device="cuda:1")]
    (unit,) = group_by_size(specs, Division(2, 1), bucket_bytes=1 << 20)
    assert [[p.name for p in b.parameters] for b in unit.buckets] == [["c", "b"], ["a"]]
    (unit,) = group_by_module(specs, dict.fromkeys("abc", "block"), Division(2, 1))
    assert [b.name for b in unit.buckets] == ["block float32 cuda:0", "block float32 cuda:1"]


@pytest.mark.parametrize("seed", range(30))
def test_whole_owners_cover_everything_once_and_are_balanced(seed: int) -> None:
    generator = random.Random(seed)
    specs = [_spec(f"p{i}", generator.randint(1, 60), generator.randint(1, 60)) for i in range(40)]
    num_owners = generator.randint(1, 6)
    units = (
        group_by_size(specs, Division(num_owners, 16, "whole"), bucket_bytes=6000)
        if seed % 2
        else group_by_module(
            specs, {s.name: f"b{i // 7}" for i, s in enumerate(specs)}, Division(num_owners, 16, "whole")
        )
    )
    buckets = [bucket for unit in units for bucket in unit.buckets]
    owned = [entry for bucket in buckets for entry in bucket.ownership()]
    assert sorted((o.name, o.start, o.stop) for o in owned) == sorted((s.name, 0, s.numel) for s in specs)
    for bucket in buckets:
        assert bucket.spans[0][0] == 0
        assert bucket.spans[-1][1] == bucket.numel
        assert all(a[1] == b[0] for a, b in pairwise(bucket.spans))
        for name, offset in zip([p.name for p in bucket.parameters], bucket.offsets, strict=True):
            (entry,) = [o for o in bucket.ownership() if o.name == name]
            start, stop = bucket.spans[entry.owner]
            assert start <= offset < stop
    loads = [sum(o.stop - o.start for o in owned if o.owner == index) for index in range(num_owners)]
    assert owner_imbalance(units) == pytest.approx(max(loads) * num_owners / sum(loads))
    # Greedy with the largest first: at most 4/3 of the best balance, which is at least the mean.
    assert max(loads) <= 4 / 3 * max(sum(loads) / num_owners, max(s.numel for s in specs))


def test_owners_of_equal_blocks_alternate_within_each_block() -> None:
    blocks = [
        [_spec(f"{i}.{name}", size) for name, size in (("up", 40), ("down", 40), ("qkv", 30))]
        for i in range(4)
    ]
    owners = assign_owners(blocks, 4)
    for block in blocks:
        assert len({owners[spec.name] for spec in block}) >= 2
    assert owners == assign_owners(blocks, 4)


def test_one_large_parameter_is_the_imbalance() -> None:
    specs = [_spec("big", 90), _spec("a", 5), _spec("b", 5)]
    assert owner_imbalance(group_by_size(specs, Division(2, 1, "whole"), bucket_bytes=1 << 20)) == 1.8
    assert owner_imbalance(()) == 1.0


def test_servers_own_everything_and_workers_nothing() -> None:
    specs = [_spec(f"p{i}", 10 + i) for i in range(9)]
    (unit,) = group_by_size(specs, Division(5, 16, "whole", first_owner=3), bucket_bytes=200)
    for bucket in unit.buckets:
        assert all(bucket.shard_numel(worker) == 0 for worker in range(3))
        assert sum(bucket.shard_numel(server) for server in (3, 4)) == bucket.numel
    loads = [sum(bucket.shard_numel(server) for bucket in unit.buckets) for server in (3, 4)]
    assert max(loads) <= 4 / 3 * sum(loads) / 2
    assert owner_imbalance((unit,), first_owner=3) < 1.1
