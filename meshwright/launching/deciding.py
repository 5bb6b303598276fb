"""`plan.mode = "auto"` of a local run: ranks that measure, then a plan, before any rank trains.

Owns the order: our launcher has no torch, so as many workers as will train measure the model at the same time and end.
Must not know how plans are found (`training/deciding.py`).
"""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import cloudpickle

from meshwright.launching.local import run_local
from meshwright.launching.messages import WorkerContext
from meshwright.training.config import Resolved, RunConfig
from meshwright.training.deciding import Decision, decide, decided
from meshwright.training.kept_plan import kept_plan
from meshwright.training.measured import Measured, agreed
from meshwright.verification.job import Functions

if TYPE_CHECKING:
    from meshwright.comm.mesh import World


# (configuration, processes, the model, loss and data where they are Python objects) -> a plan
Decide = Callable[[RunConfig, int, Functions | None], Decision]


def decide_locally(config: RunConfig, processes: int, functions: Functions | None = None) -> Decision:
    """The plan of `config` on `processes` local ranks.

    Args:
        config: of the run.
        processes: local ranks.
        functions: the model, loss and data where they are given as Python objects.

    Raises:
        MeshwrightError: as `decide`, and what building the model raises.
    """
    call = None if functions is None else cloudpickle.dumps(functions)
    with tempfile.TemporaryDirectory(prefix="meshwright-plan-") as folder:
        found = run_local(partial(_measure, config, call), processes=processes, run_dir=Path(folder))
    return decide(config, agreed(found), world_size=processes)


def with_plan(
    resolved: Resolved,
    *,
    processes: int,
    place: Path | None = None,
    functions: Functions | None = None,
) -> tuple[Resolved, tuple[str, ...]]:
    """What `resolved` says with its plan decided, each key with its reason, and lines for people.

    Args:
        resolved: the configuration.
        processes: local ranks.
        place: where the checkpoint is from which the run goes on; its plan is kept if it can be.
        functions: the model, loss and data where they are given as Python objects.
    """
    kept = None if place is None else kept_plan(resolved.config, place, world_size=processes)
    decision = kept or decide_locally(resolved.config, processes, functions)
    origins = dict(resolved.origins)
    origins |= {f"plan.{key}": f"auto: {reason}" for key, reason in decision.reasons.items()}
    origins["plan.mode"] = f"auto ({resolved.origins['plan.mode']})"
    found = Resolved(
        decided(resolved.config, decision), MappingProxyType(origins), resolved.source, resolved.warnings
    )
    return found, decision.lines


def _measure(config: RunConfig, call: bytes | None, world: World, _context: WorkerContext) -> Measured:
    """The target of the ranks that measure."""
    # Imported here because they need torch, which a launcher must not load.
    from meshwright.comm.mesh import connect, disconnect
    from meshwright.training.agreeing import measure_rank
    from meshwright.training.device import choose_device
    from meshwright.verification.subject import make_task_of

    functions = None if call is None else pickle.loads(call)
    device = choose_device(config, world)
    connect(world, device=device, timeout_seconds=config.train.watchdog)
    try:
        return measure_rank(config, make_task_of(config, functions), world, device=device)
    finally:
        disconnect()
