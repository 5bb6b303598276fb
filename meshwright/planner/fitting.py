"""What would fit where nothing does: fewer things fixed, more devices, or devices with more memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from meshwright.planner.request import Request
from meshwright.planner.search import DOES_NOT_FIT, Wanted, search
from meshwright.planner.standing import Priced
from meshwright.presets.machines import MACHINES

_MOST_DOUBLINGS = 12
_GIB = 2**30


def what_would_fit(request: Request, smallest: Priced | None, rejected: Mapping[str, int]) -> str:
    """The text of E301: what is needed, and the changes that fit.

    Args:
        request: the question without an answer.
        smallest: the layout with the least memory; None where none was legal.
        rejected: reasons of refusals.
    """
    usable = request.usable_bytes / _GIB
    if smallest is None or not rejected.get(DOES_NOT_FIT):
        reasons = ", ".join(f"{reason} ({count})" for reason, count in sorted(rejected.items()))
        text = f"no layout is legal on {request.cluster.num_devices} devices: {reasons}"
    else:
        text = (
            f"does not fit: the smallest layout needs {smallest.bytes / _GIB:.1f} of {usable:.1f} GiB usable "
            f"({request.cluster.machine.name} less {100 * request.headroom:.0f} %)"
        )
    changes = [change for change in (_unfixed(request), _more(request), _larger(request)) if change]
    return f"{text}. Changes that fit: {' · '.join(changes) or 'none was found; take a smaller model'}"


def _unfixed(request: Request) -> str:
    """Each fixed key that alone stands in the way."""
    found = []
    for key in request.fixed:
        rest = {name: value for name, value in request.fixed.items() if name != key}
        if _fits(replace(request, fixed=rest)):
            found.append(f"without plan.{key}={request.fixed[key]}")
    if not found and len(request.fixed) > 1 and _fits(replace(request, fixed={})):
        found.append("with nothing fixed")
    return " · ".join(found)


def _more(request: Request) -> str:
    """The least power of two times the devices that fits; the batch grows where it must."""
    if "dp" in request.fixed and len({"tp", "pp", "cp"} & set(request.fixed)) == 3:
        return ""
    total = request.cluster.num_devices
    for doublings in range(1, _MOST_DOUBLINGS + 1):
        count = total * 2**doublings
        if _fits(replace(request, cluster=replace(request.cluster, num_devices=count))):
            return f"{count} devices"
    return ""


def _larger(request: Request) -> str:
    """The machine with the least memory that fits."""
    has = request.cluster.machine.memory_bytes
    more = sorted(
        {machine.memory_bytes: machine for machine in MACHINES if machine.memory_bytes > has}.items()
    )
    for _, machine in more:
        if machine.name != "cpu" and _fits(
            replace(request, cluster=replace(request.cluster, machine=machine))
        ):
            return f"{request.cluster.num_devices} x {machine.name} ({machine.memory_bytes / _GIB:.0f} GiB)"
    return ""


def _fits(request: Request) -> bool:
    return search(request, Wanted(slack=1.0, num_meshes=1, first=True)).best is not None
