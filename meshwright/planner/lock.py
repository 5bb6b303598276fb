"""plan.lock.json: the plans of a search with what they were made for.

Owns the file's form. The fingerprint is of the model's shape, its batch and the cluster; what the cost model says is
in the file itself (`take.py` compares it with what it says now).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from meshwright.errors import ConfigError, writing
from meshwright.planner.plans import Plans
from meshwright.planner.request import Request
from meshwright.planner.stages import stage_cuts
from meshwright.presets import find_machine
from meshwright.presets.host import profile_of
from meshwright.presets.models import ModelPreset
from meshwright.simulation.job import Cluster, Workload, on_host

LOCK_NAME = "plan.lock.json"
_FORMAT = 2
_KEYS = {
    "plans",
    "model",
    "seq_len",
    "global_batch",
    "cluster",
    "fixed",
    "headroom",
    "rejected",
    "fingerprint",
}
# Of a preset, what changes no price.
_SILENT = ("aliases", "source", "name", "rope_theta", "norm_epsilon")


def fingerprints(request: Request) -> dict[str, str]:
    """Of what a plan is for: the model's shape, the data's, and the cluster."""
    work = request.work
    # What was measured of this host says itself when a price has changed.
    cluster = {key: value for key, value in cluster_value(request.cluster).items() if key != "host"}
    shape = {key: value for key, value in asdict(work.model).items() if key not in _SILENT}
    parts = {
        "model": shape,
        "data": {"seq_len": work.seq_len, "global_batch": work.global_batch},
        "cluster": {**cluster, "headroom": request.headroom},
        "fixed": {key: request.fixed[key] for key in sorted(request.fixed)},
    }
    return {name: _digest(part) for name, part in parts.items()}


def _digest(value: object) -> str:
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def save_lock(path: Path, found: Plans, *, source: str) -> None:
    """Write the plans, best first.

    Raises:
        ConfigError: E297 where it cannot be written.
    """
    text = json.dumps(lock_value(found, source=source), indent=1) + "\n"
    with writing(path):
        path.write_text(text, encoding="utf-8")


def lock_value(found: Plans, *, source: str) -> dict[str, object]:
    """The plans as the file has them; `source` is what the model was read from."""
    request = found.request
    return {
        "format": _FORMAT,
        "source": source,
        "fingerprint": fingerprints(request),
        "model": asdict(request.work.model),
        "seq_len": request.work.seq_len,
        "global_batch": request.work.global_batch,
        "cluster": cluster_value(request.cluster),
        "fixed": dict(request.fixed),
        "headroom": request.headroom,
        "stages": [asdict(stage) for stage in stage_cuts(request, found.best.layout)],
        **found.to_json(),
    }


def cluster_value(cluster: Cluster) -> dict[str, object]:
    """A cluster as the file has it."""
    return {
        "machine": cluster.machine.name,
        "devices": cluster.num_devices,
        "devices_per_node": cluster.devices_per_node,
        "nic_bytes_per_second": cluster.nic_bytes_per_second,
        "oversubscription": cluster.oversubscription,
        "pod_devices": cluster.pod_devices,
        **({} if cluster.host is None else {"host": cluster.host.to_value()}),
    }


def cluster_of(lock: Mapping[str, object]) -> Cluster:
    """The cluster that the plans were made for."""
    value = lock["cluster"]
    assert isinstance(value, dict), "a table of a lock file"
    rest = {key: part for key, part in value.items() if key not in ("machine", "devices", "host")}
    cluster = Cluster(find_machine(value["machine"]), value["devices"], **rest)
    return cluster if "host" not in value else on_host(cluster, profile_of(value["host"]))


def work_of(lock: Mapping[str, object]) -> Workload:
    """The model and the batch that the plans were made for."""
    model, seq_len, batch = lock["model"], lock["seq_len"], lock["global_batch"]
    assert isinstance(model, dict), "a table of a lock file"
    assert isinstance(seq_len, int), "a number of a lock file"
    assert isinstance(batch, int), "a number of a lock file"
    preset = ModelPreset(**{**model, "aliases": tuple(model["aliases"])})
    return Workload(preset, seq_len, batch)


def read_lock(path: Path) -> dict[str, object]:
    """What `save_lock` wrote.

    Raises:
        ConfigError: E289 where there is no such file, or it has another form.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            "E289", f"{path} cannot be read: {error}; make one with `meshwright plan`"
        ) from error
    is_one = isinstance(value, dict) and value.get("format") == _FORMAT and set(value) >= _KEYS
    if not is_one or not value["plans"]:
        raise ConfigError(
            "E289", f"{path} is no plan of this version (format {_FORMAT}); run `meshwright plan` again"
        )
    return value
