"""What one rank of the run under test trains with, and where faults are committed. Must not know the comparison."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from meshwright.adapt.context_parallel import ContextScope
from meshwright.data.batches import Batches
from meshwright.pipeline.executor import PipelineExecutor
from meshwright.sharding.engine import ShardingEngine
from meshwright.training.state import TrainState
from meshwright.training.step import Loss


@dataclass
class CandidateRank:
    """What a rank trains with; `inject` gets it before training and may change anything in it.

    A fault is committed by patching: a method of `engine`, `state.optimizer` or `batches` (an attribute of the
    instance shadows the class), the memory of a parameter, a forward hook, or by giving `loss` another value.
    Everything that is compared is read through these objects by code that a fault does not reach.

    Attributes:
        rank: global rank.
        engine: the sharded model; `engine.model`, `engine.group`, `engine.shards`, `engine.memories`.
        state: step counter and optimizer.
        batches: this rank's samples by step and micro-step.
        loss: (model, batch) -> (sum, count).
        num_microbatches: micro-steps of a step; a fault may lower it on every rank.
        clip_norm: limit of the gradient norm; None: no clipping.
        loss_of_part: the same of a rank's part of each sequence, before `context` puts the cut around it.
        context: computes attention over ranks that share sequences; None: each has them whole.
        executor: runs this rank's stages of a pipeline; None: it has the whole depth.
        again: name of a module to those that run again as wholes when its backward begins (plan.recompute).
    """

    rank: int
    engine: ShardingEngine
    state: TrainState
    batches: Batches
    loss: Loss
    loss_of_part: Loss
    num_microbatches: int
    clip_norm: float | None
    again: Mapping[str, Sequence[str]] = field(default_factory=dict)
    context: ContextScope | None = None
    executor: PipelineExecutor | None = None
