"""GPUs of this host as their driver names them, found without torch."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass

from meshwright.presets import machine_of_device


@dataclass(frozen=True)
class Gpu:
    """One accelerator as its driver names it."""

    name: str
    memory_bytes: int


def find_gpus() -> tuple[Gpu, ...]:
    """The accelerators nvidia-smi lists; none where it is absent, fails or takes over 10 s."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return ()
    return parse_gpus(done.stdout)


def parse_gpus(listing: str) -> tuple[Gpu, ...]:
    """Rows `name, MiB` of nvidia-smi; a memory it cannot tell counts as 0."""
    rows = (line.rpartition(",") for line in listing.splitlines() if "," in line)
    return tuple(
        Gpu(name.strip(), int(mebibytes) * 2**20 if mebibytes.strip().isdigit() else 0)
        for name, _, mebibytes in rows
    )


def local_cluster(num_gpus: int) -> str | None:
    """`num_gpus` of this host's GPUs as a cluster; None where their machine is not in the table."""
    found = find_gpus()
    machine = machine_of_device(found[0].name) if found else None
    return None if machine is None else f"{num_gpus}x{machine.name}"
