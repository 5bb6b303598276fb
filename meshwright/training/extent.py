"""How long a run is, and the learning rate over it: from what the run file says to numbers of steps."""

from __future__ import annotations

import math

from meshwright.errors import ConfigError
from meshwright.training.learning_rate import LearningRate
from meshwright.training.sections import TrainConfig
from meshwright.training.task import Task


def total_steps_of(train: TrainConfig, task: Task, *, global_batch: int) -> int | None:
    """Length of the run in steps; None when it stops by time.

    Raises:
        ConfigError: E102 for a number of tokens where samples are no sequences.
    """
    stop = train.stop_at
    if stop.unit == "seconds":
        return None
    if stop.unit == "steps":
        return int(stop.amount)
    if stop.unit == "epochs":
        return max(1, math.ceil(stop.amount * len(task.train_data) / global_batch))
    if "sequence" not in task.shape:
        raise ConfigError(
            "E102",
            f'train.stop_at = "{stop}": samples of {task.name} are not token sequences of a known '
            f'length; write "5000 steps", "2 epochs" or "6h".',
        )
    return max(1, math.ceil(stop.amount / (global_batch * task.shape["sequence"])))


def learning_rate_of(train: TrainConfig, total_steps: int | None) -> LearningRate:
    """The schedule over a run of `total_steps`; None: of unknown length."""
    schedule = train.schedule
    return LearningRate(
        schedule.name,
        peak=train.optimizer.lr,
        warmup_steps=schedule.warmup.num_steps(total_steps or 0),
        decay_steps=schedule.decay.num_steps(total_steps or 0),
        total_steps=total_steps,
        final_ratio=schedule.final_ratio,
    )
