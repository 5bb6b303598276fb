"""Sweeps of published runs: the published order, the predicted one, and what the predicted best lacks.

    python benchmarks/rank_sweeps.py [more.csv ...] [--orders]

Both shipped tables are read always; further ones, with its columns, add rows that are not shipped. A sweep without two
layouts in the tables is left out. With --orders each sweep's layouts are listed, the published best first.
"""

from __future__ import annotations

import argparse
import csv
from importlib.resources import files

from meshwright.simulation.published import Job, Row, read_jobs
from meshwright.simulation.sweeps import Entry, Ranking, rank, shipped_sweeps

_BAR = 0.05
# Runs of the second are for rankings alone: no constant is fitted to them.
_SHIPPED = ("published_runs.csv", "published_rankings.csv")


def rankings(paths: list[str]) -> list[Ranking]:
    """All sweeps that the tables have."""
    texts = [(files("meshwright.simulation") / name).read_text(encoding="utf-8") for name in _SHIPPED]
    for path in paths:
        with open(path, newline="", encoding="utf-8") as file:
            texts.append(file.read())
    rows: dict[str, Row] = {}
    for text in texts:
        for row in csv.DictReader(text.splitlines()):
            rows.setdefault(row["id"], row)
    jobs: list[tuple[Row, Job]] = read_jobs(rows.values())[0]
    found = (rank(sweep, jobs) for sweep in shipped_sweeps())
    return [ranking for ranking in found if ranking is not None]


def _label(entry: Entry) -> str:
    return "=".join(entry.rows)


def main() -> None:
    """Print one line a sweep."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tables", nargs="*")
    parser.add_argument("--orders", action="store_true")
    asked = parser.parse_args()
    found = rankings(asked.tables)
    for ranking in found:
        mark = "" if ranking.loss <= _BAR else "  NOT within 5 %"
        layouts = len(ranking.entries)
        print(f"{ranking.sweep.name:44s}{layouts:3d} layouts  loss {100 * ranking.loss:5.1f} %{mark}")
        if asked.orders:
            for entry in ranking.entries:
                error = entry.predicted / entry.published - 1
                print(f"    {_label(entry):14s} published {entry.published:.5f}, predicted {error:+.1%}")
            print("    predicted order:", " ".join(map(_label, ranking.predicted_order)))
    print(f"{sum(ranking.loss <= _BAR for ranking in found)} of {len(found)} sweeps within 5 %")


if __name__ == "__main__":
    main()
