"""Boxes: whatever the cuts and the flat ownership, the ranks' boxes hold every element exactly once."""

import itertools
import math
import random

import numpy as np
import pytest

from meshwright.layout.layout import Box, Cut, FlatOwnership, Layout, interval_boxes


def _random_sizes(generator: random.Random, total: int, parts: int) -> tuple[int, ...]:
    marks = sorted(generator.randint(0, total) for _ in range(parts - 1))
    return tuple(stop - start for start, stop in itertools.pairwise([0, *marks, total]))


def _equal_sizes(generator: random.Random, shape: list[int], parts: int) -> tuple[int, int]:
    """A dim, and the equal chunk of it; the dim grows so that `parts` divides it."""
    dim = generator.randrange(len(shape))
    shape[dim] = -(-max(shape[dim], 1) // parts) * parts
    return dim, shape[dim] // parts


def _random_layout(generator: random.Random) -> tuple[Layout, dict[str, int]]:
    """Two nested or separate cuts (the first uneven unless the second or flat ownership follows), and flat or not."""
    shape = [generator.randint(1, 7) for _ in range(generator.randint(1, 4))]
    axes = {"tp": generator.randint(1, 3), "cp": generator.randint(1, 3), "dp": generator.randint(1, 4)}
    kind = generator.choice(["uneven", "nested", "flat", "cut and flat", "parts"])
    if kind == "parts":
        dim, parts = generator.randrange(len(shape)), generator.randint(2, 3)
        fused = Cut("tp", dim, _random_sizes(generator, shape[dim], axes["tp"]), parts)
        shape[dim] *= parts
        return Layout(tuple(shape), (fused,)), {"tp": axes["tp"]}
    if kind == "flat":
        marks = sorted(generator.randint(0, math.prod(shape)) for _ in range(axes["dp"] - 1))
        intervals = tuple(itertools.pairwise([0, *marks, math.prod(shape)]))
        return Layout(tuple(shape), flat=FlatOwnership("dp", intervals)), {"dp": axes["dp"]}
    if kind == "uneven":
        dims = generator.sample(range(len(shape)), min(2, len(shape)))
        names = ["tp", "cp"][: len(dims)]
        cuts = tuple(
            Cut(name, dim, _random_sizes(generator, shape[dim], axes[name]))
            for name, dim in zip(names, dims, strict=True)
        )
        return Layout(tuple(shape), cuts), {name: axes[name] for name in names}
    dim, chunk = _equal_sizes(generator, shape, axes["tp"])
    first = Cut("tp", dim, (chunk,) * axes["tp"])
    if kind == "nested":
        second = Cut("cp", dim, _random_sizes(generator, chunk, axes["cp"]))
        return Layout(tuple(shape), (first, second)), {"tp": axes["tp"], "cp": axes["cp"]}
    local = math.prod(shape) // axes["tp"]
    marks = sorted(generator.randint(0, local) for _ in range(axes["dp"] - 1))
    flat = FlatOwnership("dp", tuple(itertools.pairwise([0, *marks, local])))
    return Layout(tuple(shape), (first,), flat), {"tp": axes["tp"], "dp": axes["dp"]}


@pytest.mark.parametrize("seed", range(150))
def test_boxes_of_all_ranks_cover_every_element_once(seed: int) -> None:
    layout, axes = _random_layout(random.Random(seed))
    held = np.zeros(layout.shape, dtype=int)
    for indices in itertools.product(*(range(size) for size in axes.values())):
        offset = 0
        for box in layout.boxes(dict(zip(axes, indices, strict=True))):
            assert box.offset == offset, "boxes lie end to end in the local shard"
            offset += box.numel
            held[tuple(slice(*pair) for pair in zip(box.start, box.stop, strict=True))] += 1
    assert (held == 1).all()


@pytest.mark.parametrize("shape", [(7,), (3, 4), (2, 3, 5), (3, 1, 2, 2), (1, 1)])
def test_every_interval_becomes_few_boxes_in_row_major_order(shape) -> None:
    numel = math.prod(shape)
    flat = np.arange(numel).reshape(shape)
    for first, last in itertools.combinations(range(numel + 1), 2):
        boxes = interval_boxes(shape, first, last)
        assert len(boxes) <= 2 * len(shape) - 1
        values = []
        for low, high, offset in boxes:
            part = flat[tuple(slice(*pair) for pair in zip(low, high, strict=True))].flatten()
            assert part[0] == offset
            values += part.tolist()
        assert values == list(range(first, last))


def test_an_interval_that_crosses_rows() -> None:
    assert interval_boxes((3, 4), 2, 9) == [((0, 2), (1, 4), 2), ((1, 0), (2, 4), 4), ((2, 0), (3, 1), 8)]
    assert interval_boxes((3, 4), 5, 5) == []
    assert interval_boxes((), 0, 1) == [((), (), 0)]


def test_order_of_two_cuts_on_one_dim_matters() -> None:
    halves, thirds = Cut("tp", 0, (3, 3)), Cut("cp", 0, (1, 1, 1))
    here = {"tp": 1, "cp": 2}
    assert Layout((6,), (halves, thirds)).boxes(here) == [Box((5,), (6,), 0)]
    outer = (Cut("cp", 0, (2, 2, 2)), Cut("tp", 0, (1, 1)))
    assert Layout((6,), outer).boxes({"tp": 1, "cp": 1}) == [Box((3,), (4,), 0)]
    assert Layout((6,), (halves, thirds)).boxes({"tp": 1, "cp": 1}) == [Box((4,), (5,), 0)]


def test_a_rank_may_hold_nothing() -> None:
    layout = Layout((2, 2), flat=FlatOwnership("dp", ((0, 3), (3, 4), (4, 4))))
    assert layout.boxes({"dp": 2}) == []
    assert layout.boxes({"dp": 1}) == [Box((1, 1), (2, 2), 0)]


def test_chunks_that_do_not_cover_are_refused() -> None:
    with pytest.raises(AssertionError, match="do not cover dim 0"):
        Layout((6,), (Cut("tp", 0, (3, 2)),)).boxes({"tp": 0})


def test_parts_of_a_fused_dim_are_cut_one_by_one():
    """Rank 1 of 2 has the second head of two in queries, keys and values; of columns, in each row."""
    rows = Layout((6, 2), (Cut("tp", 0, (1, 1), parts=3),)).boxes({"tp": 1})
    assert rows == [Box((1, 0), (2, 2), 0), Box((3, 0), (4, 2), 2), Box((5, 0), (6, 2), 4)]
    columns = Layout((2, 4), (Cut("tp", 1, (1, 1), parts=2),)).boxes({"tp": 0})
    assert columns == [
        Box((0, 0), (1, 1), 0),
        Box((0, 2), (1, 3), 1),
        Box((1, 0), (2, 1), 2),
        Box((1, 2), (2, 3), 3),
    ]
    nested = (Cut("tp", 0, (1, 1), parts=3), Cut("cp", 0, (2, 1)))
    assert Layout((6,), nested).boxes({"tp": 1, "cp": 0}) == [Box((1,), (2,), 0), Box((3,), (4,), 1)]
