import pytest

from meshwright.data.index_law import BatchGeometry, even_part, rank_range
from meshwright.mesh import MeshSpec


@pytest.mark.parametrize(
    ("tp", "dp", "rows_of_rank"),
    [
        (2, 1, [range(0, 8), range(0, 8)]),
        (1, 2, [range(0, 4), range(4, 8)]),
        (2, 2, [range(0, 4), range(0, 4), range(4, 8), range(4, 8)]),
    ],
)
def test_data_split_of_eight_rows(tp, dp, rows_of_rank):
    mesh = MeshSpec.of(tp=tp, dp_shard=dp)
    for rank, rows in enumerate(rows_of_rank):
        dp_rank = mesh.index(rank, ("dp_replicate", "dp_shard"))
        geometry = BatchGeometry(global_batch=8, dp_size=dp, dp_rank=dp_rank)
        assert geometry.rank_range(0, 0) == rows


@pytest.mark.parametrize("dp_size", [1, 2, 3, 4, 5, 7])
@pytest.mark.parametrize("num_microbatches", [1, 2, 3, 6])
def test_a_micro_step_holds_the_same_positions_whatever_dp_is(dp_size, num_microbatches):
    batch = 12
    for step in (0, 5):
        for k in range(num_microbatches):
            positions = [
                position
                for dp_rank in range(dp_size)
                for position in BatchGeometry(batch, num_microbatches, dp_size, dp_rank).rank_range(step, k)
            ]
            first = step * batch + k * batch // num_microbatches
            assert positions == list(range(first, first + batch // num_microbatches))


def test_the_first_ranks_take_one_more():
    sizes = [
        len(rank_range(0, 1, global_batch=20, num_microbatches=2, dp_size=4, dp_rank=rank))
        for rank in range(4)
    ]
    assert sizes == [3, 3, 2, 2]
    assert [len(even_part(2, 4, index)) for index in range(4)] == [1, 1, 0, 0]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"num_microbatches": 3}, "num_microbatches=3 must divide global_batch=8"),
        ({"dp_rank": 2}, r"2 is outside 0\.\.1"),
        ({"microbatch": 2}, r"micro-step 2 is outside 0\.\.1"),
        ({"step": -1}, "step -1 is negative"),
    ],
)
def test_impossible_geometries_are_refused(change, text):
    arguments = {
        "step": 0, "microbatch": 0, "global_batch": 8, "num_microbatches": 2, "dp_size": 2, "dp_rank": 0,
    } | change  # fmt: skip
    with pytest.raises(AssertionError, match=text):
        rank_range(**arguments)
