"""Cuts of a sequence: every position once, equal parts, balanced under a causal mask."""

import itertools

import pytest

from meshwright.errors import PlanError
from meshwright.layout.sequence import SequenceCut, check_heads, cut_sequence, factors, padding


def _positions(cut: SequenceCut, rank: int) -> list[int]:
    return [position for start, stop in cut.runs(rank) for position in range(start, stop)]


@pytest.mark.parametrize("kind", ["ring", "ulysses", "allgather", "2d"])
def test_every_position_is_on_one_rank_in_ascending_order(kind) -> None:
    for size, length in itertools.product(range(1, 9), (1, 7, 16, 31)):
        cut = cut_sequence(length, size, kind)
        held = [_positions(cut, rank) for rank in range(size)]
        assert all(own == sorted(own) and len(own) == cut.local_length for own in held)
        assert sorted(itertools.chain(*held)) == list(range(cut.padded))
        assert 0 <= padding(length, size, kind) < 2 * size


def test_zigzag_gives_every_rank_as_many_scores() -> None:
    for size in (2, 3, 4, 8):
        cut = cut_sequence(16 * size, size, "ring")
        scores = [sum(position + 1 for position in _positions(cut, rank)) for rank in range(size)]
        assert len(set(scores)) == 1
    plain = cut_sequence(8, 2, "ring", zigzag=False)
    assert [plain.runs(rank) for rank in range(2)] == [((0, 4),), ((4, 8),)]


def test_two_dimensions_are_rings_of_groups_of_neighbours() -> None:
    assert [factors(size) for size in (4, 6, 7, 8, 12)] == [(2, 2), (2, 3), (1, 7), (2, 4), (3, 4)]
    cut = cut_sequence(24, 4, "2d")
    assert cut.merged(2).runs_of_all() == (((0, 6), (18, 24)), ((6, 18),))
    assert [cut.runs(rank) for rank in range(4)] == [((0, 6),), ((18, 24),), ((6, 12),), ((12, 18),)]


def test_heads_for_every_rank() -> None:
    check_heads(4, 4, "ulysses")
    check_heads(8, 2, "2d")
    check_heads(8, 1, "ring")
    with pytest.raises(PlanError) as caught:
        check_heads(4, 3, "ulysses")
    assert caught.value.code == "E252"
    assert "gives each of 4 ranks some heads of an attention that has 3" in caught.value.message
    assert 'Set plan.cp<=3, or plan.cp_kind="ring".' in caught.value.message
