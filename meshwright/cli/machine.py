"""What this machine is, found without importing torch: cores, memory, GPUs, shared memory, ports, disk.

Owns the inspection. Knows nothing of how it is printed.
Simplifications: control-group limits are read on Linux with cgroup v2 only; GPUs are those nvidia-smi lists.
"""

from __future__ import annotations

import os
import platform
import shutil
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from meshwright.launching.gpus import Gpu, find_gpus

_CGROUP = Path("/sys/fs/cgroup")
_SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class Machine:
    """One machine as a run would find it.

    Attributes:
        system: operating system and architecture, e.g. "Linux x86_64".
        python: version of the interpreter.
        torch: version of the installed torch, or None.
        cores: cores this process may use; a fraction where a container limits the time.
        memory_bytes: memory this process may use, at most.
        gpus: accelerators, empty without a driver.
        shared_memory_bytes: free bytes of /dev/shm, or None where there is none.
        disk_free_bytes: free bytes of the folder that was asked about.
        loopback: whether a port of 127.0.0.1 can be opened.
    """

    system: str
    python: str
    torch: str | None
    cores: float
    memory_bytes: int
    gpus: tuple[Gpu, ...]
    shared_memory_bytes: int | None
    disk_free_bytes: int
    loopback: bool


def inspect_machine(folder: Path) -> Machine:
    """Look at this machine; `folder` is where the disk is measured. Starts at most nvidia-smi."""
    try:
        torch = metadata.version("torch")
    except metadata.PackageNotFoundError:
        torch = None
    return Machine(
        system=f"{platform.system()} {platform.machine()}",
        python=platform.python_version(),
        torch=torch,
        cores=_cores(),
        memory_bytes=_memory_bytes(),
        gpus=find_gpus(),
        shared_memory_bytes=shutil.disk_usage(_SHARED_MEMORY).free if _SHARED_MEMORY.is_dir() else None,
        disk_free_bytes=shutil.disk_usage(folder).free,
        loopback=can_bind(0),
    )


def can_bind(port: int) -> bool:
    """Whether this process can listen on `port` of 127.0.0.1 (0: on any free one)."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # As a server does it: a port in TIME_WAIT after an earlier run is not in use.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def find_problems(machine: Machine, environment: Mapping[str, str]) -> list[str]:
    """What would stop or slow a run here, each with its fix; `environment` holds the launch variables."""
    problems = []
    if machine.torch is None:
        problems.append('train needs PyTorch: pip install "meshwright[train]" (meshwright explain E001)')
    if machine.system.split()[0] not in ("Linux", "Darwin"):
        problems.append("training runs on Linux and macOS; on Windows use WSL (meshwright explain E405)")
    if not machine.loopback:
        problems.append("no port of 127.0.0.1 can be opened: local processes cannot meet; check the sandbox")
    if machine.disk_free_bytes < 2**30:
        problems.append(f"{machine.disk_free_bytes / 2**20:.0f} MiB of disk are free; a run wants 1 GiB")
    if machine.shared_memory_bytes is not None and machine.shared_memory_bytes < 2**28:
        free = machine.shared_memory_bytes / 2**20
        problems.append(f"{free:.0f} MiB of /dev/shm are free; containers: --shm-size=1g (nccl uses it)")
    port = environment.get("MASTER_PORT")
    if port is not None and not (port.isdigit() and 0 < int(port) < 2**16):
        problems.append(f"MASTER_PORT={port} is not a port (1 to 65535): unset it")
    elif port is not None and not can_bind(int(port)):
        problems.append(f"MASTER_PORT={port} is set and in use: unset it, local runs pick a free port (E403)")
    return problems


def _cores() -> float:
    try:
        usable = len(os.sched_getaffinity(0))
    except AttributeError:
        # macOS has no affinity.
        usable = os.cpu_count() or 1
    quota, _, period = _read(_CGROUP / "cpu.max").partition(" ")
    if quota.isdigit() and period.isdigit():
        return min(float(usable), int(quota) / int(period))
    return float(usable)


def _memory_bytes() -> int:
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = _read(_CGROUP / "memory.max")
    return min(total, int(limit)) if limit.isdigit() else total


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
