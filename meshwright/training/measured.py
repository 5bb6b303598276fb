"""What ranks measured of a model's units, as plain data: put together to what all of them decide by.

Owns the median over ranks and the file in which costs are kept. Without torch.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from meshwright.partitioning.unit_costs import UnitCosts


@dataclass(frozen=True)
class Measured:
    """What one rank found of a model.

    Attributes:
        costs: of its units; None where it cannot be cut.
        why_not: what stands in the way then.
        usable: bytes that a rank may use; None: unknown.
        keep_at: the file for costs that were measured now; None for those that were read.
    """

    costs: UnitCosts | None
    why_not: str
    usable: int | None
    keep_at: Path | None = None


def agreed(measured: Sequence[Measured]) -> Measured:
    """Of what several ranks measured at the same time, the median of each number and the least memory; it is kept."""
    first = measured[0]
    usable = [x.usable for x in measured if x.usable is not None]
    costs = [x.costs for x in measured if x.costs is not None]
    found = dataclasses.replace(first, usable=min(usable, default=None))
    if len(costs) < len(measured):
        return found
    assert all(x.samples == costs[0].samples and len(x.units) == len(costs[0].units) for x in costs), (
        "ranks measured other units"
    )
    common = _median_costs(costs)
    if first.keep_at is not None:
        first.keep_at.parent.mkdir(parents=True, exist_ok=True)
        unfinished = first.keep_at.with_suffix(f".{os.getpid()}")
        unfinished.write_text(common.to_json(), encoding="utf-8")
        unfinished.replace(first.keep_at)
    return dataclasses.replace(found, costs=common)


def _median_costs(costs: Sequence[UnitCosts]) -> UnitCosts:
    def median(rows: Sequence[Sequence[float]]) -> tuple[float, ...]:
        return tuple(sorted(values)[len(values) // 2] for values in zip(*rows, strict=True))

    units = tuple(
        dataclasses.replace(
            unit,
            forward=median([x.units[number].forward for x in costs]),
            backward=median([x.units[number].backward for x in costs]),
        )
        for number, unit in enumerate(costs[0].units)
    )
    return dataclasses.replace(costs[0], units=units)
