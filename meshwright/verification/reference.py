"""The run on one device: recorded in a file, and run again in other ways to measure the noise of rounding.

Owns which other ways say something about a model (an order of samples, weights moved by one rounding error), and the
limits of every check. Must not know ranks.
Simplification: what rounding does is measured by two or three other runs, its largest effect by check.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn

from meshwright.adapt.batch_norm import find_batch_norms
from meshwright.adapt.float64 import asks_for_float32, float64_throughout
from meshwright.layout.plan import Precision
from meshwright.training.precision import cast_parameters, is_low
from meshwright.verification.job import Reference, Samples, Uses, VerifyJob
from meshwright.verification.masters import finite_scale
from meshwright.verification.observe import Rows, probe_rows
from meshwright.verification.plain import (
    Order,
    PlainRun,
    Stream,
    as_given,
    one_by_one,
    reversed_halves,
    reversed_whole,
    swapped_halves,
)
from meshwright.verification.store import Comparer, Recorder
from meshwright.verification.subject import (
    WatchedData,
    batch_of,
    check_masks,
    check_same_build,
    check_same_loss,
    draws_random_numbers,
    loss_of_copy,
    make_subject,
    materialise,
    peak_memory,
)
from meshwright.verification.tensors import NEGLIGIBLE, Key, Noise, Recorded, Tolerance, tolerance

_CHECKS = ("loss", "activations", "grad_norm", "gradients", "parameters", "optimizer", "buffers")
# More than any rounding: halves of a micro-step that differ so much from the whole are not the same computation.
_MIXES_SAMPLES = {"fp64": 1e-7, "fp32": 1e-2, "bf16": 0.3, "fp16": 0.1}
# Where no order is the same computation: a few rounding errors of a sum of hundreds.
_UNKNOWN_NOISE = {
    "fp64": Noise(),
    "fp32": Noise(norm=4e-6, element=4e-5, module=4e-6),
    "bf16": Noise(norm=1e-2, element=1e-1, module=1e-2),
    "fp16": Noise(norm=2e-3, element=2e-2, module=2e-3),
}


def run_reference(job: VerifyJob, path: Path) -> Reference:
    """Train on this process alone, record into the file `path`, and measure the noise of reordering.

    Raises:
        ConfigError: E801, E802, E804, and what building the model raises.
        NumericsError: E601 when the reference itself is not finite.
    """
    check_same_build(job)
    subject = _inspect(job)
    if subject.is_random:
        check_masks(job)
    gc.collect()  # hooks refer to their model in circles, and another one is trained now
    recorded, outcome = _record(job, path, subject)
    gc.collect()
    tolerances = measure_noise(
        job,
        path,
        recorded,
        subject=subject,
        clip_norm=outcome.clip_norm,
    )
    return Reference(
        recorded=recorded,
        tolerances=tolerances,
        losses=outcome.losses,
        samples=subject.samples,
        num_samples=subject.num_samples,
        ties=subject.ties,
        uses=outcome.uses,
        loss_scale=subject.loss_scale,
        clip_norm=outcome.clip_norm,
        uncompared=outcome.uncompared,
        asks_for_float32=subject.asks_for_float32,
        peak_memory_bytes=peak_memory(),
    )


@dataclass(frozen=True)
class Subject:
    """What the job's model and data are, besides what is in `Reference`.

    Attributes:
        rows: of module outputs by name.
        is_random: whether a forward draws random numbers.
        has_batch_norms: whether its halves differ from the whole.
        asks_for_float32: see `Reference`.
        samples: see `Reference`.
        num_samples: see `Reference`.
        ties: see `Reference`.
        loss_scale: of fp16, else None.
        first_count: what the loss counts in a step like the first micro-step.
    """

    rows: dict[str, Rows]
    is_random: bool
    has_batch_norms: bool
    asks_for_float32: bool
    samples: dict[tuple[int, int], Samples]
    num_samples: int
    ties: tuple[tuple[str, ...], ...]
    loss_scale: float | None
    first_count: float

    @property
    def factor(self) -> float:
        """What the loss sum is multiplied by before backward."""
        return 1.0 if self.loss_scale is None else self.loss_scale / self.first_count

    def scope(self) -> AbstractContextManager[None]:
        """Around every forward and backward."""
        return float64_throughout() if self.asks_for_float32 else nullcontext()


@dataclass(frozen=True)
class _Outcome:
    """What a run leaves besides tensors: see `Reference`."""

    losses: tuple[float, ...]
    clip_norm: float | None
    uses: tuple[Uses, ...]
    uncompared: tuple[str, ...]


def _record(job: VerifyJob, path: Path, subject: Subject) -> tuple[tuple[Recorded, ...], _Outcome]:
    """Train, with every tensor going to the file `path`."""
    with Recorder(path) as recorder:

        def record(key: Key, tensor: Tensor, *, order: int, start: int, rows: Rows) -> None:
            assert start == 0, f"{key} is recorded whole"
            recorder.add(key, tensor, order=order, batch_dim=rows.dim, rows_per_sample=rows.per_sample)

        run = PlainRun(
            job, put=record, order=as_given, rows=subject.rows, scope=subject.scope, scale=subject.factor
        )
        run.train()
        outcome = _Outcome(tuple(run.losses), run.clip_norm, run.uses, tuple(sorted(run.uncompared)))
        return recorder.finish(), outcome


def _inspect(job: VerifyJob) -> Subject:
    """Rows of module outputs, the sample stream and ties of the job; raises E802."""
    task = make_subject(job)
    model = materialise(task)
    stream = Stream(job, len(task.train_data))
    ids = stream.ids(0, 0)
    whole = batch_of(task.train_data, ids, precision=job.plan.precision)
    asks = job.plan.precision == "fp64" and asks_for_float32(
        lambda: loss_of_copy(model, task.loss, whole, seed=job.config.train.seed)
    )
    with float64_throughout() if asks else nullcontext():
        check_same_loss(model, task.loss, whole, job=job)
        is_random = draws_random_numbers(model, task.loss, whole)
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
    loss_scale, count = None, 1.0
    if job.plan.precision == "fp16":
        count = job.plan.num_microbatches * max(1.0, float(task.loss(model, whole)[1]))
        cast_parameters(model, "fp16")
        loss_scale = finite_scale(model, task.loss, whole, count=count)
    return Subject(
        rows=rows,
        is_random=is_random,
        has_batch_norms=bool(find_batch_norms(model)),
        asks_for_float32=asks,
        samples=samples,
        num_samples=len(task.train_data),
        ties=ties,
        loss_scale=loss_scale,
        first_count=count,
    )


def _orders(subject: Subject, precision: Precision) -> tuple[Order, ...]:
    """Orders of samples under which the model computes the same, the most different first.

    Dropout masks belong to places in the batch, which are consecutive: no part can run backwards. With batch
    statistics no sample can run by itself, and in 16 bits nothing is known then of the rounding of parts of a sum.
    """
    halves = swapped_halves if subject.is_random else reversed_halves
    if is_low(precision):
        whole = as_given if subject.is_random else reversed_whole
        return () if subject.has_batch_norms else (halves, one_by_one, whole)
    whole_only = () if subject.is_random else (reversed_whole,)
    return whole_only if subject.has_batch_norms else (halves, *whole_only)


def _nudges(precision: Precision) -> tuple[int, ...]:
    """Seeds of runs with nudged weights.

    Batch statistics of two samples are the same sums in any order, and yet they may lose digits. An adaptive
    optimizer magnifies the rounding of a single gradient that is nearly zero, and one run may have little of it: in
    float32, where no smallest limit hides that, there are two. In 16 bits a nudge of the float32 copies moves either no
    weight or one by 2^-8, which is no rounding of sums.
    """
    return () if is_low(precision) else (1, 2) if precision == "fp32" else (1,)


def measure_noise(
    job: VerifyJob,
    path: Path,
    recorded: Sequence[Recorded],
    *,
    subject: Subject,
    clip_norm: float | None,
) -> dict[str, Tolerance]:
    """The limits of every check, after running the reference in other ways; the largest noise counts.

    Of the orders the first counts under which the model stays the same computation (in 16 bits all such); with none,
    reordering may do what it does elsewhere. In its own order a nudge changes no computation, however much it moves
    results.
    """
    precision = job.plan.precision
    runs = _Runs(job, path, recorded, subject=subject, clip_norm=clip_norm)
    reordered = []
    for order in _orders(subject, precision):
        noise = runs.noise_of(order)
        if max(item.norm for item in noise.values()) <= _MIXES_SAMPLES[precision]:
            reordered.append(noise)
            if not is_low(precision):
                break
    measured = reordered or [dict.fromkeys(_CHECKS, _UNKNOWN_NOISE[precision])]
    measured += [runs.noise_of(as_given, nudge=seed) for seed in _nudges(precision)]
    return {
        check: tolerance(precision, *(noise[check] for noise in measured), check=check) for check in _CHECKS
    }


class _Runs:
    """Trains the reference in other ways and compares with what was recorded."""

    def __init__(
        self,
        job: VerifyJob,
        path: Path,
        recorded: Sequence[Recorded],
        *,
        subject: Subject,
        clip_norm: float | None,
    ) -> None:
        self._job = job
        self._path = path
        self._recorded = recorded
        self._subject = subject
        self._clip_norm = clip_norm

    def noise_of(self, order: Order, *, nudge: int | None = None) -> dict[str, Noise]:
        """What this order, and weights moved by a rounding error (by this seed), did to the tensors of every check."""
        comparer = Comparer(self._path, self._recorded, tolerances={}, rank=0)

        def measure(key: Key, tensor: Tensor, *, order: int, start: int, rows: Rows) -> None:
            if comparer.knows(key) is not None:
                comparer.compare(key, tensor, start=start)

        subject = self._subject
        run = PlainRun(
            self._job,
            put=measure,
            order=order,
            rows=subject.rows,
            scope=subject.scope,
            scale=subject.factor,
        )
        if nudge is not None:
            run.nudge(nudge)
        run.train(self._clip_norm)
        del run
        gc.collect()  # as above
        return {check: _noise_of(check, comparer, precision=self._job.plan.precision) for check in _CHECKS}


def _noise_of(check: str, comparer: Comparer, *, precision: str) -> Noise:
    bare = tolerance(precision, Noise())
    norm, element, module, first = 0.0, 0.0, 0.0, 0.0
    for stats in comparer.stats:
        item = comparer.knows(stats.key)
        if item is None or item.check != check or stats.problem:
            continue
        error = bare.norm_error(item, stats.square_error)
        norm, first = max(norm, error), max(first, error if item.step == 1 else 0.0)
        scale = item.scale
        if scale.module_largest:
            module = max(module, stats.largest_error / scale.module_largest)
        if scale.largest > NEGLIGIBLE[precision] * scale.module_largest:
            element = max(element, stats.largest_error / scale.largest)
    return Noise(norm, element, module, first)
