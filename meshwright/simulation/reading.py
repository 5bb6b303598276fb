"""What users write about a job, read: clusters (`64xh100` or a file), plans (`tp=8,pp=4`), run files.

Owns the keys of a plan that can be priced: those of `[plan]` in a run file, which need not be built yet in training.
"""

from __future__ import annotations

import difflib
import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import get_args

from meshwright.errors import ConfigError
from meshwright.presets.machines import Machine, find_machine
from meshwright.simulation.job import Attention, Cluster, ContextKind, Layout, Recompute, Schedule

# Keys of a plan, and the field of a layout where its name is another.
_KEYS = {
    **{key: key for key in ("dp", "tp", "pp", "cp", "zero", "sequence_parallel", "schedule", "chunks")},
    "half_layers": "half_layers",
    **{key: key for key in ("recompute", "micro_batch", "precision", "attention", "cp_kind")},
    "hsdp": "shard",
}
# Keys of a run file's plan that change no figure here.
_SILENT = (
    "mode",
    "lock",
    "processes",
    "transport",
    "sync",
    "cluster",
    "memory_headroom",
    "bucket_bytes",
    "layout",
)
_WORDS: dict[str, tuple[str, ...]] = {
    "schedule": get_args(Schedule),
    "recompute": get_args(Recompute),
    "attention": get_args(Attention),
    "cp_kind": get_args(ContextKind),
    "precision": ("bf16", "fp16", "fp32", "fp8", "fp8-rows"),
}
_MOST = {"zero": 3}
_ONE_DEVICE = Layout()


def parse_cluster(text: str) -> Cluster:
    """The cluster that `text` names.

    Args:
        text: COUNTxMACHINE, or a TOML file with machine, devices, and optionally devices_per_node,
            nic_gbit_per_second (of a node's cards together), oversubscription, pod_devices.

    Raises:
        ConfigError: E282 for another form, E104 for an unknown machine.
    """
    if text.endswith(".toml"):
        return _from_file(Path(text))
    match = re.fullmatch(r"(\d+)\s*x\s*([\w.-]+)", text.strip())
    if not match or int(match[1]) == 0:
        raise ConfigError(
            "E282", f"cluster {text!r}: write COUNTxMACHINE, e.g. 64xh100, or a file that ends in .toml"
        )
    return make_cluster(find_machine(match[2]), int(match[1]))


def make_cluster(machine: Machine, num_devices: int, *, devices_per_node: int = 0) -> Cluster:
    """`num_devices` of a machine, with the network that is typical for it."""
    # Processes are of one host unless a file says otherwise.
    in_node = devices_per_node or (num_devices if machine.name == "cpu" else machine.devices_per_node)
    link = machine.links.get("network") or machine.links.get("node")
    assert link is not None, f"{machine.name} has no link"
    return Cluster(machine, num_devices, in_node, in_node * link.bandwidth_bytes_per_second)


def _from_file(path: Path) -> Cluster:
    values = _read_toml(path)
    known = {
        "machine",
        "devices",
        "devices_per_node",
        "nic_gbit_per_second",
        "oversubscription",
        "pod_devices",
    }
    unknown = sorted(set(values) - known)
    if unknown or not {"machine", "devices"} <= set(values):
        what = f"unknown {', '.join(unknown)}" if unknown else "machine or devices is missing"
        raise ConfigError("E282", f"{path}: {what}; keys: {', '.join(sorted(known))}")
    machine = find_machine(str(values["machine"]))
    made = make_cluster(
        machine,
        _whole(values, "devices", path, least=1),
        devices_per_node=_whole(values, "devices_per_node", path),
    )
    own = made.nic_bytes_per_second
    return replace(
        made,
        nic_bytes_per_second=_rate(values, "nic_gbit_per_second", path, own * 8 / 1e9) * 1e9 / 8,
        oversubscription=_rate(values, "oversubscription", path, 1.0),
        pod_devices=_whole(values, "pod_devices", path),
    )


def _whole(values: Mapping[str, object], key: str, path: Path, *, least: int = 0) -> int:
    value = values.get(key, 0)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(
            "E282", f"{path}: {key}={value!r} is not a whole number of at least {least}; write e.g. 8"
        )
    return value


