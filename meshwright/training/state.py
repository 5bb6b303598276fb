"""The mutable part of a run, all of it: what a step changes, and what a checkpoint will hold."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.sharding.engine import ShardingEngine
from meshwright.training.optimizer import ShardedOptimizer


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
    """

    engine: ShardingEngine
    optimizer: ShardedOptimizer
    step: int = 0
    tokens: int = 0
    expected_count: float = 1.0
