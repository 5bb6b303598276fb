"""The one ordered list of adaptations: what is swapped in an unmodified module, and how it is put back.

Order matters: what changes results (batch normalisation) comes before what only changes speed (linear), and what is
installed last is undone first. Dropout is not swapped in modules: `dropout.stateless` is entered a micro-step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import nn

from meshwright.adapt import batch_norm, dropout, linear, precision
from meshwright.adapt.dropout import DropoutKind
from meshwright.adapt.linear import Deferral
from meshwright.layout.recompute import NOTHING_AGAIN, RecomputePlan
from meshwright.partitioning.checkpointing import Span
from meshwright.recompute.install import install as install_recompute
from meshwright.sharding.engine import ShardingEngine


def install(
    model: nn.Module,
    engine: ShardingEngine,
    *,
    dropout_kind: DropoutKind = "stateless",
    recompute: RecomputePlan = NOTHING_AGAIN,
    schedules: Mapping[str, Span] | None = None,
    deferral: Deferral | None = None,
) -> Callable[[], None]:
    """Adapt `model`, which `engine` shards; instances change, classes do not.

    Returns:
        A function that undoes all of it.

    Raises:
        PlanError: E208 for a layer whose dropout cannot be cut over the engine's ranks, E242 for a pattern of
            plan.recompute that matches nothing.
    """
    if dropout_kind == "stateless":
        dropout.check_modules(model, num_ranks=engine.groups.num_workers)
    undos = [
        precision.install(model, engine.compute_dtype),
        batch_norm.install(model, engine.groups.workers),
        linear.install(model, engine.gradients, deferral),
        # Last, around all of these: what runs again is what ran.
        install_recompute(
            model,
            recompute,
            weights=engine.gatherer,
            schedules=schedules,
            region=engine.region,
        ).undo,
    ]

    def undo() -> None:
        for step in reversed(undos):
            step()

    return undo


def warnings_of(
    model: nn.Module, *, dropout_kind: DropoutKind, num_ranks: int, num_microbatches: int
) -> list[str]:
    """Texts with a W-code about what makes results depend on the plan; to be asked before `install`."""
    return [
        *batch_norm.micro_step_warnings(model, num_microbatches=num_microbatches),
        *dropout.native_warnings(model, dropout_kind, num_ranks=num_ranks),
    ]
