"""The registry, and injection that touches one rank and one operation only."""

import pytest
import torch

from meshwright.comm import ops
from meshwright.comm.log import CommLog
from meshwright.testing.faults.network import (
    FAULTS,
    FaultRule,
    FaultyTransport,
    InjectedError,
    commit,
    faulty_group,
)


def test_every_fault_has_a_public_source_and_known_codes() -> None:
    for name, fault in FAULTS.items():
        assert fault.name == name
        assert fault.source.startswith("https://github.com/")
        assert set(fault.noticed_as) <= {"E401", "E402", "E404"}


def test_commit_touches_only_its_rank_and_operation() -> None:
    tensor = torch.ones(3)
    rule = FaultRule("skip", rank=1, operation=2)
    assert commit(rule, tensor, rank=0, operation=2) is tensor
    assert commit(rule, tensor, rank=1, operation=1) is tensor
    assert commit(rule, tensor, rank=1, operation=2) is None
    resized = commit(FaultRule("resize", rank=1, operation=2), tensor, rank=1, operation=2)
    assert resized is not None
    assert resized.shape == (4,)
    with pytest.raises(InjectedError, match="before operation 2 of rank 1"):
        commit(FaultRule("raise", rank=1, operation=2), tensor, rank=1, operation=2)


def test_each_kind_of_fault_has_its_tool() -> None:
    with pytest.raises(AssertionError, match="wrap the group"):
        commit(FaultRule("drop", rank=0, operation=0), torch.ones(1), rank=0, operation=0)
    with pytest.raises(AssertionError, match="call commit"):
        FaultyTransport(None, FaultRule("kill", rank=0, operation=0), rank=0)
    with pytest.raises(AssertionError, match="none of kill, raise"):
        FaultRule("melt", rank=0, operation=0)
    lonely = ops.Group("dp", (0,), 0, None, CommLog())
    with pytest.raises(AssertionError, match="has no transport"):
        faulty_group(lonely, FaultRule("drop", rank=0, operation=0))


def _drop_second(mesh) -> list[float]:
    """Rank 0 issues three operations of which the second is dropped, rank 1 two."""
    group = faulty_group(mesh.group("dp"), FaultRule("drop", rank=0, operation=1))
    tensors = [torch.ones(4) for _ in range(3 - mesh.rank)]
    for tensor in tensors:
        ops.all_reduce(tensor, group, cause="t").wait()
    return [float(tensor[0]) for tensor in tensors]


def test_drop_leaves_one_operation_out(ranks) -> None:
    assert ranks.run(_drop_second, 2) == [[2.0, 1.0, 2.0], [2.0, 2.0]]