def _rate(values: Mapping[str, object], key: str, path: Path, default: float) -> float:
    value = values.get(key, default)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise ConfigError("E282", f"{path}: {key}={value!r} is not a number above 0; write e.g. 2 or 0.5")
    return float(value)


def _read_toml(path: Path) -> dict[str, object]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise ConfigError("E100", f"{path} cannot be read: {error}; check the path and its TOML") from error


def parse_layout(text: str, *, start: Layout = _ONE_DEVICE, num_devices: int = 0) -> Layout:
    """`start` with the keys of `text` ("tp=8,pp=4,zero=1"); dp is what is left of `num_devices` unless given.

    Raises:
        ConfigError: E280 for degrees that do not divide the devices, E283 for an unknown key or an illegal value.
    """
    return layout_of(plan_values(text), start=start, num_devices=num_devices)


def plan_values(text: str) -> dict[str, object]:
    """ "tp=8,pp=4" as a table of keys, values unchecked.

    Raises:
        ConfigError: E283 for a key that is written twice, or keys that no comma separates.
    """
    found: dict[str, object] = {}
    for part in filter(str.strip, text.split(",")):
        key, _, value = (word.strip() for word in part.partition("="))
        if key in found or "=" in value:
            what = f"has {key!r} twice" if key in found else f"has no comma within {part.strip()!r}"
            raise ConfigError("E283", f"plan {text!r} {what}; write each key once, e.g. tp=8,pp=4")
        found[key] = _value(value)
    return found


def _value(text: str) -> object:
    if text in ("true", "false"):
        return text == "true"
    return int(text) if text.isdigit() else text.strip('"')


def layout_of(values: Mapping[str, object], *, start: Layout = _ONE_DEVICE, num_devices: int = 0) -> Layout:
    """As `parse_layout`, from a table of keys, e.g. `[plan]` of a run file."""
    changes: dict[str, object] = {}
    for key, value in values.items():
        if key in _SILENT:
            continue
        changes[_field(key)] = _checked(key, value)
    layout = replace(start, **changes)  # type: ignore[arg-type]
    if layout.pp > 1 and layout.schedule == "serial" and "schedule" not in changes:
        layout = replace(layout, schedule="1f1b")
    if layout.schedule == "interleaved" and layout.chunks == 1:
        layout = replace(layout, chunks=2)
    # hsdp counts along dp; cp ranks share as well.
    layout = replace(layout, shard=layout.shard * layout.cp)
    rest = layout.tp * layout.pp * layout.cp
    if "dp" in changes or not num_devices:
        return layout
    if num_devices % rest:
        raise ConfigError(
            "E280",
            f"tp={layout.tp} x pp={layout.pp} x cp={layout.cp} = {rest} does not divide the {num_devices} devices of "
            f"the cluster, so no dp fills it; take degrees whose product is a divisor of {num_devices}",
        )
    return replace(layout, dp=num_devices // rest)


def _field(key: str) -> str:
    if key in _KEYS:
        return _KEYS[key]
    near = difflib.get_close_matches(key, _KEYS, n=1, cutoff=0.5)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise ConfigError("E283", f"a plan that is priced has no key {key!r}.{hint} Known: {', '.join(_KEYS)}")


def _checked(key: str, value: object) -> object:
    words = _WORDS.get(key)
    if words is not None:
        if value not in words:
            raise ConfigError(
                "E283", f"plan.{key}={value!r} cannot be priced; take one of {', '.join(words)}"
            )
        return value
    if key in ("sequence_parallel", "half_layers"):
        if not isinstance(value, bool):
            raise ConfigError("E283", f"plan.{key}={value!r}: write true or false")
        return value
    least = 0 if key in ("zero", "hsdp") else 1
    most = _MOST.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < least or (most and value > most):
        upto = f"{least} to {most}" if most else f"a whole number of at least {least}"
        raise ConfigError("E283", f"plan.{key}={value!r}: write {upto}")
    return value


def read_run(path: Path) -> dict[str, dict[str, object]]:
    """The sections of a run file, unchecked: `simulate` prices plans that training does not run yet.

    Raises:
        ConfigError: E100 where it cannot be read.
    """
    return {name: dict(part) for name, part in _read_toml(path).items() if isinstance(part, dict)}
