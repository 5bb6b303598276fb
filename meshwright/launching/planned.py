"""The plan that a run takes from a file of plans, written into its configuration before any process starts.

Owns how a plan of `planner/` becomes keys of `[plan]` with their origins. On every rank of torchrun or SLURM the same
file gives the same plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from meshwright.errors import PlanError
from meshwright.planner.asking import ask, sections_of
from meshwright.planner.take import Taken, lock_cluster, take
from meshwright.training.config import DEFAULT, Resolved
from meshwright.training.sections import PlanConfig


def planned(resolved: Resolved, *, world_size: int | None) -> tuple[Resolved, Taken | None]:
    """The configuration with the plan of `plan.lock`, if it names one.

    Args:
        resolved: the configuration.
        world_size: processes that a launcher has started; None: this one starts them.

    Raises:
        MeshwrightError: what `take` raises; E294 for a plan of another number of processes.
    """
    path = resolved.config.plan.lock
    if path is None:
        return resolved, None
    sections = sections_of(resolved)
    places = sections.get("plan", {})
    cluster = None if {"cluster", "processes"} & set(places) else lock_cluster(path)
    request = ask(sections, {}, cluster=cluster)
    taken = take(path, request, again=_command(resolved.source, path))
    devices = request.cluster.num_devices
    asked = world_size or resolved.config.plan.processes or devices
    if asked != devices:
        raise PlanError(
            "E294",
            f"{path} has plans for {devices} devices, and {asked} processes are asked for. Start {devices}, or run "
            f"`{_command(resolved.source, path)}` with plan.processes={asked}",
        )
    keys = {**taken.keys, **({} if world_size else {"processes": devices})}
    return with_keys(resolved, keys, origin=path.name), taken


def with_keys(resolved: Resolved, keys: Mapping[str, object], *, origin: str) -> Resolved:
    """The configuration with these keys of `[plan]`; what somebody set himself keeps its origin."""
    plan = resolved.config.plan
    values = {**plan.model_dump(mode="json", exclude_unset=True), **keys}
    config = resolved.config.model_copy(update={"plan": PlanConfig.model_validate(values)})
    origins = dict(resolved.origins)
    for key in keys:
        if origins[f"plan.{key}"] == DEFAULT:
            origins[f"plan.{key}"] = origin
    return Resolved(config, MappingProxyType(origins), resolved.source, resolved.warnings)


def _command(source: Path | None, lock: Path) -> str:
    beside = source is None or lock == source.with_name(lock.name)
    return f"meshwright plan {source or 'run.toml'}" + ("" if beside else f" --out {lock}")
