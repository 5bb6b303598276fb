"""Checkpoints of a job: its model, its optimizers' settings, its position, and what the user adds.

Owns what belongs to a job beside tensors. When a save is made is the user's line; how, that of `checkpoints.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.checkpoint.folder import FOLDER_NAME, ResumeFrom
from meshwright.checkpoint.manifest import RunFacts
from meshwright.errors import CheckpointError, LoopError
from meshwright.layout.plan import TrainPlan
from meshwright.training.checkpoints import Checkpoints
from meshwright.training.own_loop import ShardedModel
from meshwright.training.saving import aliases_of, state_numbers
from meshwright.training.sections import SaveConfig
from meshwright.training.units import SaveEvery

_SETTING = (int, float, bool, str, list, tuple, type(None))


@dataclass
class Position:
    """Where a job is in its data.

    Attributes:
        step: number of the newest batch, from 1.
        samples: global stream position after it.
    """

    step: int = 0
    samples: int = 0


class JobCheckpoints:
    """Saves and resumes the model of a job.

    Args:
        run_dir: folder of the job.
        plan: how it is laid out.
        position: where it is.
        say: prints a line for people on rank 0.
    """

    def __init__(
        self, run_dir: Path, plan: TrainPlan, position: Position, *, say: Callable[[str], None]
    ) -> None:
        self._root = run_dir / FOLDER_NAME
        self._plan = plan
        self._position = position
        self._say = say
        self._user: dict[str, Any] = {}
        self._checkpoints: Checkpoints | None = None
        self._has_started = False

    def save(self, models: Sequence[ShardedModel], user: dict[str, Any]) -> None:
        """Write a checkpoint; see `Job.save`."""
        checkpoints = self._of(models, "job.save()")
        if not self._has_started:
            self._has_started = True
            checkpoints.start()
        self._user = user
        checkpoints.after_step(last=True)

    def resume(
        self, models: Sequence[ShardedModel], place: Path | None, *, required: bool
    ) -> dict[str, Any] | None:
        """Load the newest valid checkpoint; see `Job.resume`."""
        checkpoints = self._of(models, "job.resume()")
        (model,) = models
        request = ResumeFrom(place or self._root, required)
        found = checkpoints.resume(request, optimizer=_rules(model), numbers={})
        if found is None:
            return None
        facts = found.manifest.run
        saved = facts.config.get("job", {})
        _restore_settings(model, saved.get("groups", []), found.path)
        self._position.step, self._position.samples = int(saved.get("step", facts.step)), facts.samples
        self._say(f"resume {found.path}: step {self._position.step}, next sample {facts.samples:,}")
        return dict(saved.get("user", {}))

    def finish(self) -> None:
        """Wait for what is still being written."""
        if self._checkpoints is not None:
            self._checkpoints.finish()

    def _of(self, models: Sequence[ShardedModel], what: str) -> Checkpoints:
        if len(models) != 1:
            raise LoopError(
                "E707",
                f"{what} with {len(models)} models: it comes after job.build(), and what trains together is one "
                f"module, so that its parts are of the same step.",
            )
        models[0].check_between_steps(what)
        if self._checkpoints is None:
            self._checkpoints = Checkpoints(
                self._root,
                models[0].state,
                settings=SaveConfig(every=SaveEvery(1, "steps")),
                facts=lambda: self._facts(models[0]),
                say=self._say,
            )
        return self._checkpoints

    def _facts(self, model: ShardedModel) -> RunFacts:
        state = model.state
        job = {"step": self._position.step, "groups": _settings(model), "user": self._user}
        return RunFacts(
            step=state.step,
            tokens=state.tokens,
            samples=self._position.samples,
            state=state_numbers(state),
            seed=model.rules.seed,
            dropout=model.rules.dropout,
            optimizer=_rules(model),
            plan={"policy": {"name": self._plan.policy.name}, "precision": self._plan.precision},
            config={"job": job},
            aliases=aliases_of(state.engine),
        )


def _rules(model: ShardedModel) -> str:
    return "+".join(type(optimizer).__name__.lower() for optimizer in model.optimizers)


def _settings(model: ShardedModel) -> list[dict[str, Any]]:
    """Learning rates and the like of all groups, as they stand."""
    return [
        {name: value for name, value in group.items() if name != "params" and isinstance(value, _SETTING)}
        for optimizer in model.optimizers
        for group in optimizer.param_groups
    ]


def _restore_settings(model: ShardedModel, saved: list[dict[str, Any]], path: Path) -> None:
    groups = [group for optimizer in model.optimizers for group in optimizer.param_groups]
    if len(groups) != len(saved):
        raise CheckpointError(
            "E505",
            f"{path} holds settings of {len(saved)} parameter groups, the optimizers have {len(groups)}. Give them the "
            f"same groups, or load weights only: model.load_state_dict.",
        )
    for group, values in zip(groups, saved, strict=True):
        group.update({name: tuple(v) if isinstance(v, list) else v for name, v in values.items()})
