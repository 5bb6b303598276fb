"""Machines as numbers: peak arithmetic, memory and links of one device, and which device torch is running on.

Owns the device table. Knows no torch. Peaks are dense (vendors often print twice that, for 2:4 sparsity)
and accumulate in float32. Figures are the vendors' unless `source` says otherwise; nothing here is measured
on your machine. Simplifications: one bandwidth and one latency per level of the network.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from meshwright.presets.nearest import find_entry

_GIB = 2**30


@dataclass(frozen=True)
class Link:
    """One level of the network, as one device sees it.

    Attributes:
        latency_seconds: of one step of a ring.
        bandwidth_bytes_per_second: one direction.
    """

    latency_seconds: float
    bandwidth_bytes_per_second: float


@dataclass(frozen=True)
class Machine:
    """One device and its surroundings.

    Attributes:
        name: the name that is printed.
        flops: dense peak in FLOP/s by dtype: fp64, fp32, tf32, bf16, fp16, fp8. A dtype that the device
            does not compute in hardware is absent.
        memory_bytes: nominal memory (what vendors print as GB are GiB); the driver keeps about 1 % of it.
        memory_bandwidth: bytes per second.
        links: by level: "pair" (two neighbours only, where there is such a bridge), "node" (inside
            one node or NVLink domain), "network" (between nodes, per device). A level without a figure is
            absent.
        devices_per_node: devices that share the "node" level; 1 where no figure is typical.
        source: where the figures come from.
        aliases: other names that `find_machine` understands.
        device_pattern: regular expression that the whole name torch reports must match; empty: none does.
    """

    name: str
    flops: Mapping[str, float]
    memory_bytes: int
    memory_bandwidth: float
    links: Mapping[str, Link]
    devices_per_node: int
    source: str
    aliases: tuple[str, ...] = ()
    device_pattern: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "flops", MappingProxyType(dict(self.flops)))
        object.__setattr__(self, "links", MappingProxyType(dict(self.links)))

    def __reduce__(self) -> tuple[object, ...]:
        # A mapping proxy cannot be pickled, and plans travel to workers.
        numbers = (dict(self.flops), self.memory_bytes, self.memory_bandwidth, dict(self.links))
        rest = (self.devices_per_node, self.source, self.aliases, self.device_pattern)
        return (Machine, (self.name, *numbers, *rest))
