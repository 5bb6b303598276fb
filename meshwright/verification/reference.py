"""The run on one device: a plain PyTorch loop that shares no code with the engine, and the noise of reordering it.

Owns what is recorded: gradients divided by the global count and before clipping, parameters and buffers after every
step (parameters before the first too), optimizer state after the last, outputs of modules in every micro-step, losses
and norms.
Must not know ranks. [Note: clip] The limit of the norm is lowered to half the first step's norm, so that clipping acts.
Simplification: what reordering does is measured by one other order, its largest effect by check; a model that mixes
samples (its halves differ from the whole) is reordered without being halved.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from meshwright.data.order import sample_ids
from meshwright.errors import NumericsError
from meshwright.sharding.units import find_units
from meshwright.training.sections import OptimizerConfig
from meshwright.verification.job import Reference, Samples, VerifyJob
from meshwright.verification.observe import ModuleObserver, Rows, probe_rows
from meshwright.verification.store import Comparer, Recorder
from meshwright.verification.subject import (
    WatchedData,
    batch_of,
    check_same_build,
    check_same_loss,
    make_subject,
    materialise,
    peak_memory,
)
from meshwright.verification.tensors import NEGLIGIBLE, Key, Noise, Recorded, Tolerance, tolerance

_CHECKS = ("loss", "activations", "grad_norm", "gradients", "parameters", "optimizer", "buffers")
# More than any rounding: halves of a micro-step that differ so much from the whole are not the same computation.
_MIXES_SAMPLES = {"fp64": 1e-7, "fp32": 1e-2}
# As torch.nn.utils.clip_grad_norm_.
_CLIP_EPSILON = 1e-6

# Samples of one micro-step -> the parts in which they run; positions may be in descending order.
Order = Callable[[range], list[Sequence[int]]]


def as_given(micro_step: range) -> list[Sequence[int]]:
    """The whole micro-step at once, in order."""
    return [micro_step]


def reversed_halves(micro_step: range) -> list[Sequence[int]]:
    """The second half, then the first, each backwards."""
    cut = len(micro_step) // 2
    return [part[::-1] for part in (micro_step[cut:], micro_step[:cut]) if len(part)]


def reversed_whole(micro_step: range) -> list[Sequence[int]]:
    """The whole micro-step at once, backwards."""
    return [micro_step[::-1]]


class Put(Protocol):
    """Where a run's tensors go."""

    def __call__(self, key: Key, tensor: Tensor, *, order: int, start: int, rows: Rows) -> None:
        """Take a tensor, or its samples from row `start` on."""


def run_reference(job: VerifyJob, path: Path) -> Reference:
    """Train on this process alone, record into the file `path`, and measure the noise of reordering.

    Raises:
        ConfigError: E801, E802, and what building the model raises.
        NumericsError: E601 when the reference itself is not finite.
    """
    check_same_build(job)
    subject = _inspect(job)
    recorded, outcome = _record(job, path, subject.rows)
    gc.collect()  # hooks refer to their model in circles, and a second one is trained now
    tolerances = measure_noise(job, path, recorded, rows=subject.rows, clip_norm=outcome.clip_norm)
    return Reference(
        recorded=recorded,
        tolerances=tolerances,
        losses=outcome.losses,
        samples=subject.samples,
        num_samples=subject.num_samples,
        ties=subject.ties,
        units_in_order=outcome.units_in_order,
        clip_norm=outcome.clip_norm,
        uncompared=outcome.uncompared,
        peak_memory_bytes=peak_memory(),
    )


@dataclass(frozen=True)
class _Subject:
    """What the job's model and data are: see `Reference`, and rows of module outputs by name."""

    rows: dict[str, Rows]
    samples: dict[tuple[int, int], Samples]
    num_samples: int
    ties: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class _Outcome:
    """What a run leaves besides tensors: see `Reference`."""

    losses: tuple[float, ...]
    clip_norm: float | None
    units_in_order: bool
    uncompared: tuple[str, ...]


def _record(job: VerifyJob, path: Path, rows: dict[str, Rows]) -> tuple[tuple[Recorded, ...], _Outcome]:
    """Train, with every tensor going to the file `path`."""
    with Recorder(path) as recorder:

        def record(key: Key, tensor: Tensor, *, order: int, start: int, rows: Rows) -> None:
            assert start == 0, f"{key} is recorded whole"
            recorder.add(key, tensor, order=order, batch_dim=rows.dim, rows_per_sample=rows.per_sample)

        run = PlainRun(job, put=record, order=as_given, rows=rows)
        run.train()
        outcome = _Outcome(
            tuple(run.losses), run.clip_norm, run.units_in_order, tuple(sorted(run.uncompared))
        )
        return recorder.finish(), outcome


