"""Runs as stripes: nothing is lost, few values say it, and covers with a fault are found."""

from __future__ import annotations

import itertools

import pytest

from meshwright.layout.layout import Cut
from meshwright.layout.stripes import Stripe, wrong_cover
from meshwright.layout.tensor_layout import TensorLayout


def elements(stripe: Stripe) -> list[tuple[int, int]]:
    return [
        (stripe.start + k * stripe.stride + i, stripe.offset + k * stripe.local_stride + i)
        for k in range(stripe.count)
        for i in range(stripe.length)
    ]


@pytest.mark.parametrize(("dim", "sizes"), [(0, (3, 2, 2)), (1, (2, 2, 1)), (2, (1, 2, 1))])
def test_any_interval_of_any_part_is_its_runs_in_at_most_three_stripes(dim, sizes):
    shape = [7, 5, 4]
    for index, start, stop in itertools.product(range(3), (0, 3, 9), (10, 17, None)):
        layout = TensorLayout(3, index, {"w": Cut("tp", dim, sizes)})
        local = [*shape[:dim], sizes[index], *shape[dim + 1 :]]
        numel = local[0] * local[1] * local[2]
        end = min(numel, stop or numel)
        runs = list(layout.runs("w", local, start, end))
        wanted = sorted((a + i, low + i - start) for a, low, high in runs for i in range(high - low))
        stripes = layout.stripes("w", local, start, end)
        assert sorted(itertools.chain(*map(elements, stripes))) == wanted
        assert len(stripes) <= 3


def test_parts_of_a_fused_dim_are_one_stripe_each():
    layout = TensorLayout(2, 0, {"w": Cut("tp", 1, (2, 2), parts=3)})
    assert layout.stripes("w", (9, 6), 0, 54) == [
        Stripe(4 * part, 2, 9, 12, 2 * part, 6) for part in range(3)
    ]


def parts(shape: tuple[int, int], sizes: tuple[int, ...], ways: int) -> list[Stripe]:
    """Each part of a matrix whose columns are cut, in `ways` intervals."""
    found = []
    for index, width in enumerate(sizes):
        layout, numel = TensorLayout(len(sizes), index, {"w": Cut("tp", 1, sizes)}), shape[0] * width
        for way in range(ways):
            found += layout.stripes("w", (shape[0], width), way * numel // ways, (way + 1) * numel // ways)
    return found


@pytest.mark.parametrize("ways", [1, 2, 5])
def test_parts_cut_over_two_axes_cover_the_matrix(ways):
    assert wrong_cover(parts((7, 11), (4, 4, 3), ways), 77) == ""


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda found: found[1:], "are missing"),
        (lambda found: found[:-1], "are missing"),
        (lambda found: [*found, Stripe(3, 2)], "are there twice"),
        (lambda found: [*found[:2], Stripe(found[2].start, 3, 2, 11), *found[3:]], "are missing"),
    ],
)
def test_a_gap_or_an_overlap_of_stripes_is_named(change, text):
    found = parts((7, 11), (4, 4, 3), 1)
    assert text in wrong_cover(change(found), 77)
