"""Predictions beside published figures: rows of a table with what is predicted, and errors by source.

Owns the added columns. Knows nothing of files.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

from meshwright.simulation.peak import PeakBytes, peak_bytes
from meshwright.simulation.prediction import Prediction, predict
from meshwright.simulation.published import Job, Row, Unpriced, read_job

# Of what is held, at the peak: 0.06 to 0.15 in BigScience's runs, whose allocator did not yet grow its blocks.
_KEPT_BY_ALLOCATOR = 0.11
ADDED = (
    "predicted_iteration_time_s",
    "predicted_peak_mem_gib",
    "predicted_mfu",
    "predicted_fits",
    "skipped_reason",
)
_RESULTS = ("tflops_per_gpu", "iteration_time_s", "tokens_per_s_per_gpu", "peak_mem_gib")


@dataclass(frozen=True)
class Scored:
    """One row.

    Attributes:
        row: its texts with the added columns.
        machine: empty where it is not priced.
        time_error, memory_error: relative, where the row has the figure.
        fits: whether it is predicted to.
        ran_out: whether the row says that memory did not suffice.
    """

    row: dict[str, str]
    machine: str
    time_error: float | None
    memory_error: float | None
    fits: bool = True
    ran_out: bool = False


@dataclass(frozen=True)
class Calls:
    """Whether runs are told from failures: of those that ran out of memory, and of those that ran, how many there are,
    and how many are called out of memory. A run that does not say what it computes again is not judged."""

    failed: int
    failed_called: int
    ran: int
    ran_called: int


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
    gib = _seen(found.memory, job, row) / 2**30
    fits = "yes" if found.fits else "no"
    texts = (f"{found.step.total:.6g}", f"{gib:.4g}", f"{found.mfu:.4g}", fits, "")
    filled = {**row, **dict(zip(ADDED, texts, strict=True))}
    name = job.cluster.machine.name
    return Scored(filled, name, _time_error(job, found), _memory_error(row, gib), found.fits, _ran_out(row))


def _ran_out(row: Row) -> bool:
    results = " ".join(row.get(key, "") for key in _RESULTS)
    return re.search(r"\bOOM\b|out of memory", results, re.IGNORECASE) is not None


def calls(scored: Iterable[Scored]) -> Calls:
    """Who fits and who does not, predicted and published."""
    said = re.compile("none|full|selective|per-op|every 2nd")
    judged = [
        item
        for item in scored
        if item.machine and said.match(item.row.get("activation_recompute", "").lower())
    ]
    failed = [item for item in judged if item.ran_out]
    ran = [item for item in judged if item.time_error is not None or item.memory_error is not None]
    return Calls(
        len(failed),
        sum(not item.fits for item in failed),
        len(ran),
        sum(not item.fits for item in ran),
    )


def _seen(memory: PeakBytes, job: Job, row: Row) -> float:
    """Bytes of a peak as they are reported: by a framework what it holds; by the driver also the context, and what the
    framework's allocator keeps in blocks that do not fit, which it gives back before anything fails."""
    if "first stage" in row.get("peak_mem_unit", ""):
        memory = peak_bytes(job.work, job.layout, job.cluster, of_first_stage=True)
    held = memory.peak - memory.reserve
    if "nvidia-smi" not in " ".join(row.values()):
        return held
    return min(held * (1 + _KEPT_BY_ALLOCATOR) + memory.reserve, job.cluster.machine.memory_bytes)


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
