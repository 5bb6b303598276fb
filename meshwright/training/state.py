"""The mutable part of a run, all of it: what a step changes, and what a checkpoint will hold."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from meshwright.sharding.engine import ShardingEngine
from meshwright.training.loss_scale import LossScale
from meshwright.training.optimizer import ShardedOptimizer


def native_randomness(_step: int, _microbatch: int) -> AbstractContextManager[None]:
    """For `TrainState.randomness`: random numbers are torch's."""
    return nullcontext()


class Stages(Protocol):
    """The stages of a model on this rank, and the schedule that runs them."""

    def run(
        self, engine: ShardingEngine, micro_batch: Callable[[int], Any], *, divisor: float, step: int
    ) -> Tensor:
        """Forward and backward of all micro-batches of a step.

        Returns:
            This rank's loss sum and count, float64 (2,): zeros without the last stage.
        """


@dataclass
class TrainState:
    """Everything that a training step changes.

    Attributes:
        engine: the sharded model with its weights and gradients.
        optimizer: update rule and its state.
        step: number of finished steps; the data position is step x global batch.
        tokens: counted elements of the loss so far (valid tokens for a language model).
        expected_count: global count of the newest step, by which the next backward is divided beforehand; where
            the count stays, gradients come out normalised and the pass that divides them is saved.
        loss_scale: what fp16 multiplies the loss by; None in every other precision.
        stop_requested: whether this rank has been asked to stop after the step; one is enough to stop all.
        randomness: (step, micro-step) -> what is entered around its forward and backward; the default leaves
            random numbers to torch.
        stages: what runs the micro-batches where this rank has stages of the model only; None: it has all of it.
    """

    engine: ShardingEngine
    optimizer: ShardedOptimizer
    step: int = 0
    tokens: int = 0
    expected_count: float = 1.0
    loss_scale: LossScale | None = None
    stop_requested: bool = False
    randomness: Callable[[int, int], AbstractContextManager[None]] = native_randomness
    stages: Stages | None = None

    @property
    def divisor(self) -> float:
        """What a loss sum is divided by before backward: the expected count, less the loss scale."""
        return self.expected_count / (1.0 if self.loss_scale is None else self.loss_scale.value)
