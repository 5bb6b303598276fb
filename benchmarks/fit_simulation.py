"""Fit the constants of `meshwright/presets/calibration.py` to a table of published runs, and cross-validate them.

    python benchmarks/fit_simulation.py rows.csv [more.csv ...]

Columns are those of `meshwright simulate --published`. For each family of devices the constants are those of least
mean |log(predicted / published)|, each source weighted by the root of its rows, found by search along one direction at
a time from the same start: no random number, no order that matters. Then each source is left out in turn, the constants
are fitted to the others, and the source is predicted: only these errors say how well a run that nobody has seen is
predicted. A source is the first word of the row's `source`, so all tables of one publisher count as one.
"""

from __future__ import annotations

import csv
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import exp, log, sqrt
from statistics import median

from meshwright.presets.calibration import Calibration, calibration_of, limited
from meshwright.presets.machines import find_machine
from meshwright.simulation import kernels, layers
from meshwright.simulation.published import Job, Row, predict, read_jobs

_BOUNDS = {
    "matmul": (0.5, 0.95),
    "matmul_fp8": (0.35, 0.8),
    "prologue": (64.0, 600.0),
    "memory": (0.3, 1.0),
    "attention": (0.1, 0.8),
    "gap_seconds": (1e-6, 6e-6),
    "network": (0.2, 1.0),
    "overlap": (0.05, 1.0),
    "launch_seconds": (5e-6, 6e-5),
}
# Each constant alone, and those that stand for one another: faster products with more lost at their ends.
_DIRECTIONS: tuple[Mapping[str, float], ...] = (
    *({name: 1.0} for name in _BOUNDS),
    {"matmul": 0.1, "matmul_fp8": 0.1, "prologue": 1.0},
    {"matmul": 0.1, "prologue": 1.0},
    {"matmul": 0.1, "gap_seconds": 1.0},
    {"matmul": 0.2, "memory": -1.0},
    {"matmul": 0.1, "overlap": -1.0},
    {"matmul": 0.3, "attention": -1.0},
)
# Where every search starts, for all machines: round numbers, so that no start knows a source that is left out.
_START = {
    "matmul": 0.7,
    "matmul_fp8": 0.6,
    "prologue": 200.0,
    "memory": 0.8,
    "attention": 0.3,
    "gap_seconds": 2e-6,
    "network": 0.8,
    "overlap": 0.5,
    "launch_seconds": 3e-5,
}
_FAMILIES = {"a100-80": ("a100-80", "a100-40"), "h100": ("h100", "h100-96")}
_WORST = 0.3  # a row counts at most so much, lest one typing error decides
# What rows do not tell apart stays near its start: weight of the squared logarithm.
_TIE = 0.003
Scored = Sequence[tuple[Row, Job]]


def source_of(row: Row) -> str:
    """Who published a row."""
    return row["source"].replace("/", " ").split()[0].lower()


def log_error(job: Job, fit: Calibration) -> float:
    """log(predicted / published) of one run, with the limited part's own clock."""
    own = limited(fit) if job.cluster.machine.name == "h100-96" else fit
    assert job.measured_seconds is not None
    return log(predict(job, own) / job.measured_seconds)


def loss(jobs: Scored, fit: Calibration) -> float:
    """Weighted mean of what `fit` misses."""
    for cached in (layers.products_seconds, kernels.matmul_seconds):
        cached.cache_clear()
    rows = Counter(source_of(row) for row, _ in jobs)
    weights = [1 / sqrt(rows[source_of(row)]) for row, _ in jobs]
    missed = (min(abs(log_error(job, fit)), _WORST) for _, job in jobs)
    strayed = sum(log(getattr(fit, name) / value) ** 2 for name, value in _START.items())
    return sum(w * e for w, e in zip(weights, missed, strict=True)) / sum(weights) + _TIE * strayed


def fit_constants(jobs: Scored, start: Calibration, *, step: float = 0.3, rounds: int = 7) -> Calibration:
    """The constants of least loss, by steps along one direction at a time that halve each round."""
    has_fp8 = any(job.layout.precision.startswith("fp8") for _, job in jobs)
    directions = [way for way in _DIRECTIONS if has_fp8 or "matmul_fp8" not in way]
    best, least = start, loss(jobs, start)
    for _ in range(rounds):
        for way in directions:
            for sign in (1, -1):
                while (tried := _moved(best, way, sign * step)) is not None:
                    missed = loss(jobs, tried)
                    if missed >= least - 1e-6:
                        break
                    best, least = tried, missed
        step /= 2
    return best


def _moved(fit: Calibration, way: Mapping[str, float], step: float) -> Calibration | None:
    changes = {}
    for name, weight in way.items():
        low, high = _BOUNDS[name]
        changes[name] = min(high, max(low, getattr(fit, name) * exp(step * weight)))
    moved = replace(fit, **changes)
    return None if moved == fit else moved


def summary(errors: Sequence[float]) -> str:
    """Count, mean of logs, median and 90th percentile of |relative error|."""
    sizes = sorted(abs(exp(error) - 1) for error in errors)
    at = sizes[min(len(sizes) - 1, int(0.9 * len(sizes)))]
    bias = sum(errors) / len(errors)
    return f"{len(errors):4d} rows  bias {bias:+.3f}  median {median(sizes):.3f}  90 % {at:.3f}"


def _lines(paths: Sequence[str]) -> Iterator[Row]:
    for path in paths:
        with open(path, newline="") as file:
            yield from csv.DictReader(file)


def main(paths: Sequence[str]) -> None:
    """Fit, then cross-validate, each family."""
    jobs, _ = read_jobs(_lines(paths))
    for name, machines in _FAMILIES.items():
        own = [(row, job) for row, job in jobs if job.cluster.machine.name in machines]
        start = replace(calibration_of(find_machine(name)), **_START)
        best = fit_constants(own, start)
        print(f"\n{name}: {best}\n  all rows, in sample: {summary([log_error(job, best) for _, job in own])}")
        unseen: list[float] = []
        for source in sorted({source_of(row) for row, _ in own}):
            rest = [(row, job) for row, job in own if source_of(row) != source]
            fit = fit_constants(rest, start)
            errors = [log_error(job, fit) for row, job in own if source_of(row) == source]
            unseen += errors
            print(f"  left out: {source:14s}{summary(errors)}", flush=True)
        print(f"  cross-validated:        {summary(unseen)}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
