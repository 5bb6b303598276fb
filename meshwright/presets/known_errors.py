"""How far predicted step times were off on runs of each machine that others published: what stands beside a prediction.

Owns the figures; `docs/simulation.md` says how they were measured (publishers left out in turn). Rounded up.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StepError:
    """Attributes: of published runs half are within `median` of the predicted time, 9 of 10 within `high`."""

    median: float
    high: float


_A100, _H100 = StepError(0.08, 0.19), StepError(0.07, 0.16)
_KNOWN = {"a100-40": _A100, "a100-80": _A100, "h100": _H100, "h100-96": _H100}


def step_error(machine: str) -> StepError | None:
    """Of a machine by its name; None where too few published runs are known."""
    return _KNOWN.get(machine)
