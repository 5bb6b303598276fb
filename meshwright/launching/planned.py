"""The plan that a run takes from the planner, written into its configuration before any process starts.

Owns how a plan of `planner/` becomes keys of `[plan]` with their origins: that of a file (`plan.lock`), or the one that
is found now (`plan.mode = "auto"` of decoders whose shape is known; `launching/deciding.py` has all other models). On
every rank of torchrun or SLURM the same file gives the same plan.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from meshwright.errors import ConfigError, PlanError
from meshwright.launching.gpus import local_cluster
from meshwright.launching.shapes import shape_of_run
from meshwright.launching.this_host import located, num_cores
from meshwright.planner.asking import ask, sections_of
from meshwright.planner.lock import LOCK_NAME
from meshwright.planner.plans import Plans, describe, make_plans
from meshwright.planner.request import Request
from meshwright.planner.runnable import plan_keys
from meshwright.planner.take import Offered, of_file, take
from meshwright.presets.models import ModelPreset
from meshwright.simulation.host_keys import is_known
from meshwright.training.config import COMMAND_LINE, DEFAULT, Resolved, default_cache_dir
from meshwright.training.sections import PlanConfig

# Of a model or a plan that the planner has no shape or no price for.
_NOT_PLANNED = ("E104", "E106", "E283", "E287")
_SHOWN = 3
# Keys of [plan] that are options of `meshwright plan`, or none of its business.
_NOT_ASKED = ("lock", "mode", "cluster", "processes", "memory_headroom", "transport", "bucket_bytes")
# More processes than this on a core are a plan for another machine.
_MOST_A_CORE = 4


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


@dataclass(frozen=True)
class FromPython:
    """What a script gave beside the configuration.

    Attributes:
        offered: plans of `meshwright.plan`; their fixed keys and their headroom count where the run says none.
        shape: of a model that is a Python object.
    """

    offered: Offered | None = None
    shape: ModelPreset | None = None


NOTHING_GIVEN = FromPython()


def planned(
    resolved: Resolved, *, world_size: int | None, num_gpus: int = 0, given: FromPython = NOTHING_GIVEN
) -> Planned:
    """The configuration with the plan of `plan.lock`, or the best one under `plan.mode = "auto"`.

    Args:
        resolved: the configuration.
        world_size: processes that a launcher has started; None: this one starts them.
        num_gpus: of this host.
        given: by a script; its plans count more than a file's.

    Raises:
        MeshwrightError: what `take` and `make_plans` raise; E294 for a plan of another number of processes.
    """
    path = resolved.config.plan.lock
    if given.offered is not None:
        return _taken(resolved, given.offered, world_size, given)
    if path is not None:
        offered = of_file(path, again=_command(resolved, path))
        return _taken(resolved, offered, world_size, given)
    if resolved.config.plan.mode != "auto" or world_size is not None:
        return Planned(resolved)
    request = _question(resolved, num_gpus)
    if request is None:
        return Planned(resolved)
    devices = request.cluster.num_devices
    _check_processes(resolved, devices, "plan.cluster has", "leave plan.cluster out")
    return _found(resolved, make_plans(request))


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


def _taken(resolved: Resolved, offered: Offered, world_size: int | None, given: FromPython) -> Planned:
    sections, of_script = sections_of(resolved), given.offered is not None
    places = sections.get("plan", {})
    if of_script:
        said = {"memory_headroom": offered.lock["headroom"], **_table(offered.lock["fixed"])}
        sections = {**sections, "plan": {**said, **places}}
    names = {"cluster"} if of_script else {"cluster", "processes"}
    shape = given.shape or shape_of_run(resolved.config, here=world_size is not None)
    cluster = None if names & set(places) else offered.cluster
    request = ask(sections, {}, cluster=cluster, model=shape)
    request = located(request, cache_of(resolved), measures=False)
    taken = take(offered, request)
    devices = request.cluster.num_devices
    place = f"{offered.place} has plans for"
    _check_processes(resolved, devices, place, offered.fix, world_size=world_size)
    keys = {**taken.keys, "mode": "given", **({} if world_size else {"processes": devices})}
    return _predicted(with_keys(resolved, keys, origin=Path(offered.place).name), taken.predicted, request)


def _check_processes(
    resolved: Resolved, devices: int, place: str, fix: str, *, world_size: int | None = None
) -> None:
    """A plan is for as many processes as there are; what a launcher has not started is started here, if this host is
    meant."""
    asked = world_size or resolved.config.plan.processes or devices
    if asked != devices:
        raise PlanError(
            "E294",
            f"{place} {devices} devices, and {asked} processes are asked for. Start {devices}, or with "
            f"plan.processes={asked}: {fix}",
        )
    given = world_size or resolved.config.plan.processes
    if not given and devices > _MOST_A_CORE * num_cores():
        raise PlanError(
            "E294",
            f"{place} {devices} devices, and this host has {num_cores()} cores. Start the run there, by torchrun or "
            f"`meshwright launch`; or {fix[0].lower()}{fix[1:]}; plan.processes={devices} starts all of them here",
        )


def _table(value: object) -> dict[str, object]:
    assert isinstance(value, dict), "a table of a lock"
    return value


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


def _command(resolved: Resolved, lock: Path) -> str:
    """What makes the file anew for this run, with what its command line says."""
    said = {key: value for key, value in resolved.values().items() if resolved.origins[key] == COMMAND_LINE}
    keys = {key.removeprefix("plan."): value for key, value in said.items() if key.startswith("plan.")}
    fixed = ",".join(f"{key}={_word(value)}" for key, value in keys.items() if key not in _NOT_ASKED)
    options = {
        "--cluster": keys.get("cluster") or (f"{keys['processes']}xcpu" if "processes" in keys else None),
        "--batch": said.get("train.global_batch"),
        "--seq": said.get("data.seq_len"),
        "--headroom": keys.get("memory_headroom"),
        "--plan": fixed,
        "--out": None if lock.absolute() == Path(LOCK_NAME).absolute() else lock,
    }
    words = [f"{name} {shlex.quote(str(value))}" for name, value in options.items() if value]
    return " ".join(("meshwright plan", str(resolved.source or "run.toml"), *words))


def _word(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
