"""Where parameters lie in buckets, what pads them, who owns what, and how they are grouped."""

import random

import numpy as np
import pytest

from meshwright.layout.bucket import ParameterSpec, make_bucket


def _spec(name: str, *shape: int, dtype: str = "float32", trainable: bool = True) -> ParameterSpec:
    return ParameterSpec(name, shape, dtype, {"float32": 4, "float64": 8}[dtype], trainable)


def test_starts_are_aligned_and_the_total_divides_by_ranks() -> None:
    bucket = make_bucket("b", [_spec("w", 3, 5), _spec("b", 5), _spec("s")], num_shards=3, alignment_numel=8)
    assert bucket.offsets == (0, 16, 24)
    assert bucket.numel == 48
    assert bucket.spans == ((0, 16), (16, 32), (32, 48))
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
                assert bucket.spans[index][0] + piece.offset == offset + piece.start
                local = np.arange(piece.start, piece.stop)
                for box in boxes:
                    where = tuple(slice(*pair) for pair in zip(box.start, box.stop, strict=True))
                    part = local[box.offset : box.offset + box.numel]
                    rebuilt[where] = part.reshape(rebuilt[where].shape)
        assert (rebuilt == values).all()


def test_a_bucket_never_mixes() -> None:
    with pytest.raises(AssertionError, match="bucket b mixes"):
        make_bucket("b", [_spec("w", 1), _spec("f", 1, trainable=False)], num_shards=1, alignment_numel=1)
