"""A run folder as plain data: what its files say, and what is not there.

Owns the reading of the folder. Must not import torch, and draws nothing.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.errors import ConfigError
from meshwright.layout.plan import TrainPlan

METRICS, PLAN, CONFIG, RESULT, VERIFY = (
    "metrics.jsonl",
    "plan.lock.json",
    "resolved.toml",
    "result.json",
    "verify.json",
)
TIMELINE = "timeline"
_SETTING = re.compile(r"(?P<key>[^=]+?) = (?P<value>.*?)(?:  # (?P<origin>[^\"']*))?")


@dataclass(frozen=True)
class Setting:
    """One line of the resolved configuration: dotted key, value as TOML, and where the value came from."""

    key: str
    value: str
    origin: str


@dataclass(frozen=True)
class Computed:
    """One computation of a pipeline's rank: what, and from when to when, in seconds since the first of all ranks."""

    action: str
    start: float
    end: float


@dataclass(frozen=True)
class RunData:
    """What a run folder holds.

    Attributes:
        path: the folder.
        steps: lines of `metrics.jsonl`, in order.
        plan: of `plan.lock.json`; None where there is none.
        result: of `result.json`; None where the run has not come to its end.
        verified: of `verify.json`; None where the plan was not verified, or another one was.
        settings: of `resolved.toml`.
        computed: for each place of a pipeline what it computed in the newest step; empty where it was not kept.
    """

    path: Path
    steps: tuple[Mapping[str, Any], ...]
    plan: TrainPlan | None
    result: Mapping[str, Any] | None
    verified: Mapping[str, Any] | None
    settings: tuple[Setting, ...]
    computed: tuple[tuple[Computed, ...], ...] = ()

    def series(self, name: str) -> list[tuple[int, float]]:
        """(step, value) of the steps where the number is known and finite."""
        return [(line["step"], float(line[name])) for line in self.steps if is_number(line.get(name))]


def is_number(value: object) -> bool:
    """Whether a value of a JSON file is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def read_run(path: Path) -> RunData:
    """Read the files of a run folder, as far as they are there.

    Raises:
        ConfigError: E295 where the folder is none of a run; E296 for a file that cannot be read.
    """
    if not any((path / name).is_file() for name in (METRICS, PLAN, CONFIG, RESULT)):
        what = "a folder without a run's files" if path.is_dir() else "not a folder"
        raise ConfigError(
            "E295",
            f"{str(path)!r} is {what} ({METRICS}, {PLAN}, {CONFIG}). Give the folder that `meshwright train` named "
            f"in its first line, e.g. runs/demo.",
        )
    return RunData(
        path=path,
        steps=tuple(_steps(path / METRICS)),
        plan=_plan(path / PLAN),
        result=_object(path / RESULT),
        verified=_verified(path),
        settings=tuple(_settings(path / CONFIG)),
        computed=_computed(path / TIMELINE),
    )


def fingerprint(folder: Path) -> str:
    """Of a run's configuration and plan: a result of verify is of these, and not of what the folder holds later."""
    return hashlib.sha256(
        b"\0".join((_text(folder / name) or "").encode() for name in (CONFIG, PLAN))
    ).hexdigest()


def _verified(folder: Path) -> Mapping[str, Any] | None:
    found = _object(folder / VERIFY)
    return found if found is not None and found.get("fingerprint") == fingerprint(folder) else None


def _text(path: Path) -> str | None:
    if not path.is_file():
        return None
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable(path, str(error)) from error


def _unreadable(path: Path, why: str, *, line: int | None = None) -> ConfigError:
    where = str(path) if line is None else f"{path}:{line}"
    return ConfigError(
        "E296", f"cannot be read: {why}. Restore the file, or move it away to see the rest.", where=where
    )


def _steps(path: Path) -> Iterator[Mapping[str, Any]]:
    for number, line in enumerate((_text(path) or "").splitlines(keepends=True), start=1):
        if not line.endswith("\n"):
            return  # a run that goes on, or died, has written a part of it
        try:
            value = json.loads(line)
        except ValueError as error:
            raise _unreadable(path, str(error), line=number) from error
        if not isinstance(value, dict) or not isinstance(value.get("step"), int):
            raise _unreadable(path, "a line is an object with a whole number `step`", line=number)
        yield value


def _computed(folder: Path) -> tuple[tuple[Computed, ...], ...]:
    """Of all places, counted from the first computation of any."""
    lines = []
    for path in sorted(folder.glob("place-*.json")):
        try:
            lines.append(
                [(str(name), float(start), float(end)) for name, start, end in json.loads(_text(path) or "")]
            )
        except (ValueError, TypeError) as error:
            raise _unreadable(path, str(error)) from error
    zero = min((line[0][1] for line in lines if line), default=0.0)
    return tuple(
        tuple(Computed(name, start - zero, end - zero) for name, start, end in line) for line in lines
    )


def _object(path: Path) -> Mapping[str, Any] | None:
    text = _text(path)
    if text is None:
        return None
    try:
        value = json.loads(text)
    except ValueError as error:
        raise _unreadable(path, str(error)) from error
    if not isinstance(value, dict):
        raise _unreadable(path, "it is no JSON object")
    return value


def _plan(path: Path) -> TrainPlan | None:
    text = _text(path)
    try:
        return None if text is None else TrainPlan.from_json(text)
    except (ValueError, KeyError, TypeError) as error:
        raise _unreadable(path, f"it is no plan ({error})") from error


def _settings(path: Path) -> Iterator[Setting]:
    text = _text(path) or ""
    try:
        tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise _unreadable(path, str(error)) from error
    table = ""
    for line in text.splitlines():
        if line.startswith("["):
            table = line.strip("[] ")
        elif found := _SETTING.fullmatch(line):
            yield Setting(f"{table}.{found['key']}", found["value"], found["origin"] or "not said")
