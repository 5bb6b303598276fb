"""What `plan.mode = "auto"` needs of this process: the units of the run's model, measured here or read from the cache.

Owns the example micro-batches and the name of the file of seconds: one a model, machine, version of torch, threads and
number of processes that compute at once. Must not know how plans are found.
"""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import default_collate

from meshwright.errors import PlanError
from meshwright.layout.plan import Precision
from meshwright.partitioning.unit_costs import UnitCosts
from meshwright.pipeline.units import Units
from meshwright.training.ledger import usable_bytes
from meshwright.training.measured import Measured
from meshwright.training.precision import COMPUTE_DTYPES, MASTER_DTYPES
from meshwright.training.task import Task
from meshwright.training.tree import cast_batch

# Of a model that cannot be followed from module to module.
_CANNOT_BE_CUT = ("E261", "E262", "E263", "E264")


def measured_units(
    task: Task,
    samples: Sequence[int],
    *,
    precision: Precision,
    device: torch.device,
    processes: int,
    cache_dir: Path,
) -> Measured:
    """What the units of `task` take while `processes` ranks compute at once; all of these must call.

    Args:
        task: its model is not changed, and may be on the meta device.
        samples: sizes of a micro-batch.
        precision: of the run.
        device: where this rank computes.
        processes: on this host.
        cache_dir: where seconds are kept.

    Raises:
        PlanError: E276 for a model that runs with none of `samples`.
    """
    usable = usable_bytes(device, local_size=processes)

    def batch(count: int) -> Any:
        rows = [task.train_data[index % len(task.train_data)] for index in range(count)]
        return cast_batch(default_collate(rows), MASTER_DTYPES[precision], device)

    try:
        units = Units.of(
            task.model, task.loss, batch, samples, device=device, compute_dtype=COMPUTE_DTYPES[precision]
        )
    except PlanError as error:
        if error.code not in _CANNOT_BE_CUT:
            raise
        return Measured(None, f"{error.code} {error.message}", usable)
    path = cache_dir / "unit-seconds" / f"{_fingerprint(units, device, processes)}.json"
    if path.is_file():
        return Measured(UnitCosts.from_json(path.read_text(encoding="utf-8")), "", usable)
    return Measured(units.measure(), "", usable, path)


def _fingerprint(units: Units, device: torch.device, processes: int) -> str:
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    machine = (platform.node(), where, os.cpu_count(), torch.__version__, torch.get_num_threads(), processes)
    return hashlib.sha256(f"{machine} {units.digest}".encode()).hexdigest()[:16]
