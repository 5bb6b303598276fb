"""The model, loss and data under comparison, and the tests that they are functions of their inputs alone.

Owns E801, E802 and E804. Must not know the engine.
"""

from __future__ import annotations

import copy
import resource
import sys
import zlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from meshwright.data.batches import MapStyle
from meshwright.errors import ConfigError
from meshwright.layout.plan import Precision
from meshwright.nested import map_tensors
from meshwright.sharding.memory import give_memory
from meshwright.training.config import RunConfig
from meshwright.training.determinism import prepare
from meshwright.training.flops import FlopsPerSample, count_flops
from meshwright.training.initialise import call_build, first_values
from meshwright.training.normaliser import sum_and_count
from meshwright.training.precision import MASTER_DTYPES, check_runs, to_master
from meshwright.training.step import Loss
from meshwright.training.task import Task, make_task
from meshwright.training.tree import cast_batch
from meshwright.verification.job import Functions, Samples, VerifyJob

# Samples on which a bare scalar loss must be a mean.
_PROBE_SAMPLES = 8
_SAME_LOSS = {torch.float64: 1e-12, torch.float32: 1e-5}


class WatchedData:
    """A map-style dataset that notes which samples are read, with a digest of their content."""

    def __init__(self, dataset: MapStyle) -> None:
        self._dataset = dataset
        self._read: list[tuple[int, int]] = []

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        """Sample `index`."""
        sample = self._dataset[index]
        self._read.append((index, _content_digest(sample)))
        return sample

    def take(self) -> Samples:
        """What was read since the last call."""
        read, self._read = tuple(self._read), []
        return read


def _content_digest(sample: Any) -> int:
    digest = 0

    def add(tensor: Tensor) -> Tensor:
        nonlocal digest
        digest = zlib.crc32(tensor_digest(tensor).to_bytes(4, "little"), digest)
        return tensor

    map_tensors(default_collate([sample]), add)
    return digest


def make_subject(job: VerifyJob) -> Task:
    """The task of `job`, built under its seed.

    Raises:
        ConfigError: as `make_task`, and E111, E112, E105 for Python objects.
    """
    return make_task_of(job.config, job.functions)


def make_task_of(config: RunConfig, functions: Functions | None, *, with_flops: bool = False) -> Task:
    """The task of `functions`, or without them of `config`; raises as `make_subject`.

    Args:
        config: of the run.
        functions: the model, loss and data.
        with_flops: count those of `functions`, for a run that reports its utilisation.
    """
    prepare(seed=config.train.seed, deterministic=config.train.deterministic)
    if functions is None:
        return make_task(config)
    task = _task_of(functions, seed=config.train.seed, precision=config.plan.precision)
    if not with_flops or any(parameter.is_meta for parameter in task.model.parameters()):
        return task
    return replace(task, flops=count_flops(task.model, task.loss, [task.train_data[0]]))


def _task_of(functions: Functions, *, seed: int, precision: Precision) -> Task:
    model, data = call_build(functions.build), functions.data
    if not isinstance(model, nn.Module):
        raise ConfigError("E111", f"build() must return an nn.Module; it returned {type(model).__name__}")
    if not len(data):
        raise ConfigError("E105", "data has 0 samples; at least 1 is needed")
    to_master(model, precision)
    initialiser = first_values(functions.build, model, seed)
    if any(parameter.is_meta for parameter in model.parameters()):
        loss = _pair_only(functions.loss)
    else:
        probe = [data[index] for index in range(min(_PROBE_SAMPLES, len(data)))]
        loss = sum_and_count(model, functions.loss, probe)
        check_runs(model, loss, probe[:2], precision=precision)
    return Task(
        name=type(model).__name__,
        model=model,
        loss=loss,
        train_data=data,
        heldout_data=None,
        initialiser=initialiser,
        flops=FlopsPerSample(0.0, 0.0),
        shape={},
    )


def _pair_only(loss: Callable[[Any, Any], Any]) -> Loss:
    """A model without memory cannot show whether a scalar is a mean: the loss must return a pair."""

    def checked(model: Any, batch: Any) -> tuple[Tensor, Any]:
        value = loss(model, batch)
        if not isinstance(value, tuple) or len(value) != 2:
            raise ConfigError(
                "E112",
                "build() makes the model on the meta device, so a bare scalar loss cannot be tested to be a mean; "
                "return (sum, count)",
            )
        return value

    return checked


