"""From a run's sections to a question for the planner: model, batch, cluster, and what is fixed.

Owns which keys of `[plan]` fix something that is searched. `plan`, `train` and questions about a lock file ask alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Protocol

from meshwright.errors import ConfigError
from meshwright.planner.request import DEFAULT_HEADROOM, Request, make_request
from meshwright.presets import find_model
from meshwright.presets.hf_config import read_hf_config
from meshwright.presets.models import ModelPreset
from meshwright.simulation.job import Cluster, Workload
from meshwright.simulation.reading import parse_cluster

# Keys of a run's plan that fix nothing that is searched here.
_NOT_FIXED = (
    "mode",
    "lock",
    "processes",
    "cluster",
    "memory_headroom",
    "transport",
    "bucket_bytes",
    "layout",
)
# Those that decide how a run is carried out in ways that are not priced: a plan with them is the user's.
_NOT_PRICED = ("ownership", "offload", "servers", "staleness", "stages", "sync")
_DEFAULT = "default"
_UNITS = {"--batch": ("", "sequences", "sequence", "samples", "sample"), "--seq": ("", "tokens")}
Sections = Mapping[str, Mapping[str, object]]


class Resolved(Protocol):
    """A configuration with origins, as `training/config.py` makes it."""

    @property
    def origins(self) -> Mapping[str, str]:
        """Dotted key to where its value came from."""

    def values(self) -> dict[str, object]:
        """Dotted key to value."""


def sections_of(resolved: Resolved) -> Sections:
    """What a run says: of its plan and model the keys that somebody set, of the rest all."""
    found: dict[str, dict[str, object]] = {}
    for key, value in resolved.values().items():
        section, _, name = key.partition(".")
        is_set = resolved.origins[key] != _DEFAULT or section not in ("plan", "model") or name == "source"
        if is_set and value is not None and "." not in name:
            found.setdefault(section, {})[name] = value
    return found


def ask(
    sections: Sections,
    given: Mapping[str, object],
    *,
    seq: int | None = None,
    batch: str | None = None,
    cluster: Cluster | None = None,
    model: ModelPreset | None = None,
) -> Request:
    """The question.

    Args:
        sections: of a run; `model.source` at least.
        given: keys of a plan that count more than those of the run, with cluster and memory_headroom.
        seq: tokens of a sequence, instead of the run's or the model's longest.
        batch: sequences of a step, instead of the run's or one a device.
        cluster: where no key names one.
        model: a shape that `sections` do not say.

    Raises:
        ConfigError: E104 for an unknown model or machine, E282 without a cluster, E283, E285, E287.
        PlanError: E286.
    """
    keys = {**sections.get("plan", {}), **given}
    work, where = job_of(sections, keys, seq=seq, batch=batch, cluster=cluster, model=model)
    for key in _NOT_PRICED:
        if keys.get(key) not in (None, "flat", "none", "native"):
            raise ConfigError(
                "E283",
                f"plan.{key} = {keys[key]!r} is not priced: leave it out, or write the whole plan and "
                'plan.mode = "given"',
            )
    fixed = {key: value for key, value in keys.items() if key not in (*_NOT_FIXED, *_NOT_PRICED)}
    free = keys.get("memory_headroom")
    return make_request(work, where, fixed, headroom=DEFAULT_HEADROOM if free is None else part_of(free))


def job_of(
    sections: Sections,
    keys: Mapping[str, object],
    *,
    seq: int | None = None,
    batch: str | None = None,
    cluster: Cluster | None = None,
    model: ModelPreset | None = None,
) -> tuple[Workload, Cluster]:
    """The model with its batch, and where; `keys` are of a plan, the rest is as for `ask`."""
    where = cluster or parse_cluster(_cluster_text(keys))
    model = model or model_of(sections.get("model", {}))
    if not model.num_heads or model.num_experts:
        what = f"a {model.family}" if not model.num_heads else "a model with experts"
        raise ConfigError(
            "E283",
            f"{model.name} is {what}: only dense transformers are priced and planned; take one of their presets, e.g. "
            "llama-3.1-8b, or the config.json of one",
        )
    length = seq or sections.get("data", {}).get("seq_len") or model.max_seq_len
    size = batch or sections.get("train", {}).get("global_batch") or where.num_devices
    return Workload(model, _number(length, "--seq"), _number(size, "--batch")), where


def _cluster_text(keys: Mapping[str, object]) -> str:
    """`plan.cluster`; without one, the processes of the run on this machine."""
    if keys.get("cluster"):
        return str(keys["cluster"])
    if not keys.get("processes"):
        raise ConfigError(
            "E282",
            "there is no --cluster, e.g. --cluster 64xh100 (in Python cluster='64xh100'), or plan.cluster or "
            "plan.processes in the run file",
        )
    return f"{keys['processes']}xcpu"


def model_of(section: Mapping[str, object]) -> ModelPreset:
    """The shape of `model.source`, with the sizes that the section changes.

    Raises:
        ConfigError: E104 for an unknown preset, E283 for a source without a shape, E287.
    """
    name = str(section.get("source", ""))
    if name.startswith("hf:"):
        model = read_hf_config(Path(name.removeprefix("hf:")))
    elif name.startswith("py:"):
        raise ConfigError("E283", f"model.source = {name!r} has no shape that is known without running it")
    else:
        model = find_model(name.removeprefix("preset:"))
    sizes = {item.name for item in fields(ModelPreset) if item.type == "int"}
    changes = {key: value for key, value in section.items() if key in sizes}
    return replace(model, **changes) if changes else model  # type: ignore[arg-type]


def _number(value: object, option: str) -> int:
    number, _, unit = str(value).strip().partition(" ")
    if not number.isdigit() or int(number) == 0 or unit.strip() not in _UNITS[option]:
        example = '512 or "512 sequences"' if option == "--batch" else "8192"
        raise ConfigError("E283", f"{option}={value!r}: write a whole number, e.g. {example}")
    return int(number)


def part_of(value: object) -> float:
    """ "10%" or 0.1 as a number; E285 for what is neither."""
    text = str(value).strip()
    try:
        return float(text[:-1]) / 100 if text.endswith("%") else float(text)
    except ValueError as error:
        raise ConfigError("E285", f'memory_headroom={text!r}: write e.g. "10%" or 0.1') from error
