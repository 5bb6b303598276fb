"""How much faster more devices are, and where adding them stops to pay."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from meshwright.errors import ConfigError
from meshwright.planner.request import Request
from meshwright.planner.runnable import plan_keys, why_not_trainable
from meshwright.planner.search import Wanted, search
from meshwright.simulation.prediction import Prediction, predict

# Adding devices pays while a doubling makes the step at least this much faster: half of what is added is used.
_LEAST_GAIN = 1.5
_READY = Wanted(slack=1.0, num_meshes=1, ready=True)


@dataclass(frozen=True)
class ScalingPoint:
    """One number of devices.

    Attributes:
        num_devices: of the cluster.
        request: the question on them.
        plan: the fastest that training runs, else the fastest; None where none fits.
        obstacle: why there is none, or why training does not run it.
    """

    num_devices: int
    request: Request
    plan: Prediction | None
    obstacle: str = ""

    @property
    def seconds(self) -> float:
        """Of a step."""
        assert self.plan is not None, "a point without a plan has no time"
        return self.plan.step.total

    def efficiency(self, base: ScalingPoint) -> float:
        """Of the devices beyond `base`'s, which part makes the step faster; 1: all."""
        return base.seconds / self.seconds * base.num_devices / self.num_devices

    def to_json(self) -> dict[str, object]:
        """One entry of `scaling`."""
        if self.plan is None:
            return {"devices": self.num_devices, "step_seconds": None, "obstacle": self.obstacle}
        return {
            "devices": self.num_devices,
            "step_seconds": self.seconds,
            "mfu": self.plan.mfu,
            "keys": plan_keys(self.plan.layout),
            "trainable": not self.obstacle,
            "obstacle": self.obstacle,
        }


def parse_range(text: str, most: int) -> tuple[int, ...]:
    """ "8..64" as 8, 16, 32, 64: doublings of the first, and the last.

    Raises:
        ConfigError: E285 for another form.
    """
    match = re.fullmatch(r"\s*(\d+)\s*\.\.\s*(\d+|N)\s*", text)
    first, last = (int(match[1]), most if match[2] == "N" else int(match[2])) if match else (0, 0)
    if not 0 < first <= last:
        raise ConfigError(
            "E285", f"--scaling={text!r}: write FIRST..LAST numbers of devices, e.g. 8..64 or 8..N"
        )
    found = []
    while first < last:
        found.append(first)
        first *= 2
    return (*found, last)


def scale(request: Request, counts: tuple[int, ...]) -> tuple[ScalingPoint, ...]:
    """The fastest plan on each number of devices, for the same batch. What is fixed stays fixed, but for dp."""
    points = []
    for count in counts:
        fixed = {key: value for key, value in request.fixed.items() if key != "dp"}
        own = replace(request, cluster=replace(request.cluster, num_devices=count), fixed=fixed)
        found = search(own, _READY)
        best = found.ready or found.best
        if best is None:
            worst = max(found.rejected.items(), key=lambda pair: pair[1], default=("nothing is legal", 0))
            points.append(ScalingPoint(count, own, None, worst[0]))
        else:
            priced = predict(own.work, best.layout, own.cluster)
            points.append(ScalingPoint(count, own, priced, why_not_trainable(own.work, best.layout)))
    return tuple(points)


def still_pays(points: tuple[ScalingPoint, ...]) -> int | None:
    """The largest number of devices up to which every step of the row gives at least half of what it adds."""
    fitting = [point for point in points if point.plan is not None]
    if not fitting:
        return None
    last = fitting[0]
    for point in fitting[1:]:
        grown = point.num_devices / last.num_devices
        if last.seconds / point.seconds < 1 + (grown - 1) * (_LEAST_GAIN - 1):
            break
        last = point
    return last.num_devices
