"""What earlier runs on this host taught about predictions: a ratio measured / predicted for each part of a step.

A run tells its whole time only. Each part takes the blame by its share of the prediction, and half of it: with P the
sum of predicted parts p and M what was measured, the ratio of a part is multiplied by 1 + (M / P - 1) x p / P / 2, kept
within a factor of two. So runs of different plans, whose parts have different shares, tell them apart in time, and one
odd run moves little. Owns the rule and the file; the same runs in the same order give the same ratios.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path

from meshwright.errors import ConfigError
from meshwright.presets.host import Learned

_DAMPING = 0.5
_LEAST, _MOST = 0.5, 2.0
# Fewer steps have no steady median.
FEWEST_STEPS = 5
_FORMAT = 1
# Ratio to the parts of a step that it multiplies.
PARTS: Mapping[str, tuple[str, ...]] = {
    "compute": ("compute",),
    "waiting": ("bubble",),
    "exchange": ("tensor", "context", "pipeline", "weights", "gradients"),
    "update": ("optimizer",),
}


def updated(
    learned: Learned,
    parts: Mapping[str, float],
    seconds: float,
    *,
    memory: tuple[float, float],
) -> Learned:
    """The ratios after one more run.

    Args:
        learned: before; the prediction was made with it.
        parts: predicted seconds of a step, by part.
        seconds: of a step, measured.
        memory: bytes of the fullest rank, predicted and measured.
    """
    total = sum(parts[name] for names in PARTS.values() for name in names)
    wrong = seconds / total - 1
    changes = {
        ratio: _within(
            getattr(learned, ratio) * (1 + _DAMPING * wrong * sum(parts[name] for name in names) / total)
        )
        for ratio, names in PARTS.items()
    }
    changes["memory"] = _within(learned.memory * (1 + _DAMPING * (memory[1] / memory[0] - 1)))
    return replace(learned, runs=learned.runs + 1, **changes)


def _within(ratio: float) -> float:
    return min(_MOST, max(_LEAST, ratio))


def experience_file(host_file: Path) -> Path:
    """Where it is kept: beside what was measured of the host."""
    return host_file.with_name(host_file.stem + "-learned.json")


def read_experience(path: Path) -> Learned:
    """What the file says; without one, nothing was learned.

    Raises:
        ConfigError: E299 for a file that cannot be read.
    """
    if not path.is_file():
        return Learned()
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        if value.pop("format") != _FORMAT:
            raise ValueError("another version")
        return Learned(**value)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            "E299", f"{path} cannot be read: {error}. Remove it: it is learned again"
        ) from error


def keep_experience(path: Path, learned: Learned) -> None:
    """Write it as a whole."""
    whole = path.with_suffix(f".{os.getpid()}")
    whole.write_text(json.dumps({"format": _FORMAT, **asdict(learned)}, indent=1) + "\n", encoding="utf-8")
    whole.replace(path)
