"""Days and dollars of a run: tokens over the predicted rate, devices times hours times a price.

A price is the user's; none is guessed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from meshwright.errors import ConfigError
from meshwright.planner.request import Request
from meshwright.simulation.prediction import Prediction

_DAY = 86400.0
_UNITS = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}


@dataclass(frozen=True)
class Cost:
    """Attributes: steps; days of training without pauses; device hours; dollars, None without a price."""

    steps: float
    days: float
    device_hours: float
    dollars: float | None


def parse_tokens(text: str, *, name: str = "--tokens") -> float:
    """ "100B", "300B tokens", "1.5T" as a number; `name` is what an error calls it.

    Raises:
        ConfigError: E102 for another form.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMBT]?)(?:\s*tokens)?\s*", text, re.IGNORECASE)
    if not match or not float(match[1]):
        raise ConfigError("E102", f'{name}={text!r}: write a number with a unit, e.g. "100B" or "1.5T"')
    return float(match[1]) * _UNITS[match[2].upper()]


def cost_of(plan: Prediction, request: Request, tokens: float, price: float | None) -> Cost:
    """What training on `tokens` takes.

    Args:
        plan: with its step time.
        request: its batch and devices.
        tokens: of the whole run.
        price: dollars of a device and hour.
    """
    steps = tokens / (request.work.global_batch * request.work.seq_len)
    days = steps * plan.step.total / _DAY
    hours = days * 24 * request.cluster.num_devices
    return Cost(steps, days, hours, None if price is None else hours * price)
