"""Sweeps of published runs: one model, batch and cluster, laid out in several ways; which way is predicted to be best.

Owns which rows are one sweep, and why (`published_sweeps.csv`). Runs of one layout count once, by their mean. Rows
are of `published_runs.csv`, of `published_rankings.csv` (no constant is fitted to it), or of a table that is not
shipped.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.resources import files

from meshwright.simulation.job import Layout, Workload
from meshwright.simulation.published import Job, Row, predict


@dataclass(frozen=True)
class Sweep:
    """Attributes: its name; `id` of its rows; what differs between them; why they can be compared."""

    name: str
    rows: tuple[str, ...]
    varies: str
    why: str


@dataclass(frozen=True)
class Entry:
    """One layout of a sweep: `id` of its rows, and sequences a second and device, published and predicted."""

    rows: tuple[str, ...]
    published: float
    predicted: float


@dataclass(frozen=True)
class Ranking:
    """A sweep with predictions.

    Attributes:
        entries: its layouts, the one that was published fastest first.
        chosen: the one that is predicted to be fastest.
    """

    sweep: Sweep
    entries: tuple[Entry, ...]
    chosen: Entry

    @property
    def loss(self) -> float:
        """What the chosen layout lacks of the published best, a fraction."""
        return 1 - self.chosen.published / self.entries[0].published

    @property
    def predicted_order(self) -> tuple[Entry, ...]:
        """Fastest first."""
        return tuple(sorted(self.entries, key=lambda entry: -entry.predicted))


def shipped_sweeps() -> tuple[Sweep, ...]:
    """All of them; some have rows only in tables that are not shipped."""
    text = (files("meshwright.simulation") / "published_sweeps.csv").read_text(encoding="utf-8")
    return tuple(
        Sweep(row["name"], tuple(row["rows"].split()), row["varies"], row["why"])
        for row in csv.DictReader(text.splitlines())
    )


def rank(sweep: Sweep, jobs: Iterable[tuple[Row, Job]]) -> Ranking | None:
    """The sweep with predictions, of its rows in `jobs`; None where they are fewer than two layouts."""
    groups: dict[tuple[Workload, Layout], list[tuple[str, Job]]] = {}
    for row, job in jobs:
        if row["id"] in sweep.rows:
            groups.setdefault((job.work, job.layout), []).append((row["id"], job))
    if len(groups) < 2:
        return None
    entries = sorted((_entry(runs) for runs in groups.values()), key=lambda entry: -entry.published)
    return Ranking(sweep, tuple(entries), max(entries, key=lambda entry: entry.predicted))


def _entry(runs: list[tuple[str, Job]]) -> Entry:
    job = runs[0][1]
    each = job.work.global_batch / job.cluster.num_devices
    times = [found.measured_seconds for _, found in runs if found.measured_seconds is not None]
    return Entry(
        rows=tuple(identity for identity, _ in runs),
        published=each * sum(1 / seconds for seconds in times) / len(times),
        predicted=each / predict(job),
    )