def materialise(task: Task) -> nn.Module:
    """The task's model with memory and all its values on this process."""
    with torch.no_grad():
        for name, parameter in task.model.named_parameters():
            if parameter.is_meta:
                assert task.initialiser is not None, f"parameter {name} has no values"
                values = task.initialiser(name, 0, parameter.numel(), parameter.dtype)
                give_memory(parameter, values.view(parameter.shape))
    return task.model


def check_same_build(job: VerifyJob) -> None:
    """Raise E801 unless the job's model comes out bitwise the same from two builds in one process."""
    first, second = (_value_digests(make_subject(job).model) for _ in range(2))
    if first == second:
        return
    names = [name for name in {**first, **second} if first.get(name) != second.get(name)]
    raise ConfigError(
        "E801",
        f"two builds of the model in one process differ, first in {names[0]!r} ({len(names)} of "
        f"{len({**first, **second})} tensors). Every rank must build the same: draw values from torch's generator "
        f"only, which is seeded before each build; no time, no counter, no numpy or random without a seed.",
    )


def _value_digests(model: nn.Module) -> dict[str, tuple[object, ...]]:
    named = [*model.named_parameters(), *model.named_buffers()]
    return {
        name: (tuple(t.shape), str(t.dtype), None if t.is_meta else tensor_digest(t)) for name, t in named
    }


def check_same_loss(model: nn.Module, loss: Loss, batch: Any, *, job: VerifyJob) -> None:
    """Raise E802 unless the loss of one batch is the same twice, from equal copies and under one torch seed."""
    seed = job.config.train.seed
    values = [loss_of_copy(model, loss, batch, seed=seed) for _ in range(2)]
    (first, first_count), (second, second_count) = values
    scale = max(abs(first), abs(second))
    if (
        first_count == second_count
        and abs(first - second) <= _SAME_LOSS[MASTER_DTYPES[job.plan.precision]] * scale
    ):
        return
    raise ConfigError(
        "E802",
        f"the loss of one batch on equal models is {first:.10g} over {first_count:g}, and then {second:.10g} over "
        f"{second_count:g}: it is no function of (model, batch). Randomness must come from torch's generator; no "
        f"time, no counter outside the model, no numpy or random without a seed.",
    )


def check_masks(job: VerifyJob) -> None:
    """Raise E804 where a model that drops elements would drop others on several ranks."""
    num_ranks = job.plan.mesh.dp
    if job.config.train.dropout == "native" and num_ranks > 1:
        raise ConfigError(
            "E804",
            f'train.dropout = "native" on {num_ranks} ranks, and the model draws random numbers: each rank draws masks '
            f"for its own rows, so no device computes the same alone. Verify one rank (--processes 1), or set "
            f'train.dropout = "stateless".',
        )


def draws_random_numbers(model: nn.Module, loss: Loss, batch: Any) -> bool:
    """Whether the loss of one batch depends on the seed of torch's generator, as it does with dropout."""
    return loss_of_copy(model, loss, batch, seed=1) != loss_of_copy(model, loss, batch, seed=2)


def loss_of_copy(model: nn.Module, loss: Loss, batch: Any, *, seed: int) -> tuple[float, float]:
    """(sum, count) of a training forward of a copy, so that the model's own state stays."""
    twin = copy.deepcopy(model).train()
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        total, count = loss(twin, batch)
    return float(total), float(count)


def batch_of(data: MapStyle, ids: list[int], *, precision: str) -> Any:
    """These samples, collated, in the element type of the plan's masters."""
    return cast_batch(default_collate([data[index] for index in ids]), MASTER_DTYPES[precision])


def tensor_digest(tensor: Tensor) -> int:
    """Checksum of the bytes of a tensor."""
    values = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    values = torch.view_as_real(values) if values.is_complex() else values
    return zlib.crc32(values.reshape(-1).view(torch.uint8).numpy().data) if values.numel() else 0


def peak_memory() -> int:
    """Largest resident set of this process so far, in bytes."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
