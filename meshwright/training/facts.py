"""What a checkpoint says of a run beside tensors, from the run's configuration, plan and state."""

from __future__ import annotations

import json

from meshwright.checkpoint.manifest import RunFacts
from meshwright.data.index_law import BatchGeometry
from meshwright.layout.plan import TrainPlan
from meshwright.training.config import RunConfig, values_of
from meshwright.training.saving import aliases_of, state_numbers
from meshwright.training.state import TrainState
from meshwright.training.task import model_numbers

# Keys of these sections decide what is learned, but for those that only decide how long and what is looked at.
_SECTIONS = ("model", "data", "train")
_NOT_LEARNED = (
    "data.cache_dir",
    "data.eval",
    "train.global_batch",
    "train.stop_at",
    "train.eval_every",
    "train.eval_samples",
    "train.control",
    "train.watchdog",
)


def run_facts(config: RunConfig, plan: TrainPlan, state: TrainState, geometry: BatchGeometry) -> RunFacts:
    """The facts of a run as it stands.

    Args:
        config: of the run.
        plan: how it is laid out.
        state: after how many steps, and the like.
        geometry: where in the stream of samples a step begins.
    """
    values = values_of(config)
    learned = {
        key: value
        for key, value in values.items()
        if key.partition(".")[0] in _SECTIONS and key not in _NOT_LEARNED
    }
    return RunFacts(
        step=state.step,
        tokens=state.tokens,
        samples=geometry.start_of(state.step),
        state=state_numbers(state),
        seed=config.train.seed,
        dropout=config.train.dropout,
        optimizer=config.train.optimizer.name,
        plan=json.loads(plan.to_json()),
        config=learned,
        numbers=model_numbers(config),
        aliases=aliases_of(state.engine),
    )
