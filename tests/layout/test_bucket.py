"""Where parameters lie in buckets, what pads them, who owns what, and how they are grouped."""

import random

import numpy as np
import pytest

from meshwright.layout.bucket import ParameterSpec, group_by_module, group_by_size, make_bucket


def _spec(name: str, *shape: int, dtype: str = "float32", trainable: bool = True) -> ParameterSpec:
    return ParameterSpec(name, shape, dtype, {"float32": 4, "float64": 8}[dtype], trainable)


def test_starts_are_aligned_and_the_total_divides_by_ranks() -> None:
    bucket = make_bucket("b", [_spec("w", 3, 5), _spec("b", 5), _spec("s")], num_shards=3, alignment_numel=8)
    assert bucket.offsets == (0, 16, 24)
    assert bucket.numel == 48
    assert bucket.shard_numel == 16
    assert bucket.gaps() == [(15, 16), (21, 24), (25, 48)]


def test_pieces_cross_shards_and_know_their_place() -> None:
    bucket = make_bucket("b", [_spec("w", 2, 3), _spec("b", 4)], num_shards=3, alignment_numel=1)
    assert bucket.numel == 12
    pieces = [[(p.name, p.start, p.stop, p.offset) for p in bucket.owned(index)] for index in range(3)]
    assert pieces == [[("w", 0, 4, 0)], [("w", 4, 6, 0), ("b", 0, 2, 2)], [("b", 2, 4, 0)]]
    assert [(p.name, p.start, p.stop) for p in bucket.owned(0, 1)] == [("w", 0, 6), ("b", 0, 4)]


@pytest.mark.parametrize("seed", range(60))
def test_owners_divide_a_bucket_and_its_layouts_agree(seed: int) -> None:
    generator = random.Random(seed)
    specs = [
        _spec(f"p{i}", *(generator.randint(1, 6) for _ in range(generator.randint(0, 3))))
        for i in range(generator.randint(1, 6))
    ]
    shards = generator.randint(1, 5)
    bucket = make_bucket("b", specs, num_shards=shards, alignment_numel=generator.choice([1, 4, 16]))
    assert sum(stop - start for start, stop in bucket.gaps()) + sum(s.numel for s in specs) == bucket.numel
    for spec, offset in zip(specs, bucket.offsets, strict=True):
        values, rebuilt = np.arange(spec.numel).reshape(spec.shape), np.full(spec.shape, -1)
        for index in range(shards):
            boxes = bucket.layout(spec.name, "dp").boxes({"dp": index})
            pieces = [piece for piece in bucket.owned(index) if piece.name == spec.name]
            assert sum(box.numel for box in boxes) == sum(p.stop - p.start for p in pieces)
            for piece in pieces:
                assert index * bucket.shard_numel + piece.offset == offset + piece.start
                local = np.arange(piece.start, piece.stop)
                for box in boxes:
                    where = tuple(slice(*pair) for pair in zip(box.start, box.stop, strict=True))
                    part = local[box.offset : box.offset + box.numel]
                    rebuilt[where] = part.reshape(rebuilt[where].shape)
        assert (rebuilt == values).all()


def test_reducer_example_reverse_order_in_two_buckets() -> None:
    specs = [_spec(str(i), 10) for i in range(4)]
    (unit,) = group_by_size(specs, num_shards=2, bucket_bytes=80, alignment_numel=1)
    assert unit.is_root
    names = {bucket.name: [p.name for p in bucket.parameters] for bucket in unit.buckets}
    assert names == {"bucket 0": ["3", "2"], "bucket 1": ["1", "0"]}


def test_a_large_parameter_closes_its_bucket_and_one_bucket_can_hold_all() -> None:
    specs = [_spec("a", 1), _spec("big", 1000), _spec("c", 1)]
    (unit,) = group_by_size(specs, num_shards=1, bucket_bytes=400, alignment_numel=1)
    assert [[p.name for p in b.parameters] for b in unit.buckets] == [["c", "big"], ["a"]]
    (unit,) = group_by_size(specs, num_shards=1, bucket_bytes=1 << 20, alignment_numel=1)
    assert [[p.name for p in b.parameters] for b in unit.buckets] == [["c", "big", "a"]]


def test_by_size_separates_element_types_and_leaves_frozen_parameters_out() -> None:
    specs = [
        _spec("a", 4, dtype="float64"),
        _spec("frozen", 4, trainable=False),
        _spec("b", 4),
        _spec("c", 4),
    ]
    (unit,) = group_by_size(specs, num_shards=2, bucket_bytes=1 << 20, alignment_numel=1)
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
    units = group_by_module(specs, unit_of, num_shards=2, alignment_numel=1)
    assert [unit.name for unit in units] == ["", "blocks.0", "blocks.1"]
    assert [[bucket.name for bucket in unit.buckets] for unit in units] == [
        ["root"],
        ["blocks.0 float32", "blocks.0 float32 frozen"],
        ["blocks.1"],
    ]
    assert [bucket.trainable for bucket in units[1].buckets] == [True, False]
    assert units[0].buckets[0].numel == 4  # 3, padded to 2 ranks


def test_no_root_without_parameters_outside_of_blocks() -> None:
    units = group_by_module(
        [_spec("blocks.0.w", 4)], {"blocks.0.w": "blocks.0"}, num_shards=2, alignment_numel=1
    )
    assert [unit.is_root for unit in units] == [False]


def test_a_bucket_never_mixes() -> None:
    with pytest.raises(AssertionError, match="bucket b mixes"):
        make_bucket("b", [_spec("w", 1), _spec("f", 1, trainable=False)], num_shards=1, alignment_numel=1)
