"""One step of the engine without the training step around it, for lessons that count what the engine does."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from meshwright.sharding.engine import ShardingEngine


def accumulate_gradients(
    engine: ShardingEngine, loss: Callable[[int], Tensor], *, num_microbatches: int
) -> None:
    """Forward and backward of every micro-batch; afterwards the gradient shards hold the sum over ranks.

    Args:
        engine: the sharded model.
        loss: micro-batch number -> summed loss, a 0-dim tensor.
        num_microbatches: how many.
    """
    engine.start_step()
    for microbatch in range(num_microbatches):
        engine.start_microbatch(last=microbatch == num_microbatches - 1)
        total = loss(microbatch)
        engine.start_backward()
        total.backward()
        engine.finish_microbatch()
