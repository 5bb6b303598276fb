"""Pairwise-covering subsets: every pair of values of two factors occurs in some row."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pytest


def pairwise(factors: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Rows of `factors` such that every pair of values appears; greedy, deterministic."""
    names = list(factors)
    open_pairs = {
        (a, x, b, y) for a, b in itertools.combinations(names, 2) for x in factors[a] for y in factors[b]
    }
    rows = []
    products = [dict(zip(names, values, strict=True)) for values in itertools.product(*factors.values())]
    while open_pairs:
        best = max(products, key=lambda row: len(open_pairs & _pairs(row, names)))
        rows.append(best)
        open_pairs -= _pairs(best, names)
    return rows


def as_cases(rows: Iterable[Mapping[str, Any]], *, num_default: int) -> list[Any]:
    """`rows` as cases of pytest: the first ones always run (a cover's hold most pairs), the rest in `make parity`."""
    return [
        pytest.param(
            row,
            id="-".join(map(str, row.values())),
            marks=pytest.mark.parity if number >= num_default else (),
        )
        for number, row in enumerate(rows)
    ]


def _pairs(row: Mapping[str, Any], names: Sequence[str]) -> set[tuple[str, Any, str, Any]]:
    return {(a, row[a], b, row[b]) for a, b in itertools.combinations(names, 2)}
