"""Which dim of a value has its samples, learned from a batch of one more, and who sends whom which of them."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from torch import Tensor, nn

from meshwright.comm.log import CommLog
from meshwright.comm.ops import Group, PipelineGroups
from meshwright.data.index_law import even_part
from meshwright.errors import PlanError
from meshwright.pipeline.cut import Stage, make_stages, named_cut
from meshwright.pipeline.record import Twin
from meshwright.pipeline.redistribute import Parts, crossing, num_samples_in, sample_dims, with_one_more
from meshwright.pipeline.tape import Tape
from meshwright.schedule.action import Replicas

BATCH = {"x": torch.zeros(2, 3, 4)}


class Folding(nn.Module):
    """(batch, 3, 4) to what a function makes of it."""

    def __init__(self, fold) -> None:
        super().__init__()
        self.linear, self.fold = nn.Linear(4, 4), fold

    def forward(self, x: Tensor) -> Tensor:
        return self.fold(self.linear(x))


def cut_model(fold) -> tuple[Tape, Tape, list[Stage]]:
    parts = OrderedDict(first=Folding(fold), second=nn.Linear(4, 4))
    model, loss = nn.Sequential(parts), lambda model, batch: (model(batch["x"]).sum(), 2)
    twin = Twin(model, torch.device("cpu"))
    tape, taller = (twin.record(loss, b, training=True) for b in (BATCH, with_one_more(BATCH)))
    return tape, taller, make_stages(tape, named_cut(tape, ("second",), model="Sequential"))


def groups(teams, index: int) -> PipelineGroups:
    group = Group("pp", tuple(range(sum(map(len, teams)))), index, None, CommLog(index, 1))
    return PipelineGroups(group, group, group, teams)


@pytest.mark.parametrize(
    ("fold", "dim"), [(lambda x: x, 0), (lambda x: x.transpose(0, 1), 1), (lambda x: x[:, 0], 0)]
)
def test_the_dim_of_samples_is_the_one_that_grows(fold, dim):
    tape, taller, stages = cut_model(fold)
    unlike = crossing(stages, [(0, 1)], groups(((0,), (1, 2)), 0))
    assert unlike == set(stages[1].receives)
    assert crossing(stages, [(0, 1)], groups(((0, 1), (2, 3)), 0)) == set()
    assert sample_dims(tape, taller, unlike, num_samples_in(BATCH)) == dict.fromkeys(unlike, dim)


@pytest.mark.parametrize(
    ("fold", "shape"), [(lambda x: x.flatten(0, 1), r"\(6, 4\)"), (lambda x: x.mean(0), r"\(3, 4\)")]
)
def test_a_value_without_rows_of_samples_does_not_travel(fold, shape):
    """Samples folded into another dim might lie in any order, and a mean is of all of them."""
    tape, taller, stages = cut_model(fold)
    with pytest.raises(PlanError, match=rf"E236 plan.stage_ranks: the result of .*'first', of shape {shape}"):
        sample_dims(tape, taller, set(stages[1].receives), 2)


def test_ranks_read_what_the_schedule_says_they_have():
    for samples, ranks in [(6, 2), (7, 3), (5, 4)]:
        parts = Replicas((tuple(range(ranks)),), samples).parts()
        assert parts == tuple(even_part(samples, ranks, k) for k in range(ranks))


def test_two_ranks_share_the_samples_that_both_have():
    """Five samples on 2 ranks, 0 1 2 | 3 4, and on 3, 0 1 | 2 3 | 4."""
    first, last = (Parts.of(groups(((0, 1), (2, 3, 4)), index), 5) for index in (1, 3))
    assert (first.peers_at(1), last.peers_at(0)) == ([3, 4], [0, 1])
    assert [first.shared_with(peer) for peer in (3, 4)] == [(0, 1), (1, 1)]
    assert [last.shared_with(peer) for peer in (0, 1)] == [(0, 1), (1, 1)]
    assert Parts.of(groups(((0, 1), (2, 3)), 0), 5).shared_with(2) is None
