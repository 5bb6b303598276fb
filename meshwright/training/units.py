"""Values with units as they stand in a run file: "5000 steps", "20B tokens", "10min", "25 MiB".

Owns the value types and their parsers. Knows nothing of torch, of pydantic or of which key holds a value, so
a message starts with the value and the caller puts the key in front of it.
Simplification: K, M, B (or G) scale by powers of 1000 whatever is counted, also where nobody would write it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, cast

from meshwright.errors import ConfigError

StopUnit = Literal["steps", "tokens", "epochs", "seconds"]

_NUMBER = re.compile(r"\s*([0-9][0-9_,]*(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?)\s*(.*?)\s*")
_SCALES = MappingProxyType({"K": 1e3, "k": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12})
_STEPS = MappingProxyType({"step": ("steps", 1.0), "steps": ("steps", 1.0)})
_DURATIONS = MappingProxyType(
    {
        name: ("seconds", factor)
        for names, factor in (
            (("s", "sec", "second", "seconds"), 1.0),
            (("min", "minute", "minutes"), 60.0),
            (("h", "hour", "hours"), 3600.0),
        )
        for name in names
    }
)
_STOPS = MappingProxyType(
    {
        **_STEPS,
        **_DURATIONS,
        "token": ("tokens", 1.0),
        "tokens": ("tokens", 1.0),
        "epoch": ("epochs", 1.0),
        "epochs": ("epochs", 1.0),
    }
)
_SPANS = MappingProxyType({**_STEPS, "%": ("%", 1.0)})
_SAMPLES = MappingProxyType(
    {name: ("samples", 1.0) for name in ("sample", "samples", "sequence", "sequences")},
)
_BYTES = MappingProxyType(
    {
        "b": ("bytes", 1.0),
        "bytes": ("bytes", 1.0),
        "kb": ("bytes", 1e3),
        "mb": ("bytes", 1e6),
        "gb": ("bytes", 1e9),
        "kib": ("bytes", 2.0**10),
        "mib": ("bytes", 2.0**20),
        "gib": ("bytes", 2.0**30),
    }
)
_STOP_EXAMPLES = '"20B tokens", "5000 steps", "2 epochs" or "6h"'


@dataclass(frozen=True)
class StopAt:
    """When a run ends: an amount of optimizer steps, tokens, epochs or seconds of wall time."""

    amount: float
    unit: StopUnit

    def __str__(self) -> str:
        return f"{_plain(self.amount)} {'s' if self.unit == 'seconds' else self.unit}"


@dataclass(frozen=True)
class Span:
    """A part of a run: a number of optimizer steps, or a percentage of all of them."""

    amount: float
    unit: Literal["steps", "%"]

    def num_steps(self, total_steps: int) -> int:
        """Whole optimizer steps of this span in a run of `total_steps`, rounded to the nearest."""
        if self.unit == "steps":
            return int(self.amount)
        return round(total_steps * self.amount / 100.0)

    def __str__(self) -> str:
        return f"{_plain(self.amount)}%" if self.unit == "%" else f"{_plain(self.amount)} steps"


@dataclass(frozen=True)
class EvalEvery:
    """When the held-out data is evaluated: every `num_steps` steps (None: not between) and at the end."""

    num_steps: int | None
    at_end: bool

    def due(self, step: int, *, last: bool) -> bool:
        """Whether to evaluate after optimizer step `step` (counted from 1); `last` marks the final step."""
        if last:
            return self.at_end
        return self.num_steps is not None and step % self.num_steps == 0

    def __str__(self) -> str:
        if self.num_steps is not None:
            return f"{self.num_steps} steps"
        return "end" if self.at_end else "never"


@dataclass(frozen=True)
class SaveEvery:
    """When a checkpoint is written: every so many steps or seconds, and at the end."""

    amount: float
    unit: Literal["steps", "seconds", "end"]

    def __str__(self) -> str:
        return (
            "end"
            if self.unit == "end"
            else f"{_plain(self.amount)} {self.unit[:-1] if self.amount == 1 else self.unit}"
        )


def toml_literal(value: object) -> str:
    """A value as it would be written in TOML (on one line), for messages and for files we write."""
    if isinstance(value, Mapping):
        inner = ", ".join(f"{toml_key(str(key))} = {toml_literal(item)}" for key, item in value.items())
        return f"{{ {inner} }}" if inner else "{}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(toml_literal(item) for item in value)}]"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    return json.dumps(str(value), ensure_ascii=False)


def split_at_commas(text: str) -> list[str]:
    """Parts of "tp=2,stage_ranks=[[0],[1,2]]", at commas outside of brackets and quotes; empty ones are left out."""
    parts, depth, quoted = [""], 0, False
    for character in text:
        quoted ^= character == '"'
        depth += 0 if quoted else (character in "[{") - (character in "]}")
        if character == "," and not depth and not quoted:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts if part.strip()]


def toml_key(key: str) -> str:
    """One part of a TOML key, quoted where it must be."""
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else json.dumps(key, ensure_ascii=False)


def parse_stop_at(value: object) -> StopAt:
    """Parse `train.stop_at`, e.g. "20B tokens" or "10min". Errors: E102 for the unit, E109 for the number."""
    if isinstance(value, StopAt):
        return value
    amount, unit = _measure(value, units=_STOPS, examples=_STOP_EXAMPLES)
    if unit in ("steps", "tokens"):
        _check_whole(value, amount, unit)
    if amount <= 0:
        raise ConfigError(
            "E109", f"{toml_literal(value)}: a run is longer than nothing, e.g. {_STOP_EXAMPLES}"
        )
    return StopAt(_tidy(amount), cast(StopUnit, unit))


def parse_span(value: object) -> Span:
    """Parse a part of a run, e.g. "100 steps" or "20%". Errors: E102 for the unit, E109 for the number."""
    if isinstance(value, Span):
        return value
    amount, unit = _measure(value, units=_SPANS, examples='"100 steps" or "20%"')
    if unit == "%":
        if amount > 100:
            raise ConfigError("E109", f"{toml_literal(value)}: a part of a run is 0% to 100%")
        return Span(_tidy(amount), "%")
    _check_whole(value, amount, unit)
    return Span(_tidy(amount), "steps")


def parse_eval_every(value: object) -> EvalEvery:
    """Parse `train.eval_every`: "100 steps" (and at the end), "end" or "never". Errors: E102, E109."""
    if isinstance(value, EvalEvery):
        return value
    if value in ("end", "never"):
        return EvalEvery(num_steps=None, at_end=value == "end")
    amount, unit = _measure(value, units=_STEPS, examples='"100 steps", "end" or "never"')
    return EvalEvery(num_steps=_at_least_one(value, amount, unit), at_end=True)


def parse_save_every(value: object) -> SaveEvery:
    """Parse `save.every`: "100 steps", "30min" (and at the end), or "end". Errors: E102, E109."""
    if isinstance(value, SaveEvery):
        return value
    if value == "end":
        return SaveEvery(0, "end")
    units = MappingProxyType({**_STEPS, **_DURATIONS})
    amount, unit = _measure(value, units=units, examples='"100 steps", "30min" or "end"')
    if unit == "steps":
        return SaveEvery(_at_least_one(value, amount, unit), "steps")
    if amount <= 0:
        raise ConfigError(
            "E109", f'{toml_literal(value)}: time between checkpoints is more than zero, e.g. "30min"'
        )
    return SaveEvery(_tidy(amount), "seconds")


def parse_steps(value: object) -> int:
    """Parse a number of optimizer steps, e.g. "10 steps", at least one. Errors: E102, E109."""
    amount, unit = _measure(value, units=_STEPS, examples='"10 steps"')
    return _at_least_one(value, amount, unit)


def parse_samples(value: object) -> int:
    """Parse a global batch: 128, "128 sequences" or "64 samples", at least one. Errors: E102, E109."""
    if isinstance(value, int) and not isinstance(value, bool):
        return _at_least_one(value, value, "samples")
    amount, unit = _measure(value, units=_SAMPLES, examples='128, "128 sequences" or "64 samples"')
    return _at_least_one(value, amount, unit)


def parse_seconds(value: object) -> float:
    """Parse a duration, e.g. "300 s", "5min" or "1h", in seconds, more than zero. Errors: E102, E109."""
    amount, _ = _measure(value, units=_DURATIONS, examples='"300 s", "5min" or "1h"')
    if amount <= 0:
        raise ConfigError("E109", f'{toml_literal(value)}: a time limit is more than zero, e.g. "300 s"')
    return amount


def parse_bytes(value: object) -> int:
    """Parse a size, e.g. "25 MiB" or "1 GB", in bytes, at least one. Errors: E102, E109."""
    amount, unit = _measure(value, units=_BYTES, examples='"25 MiB" or "1 GB"')
    return _at_least_one(value, amount, unit)


def _measure(value: object, *, units: Mapping[str, tuple[str, float]], examples: str) -> tuple[float, str]:
    """Split a value into its amount in the canonical unit and the name of that unit."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ConfigError("E109", f"{toml_literal(value)}: write a number with its unit, e.g. {examples}")
    match = _NUMBER.fullmatch(str(value))
    if match is None:
        raise ConfigError("E102", f"{toml_literal(value)}: not a number with a unit. Write {examples}.")
    amount = float(match[1].replace("_", "").replace(",", ""))
    words = match[2].split()
    if len(words) == 2 and words[0] in _SCALES:
        amount *= _SCALES[words.pop(0)]
    if not words or (len(words) == 1 and words[0] in _SCALES and words[0].lower() not in units):
        raise ConfigError("E102", f"{toml_literal(value)}: no unit. Write {examples}.")
    unit = units.get(" ".join(words).lower())
    if unit is None:
        wrong = " ".join(words)
        raise ConfigError("E102", f"{toml_literal(value)}: {wrong!r} is no unit of this. Write {examples}.")
    if not math.isfinite(amount):
        raise ConfigError("E109", f"{toml_literal(value)}: too large a number. Write {examples}.")
    return amount * unit[1], unit[0]


def _check_whole(value: object, amount: float, unit: str) -> None:
    if amount != int(amount):
        raise ConfigError("E109", f"{toml_literal(value)}: {unit} are whole, e.g. {math.ceil(amount)}")


def _at_least_one(value: object, amount: float, unit: str) -> int:
    _check_whole(value, amount, unit)
    if amount < 1:
        raise ConfigError("E109", f"{toml_literal(value)}: at least 1 of {unit}")
    return int(amount)


def _tidy(amount: float) -> float:
    """Whole amounts as `int`, so that 5000 steps print and compare as 5000."""
    return int(amount) if amount == int(amount) else amount


def _plain(amount: float) -> str:
    return str(int(amount)) if amount == int(amount) else repr(amount)
