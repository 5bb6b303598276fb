"""The plan that a run takes from the planner, written into its configuration before any process starts.

Owns how a plan of `planner/` becomes keys of `[plan]` with their origins: that of a file (`plan.lock`), or the one that
is found now (`plan.mode = "auto"` of decoders whose shape is known; `launching/deciding.py` has all other models). On
every rank of torchrun or SLURM the same file gives the same plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from meshwright.errors import ConfigError, PlanError
from meshwright.launching.gpus import local_cluster
from meshwright.launching.this_host import located, num_cores
from meshwright.planner.asking import ask, sections_of
from meshwright.planner.plans import Plans, describe, make_plans
from meshwright.planner.request import Request
from meshwright.planner.runnable import plan_keys
from meshwright.planner.take import lock_cluster, take
from meshwright.simulation.host_keys import is_known
from meshwright.training.config import DEFAULT, Resolved, default_cache_dir
from meshwright.training.sections import PlanConfig

# Of a model or a plan that the planner has no shape or no price for.
_NOT_PLANNED = ("E104", "E106", "E283", "E287")
_SHOWN = 3


@dataclass(frozen=True)
class Planned:
    """A configuration with its plan.

    Attributes:
        resolved: with the keys of the plan.
        predicted: its entry as in `plans` of `meshwright plan --json`; None where nothing was predicted.
        lines: for people.
        on_host: whether the prediction is of this host as it was measured, so that the run can teach.
        runs: that had taught before.
    """

    resolved: Resolved
    predicted: Mapping[str, object] | None = None
    lines: tuple[str, ...] = ()
    on_host: bool = False
    runs: int = 0


def planned(resolved: Resolved, *, world_size: int | None, num_gpus: int = 0) -> Planned:
    """The configuration with the plan of `plan.lock`, or the best one under `plan.mode = "auto"`.

    Args:
        resolved: the configuration.
        world_size: processes that a launcher has started; None: this one starts them.
        num_gpus: of this host.

    Raises:
        MeshwrightError: what `take` and `make_plans` raise; E294 for a plan of another number of processes.
    """
    if resolved.config.plan.lock is not None:
        return _taken(resolved, resolved.config.plan.lock, world_size)
    if resolved.config.plan.mode != "auto" or world_size is not None:
        return Planned(resolved)
    request = _question(resolved, num_gpus)
    return Planned(resolved) if request is None else _found(resolved, make_plans(request))


def _question(resolved: Resolved, num_gpus: int) -> Request | None:
    """What the planner is asked; None where the model or the machine has no figures that it knows."""
    sections = sections_of(resolved)
    given: dict[str, object] = {}
    if "cluster" not in sections.get("plan", {}):
        processes = resolved.config.plan.processes or num_gpus or num_cores()
        cluster = local_cluster(processes) if num_gpus else f"{processes}xcpu"
        if cluster is None:
            return None
        given["cluster"] = cluster
    try:
        request = ask(sections, given)
    except ConfigError as error:
        if error.code in _NOT_PLANNED:
            return None
        raise
    if not is_known(request.work.model):
        return None
    return located(request, cache_of(resolved), measures=True)


def cache_of(resolved: Resolved) -> Path:
    """Where what is known of this host is kept."""
    return resolved.config.data.cache_dir or default_cache_dir()


def _found(resolved: Resolved, plans: Plans) -> Planned:
    best = plans.best
    if best.obstacle:
        raise PlanError(
            "E298",
            f"no plan that fits runs in train today: {best.obstacle}. Fix fewer keys of [plan], or change what the "
            f"message names.",
        )
    reason = f"auto: {describe(best.layout)}"
    keys = {**plan_keys(best.layout), "processes": plans.request.cluster.num_devices, "mode": "given"}
    lines = [
        f"plan   auto: {item.predicted.step.total:.3g} s a step, {item.predicted.memory.peak / 2**20:,.0f} MiB a rank "
        f"predicted   {describe(item.layout)}" + (f"   not built: {item.obstacle}" if item.obstacle else "")
        for item in plans.plans[:_SHOWN]
    ]
    return _predicted(with_keys(resolved, keys, origin=reason), best.to_json(), plans.request, tuple(lines))


def _taken(resolved: Resolved, path: Path, world_size: int | None) -> Planned:
    places = sections_of(resolved).get("plan", {})
    cluster = None if {"cluster", "processes"} & set(places) else lock_cluster(path)
    request = ask(sections_of(resolved), {}, cluster=cluster)
    request = located(request, cache_of(resolved), measures=False)
    again = _command(resolved.source, path)
    taken = take(path, request, again=again)
    devices = request.cluster.num_devices
    asked = world_size or resolved.config.plan.processes or devices
    if asked != devices:
        raise PlanError(
            "E294",
            f"{path} has plans for {devices} devices, and {asked} processes are asked for. Start {devices}, or run "
            f"`{again}` with plan.processes={asked}",
        )
    keys = {**taken.keys, "mode": "given", **({} if world_size else {"processes": devices})}
    return _predicted(with_keys(resolved, keys, origin=path.name), taken.predicted, request)


def _predicted(
    resolved: Resolved, entry: Mapping[str, object], request: Request, lines: tuple[str, ...] = ()
) -> Planned:
    host = request.cluster.host
    return Planned(resolved, entry, lines, host is not None, 0 if host is None else host.learned.runs)


def with_keys(resolved: Resolved, keys: Mapping[str, object], *, origin: str) -> Resolved:
    """The configuration with these keys of `[plan]`; what somebody set himself keeps its origin."""
    plan = resolved.config.plan
    values = {**plan.model_dump(mode="json", exclude_unset=True), **keys}
    config = resolved.config.model_copy(update={"plan": PlanConfig.model_validate(values)})
    origins = dict(resolved.origins)
    for key in keys:
        if origins[f"plan.{key}"] == DEFAULT or key == "mode":
            origins[f"plan.{key}"] = origin
    return Resolved(config, MappingProxyType(origins), resolved.source, resolved.warnings)


def _command(source: Path | None, lock: Path) -> str:
    beside = source is None or lock == source.with_name(lock.name)
    return f"meshwright plan {source or 'run.toml'}" + ("" if beside else f" --out {lock}")
