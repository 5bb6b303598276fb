"""The configuration of a run: defaults, base file, run file and `a.b=c`, each value with its origin.

Owns precedence, the one list of all problems, and every read of the environment outside launching. Knows
nothing of torch or of what the values cause.
Simplification: a value spread over several lines is attributed to the line of its key.
"""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from meshwright.errors import ConfigError, ConfigErrors, MeshwrightError
from meshwright.training.peers import find_peer_name
from meshwright.training.sections import (
    DataConfig,
    LogConfig,
    ModelConfig,
    PlanConfig,
    SaveConfig,
    Section,
    TrainConfig,
)
from meshwright.training.toml_file import TomlFile, read_toml, toml_text
from meshwright.training.units import toml_literal

PRECEDENCE = "default < base < file < a.b=c"
DEFAULT = "default"
COMMAND_LINE = "command line"
_LAUNCH_VARIABLES = (
    "MASTER_ADDR",
    "MASTER_PORT",
    "WORLD_SIZE",
    "RANK",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "SLURM_NTASKS",
    "SLURM_PROCID",
    "OMP_NUM_THREADS",
    "CUDA_VISIBLE_DEVICES",
    "GLOO_SOCKET_IFNAME",
    "NCCL_SOCKET_IFNAME",
)
# Keys that only some choices of another key look at: key -> (that key, choices it matters for).
_ONLY_WITH = MappingProxyType(
    {
        "train.optimizer.momentum": ("train.optimizer.name", ("sgd", "muon")),
        "train.optimizer.betas": ("train.optimizer.name", ("adamw", "adam", "muon")),
        "train.optimizer.eps": ("train.optimizer.name", ("adamw", "adam", "muon")),
        "train.optimizer.adamw_lr": ("train.optimizer.name", ("muon",)),
        "train.optimizer.lr_adjust": ("train.optimizer.name", ("muon",)),
        "train.schedule.decay": ("train.schedule.name", ("wsd",)),
        "train.schedule.final_ratio": ("train.schedule.name", ("cosine", "wsd")),
        "data.overlong": ("data.packing", (False,)),
    }
)


class RunConfig(Section):
    """One run, as six sections."""

    model: ModelConfig = ModelConfig()
    """Which network."""
    data: DataConfig = DataConfig()
    """On which data."""
    train: TrainConfig = TrainConfig()
    """How long and how it learns."""
    plan: PlanConfig = PlanConfig()
    """How it is laid out over devices."""
    save: SaveConfig = SaveConfig()
    """Where it is kept."""
    log: LogConfig = LogConfig()
    """What is written about it."""


