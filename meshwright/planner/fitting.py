"""What would do where no layout does: fewer things fixed, other numbers of devices, devices with more memory.

Owns the two answers to a search that found nothing: no layout is legal (E286), or none fits (E301).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from meshwright.errors import DoesNotFitError, MeshwrightError, PlanError
from meshwright.planner.request import Request
from meshwright.planner.rules import refuse_mesh
from meshwright.planner.runnable import plan_keys
from meshwright.planner.search import BEST_ONLY, DOES_NOT_FIT, Found, Wanted, search
from meshwright.planner.space import meshes
from meshwright.presets.machines import MACHINES

_MOST_DOUBLINGS = 12
_MOST_FEWER = 16
# A batch that differs by more is another training run.
_NEAR = 0.15
_WORTH_SAYING = 0.03
_GIB = 2**30


def nothing_found(request: Request, found: Found) -> MeshwrightError:
    """What a search that found nothing says: why, and the changes that give an answer.

    Returns:
        PlanError E286 where no layout is legal, DoesNotFitError E301 where none fits.
    """
    smallest = found.smallest
    if smallest is None or not found.rejected.get(DOES_NOT_FIT):
        reasons = "; ".join(reasons_of(request, found.rejected))
        changes = _unfixed(request) or [*_fewer(request), *_other_batch(request)]
        fix = (
            f"Legal: {' · '.join(changes)}" if changes else "Take another number of devices or another batch"
        )
        return PlanError(
            "E286", f"no layout on {request.cluster.num_devices} devices is legal: {reasons}. {fix}"
        )
    changes = [*_unfixed(request), *_more(request), *_larger(request)]
    return DoesNotFitError(
        "E301",
        f"does not fit: the smallest layout needs {smallest.bytes / _GIB:.1f} of {request.usable_bytes / _GIB:.1f} GiB "
        f"usable ({request.cluster.machine.name} less {100 * request.headroom:.0f} %). Changes that fit: "
        f"{' · '.join(changes) or 'none was found; take a smaller model'}",
    )


def reasons_of(request: Request, rejected: Mapping[str, int]) -> list[str]:
    """Why layouts were refused, most frequent first; of degrees with the numbers of the first that was refused."""
    details: dict[str, str] = {}
    for mesh in meshes(request):
        refused = refuse_mesh(request, mesh)
        if refused is not None:
            details.setdefault(refused.reason, refused.detail)
    ordered = sorted(rejected, key=lambda reason: (-rejected[reason], reason))
    return [details.get(reason, f"{reason} ({rejected[reason]})") for reason in ordered]


@dataclass(frozen=True)
class OtherBatch:
    """Attributes: sequences of a step that all devices share; how much faster a sequence is with them, as a part."""

    global_batch: int
    gain: float


def better_batch(request: Request, seconds: float) -> OtherBatch | None:
    """The multiple of the devices nearest to the batch, where it is much better than the batch that was asked for.

    Args:
        request: the question.
        seconds: of the fastest step with its batch.
    """
    total, batch = request.cluster.num_devices, request.work.global_batch
    other = total * round(batch / total)
    if other == batch or abs(other - batch) > _NEAR * batch or request.cluster.host is not None:
        return None
    best = search(replace(request, work=replace(request.work, global_batch=other)), BEST_ONLY).best
    gain = 0.0 if best is None else 1 - best.seconds / other * batch / seconds
    return OtherBatch(other, gain) if gain > _WORTH_SAYING else None


def _unfixed(request: Request) -> list[str]:
    """Each fixed key that alone stands in the way, with the value that is best without it."""
    found = []
    for key in request.fixed:
        rest = {name: value for name, value in request.fixed.items() if name != key}
        best = search(replace(request, fixed=rest), BEST_ONLY).best
        if best is not None:
            keys = plan_keys(best.layout)
            fastest = f" (the fastest has {keys[key]})" if key in keys else ""
            found.append(f"without plan.{key}={request.fixed[key]}{fastest}")
    if not found and len(request.fixed) > 1 and _fits(replace(request, fixed={})):
        found.append("with nothing fixed")
    return found


def _fewer(request: Request) -> list[str]:
    """The most devices below the cluster's on which a layout fits."""
    total = request.cluster.num_devices
    for count in range(total - 1, max(0, total - 1 - _MOST_FEWER), -1):
        if _fits(replace(request, cluster=replace(request.cluster, num_devices=count))):
            return [f"{count} devices"]
    return []


def _other_batch(request: Request) -> list[str]:
    """The batch nearest to the wanted one that all devices share."""
    total, work = request.cluster.num_devices, request.work
    batch = total * max(1, round(work.global_batch / total))
    fits = _fits(replace(request, work=replace(work, global_batch=batch)))
    return [f"a batch of {batch}"] if fits else []


def _more(request: Request) -> list[str]:
    """The least power of two times the devices that fits; the batch grows where it must."""
    if "dp" in request.fixed and len({"tp", "pp", "cp"} & set(request.fixed)) == 3:
        return []
    total = request.cluster.num_devices
    for doublings in range(1, _MOST_DOUBLINGS + 1):
        count = total * 2**doublings
        if _fits(replace(request, cluster=replace(request.cluster, num_devices=count))):
            return [f"{count} devices"]
    return []


def _larger(request: Request) -> list[str]:
    """The machine with the least memory that fits."""
    has = request.cluster.machine.memory_bytes
    more = sorted(
        {machine.memory_bytes: machine for machine in MACHINES if machine.memory_bytes > has}.items()
    )
    for _, machine in more:
        if machine.name != "cpu" and _fits(
            replace(request, cluster=replace(request.cluster, machine=machine))
        ):
            return [f"{request.cluster.num_devices} x {machine.name} ({machine.memory_bytes / _GIB:.0f} GiB)"]
    return []


def _fits(request: Request) -> bool:
    return search(request, Wanted(slack=1.0, num_meshes=1, first=True)).best is not None
