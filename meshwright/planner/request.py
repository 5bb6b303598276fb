"""What a search is asked: a job, a cluster, what the user fixed, how much memory stays free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from meshwright.errors import ConfigError, PlanError
from meshwright.simulation.job import Cluster, Layout, Workload
from meshwright.simulation.reading import layout_of

# Of the memory that the driver leaves; measured peaks of published runs differ by 7 % in the median.
DEFAULT_HEADROOM = 0.1
# What a driver keeps of nominal memory for itself.
_DRIVER = 0.01
_ONE_DEVICE = Layout()
_AXES = ("dp", "tp", "pp", "cp")


@dataclass(frozen=True)
class Request:
    """One question.

    Attributes:
        work: the model and its batch.
        cluster: where.
        fixed: keys of a plan with the values that the user fixed, as in `[plan]`; the rest is searched.
        headroom: part of usable memory that a plan must leave free.
        base: what is no dimension of the search: precision, attention, fused or not.
    """

    work: Workload
    cluster: Cluster
    fixed: Mapping[str, object] = field(default_factory=dict, hash=False)
    headroom: float = DEFAULT_HEADROOM
    base: Layout = _ONE_DEVICE

    @property
    def usable_bytes(self) -> float:
        """Bytes that a plan may take of each device."""
        return self.cluster.machine.memory_bytes * (1 - _DRIVER) * (1 - self.headroom)

    def size(self, key: str) -> int | None:
        """The number that the user fixed for `key`, if any."""
        value = self.fixed.get(key)
        return value if isinstance(value, int) else None


def make_request(
    work: Workload, cluster: Cluster, fixed: Mapping[str, object], *, headroom: float = DEFAULT_HEADROOM
) -> Request:
    """A checked question.

    Raises:
        ConfigError: E283 for a key or value that no priced plan has, E285 for a headroom outside of 0 to 1.
        PlanError: E286 for fixed degrees that do not divide the cluster.
    """
    on_cpu = cluster.machine.name == "cpu"
    base = layout_of({"precision": "fp32" if on_cpu else "bf16", **fixed})
    if base.precision == "fp32" and not on_cpu:
        raise ConfigError("E283", "plan.precision = 'fp32' is priced on cpu only; take bf16 or leave it out")
    if not 0 <= headroom < 1:
        raise ConfigError(
            "E285", f'memory_headroom={headroom}: write a part of 1, e.g. 0.1, or a percentage, e.g. "10%"'
        )
    product = 1
    for axis in _AXES:
        value = fixed.get(axis, 1)
        product *= value if isinstance(value, int) else 1
    total = cluster.num_devices
    complete = all(axis in fixed for axis in _AXES)
    if total % product or (complete and product != total):
        text = " x ".join(f"{axis}={fixed[axis]}" for axis in _AXES if axis in fixed)
        near = [part for part in range(1, total + 1) if total % part == 0]
        divisors = sorted(sorted(near, key=lambda part: abs(part - product))[:4])
        raise PlanError(
            "E286",
            f"plan {text} = {product} does not divide the cluster's {total} devices. "
            f"Products that do: {', '.join(map(str, divisors))}; or leave one of them out",
        )
    # zero, schedule and the rest are dimensions: only what is fixed of them stays in the base.
    return Request(work, cluster, dict(fixed), headroom, base)