def _keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, Section):
            yield from _keys(kind, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


# All dotted keys of a run file in the order of the sections, and the names of the tables that hold them.
KNOWN_KEYS = tuple(_keys(RunConfig))
_TABLES = frozenset(key.rsplit(".", depth)[0] for key in KNOWN_KEYS for depth in range(1, key.count(".") + 1))


@dataclass(frozen=True)
class Resolved:
    """A configuration with the origin of every value.

    Attributes:
        config: the validated values.
        origins: dotted key -> "default", "run.toml:14", "command line" or what built it in.
        source: the run file, or None.
        warnings: texts with a W-code about settings that have no effect.
    """

    config: RunConfig
    origins: Mapping[str, str]
    source: Path | None = None
    warnings: tuple[str, ...] = ()

    def __reduce__(self) -> tuple[object, ...]:
        # A mapping proxy cannot be pickled, and workers get their configuration by pickle.
        return (_rebuild, (self.config, dict(self.origins), self.source, self.warnings))

    def values(self) -> dict[str, object]:
        """Dotted key -> value as it stands in a TOML file (None: not set), in the order of the sections."""
        return values_of(self.config)

    def as_toml(self) -> str:
        """A run file that gives this configuration again; each line's comment names the value's origin."""
        return toml_text(self.values(), self.origins)


def values_of(config: RunConfig) -> dict[str, object]:
    """Dotted key -> value as it stands in a TOML file (None: not set), in the order of the sections."""
    tree = config.model_dump(mode="json")
    return {key: _at(tree, key) for key in KNOWN_KEYS}


def _rebuild(
    config: RunConfig, origins: dict[str, str], source: Path | None, warnings: tuple[str, ...]
) -> Resolved:
    return Resolved(config, MappingProxyType(origins), source, warnings)


def launch_environment() -> dict[str, str]:
    """The variables of the environment that decide where and how processes meet, as far as they are set."""
    return {name: os.environ[name] for name in _LAUNCH_VARIABLES if name in os.environ}


def default_cache_dir() -> Path:
    """The user's cache folder for tokenised data: `$XDG_CACHE_HOME/meshwright` or `~/.cache/meshwright`."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "meshwright"


def load_config(
    path: Path | None,
    overrides: Sequence[str] = (),
    *,
    built_in: Mapping[str, Mapping[str, object]] | None = None,
    built_in_name: str = "built in",
) -> Resolved:
    """Read and check a run's configuration: default < built in < base < file < a.b=c.

    Args:
        path: the run file, or None for defaults and overrides alone.
        overrides: texts `a.b=c`; c is read as a TOML value, else taken as a bare string.
        built_in: sections with values that a command brings itself, e.g. of the demo.
        built_in_name: their origin as it is shown.

    Returns:
        The configuration, frozen, with the origin of every value.

    Raises:
        ConfigErrors: all problems in one list: E100 (file, syntax), E101 (unknown key), E102 (unit),
            E108 (data), E109 (type or value), E110 (not built yet).
    """
    problems: list[MeshwrightError] = []
    leaves: dict[str, tuple[object, str]] = {}
    name = path.stem if path else "run"
    leaves["data.cache_dir"] = (str(default_cache_dir()), DEFAULT)
    leaves["save.dir"] = (f"runs/{name}", DEFAULT)
    for key, value in _flatten(built_in or {}):
        leaves[key] = (value, built_in_name)
    for document in _chain(path, problems):
        for key, value in _flatten(document.values):
            leaves[key] = (value, document.place(key))
    for text in overrides:
        override = _parse_override(text, problems)
        leaves |= {key: (value, COMMAND_LINE) for key, value in override}
    _set_aside_unknown(leaves, problems)
    config = _validate(leaves, problems)
    if problems or config is None:
        raise ConfigErrors(problems)
    origins = {key: leaves[key][1] if key in leaves else DEFAULT for key in KNOWN_KEYS}
    resolved = Resolved(config, MappingProxyType(origins), path)
    return Resolved(config, resolved.origins, path, _no_effect(resolved))


def _flatten(tree: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Leaves of nested tables; a known key's own table (e.g. plan.recompute) is one leaf."""
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and key not in KNOWN_KEYS and (value or key in _TABLES):
            yield from _flatten(value, f"{key}.")
        else:
            yield key, value


def _at(tree: Mapping[str, object], key: str) -> object:
    node: object = tree
    for part in key.split("."):
        assert isinstance(node, Mapping), f"{key} has no table at {part}"
        node = node[part]
    return node


def _chain(path: Path | None, problems: list[MeshwrightError]) -> list[TomlFile]:
    """The run file and its bases, the deepest base first."""
    documents: list[TomlFile] = []
    seen: set[Path] = set()
    named_by = ""
    while path is not None:
        if path.resolve() in seen:
            problems.append(
                ConfigError("E100", f"base = {str(path)!r} closes a circle; remove one", where=named_by)
            )
            break
        seen.add(path.resolve())
        try:
            document = read_toml(path, named_by=named_by)
        except ConfigError as error:
            problems.append(error)
            break
        documents.insert(0, document)
        base = document.values.pop("base", None)
        named_by = document.place("base")
        if base is not None and not isinstance(base, str):
            text = f"base = {toml_literal(base)}: one file name, relative to this file"
            problems.append(ConfigError("E109", text, where=named_by))
            break
        path = path.parent / base if base is not None else None
    return documents


def _parse_override(text: str, problems: list[MeshwrightError]) -> list[tuple[str, object]]:
    key, equals, value = text.partition("=")
    key, value = key.strip(), value.strip()
    if not equals or not key or not value:
        example = f"{key.lstrip('-') or 'plan.zero'}=1"
        message = f"{text!r} is not of the form a.b=c; write e.g. {example} (with the value you want)"
        problems.append(ConfigError("E100", message, where=COMMAND_LINE))
        return []
    try:
        parsed = tomllib.loads(f"value = {value}")
    except tomllib.TOMLDecodeError:
        parsed = {"value": value}
    # A text with a line break could hold more than one key; it is then a bare string.
    tree: object = parsed["value"] if list(parsed) == ["value"] else value
    for part in reversed(key.split(".")):
        tree = {part: tree}
    assert isinstance(tree, dict), "an override has a key"
    return list(_flatten(tree))


def _set_aside_unknown(leaves: dict[str, tuple[object, str]], problems: list[MeshwrightError]) -> None:
    """Move unknown keys and values in the place of a table from `leaves` to `problems`."""
    for key in [key for key in leaves if key not in KNOWN_KEYS]:
        value, origin = leaves.pop(key)
        if key in _TABLES:
            fields = ", ".join(item for item in KNOWN_KEYS if item.startswith(f"{key}."))
            text = f"{key} = {toml_literal(value)}: {key} is a table; set one of {fields}"
            problems.append(ConfigError("E109", text, where=origin))
        else:
            problems.append(ConfigError("E101", _unknown_key(key), where=origin))


def _unknown_key(key: str) -> str:
    row = find_peer_name(key)
    if row is not None:
        return f"{key!r} is {row.peer}'s name. Here: {row.here}"
    last = key.rpartition(".")[2]
    by_name = {item.rpartition(".")[2]: item for item in reversed(KNOWN_KEYS)}
    same_name = [item for item in KNOWN_KEYS if item.rpartition(".")[2] == last]
    near = same_name or difflib.get_close_matches(key, KNOWN_KEYS, 1, 0.75)
    near = near or [by_name[name] for name in difflib.get_close_matches(last, by_name, 1, 0.7)]
    if near:
        return f"unknown key {key!r}. Did you mean {near[0]!r}?"
    return f"unknown key {key!r}. `meshwright config show` lists all keys."


def _validate(leaves: Mapping[str, tuple[object, str]], problems: list[MeshwrightError]) -> RunConfig | None:
    tree: dict[str, object] = {}
    for key, (value, _) in leaves.items():
        node = tree
        *tables, last = key.split(".")
        for part in tables:
            child = node.setdefault(part, {})
            assert isinstance(child, dict), f"{key}: unknown keys were set aside before"
            node = child
        node[last] = value
    try:
        return RunConfig.model_validate(tree)
    except ValidationError as error:
        problems.extend(_translate(detail, leaves) for detail in error.errors(include_url=False))
        return None


def _translate(detail: ErrorDetails, leaves: Mapping[str, tuple[object, str]]) -> ConfigError:
    """One finding of pydantic as our error: code, place, key = value, rule."""
    context = detail.get("ctx", {})
    parts = [str(part) for part in (*detail["loc"], context.get("key")) if part is not None and part != ""]
    # Below a known key pydantic goes on with list indices and union members.
    while len(parts) > 1 and ".".join(parts) not in KNOWN_KEYS:
        parts.pop()
    key = ".".join(parts)
    value, origin = leaves.get(key, (detail["input"], DEFAULT))
    where = "" if origin == DEFAULT else origin
    if detail["type"][0] == "E" and detail["type"][1:].isdigit():
        return ConfigError(detail["type"], f"{key} = {detail['msg']}", where=where)
    rule = detail["msg"].replace("Input should be", "must be")
    near = difflib.get_close_matches(str(value), str(context.get("expected", "")).split("'"), 1)
    hint = f". Did you mean {near[0]!r}?" if near and isinstance(value, str) else ""
    return ConfigError("E109", f"{key} = {toml_literal(value)}: {rule}{hint}", where=where)


def _no_effect(resolved: Resolved) -> tuple[str, ...]:
    """A W-text for every key that was set but that the chosen optimizer, schedule or packing never reads."""
    values = resolved.values()
    return tuple(
        f"W101 {resolved.origins[key]}  {key} = {toml_literal(values[key])} has no effect with "
        f"{other} = {toml_literal(values[other])}; it counts for {', '.join(map(toml_literal, choices))}"
        for key, (other, choices) in _ONLY_WITH.items()
        if resolved.origins[key] != DEFAULT and values[other] not in choices
    )