def _inspect(job: VerifyJob) -> _Subject:
    """Rows of module outputs, the sample stream and ties of the job; raises E802."""
    task = make_subject(job)
    model = materialise(task)
    stream = _Stream(job, len(task.train_data))
    ids = stream.ids(0, 0)
    whole = batch_of(task.train_data, ids, precision=job.plan.precision)
    check_same_loss(model, task.loss, whole, job=job)
    rows = probe_rows(
        model,
        task.loss,
        lambda start, stop: batch_of(task.train_data, ids[start:stop], precision=job.plan.precision),
        num_samples=len(ids),
        seed=job.config.train.seed,
    )
    watched = WatchedData(task.train_data)
    samples = {}
    for step, microbatch in stream.places():
        for index in stream.ids(step, microbatch):
            _ = watched[index]
        samples[step + 1, microbatch] = watched.take()
    groups: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(parameter, []).append(name)
    ties = tuple(tuple(names) for names in groups.values() if len(names) > 1)
    return _Subject(rows, samples, len(task.train_data), ties)


@dataclass(frozen=True)
class _Stream:
    """Which samples each micro-step holds: the law written out, without ranks."""

    job: VerifyJob
    num_samples: int

    def places(self) -> Iterator[tuple[int, int]]:
        """(step, micro-step), both from 0."""
        for step in range(self.job.steps):
            for microbatch in range(self.job.plan.num_microbatches):
                yield step, microbatch

    def ids(self, step: int, microbatch: int) -> list[int]:
        """Dataset indices of a micro-step."""
        plan = self.job.plan
        size = plan.global_batch // plan.num_microbatches
        position = step * plan.global_batch + microbatch * size
        seed = self.job.config.train.seed
        return sample_ids(position, size, num_samples=self.num_samples, seed=seed).tolist()


class PlainRun:
    """One training on this process; `put` gets its tensors, `order` says in which order samples run."""

    def __init__(self, job: VerifyJob, *, put: Put, order: Order, rows: dict[str, Rows]) -> None:
        self._job = job
        self._put = put
        self._order = order
        self._rows = rows
        task = make_subject(job)
        self._loss, self._data = task.loss, task.train_data
        self._stream = _Stream(job, len(task.train_data))
        self._model = materialise(task).train()
        self._observer = ModuleObserver(self._model)
        self._units = list(find_units(self._model))
        self._optimizer = plain_optimizer(self._model, job.config.train.optimizer)
        self.clip_norm = job.config.train.clip_norm
        self.losses: list[float] = []
        self.uncompared: set[str] = set()
        self.units_in_order = True

    def train(self, clip_norm: float | None = None) -> None:
        """All steps. `clip_norm` is the limit; None chooses it (see [Note: clip])."""
        chooses = clip_norm is None and self.clip_norm is not None
        self.clip_norm = self.clip_norm if chooses else clip_norm
        for name, parameter in self._model.named_parameters():
            self._tensor("parameters", 0, name, parameter, order=0)
        for step in range(self._job.steps):
            self._optimizer.zero_grad(set_to_none=True)
            loss_sum, count = self._accumulate(step)
            if not math.isfinite(loss_sum) or not count:
                raise NumericsError(
                    "E601",
                    f"the reference's loss of step {step + 1} is {loss_sum:g} over {count:g} elements on one "
                    f"process; there is nothing to compare with. Look at the data and the learning rate.",
                )
            norm = self._normalise(step, count)
            if chooses and step == 0 and norm > 0:
                assert self.clip_norm is not None, "a limit is lowered only where there is one"
                self.clip_norm = min(self.clip_norm, norm / 2)
            self._scalar("loss", step, loss_sum / count)
            self._scalar("grad_norm", step, norm)
            self.losses.append(loss_sum / count)
            self._clip(norm)
            self._optimizer.step()
            self._put_state(step + 1)

    def _accumulate(self, step: int) -> tuple[float, float]:
        loss_sum, count = 0.0, 0.0
        for microbatch in range(self._job.plan.num_microbatches):
            ids = self._stream.ids(step, microbatch)
            for positions in self._order(range(len(ids))):
                chosen = [ids[position] for position in positions]
                batch = batch_of(self._data, chosen, precision=self._job.plan.precision)
                with self._observer.forward(self._activation_sink(step, microbatch, positions)):
                    part, part_count = self._loss(self._model, batch)
                self._watch_units()
                if part.requires_grad:
                    part.backward()
                loss_sum, count = loss_sum + float(part.detach()), count + float(part_count)
        return loss_sum, count

    def _activation_sink(
        self, step: int, microbatch: int, positions: Sequence[int]
    ) -> Callable[[str, Tensor], None]:
        num_seen = 0
        backwards = positions[0] > positions[-1]

        def sink(name: str, tensor: Tensor) -> None:
            nonlocal num_seen
            num_seen += 1
            rows = self._rows.get(name)
            if rows is None or not rows.fits(tensor.shape, len(positions)):
                self.uncompared.add(name)
                return
            start = 0
            if rows.dim is not None:
                start = min(positions) * rows.per_sample
                tensor = _backwards(tensor, rows, len(positions)) if backwards else tensor
            self._put(
                ("activations", step + 1, microbatch, name), tensor, order=num_seen, start=start, rows=rows
            )

        return sink

    def _watch_units(self) -> None:
        places = [self._observer.order.get(name, -1) for name in self._units]
        once = all(self._observer.calls(name) == 1 for name in self._units)
        self.units_in_order = self.units_in_order and once and places == sorted(places)

    def _normalise(self, step: int, count: float) -> float:
        """Divide gradients by the count, hand them on, and return their norm."""
        square, last = 0.0, len(self._observer.order)
        for name, parameter in self._model.named_parameters():
            if parameter.grad is None:
                continue
            parameter.grad.div_(count)
            square += float(torch.linalg.vector_norm(parameter.grad, dtype=torch.float64)) ** 2
            self._tensor(
                "gradients", step + 1, name, parameter.grad, order=last - self._place(name)
            )  # backward order
        return square**0.5

    def _clip(self, norm: float) -> None:
        if self.clip_norm is None:
            return
        factor = min(1.0, self.clip_norm / (norm + _CLIP_EPSILON))
        for parameter in self._model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)

    def _put_state(self, step: int) -> None:
        """Parameters and buffers after each step, optimizer state after the last."""
        for name, parameter in self._model.named_parameters():
            place = self._place(name)
            self._tensor("parameters", step, name, parameter, order=place)
            state = self._optimizer.state.get(parameter, {}) if step == self._job.steps else {}
            for part, value in state.items():
                if isinstance(value, Tensor):
                    self._tensor("optimizer", step, f"{name} {part}", value, order=place)
        for name, buffer in self._model.named_buffers():
            self._tensor("buffers", step, name, buffer, order=self._place(name))

    def _place(self, name: str) -> int:
        return self._observer.order.get(name.rpartition(".")[0], 0)

    def _scalar(self, check: str, step: int, value: float) -> None:
        self._tensor(check, step + 1, check, torch.tensor(value, dtype=torch.float64), order=0)

    def _tensor(self, check: str, step: int, name: str, value: Tensor, *, order: int) -> None:
        self._put((check, step, -1, name), value.detach(), order=order, start=0, rows=Rows(None))


