"""What surrounds the forwards and backwards of a rank: its part of each sequence, its stages, its dropout.

One place for `train` and for the run under `verify`, so that what is verified is what trains.
"""

from __future__ import annotations

from meshwright.adapt.context_parallel import ContextScope, in_context
from meshwright.pipeline.executor import PipelineExecutor
from meshwright.pipeline.part import Part
from meshwright.training.randomness import StatelessDraws
from meshwright.training.sequences import cutter, over_sequences
from meshwright.training.stages import evaluated
from meshwright.training.state import TrainState, native_randomness
from meshwright.training.step import Loss


def loss_of_rank(loss: Loss, context: ContextScope | None, executor: PipelineExecutor | None) -> Loss:
    """`loss` of whole batches as this rank computes it: on its part of each sequence, through its stages."""
    if executor is not None:
        executor.reader.cut_batch = Part if context is None else cutter(context)
        return evaluated(executor)
    return loss if context is None else over_sequences(loss, context)


def surround_passes(
    state: TrainState,
    draws: StatelessDraws | None,
    context: ContextScope | None,
    executor: PipelineExecutor | None,
) -> None:
    """Enter the context's attention and the masks of `draws` around every pass of `state`, instead of what was.

    `draws` None leaves random numbers to torch.
    """
    state.randomness = native_randomness if draws is None else draws.around
    if executor is not None:
        executor.randomness = None if draws is None else draws.part
        executor.inner_scopes = () if context is None else (context.entered,)
    if context is not None:
        state.randomness = in_context(context, state.randomness)
