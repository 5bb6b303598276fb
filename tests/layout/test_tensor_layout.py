"""Chunks that need not divide, heads that stay whole, and where a rank's part of a parameter lies in the whole."""

import itertools
import math

import pytest

from meshwright.errors import PlanError
from meshwright.layout.layout import Cut, FlatOwnership, Layout
from meshwright.layout.tensor_layout import LayoutMaker, TensorLayout, even_sizes, split_heads


@pytest.mark.parametrize(
    ("total", "parts", "sizes"),
    [(32, 6, (6, 6, 5, 5, 5, 5)), (50, 4, (13, 13, 12, 12)), (101, 2, (51, 50)), (6, 3, (2, 2, 2))],
)
def test_even_sizes(total, parts, sizes):
    assert even_sizes(total, parts) == sizes


def test_heads_stay_with_their_key_value_head():
    split = split_heads(8, 4, 3, where="attention")
    assert (split.query, split.kv) == ((4, 2, 2), (2, 1, 1))


@pytest.mark.parametrize(
    ("num_heads", "num_kv", "size", "query", "kv"),
    [
        (4, 2, 4, (1, 1, 1, 1), [(0,), (0,), (1,), (1,)]),
        (6, 2, 4, (2, 2, 1, 1), [(0, 0), (0, 1), (1,), (1,)]),
        (8, 1, 3, (3, 3, 2), [(0, 0, 0), (0, 0, 0), (0, 0)]),
    ],
)
def test_fewer_key_value_heads_than_ranks(num_heads, num_kv, size, query, kv):
    split = split_heads(num_heads, num_kv, size, where="attention")
    assert split.query == query
    assert split.kv is None
    assert [split.kv_heads_of(index) for index in range(size)] == kv


def test_more_ranks_than_heads_are_refused():
    with pytest.raises(PlanError) as caught:
        split_heads(32, 32, 48, where="blocks.0.attention")
    assert caught.value.code == "E201"
    assert caught.value.message == (
        "tp=48 exceeds the 32 heads of blocks.0.attention. Valid tp: 1..32, without uneven chunks: 1 2 4 8 16 32. "
        "Try: plan.tp=32"
    )
    with pytest.raises(PlanError, match="tp=4 exceeds the 3 rows of table"):
        LayoutMaker(4, 0).sizes(3, "rows of table")


def test_uneven_chunks_are_said_once():
    maker = LayoutMaker(6, 0)
    for _ in range(2):
        maker.note_uneven(even_sizes(32, 6), "32 heads of attention")
    assert maker.finish().warnings == (
        "W201 tp=6 does not divide 32 heads of attention: split 6 6 5 5 5 5, 12% slower there than even",
    )


@pytest.mark.parametrize(
    ("dim", "sizes", "parts"),
    [(0, (3, 1), 1), (1, (2, 3), 1), (2, (2, 1), 1), (0, (1, 1), 2), (2, (1, 0), 3)],
)
def test_runs_are_the_boxes(dim, sizes, parts):
    """Every flat interval of every rank's part, against the boxes of the same cut; together all of the whole."""
    shape = [4, 5, 3]
    cut = Cut("tp", dim, sizes, parts)
    strides = (15, 3, 1)
    covered = []
    for index in range(2):
        layout = TensorLayout(2, index, {"w": cut})
        local = list(shape)
        local[dim] = sizes[index] * parts
        assert layout.logical_shape("w", local) == tuple(shape)
        numel = math.prod(local)
        for first, last in itertools.combinations(range(0, numel + 1, 3), 2):
            flat = FlatOwnership("dp", ((first, last),))
            boxes = Layout(tuple(shape), (cut,), flat).boxes({"tp": index, "dp": 0})
            wanted = [
                sum(place * stride for place, stride in zip(places, strides, strict=True))
                for box in boxes
                for places in itertools.product(*map(range, box.start, box.stop))
            ]
            found = [
                there + step
                for there, low, high in layout.runs("w", local, first, last)
                for step in range(high - low)
            ]
            assert found == wanted
        runs = layout.runs("w", local, 0, numel)
        covered += [there + step for there, low, high in runs for step in range(high - low)]
    assert sorted(covered) == list(range(60))


def test_what_is_not_cut_is_whole_and_counted_by_the_first_rank():
    layouts = [TensorLayout(2, index, {"w": Cut("tp", 0, (1, 1))}) for index in range(2)]
    assert [layout.counts("w") for layout in layouts] == [True, True]
    assert [layout.counts("norm") for layout in layouts] == [True, False]
    assert list(layouts[1].runs("norm", (7,), 2, 5)) == [(2, 2, 5)]
    assert layouts[0].layout("norm", (7,)).boxes({"tp": 1})[0].stop == (7,)


def test_an_output_is_cut_where_its_chunks_say():
    maker = LayoutMaker(2, 1)
    maker.keeps("fused", (4, 2), parts=3)
    maker.keeps("up", (5, 3))
    maker.runs_on((2, 1))
    layout = maker.finish()
    assert layout.chunks_of("fused", (7, 18), (7, 6)) == (1, (4, 2, 4, 2, 4, 2))
    assert layout.chunks_of("activation", (7, 8), (7, 3)) == (1, (5, 3))
    assert layout.chunks_of("dropout", (7, 3, 9, 9), (7, 1, 9, 9)) == (1, (2, 1))
    assert layout.chunks_of("norm", (7, 8), (7, 8)) is None
    assert layout.chunks_of("norm", (3, 7), (1, 7), batch_dim=0) is None