def _backwards(tensor: Tensor, rows: Rows, num_samples: int) -> Tensor:
    """Samples of an output in the opposite order; the rows of one sample keep theirs."""
    assert rows.dim is not None, "an output without samples has no order of samples"
    apart = tensor.unflatten(rows.dim, (num_samples, rows.per_sample))
    return apart.flip(rows.dim).flatten(rows.dim, rows.dim + 1)


def plain_optimizer(model: nn.Module, chosen: OptimizerConfig) -> torch.optim.Optimizer:
    """torch's optimizer, parameter by parameter; matrices decay and vectors do not."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": chosen.weight_decay},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    if chosen.name == "sgd":
        return torch.optim.SGD(groups, lr=chosen.lr, momentum=chosen.momentum, foreach=False)
    kind = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam}[chosen.name]
    return kind(groups, lr=chosen.lr, betas=chosen.betas, eps=chosen.eps, foreach=False)


def measure_noise(
    job: VerifyJob,
    path: Path,
    recorded: Sequence[Recorded],
    *,
    rows: dict[str, Rows],
    clip_norm: float | None,
) -> dict[str, Tolerance]:
    """The limits of every check, after running the reference in another order of samples."""
    limit = _MIXES_SAMPLES[job.plan.precision]
    noise: dict[str, Noise] = {}
    for order in (reversed_halves, reversed_whole):
        comparer = Comparer(path, recorded, tolerances={}, rank=0)

        def measure(
            key: Key, tensor: Tensor, *, order: int, start: int, rows: Rows, comparer: Comparer = comparer
        ) -> None:
            if comparer.knows(key) is not None:
                comparer.compare(key, tensor, start=start)

        PlainRun(job, put=measure, order=order, rows=rows).train(clip_norm)
        noise = {check: _noise_of(check, comparer, precision=job.plan.precision) for check in _CHECKS}
        if max(item.norm for item in noise.values()) <= limit:
            break
    return {check: tolerance(job.plan.precision, item) for check, item in noise.items()}


def _noise_of(check: str, comparer: Comparer, *, precision: str) -> Noise:
    bare = tolerance(precision, Noise())
    norm, element, module = 0.0, 0.0, 0.0
    for stats in comparer.stats:
        item = comparer.knows(stats.key)
        if item is None or item.check != check or stats.problem:
            continue
        norm = max(norm, bare.norm_error(item, stats.square_error))
        scale = item.scale
        if scale.module_largest:
            module = max(module, stats.largest_error / scale.module_largest)
        if scale.largest > NEGLIGIBLE[precision] * scale.module_largest:
            element = max(element, stats.largest_error / scale.largest)
    return Noise(norm, element, module)
