"""`plan.mode = "auto"` where ranks were started by somebody else: all measure, and all decide the same.

Owns the order. Our own launcher decides before it starts ranks (`launching/deciding.py`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from meshwright.checkpoint.folder import ResumeFrom
from meshwright.comm.mesh import World, share_values
from meshwright.training.auto import measured_units
from meshwright.training.config import RunConfig
from meshwright.training.deciding import decide, decided, sizes_to_measure
from meshwright.training.kept_plan import kept_plan
from meshwright.training.measured import Measured, agreed
from meshwright.training.task import Task


def agree_on_plan(
    config: RunConfig,
    world: World,
    *,
    device: torch.device,
    resume: ResumeFrom | None,
    make: Callable[[RunConfig], Task],
    say: Callable[[str], None],
) -> RunConfig:
    """The configuration with a plan that all connected ranks have decided alike; every rank calls.

    Args:
        config: of the run.
        world: all ranks.
        device: where this rank computes.
        resume: where the checkpoint is from which the run goes on; its plan is kept if it can be, as rank 0 sees it.
        make: the model, its loss and its data.
        say: takes lines for people.

    Raises:
        MeshwrightError: as `measured_units` and `decide`.
    """
    if config.plan.mode != "auto":
        return config
    kept = None if resume is None else kept_plan(config, resume.place, world_size=world.size)
    decision = share_values(kept)[0]
    if decision is None:
        mine = measure_rank(config, make(config), world, device=device)
        decision = decide(config, agreed(share_values(mine)), world_size=world.size)
    for line in decision.lines:
        say(line)
    return decided(config, decision)


def measure_rank(config: RunConfig, task: Task, world: World, *, device: torch.device) -> Measured:
    """What this rank measures of the model of `config`, while all others of its host do the same."""
    return measured_units(
        task,
        sizes_to_measure(config, world.size),
        world=world,
        device=device,
        config=config,
    )
