"""Rank numbering, peers and groups: model-parallel first, the last axis fastest."""

import pytest

from meshwright.errors import PlanError
from meshwright.mesh import AXIS_NAMES, Axis, MeshSpec

DATA = ("dp_replicate", "dp_shard", "cp")
FIVE_AXES = MeshSpec.of(pp=2, dp_replicate=2, dp_shard=3, cp=2, tp=2)


def test_ranks_are_numbered_model_parallel_first() -> None:
    mesh = MeshSpec.of(dp_shard=4, tp=2)
    assert [mesh.index(rank, ["tp"]) for rank in range(8)] == [0, 1, 0, 1, 0, 1, 0, 1]
    assert [mesh.index(rank, DATA) for rank in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]


def test_pipeline_stages_are_the_slowest_axis() -> None:
    mesh = MeshSpec.of(pp=2, dp_shard=2, tp=2)
    assert [mesh.coordinates(rank)["pp"] for rank in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert mesh.groups(["pp"]) == [(0, 4), (1, 5), (2, 6), (3, 7)]


def test_rank_and_coordinates_are_inverse() -> None:
    assert FIVE_AXES.world_size == 48
    seen = [tuple(FIVE_AXES.coordinates(rank).values()) for rank in range(48)]
    assert len(set(seen)) == 48
    assert seen == sorted(seen)
    assert [FIVE_AXES.rank(FIVE_AXES.coordinates(rank)) for rank in range(48)] == list(range(48))
    assert list(FIVE_AXES.coordinates(0)) == list(AXIS_NAMES)
    assert FIVE_AXES.rank({"tp": 1}) == 1
    assert FIVE_AXES.rank({"pp": 1}) == 24


@pytest.mark.parametrize(
    ("axes", "groups"),
    [
        (["tp"], [(0, 1), (2, 3), (4, 5), (6, 7)]),
        (DATA, [(0, 2, 4, 6), (1, 3, 5, 7)]),
        (["dp_shard", "tp"], [(0, 1, 2, 3, 4, 5, 6, 7)]),
        ([], [(rank,) for rank in range(8)]),
    ],
)
def test_groups_of_a_two_axis_mesh(axes, groups) -> None:
    assert MeshSpec.of(dp_shard=4, tp=2).groups(axes) == groups


@pytest.mark.parametrize("axes", [["pp"], ["dp_shard"], DATA, ["cp", "tp"], ["pp", "tp"]])
def test_groups_divide_the_ranks_and_index_counts_within(axes) -> None:
    groups = FIVE_AXES.groups(axes)
    assert sorted(rank for group in groups for rank in group) == list(range(48))
    for group in groups:
        assert len(group) == FIVE_AXES.size(*axes)
        for position, rank in enumerate(group):
            assert FIVE_AXES.peers(rank, axes) == group
            assert FIVE_AXES.index(rank, axes) == position
        others = [
            {name: index for name, index in FIVE_AXES.coordinates(rank).items() if name not in axes}
            for rank in group
        ]
        assert all(other == others[0] for other in others)


def test_sizes() -> None:
    assert FIVE_AXES.dp == 6
    assert FIVE_AXES.sizes() == {"pp": 2, "dp": 6, "cp": 2, "tp": 2}
    assert MeshSpec.of().world_size == 1


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            lambda: MeshSpec.of(tensor=2),
            "unknown mesh axis 'tensor'; axes are pp, dp_replicate, dp_shard, cp, tp",
        ),
        (lambda: Axis("ep", 2), "unknown mesh axis 'ep'"),
        (lambda: MeshSpec.of(tp=0), "tp=0: an axis has at least 1 rank"),
        (lambda: MeshSpec.of(tp=2).coordinates(2), "rank 2 is outside the mesh of 2 ranks"),
        (lambda: MeshSpec.of(tp=2).coordinates(-1), "rank -1 is outside"),
        (lambda: MeshSpec.of(tp=2).rank({"tp": 2}), "tp index 2 is outside 0..1"),
        (lambda: MeshSpec.of(tp=2).rank({"cp": -1}), "cp index -1 is outside 0..0"),
    ],
)
def test_errors_name_value_and_rule(make, text) -> None:
    with pytest.raises(PlanError) as caught:
        make()
    assert caught.value.code == "E200"
    assert text in caught.value.message


def test_a_mesh_names_every_axis_in_order() -> None:
    with pytest.raises(AssertionError, match="names every axis in order"):
        MeshSpec((Axis("tp", 2), Axis("pp", 1)))


def test_a_mesh_of_teams_is_no_product():
    """One rank, then three: each place is a group along dp_shard, and along pp all ranks are peers."""
    mesh = MeshSpec.of_teams([[0], [1, 3, 2]])
    assert (mesh.world_size, mesh.sizes()) == (4, {"pp": 2, "dp": 3, "cp": 1, "tp": 1})
    assert [mesh.coordinates(rank)["pp"] for rank in range(4)] == [0, 1, 1, 1]
    assert mesh.groups(DATA) == [(0,), (1, 2, 3)]
    assert mesh.groups(("pp",)) == [(0, 1, 2, 3)]
    assert [mesh.index(rank, DATA) for rank in range(4)] == [0, 0, 1, 2]
    assert [mesh.rank(mesh.coordinates(rank)) for rank in range(4)] == [0, 1, 2, 3]


def test_teams_that_are_a_product_are_that_mesh():
    assert MeshSpec.of_teams([[0, 1], [2, 3]]) == MeshSpec.of(pp=2, dp_shard=2)
    assert MeshSpec.of_teams([[2, 3], [0, 1]]).teams == ((2, 3), (0, 1))


@pytest.mark.parametrize("teams", [[], [[0], []], [[0], [0, 1]], [[1], [2]]])
def test_teams_that_are_not_all_ranks_once(teams):
    with pytest.raises(PlanError, match=r"E231.*each rank from 0 on belongs to one place"):
        MeshSpec.of_teams(teams)
