"""Phase 2: merging in pairs, giving back, merging neighbours, and cutting where little passes."""

from __future__ import annotations

import itertools
import random

import pytest

from meshwright.partitioning.chain import Carried
from meshwright.partitioning.coarsen import coarsen
from meshwright.partitioning.compact import compact
from meshwright.partitioning.levels import BlockCosts, additive, ordered, single_parts
from meshwright.partitioning.segments import cheapest_cuts
from meshwright.partitioning.uncoarsen import uncoarsen

SECONDS = [4, 1, 3, 2, 6, 2, 5, 1, 3, 3, 2, 4]


def chain(num_parts: int, size: float = 0.0):
    return single_parts(num_parts, [Carried(i, (i + 1,), size) for i in range(num_parts - 1)])


def costs_of(level, seconds=SECONDS):
    return [sum(seconds[part] for part in members) for members in level.blocks]


COSTS = BlockCosts(additive(SECONDS))


def test_coarsening_of_near_equal_parts_stalls():
    levels = coarsen(chain(12), COSTS)
    assert [len(level.blocks) for level in levels] == [12, 10]
    assert levels[-1].blocks == ((0,), (1, 2), (3,), (4,), (5,), (6,), (7, 8), (9,), (10,), (11,))
    assert costs_of(levels[-1]) == [4, 4, 2, 6, 2, 5, 4, 3, 2, 4]


@pytest.mark.parametrize(
    ("most", "ends", "seconds"), [(4, (3, 4, 6, 11), [10, 6, 7, 13]), (3, (3, 6, 11), [10, 13, 13])]
)
def test_compaction(most, ends, seconds):
    found = compact(coarsen(chain(12), COSTS)[-1], COSTS, most_blocks=most)
    assert tuple(members[-1] for members in found.blocks) == ends
    assert costs_of(found) == seconds


@pytest.mark.parametrize(("most", "longest"), [(3, 13), (4, 10)])
def test_compaction_loses_balance_that_is_possible(most, longest):
    best = min(
        max(sum(SECONDS[a:b]) for a, b in itertools.pairwise((0, *cuts, 12)))
        for cuts in itertools.combinations(range(1, 12), most - 1)
    )
    assert best == longest
    found = max(costs_of(compact(chain(12), COSTS, most_blocks=most)))
    assert found == 13


def test_four_times_as_many_blocks_as_stages_keep_the_balance():
    """Seeded chains of 60 equal-ish parts: with k = S compaction loses up to half, with k = 4 S little."""
    rng = random.Random(0)
    worst = {1: 1.0, 4: 1.0}
    for _ in range(20):
        seconds = [rng.randint(1, 9) for _ in range(60)]
        costs = BlockCosts(additive(seconds))
        for times in worst:
            blocks = costs_of(compact(chain(60), costs, most_blocks=4 * times), seconds)
            longest = min(
                max(sum(blocks[a:b]) for a, b in itertools.pairwise((0, *cuts, len(blocks))))
                for cuts in itertools.combinations(range(1, len(blocks)), 3)
            )
            worst[times] = max(worst[times], longest / (sum(seconds) / 4))
    assert worst[4] < 1.25 < worst[1]


def test_a_merge_that_leaves_and_returns_is_refused():
    fork = single_parts(4, [Carried(0, (1, 2), 1.0), Carried(1, (3,), 1.0), Carried(2, (3,), 1.0)])
    assert not fork.has_detour(0, 1)
    skip = single_parts(3, [Carried(0, (1, 2), 1.0), Carried(1, (2,), 1.0)])
    assert skip.has_detour(0, 2)
    assert ordered([(0, 3), (1,), (2,)], fork.carried) is None


def test_random_graphs_stay_acyclic_and_whole():
    rng = random.Random(4)
    for _ in range(60):
        n = rng.randint(6, 30)
        carried = [
            Carried(
                i, tuple(sorted(rng.sample(range(i + 1, n), rng.randint(1, min(3, n - i - 1))))), rng.random()
            )
            for i in range(n - 1)
        ]
        seconds = [rng.choice([1, 1, 2, 30]) for _ in range(n)]
        costs = BlockCosts(additive(seconds), communication=lambda size: size)
        levels = coarsen(single_parts(n, carried), costs, min_blocks=3)
        fine = uncoarsen(levels, costs)
        for level in (*levels, fine, compact(fine, costs, most_blocks=3)):
            assert sorted(part for members in level.blocks for part in members) == list(range(n))
            assert all(a < b for a, b in level.between), "blocks are not in topological order"
        assert cut_bytes(fine) <= cut_bytes(levels[-1]) + 1e-9


def cut_bytes(level) -> float:
    return sum(level.between.values())


def test_a_piece_moves_where_less_passes():
    """a0 a1 | a2 a3 with a thin place after a2: a2 joins the first block."""
    sizes = [9.0, 5.0, 1.0]
    carried = [Carried(i, (i + 1,), size) for i, size in enumerate(sizes)]
    bottom = single_parts(4, carried)
    top = ordered([(0, 1), (2, 3)], carried)
    assert top is not None
    costs = BlockCosts(additive([1, 1, 1, 1]), communication=lambda size: size)
    assert uncoarsen([bottom, top], costs).blocks == ((0, 1, 2), (3,))
    full = BlockCosts(costs.seconds, costs.communication, fits=lambda members: len(members) < 3)
    assert uncoarsen([bottom, top], full).blocks == ((0, 1), (2, 3))


@pytest.mark.parametrize("compat", [False, True])
def test_compaction_and_memory(compat):
    """The cheapest block (1) does not fit with the one before it; RaNNC stops there."""
    costs = BlockCosts(additive([9, 1, 2, 9]), fits=lambda members: 0 not in members or len(members) == 1)
    found = compact(chain(4), costs, most_blocks=2, compat=compat)
    assert found.blocks == (((0,), (1,), (2,), (3,)) if compat else ((0,), (1, 2, 3)))


def test_cheapest_cuts_are_the_best_of_all():
    rng = random.Random(2)
    for _ in range(100):
        n = rng.randint(1, 9)
        seconds = [float(rng.randint(1, 9)) for _ in range(n)]
        live = [0.0, *(float(rng.randint(0, 9)) for _ in range(n - 1)), 0.0]
        longest = float(rng.randint(3, 20))
        starts = cheapest_cuts(seconds, live, longest=longest)

        def legal(edges, seconds=seconds, longest=longest):
            return all(b - a == 1 or sum(seconds[a:b]) <= longest for a, b in itertools.pairwise(edges))

        best = min(
            (sum(live[cut] for cut in cuts), num)
            for num in range(n)
            for cuts in itertools.combinations(range(1, n), num)
            if legal((0, *cuts, n))
        )
        assert legal((*starts, n))
        assert (sum(live[cut] for cut in starts), len(starts) - 1) == best
