"""Machines as numbers: peak arithmetic, memory and links of one device, and which device torch is running on.

Owns the device table. Knows no torch. Peaks are dense (vendors often print twice that, for 2:4 sparsity)
and accumulate in float32. Figures are the vendors' unless `source` says otherwise; nothing here is measured
on your machine. Simplifications: one bandwidth and one latency per level of the network.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

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
    flops: Mapping[str, float] = field(hash=False)
    memory_bytes: int
    memory_bandwidth: float
    links: Mapping[str, Link] = field(hash=False)
    devices_per_node: int
    source: str
    aliases: tuple[str, ...] = ()
    device_pattern: str = field(default="", repr=False)


# Seconds of one ring step, by the constants NCCL's own tuning model uses (src/graph/tuning.cc, ring, Simple).
_NVLINK_STEP_SECONDS = 3.4e-6
_PCIE_STEP_SECONDS = 5.7e-6
_NETWORK_STEP_SECONDS = 9.6e-6
_LATENCY_SOURCE = "latencies: NCCL src/graph/tuning.cc, ring, Simple protocol"
_ML_ENGINEERING = "stas00/ml-engineering, accelerator and network tables"


def _tera(**peaks: float) -> dict[str, float]:
    return {dtype: peak * 1e12 for dtype, peak in peaks.items()}


def _links(*, nvlink: float = 0.0, pcie: float = 0.0, network: float = 0.0) -> dict[str, Link]:
    """Links from GB/s, one direction: what a node is wired with, and the network share of one device."""
    links = {}
    if nvlink:
        links["node"] = Link(_NVLINK_STEP_SECONDS, nvlink * 1e9)
    if pcie:
        links["node"] = Link(_PCIE_STEP_SECONDS, pcie * 1e9)
    if network:
        links["network"] = Link(_NETWORK_STEP_SECONDS, network * 1e9)
    return links


_V100 = (
    "Volta tables of PyTorch AutoParallel and Lightning, ml-engineering's NVLink table; network of a DGX-1"
)
_A100 = f"{_ML_ENGINEERING}; NVIDIA A100 datasheet; network of a DGX A100"
_HOPPER = f"{_ML_ENGINEERING}; dense, NVIDIA's pages print twice that for 2:4 sparsity"

MACHINES: tuple[Machine, ...] = (
    Machine(
        name="v100-16",
        flops=_tera(fp16=125, fp32=15.7),
        memory_bytes=16 * _GIB,
        memory_bandwidth=900e9,
        links=_links(nvlink=150, network=6.25),
        devices_per_node=8,
        source=f"{_V100}; {_LATENCY_SOURCE}",
        device_pattern=r"(NVIDIA |Tesla )?V100-SXM[23]-16GB",
    ),
    Machine(
        name="v100",
        flops=_tera(fp16=125, fp32=15.7),
        memory_bytes=32 * _GIB,
        memory_bandwidth=900e9,
        links=_links(nvlink=150, network=6.25),
        devices_per_node=8,
        source=f"{_V100}; {_LATENCY_SOURCE}",
        aliases=("v100-32", "v100-sxm2", "v100-32gb"),
        device_pattern=r"(NVIDIA |Tesla )?V100-SXM[23]-32GB",
    ),
    Machine(
        name="a100-40",
        flops=_tera(bf16=312, fp16=312, tf32=156, fp32=19.5),
        memory_bytes=40 * _GIB,
        memory_bandwidth=1555e9,
        links=_links(nvlink=300, network=25),
        devices_per_node=8,
        source=f"{_A100}; {_LATENCY_SOURCE}",
        aliases=("a100-40gb", "a100-sxm4-40gb"),
        device_pattern=r"(NVIDIA )?A100-SXM4-40GB",
    ),
    Machine(
        name="a100-80",
        flops=_tera(bf16=312, fp16=312, tf32=156, fp32=19.5),
        memory_bytes=80 * _GIB,
        memory_bandwidth=2039e9,
        links=_links(nvlink=300, network=25),
        devices_per_node=8,
        source=f"{_A100}; {_LATENCY_SOURCE}",
        aliases=("a100", "a100-80gb", "a100-sxm4-80gb"),
        device_pattern=r"(NVIDIA )?A100-SXM4?-80GB",
    ),
    Machine(
        name="h100",
        flops=_tera(fp8=1979, bf16=989, fp16=989, tf32=494.5, fp32=67),
        memory_bytes=80 * _GIB,
        memory_bandwidth=3350e9,
        links=_links(nvlink=450, network=50),
        devices_per_node=8,
        source=f"{_HOPPER}; {_LATENCY_SOURCE}",
        aliases=("h100-80", "h100-80gb", "h100-sxm"),
        device_pattern=r"NVIDIA H100 80GB HBM3",
    ),
    Machine(
        name="h100-96",
        flops=_tera(fp8=1979, bf16=989, fp16=989, tf32=494.5, fp32=67),
        memory_bytes=96 * _GIB,
        memory_bandwidth=2400e9,
        links=_links(nvlink=450, network=50),
        devices_per_node=8,
        source=f"the HBM2e part of 500 W that torchtitan's published runs name; {_HOPPER}; {_LATENCY_SOURCE}",
        aliases=("h100-96gb",),
    ),
    Machine(
        name="h100-pcie",
        flops=_tera(fp8=1513, bf16=756, fp16=756, tf32=378, fp32=51),
        memory_bytes=80 * _GIB,
        memory_bandwidth=2000e9,
        links={"pair": Link(_NVLINK_STEP_SECONDS, 300e9), **_links(pcie=63)},
        devices_per_node=8,
        source=f"{_HOPPER}; bridges join pairs, all else crosses PCIe 5; {_LATENCY_SOURCE}",
        device_pattern=r"NVIDIA H100 PCIe",
    ),
    Machine(
        name="h800",
        flops=_tera(fp8=1979, bf16=989, fp16=989, tf32=494.5, fp32=67),
        memory_bytes=80 * _GIB,
        memory_bandwidth=3350e9,
        links=_links(nvlink=200, network=50),
        devices_per_node=8,
        source=f"an H100 whose NVLink has 400 GB/s in both directions together (DeepSeek-V3 report, 2024); "
        f"{_HOPPER}; {_LATENCY_SOURCE}",
        aliases=("h800-80gb",),
        device_pattern=r"NVIDIA H800",
    ),
    Machine(
        name="h200",
        flops=_tera(fp8=1979, bf16=989, fp16=989, tf32=494.5, fp32=67),
        memory_bytes=141 * _GIB,
        memory_bandwidth=4800e9,
        links=_links(nvlink=450, network=50),
        devices_per_node=8,
        source=f"{_HOPPER}; {_LATENCY_SOURCE}",
        aliases=("h200-sxm", "h200-141gb"),
        device_pattern=r"NVIDIA H200",
    ),
    Machine(
        name="b200",
        flops=_tera(fp8=4500, bf16=2250, fp16=2250, tf32=1125, fp32=80),
        memory_bytes=180 * _GIB,
        memory_bandwidth=8000e9,
        links=_links(nvlink=900, network=50),
        devices_per_node=8,
        source=f"{_ML_ENGINEERING}; {_LATENCY_SOURCE}",
        aliases=("b200-sxm",),
        device_pattern=r"NVIDIA B200",
    ),
    Machine(
        name="gb200",
        flops=_tera(fp8=5000, bf16=2500, fp16=2500, tf32=1250, fp32=80),
        memory_bytes=186 * _GIB,
        memory_bandwidth=8000e9,
        links=_links(nvlink=900, network=50),
        devices_per_node=72,
        source=f"{_ML_ENGINEERING}; one GPU of a 72-GPU NVLink domain; {_LATENCY_SOURCE}",
        aliases=("gb200-nvl72",),
        device_pattern=r"NVIDIA GB200",
    ),
    Machine(
        name="b300",
        flops=_tera(fp8=4500, bf16=2250, fp16=2250, tf32=1125, fp32=80),
        memory_bytes=288 * _GIB,
        memory_bandwidth=8000e9,
        links=_links(nvlink=900, network=100),
        devices_per_node=8,
        source=f"{_ML_ENGINEERING}; {_LATENCY_SOURCE}",
        aliases=("b300-sxm",),
        device_pattern=r"NVIDIA B300",
    ),
    Machine(
        name="gb300",
        flops=_tera(fp8=5000, bf16=2500, fp16=2500, tf32=1250, fp32=80),
        memory_bytes=288 * _GIB,
        memory_bandwidth=8000e9,
        links=_links(nvlink=900, network=100),
        devices_per_node=72,
        source=f"{_ML_ENGINEERING}; one GPU of a 72-GPU NVLink domain; {_LATENCY_SOURCE}",
        aliases=("gb300-nvl72",),
        device_pattern=r"NVIDIA GB300",
    ),
    Machine(
        name="mi250x",
        flops=_tera(bf16=191.5, fp16=191.5, fp32=23.95),
        memory_bytes=64 * _GIB,
        memory_bandwidth=1638.5e9,
        links={
            "pair": Link(_NVLINK_STEP_SECONDS, 200e9),
            "node": Link(_NVLINK_STEP_SECONDS, 50e9),
            "network": Link(_NETWORK_STEP_SECONDS, 12.5e9),
        },
        devices_per_node=8,
        source=f"{_ML_ENGINEERING}; one of the two dies, which torch sees as a device; network of Frontier; "
        f"latencies of NVLink assumed; {_LATENCY_SOURCE}",
        aliases=("mi250x-gcd",),
        device_pattern=r"AMD Instinct MI250X",
    ),
    Machine(
        name="mi300x",
        flops=_tera(fp8=2614.9, bf16=1307.4, fp16=1307.4, tf32=653.7, fp32=163.4),
        memory_bytes=192 * _GIB,
        memory_bandwidth=5300e9,
        # A full mesh of seven links: two devices alone reach only one of them.
        links={"pair": Link(_NVLINK_STEP_SECONDS, 64e9), **_links(nvlink=448, network=50)},
        devices_per_node=8,
        source=f"{_ML_ENGINEERING}; latencies of NVLink assumed; {_LATENCY_SOURCE}",
        aliases=("mi300",),
        device_pattern=r"AMD Instinct MI300X( OAM)?",
    ),
    Machine(
        name="l4",
        flops=_tera(fp8=242, bf16=121, fp16=121, tf32=60, fp32=30.3),
        memory_bytes=24 * _GIB,
        memory_bandwidth=300e9,
        links=_links(pcie=31),
        devices_per_node=1,
        source=f"Lightning's throughput table (Ada whitepaper); 72 W limits its clock; {_LATENCY_SOURCE}",
        device_pattern=r"NVIDIA L4",
    ),
    Machine(
        name="rtx3090",
        flops=_tera(bf16=71, fp16=71, tf32=35.6, fp32=35.6),
        memory_bytes=24 * _GIB,
        memory_bandwidth=936e9,
        links={"pair": Link(_NVLINK_STEP_SECONDS, 56e9), **_links(pcie=31)},
        devices_per_node=1,
        source=f"GA102 whitepaper v2; half precision with float32 accumulation; {_LATENCY_SOURCE}",
        aliases=("3090", "rtx-3090"),
        device_pattern=r"(NVIDIA )?GeForce RTX 3090",
    ),
    Machine(
        name="rtx4090",
        flops=_tera(fp8=330.3, bf16=165.2, fp16=165.2, tf32=82.6, fp32=82.6),
        memory_bytes=24 * _GIB,
        memory_bandwidth=1008e9,
        links=_links(pcie=31),
        devices_per_node=1,
        source="Ada whitepaper v2.1; half precision with float32 accumulation; no peer-to-peer, so transfers "
        f"cross the host; {_LATENCY_SOURCE}",
        aliases=("4090", "rtx-4090"),
        device_pattern=r"NVIDIA GeForce RTX 4090",
    ),
    Machine(
        name="cpu",
        # One core at 3 GHz with two fused multiply-add units, 8 floats or 4 doubles wide.
        flops={"fp32": 3e9 * 2 * 8 * 2, "fp64": 3e9 * 2 * 4 * 2},
        memory_bytes=4 * _GIB,
        memory_bandwidth=10e9,
        links={"node": Link(2e-4, 2e9)},
        devices_per_node=2,
        source="nominal, for planning only: arithmetic of one core, and round figures of processes that talk "
        "over loopback; measure yours with `meshwright doctor --measure`",
        aliases=("local",),
    ),
)


def find_machine(name: str) -> Machine:
    """The machine called `name`, e.g. `a100-80` or its alias `a100`; case does not matter.

    Raises:
        ConfigError: E104, naming the nearest machine and listing all.
    """
    return find_entry(name, MACHINES, kind="machine")


def machine_of_device(device_name: str) -> Machine | None:
    """The machine whose peak may be the denominator of MFU, or None when the device is not known exactly.

    Args:
        device_name: what `torch.cuda.get_device_name()` returns. PCIe, NVL, laptop and partitioned (MIG)
            variants run slower than the entry of nearly the same name, so only whole names match.
    """
    for machine in MACHINES:
        if machine.device_pattern and re.fullmatch(machine.device_pattern, device_name.strip()):
            return machine
    return None
