"""What may be verified, as a run file with texts `a.b=c`: run files, functions, and plans of both kinds.

Owns the meaning of a plan.lock.json: of a run folder it is the run's own plan, whose model stands beside it; of
`meshwright plan` it names what it was made for. Must not know what is compared.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from meshwright.errors import ConfigError
from meshwright.layout.plan import TrainPlan
from meshwright.planner.lock import read_lock
from meshwright.planner.take import first_runnable, of_file
from meshwright.training.units import toml_literal


def layout_overrides(layout: Iterable[tuple[str, str]]) -> list[str]:
    """Roles of layers as a text."""
    roles = ", ".join(f"{toml_literal(pattern)} = {toml_literal(role)}" for pattern, role in layout)
    return [f"plan.layout={{{roles}}}"] if roles else []


def read_source(source: str) -> tuple[Path | None, list[str]]:
    """The run file of a source and the overrides that it stands for."""
    if source.startswith("py:"):
        return None, [f"model.source={source}"]  # its batch: see `cut_overrides`
    path = Path(source)
    if path.suffix == ".toml":
        return path, []
    if path.suffix != ".json":
        raise ConfigError(
            "E100",
            f"{source!r} is neither a run file (.toml), py:module:function, nor a plan.lock.json",
        )
    if is_of_planner(path):
        return _read_planned(path)
    return path.with_name("resolved.toml"), _lock_overrides(path)


def is_of_planner(path: Path) -> bool:
    """Whether a plan.lock.json is one of `meshwright plan`."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(value, dict) and "fingerprint" in value


def _read_planned(path: Path) -> tuple[Path | None, list[str]]:
    lock = read_lock(path)
    source, own = str(lock["source"]), [f"plan.lock={toml_literal(str(path))}"]
    if source.endswith(".toml"):
        return Path(source), own
    sizes = [f"data.seq_len={lock['seq_len']}", f"train.global_batch={lock['global_batch']}"]
    is_file = source.endswith(".json") or Path(source).is_dir()
    return None, [f"model.source={f'hf:{source}' if is_file else source}", *sizes, *own]


def keys_of_lock(path: Path) -> list[str]:
    """The first plan that training runs, as texts; whatever it was made for, as models are verified cut down.

    Raises:
        ConfigError: E289.
        PlanError: E298 where training runs none.
    """
    keys = first_runnable(of_file(path, again="meshwright plan")).keys
    return [f"plan.{key}={toml_literal(value)}" for key, value in keys.items()]


def _lock_overrides(path: Path) -> list[str]:
    """The plan of a lock file as overrides; the model and the data are those of `resolved.toml` beside it."""
    try:
        plan = TrainPlan.from_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError("E100", f"cannot read {str(path)!r} as a plan: {error}") from error
    beside = path.with_name("resolved.toml")
    if not beside.is_file():
        raise ConfigError(
            "E100",
            f"{str(path)!r} names no model; it is read from {str(beside)!r}, which is missing. Give the "
            f"plan.lock.json of a run folder, or the run file with --plan.",
        )
    zero = {"ddp": 0, "zero1": 1, "zero2": 2, "zero3": 3, "parameter_server": 0}[plan.policy.name]
    sizes = [
        f"plan.dp={plan.mesh.dp}",
        f"plan.tp={plan.mesh.size('tp')}",
        f"plan.cp={plan.mesh.size('cp')}",
        f"plan.processes={plan.world_size}",
        f"plan.zero={zero}",
    ]
    sizes += layout_overrides(plan.layout)
    if plan.mesh.size("pp") > 1:
        sizes += [
            f"plan.pp={plan.mesh.size('pp')}",
            f"plan.schedule={plan.schedule}",
            f"plan.chunks={plan.chunks}",
        ]
        sizes += [f"plan.stages={toml_literal(plan.stages)}"] if plan.stages else []
        sizes += [f"plan.stage_ranks={toml_literal(plan.stage_ranks)}"] if plan.stage_ranks else []
    if plan.mesh.size("cp") > 1:
        sizes.append(f"plan.cp_kind={plan.cp_kind}")
    if plan.mesh.size("dp_replicate") > 1:
        sizes.append(f"plan.hsdp={plan.mesh.size('dp_shard')}")
    if plan.servers:
        sizes.append(f"plan.servers={plan.servers}")
    else:
        sizes.append(f"plan.ownership={plan.policy.ownership}")
    if plan.staleness is not None:
        sizes.append(f"plan.staleness={plan.staleness}")
    sizes += [
        f"plan.sync={plan.sync}",
        f"plan.transport={plan.transport}",
        f"plan.offload={plan.offload}",
    ]
    return [*sizes, f"plan.micro_batch={plan.micro_batch}", f"train.global_batch={plan.global_batch}"]
