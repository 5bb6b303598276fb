"""Predictions beside published figures: rows of a table with what is predicted, and errors by source.

Owns the added columns. Knows nothing of files.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

from meshwright.simulation.prediction import Prediction, predict
from meshwright.simulation.published import Job, Row, Unpriced, read_job

ADDED = ("predicted_iteration_time_s", "predicted_peak_mem_gib", "predicted_mfu", "skipped_reason")


@dataclass(frozen=True)
class Scored:
    """One row: its texts with the added columns, and relative errors where the row has the figure."""

    row: dict[str, str]
    machine: str
    time_error: float | None
    memory_error: float | None


@dataclass(frozen=True)
class Errors:
    """Of one source, or of all: counts, median and 90th percentile of |relative error| of step time, of memory."""

    source: str
    num_times: int
    median_time: float | None
    p90_time: float | None
    num_memories: int
    median_memory: float | None


def score_rows(rows: Iterable[Row]) -> list[Scored]:
    """Every row, in order; what cannot be priced says why in `skipped_reason`."""
    return [_score(row) for row in rows]


def _score(row: Row) -> Scored:
    try:
        job = read_job(row)
    except Unpriced as reason:
        return Scored({**row, **dict.fromkeys(ADDED, ""), "skipped_reason": str(reason)}, "", None, None)
    found = predict(job.work, job.layout, job.cluster)
    # What frameworks report is without the device's context; nvidia-smi's figure has it.
    is_whole = "nvidia-smi" in " ".join(row.values())
    gib = (found.memory.peak - (0.0 if is_whole else found.memory.reserve)) / 2**30
    texts = (f"{found.step.total:.6g}", f"{gib:.4g}", f"{found.mfu:.4g}", "")
    filled = {**row, **dict(zip(ADDED, texts, strict=True))}
    return Scored(filled, job.cluster.machine.name, _time_error(job, found), _memory_error(row, gib))


def _time_error(job: Job, found: Prediction) -> float | None:
    return found.step.total / job.measured_seconds - 1 if job.measured_seconds else None


def _memory_error(row: Row, gib: float) -> float | None:
    text = row.get("peak_mem_gib", "").strip()
    return gib / float(text) - 1 if re.fullmatch(r"[\d.]+", text) else None


def errors_by_source(scored: Iterable[Scored]) -> list[Errors]:
    """One line a source and machine, and the last for all."""
    kept = [item for item in scored if item.machine]
    groups: dict[str, list[Scored]] = {}
    for item in kept:
        groups.setdefault(f"{short_source(item.row.get('source', ''))} · {item.machine}", []).append(item)
    return [_errors(name, items) for name, items in sorted(groups.items())] + [_errors("all", kept)]


def short_source(text: str) -> str:
    """A source without its table or date."""
    return re.split(r"[,(]| Table| docs/| README| benchmarks/", text)[0].strip()


def skipped(scored: Iterable[Scored]) -> dict[str, int]:
    """How many rows for each reason."""
    return dict(Counter(item.row["skipped_reason"] for item in scored if item.row["skipped_reason"]))


def _errors(source: str, items: list[Scored]) -> Errors:
    times = sorted(abs(item.time_error) for item in items if item.time_error is not None)
    memories = [abs(item.memory_error) for item in items if item.memory_error is not None]
    return Errors(
        source,
        len(times),
        median(times) if times else None,
        times[min(len(times) - 1, int(0.9 * len(times)))] if times else None,
        len(memories),
        median(memories) if memories else None,
    )
