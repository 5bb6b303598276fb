"""Stages on unlike numbers of ranks: still one device, whatever is tied, skipped, sharded or dropped."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.parity.verifying import Verifier
from tests.pipeline.test_pipelines import check


@pytest.fixture(scope="module")
def verifier(ranks) -> Iterator[Verifier]:
    with Verifier(ranks) as made:
        yield made


@pytest.mark.parametrize(
    ("subject", "plan"),
    [
        ("gpt", "stage_ranks=[[0],[1,2,3]],zero=0"),
        ("gpt", "stage_ranks=[[0],[1,2,3]],zero=1"),
        ("gpt", "stage_ranks=[[0,3],[1],[2]],zero=3"),
    ],
)
def test_places_of_unlike_numbers_of_ranks_are_one_device(verifier, subject, plan):
    """A tied embedding on both ends, dropout, unequal tokens; three micro-batches."""
    check(verifier, subject, f"{plan},micro_batch=2,bucket_bytes=4096 bytes", 4, global_batch=18)
