"""What surrounds a rank's passes is said anew each time, and never nested in what was."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import pytest
import torch
from torch import nn

from meshwright.adapt.context_parallel import ContextScope
from meshwright.comm.log import CommLog
from meshwright.comm.ops import DataGroups, Group, alone
from meshwright.data.index_law import BatchGeometry
from meshwright.layout.policy import find_policy
from meshwright.sharding.engine import ShardingEngine
from meshwright.training.optimizer import OptimizerSpec, ShardedOptimizer
from meshwright.training.passes import surround_passes
from meshwright.training.randomness import StatelessDraws
from meshwright.training.state import TrainState


class Counted:
    """A context that counts how deep it is entered."""

    def __init__(self) -> None:
        self.depth = self.deepest = 0

    @contextmanager
    def entered(self) -> Iterator[None]:
        self.depth += 1
        self.deepest = max(self.deepest, self.depth)
        yield
        self.depth -= 1


@pytest.mark.parametrize("stateless", [True, False])
def test_an_own_loop_that_says_it_each_step_enters_the_context_once(stateless):
    group = alone("dp", Group("dp", (0,), 0, None, CommLog(0, 1)))
    engine = ShardingEngine(
        nn.Linear(2, 2), policy=find_policy("ddp"), groups=DataGroups.of(group), device=torch.device("cpu")
    )
    state = TrainState(engine, ShardedOptimizer(OptimizerSpec("sgd"), engine.shards))
    geometry = BatchGeometry(global_batch=4, num_microbatches=2, dp_size=1, dp_rank=0)
    context: Any = Counted()
    for step in range(3):
        draws = StatelessDraws(geometry, seed=0) if stateless else None
        surround_passes(state, draws, cast(ContextScope, context), None)
        with state.randomness(step, 0):
            assert context.depth == 1
    assert (context.deepest, context.depth) == (1, 0)
