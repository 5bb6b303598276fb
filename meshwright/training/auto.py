"""What `plan.mode = "auto"` needs of this process: the units of the run's model, measured here or read from the cache.

Owns the example micro-batches and the name of the file of seconds: one a model, machine, version of torch, threads and
number of processes that compute at once. Must not know how plans are found.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import platform
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch.utils.data import default_collate

from meshwright.adapt.batch_norm import micro_step_warnings
from meshwright.comm.mesh import World, share_values
from meshwright.data.index_law import BatchGeometry
from meshwright.errors import PlanError
from meshwright.partitioning.unit_costs import UnitCosts
from meshwright.pipeline.units import Units
from meshwright.training.config import RunConfig, default_cache_dir
from meshwright.training.ledger import usable_bytes
from meshwright.training.measured import Measured
from meshwright.training.optimizer import spec_of
from meshwright.training.precision import COMPUTE_DTYPES, MASTER_DTYPES
from meshwright.training.randomness import StatelessDraws
from meshwright.training.rates import measure_rates
from meshwright.training.sections import TrainConfig
from meshwright.training.task import Task
from meshwright.training.tree import cast_batch

# Counted up when something else is measured, so that old files are not read.
_METHOD = 2
# Of a model that cannot be followed from module to module.
_CANNOT_BE_CUT = ("E261", "E262", "E263", "E264")


def measured_units(
    task: Task,
    samples: Sequence[int],
    *,
    world: World,
    device: torch.device,
    config: RunConfig,
) -> Measured:
    """What the units of `task` take while all connected ranks compute at once; every rank calls.

    Args:
        task: its model is not changed, and may be on the meta device.
        samples: sizes of a micro-batch.
        world: all ranks.
        device: where this rank computes.
        config: of the run: precision, optimizer, transport and where seconds are kept.

    Raises:
        PlanError: E276 for a model that runs with none of `samples`.
    """
    usable, precision = usable_bytes(device, local_size=world.local_size), config.plan.precision

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
    path = (config.data.cache_dir or default_cache_dir()) / "unit-seconds"
    path /= f"{_fingerprint(units, device, world, config)}.json"
    if all(share_values(path.is_file())):  # another run may be writing it
        return Measured(UnitCosts.from_json(path.read_text(encoding="utf-8")), "", usable)
    rates = measure_rates(
        world, spec_of(config.train.optimizer), device=device, transport=config.plan.transport
    )
    costs = dataclasses.replace(
        units.measure(partial(_draws, config.train)),
        bytes_per_second=rates.message_bytes_per_second,
        message_seconds=rates.message_seconds,
        gradient_bytes_per_second=rates.gradient_bytes_per_second,
        update_seconds_per_byte=rates.update_seconds_per_byte,
        has_batch_statistics=bool(micro_step_warnings(task.model, num_microbatches=2)),
    )
    return Measured(costs, "", usable, path)


def _draws(train: TrainConfig, samples: int) -> Callable[[bool], AbstractContextManager[None]]:
    """Dropout as the run draws it: the law's masks cost more than torch's own."""
    if train.dropout != "stateless":
        return lambda _is_forward: nullcontext()
    geometry = BatchGeometry(samples, 1, 1, 0)
    return StatelessDraws(geometry, seed=train.seed).part(0, 0, 0)


def _fingerprint(units: Units, device: torch.device, world: World, config: RunConfig) -> str:
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    machine = (platform.node(), where, os.cpu_count(), torch.__version__, torch.get_num_threads())
    ranks = (
        world.size,
        world.local_size,
        config.plan.transport,
        config.train.optimizer.name,
        config.train.dropout,
    )
    return hashlib.sha256(f"{_METHOD} {machine} {ranks} {units.digest}".encode()).hexdigest()[:16]
