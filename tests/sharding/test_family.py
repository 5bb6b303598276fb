"""Copies of the model (hsdp) and whole ownership: gradients, calls and bytes to the number, and one norm."""

from __future__ import annotations

from typing import Any

import pytest

from tests.sharding.harness import check_gradients
from tests.sharding.test_engine import _build_frozen, _build_routed, _later_loss, _loss

# (ranks, copies)
SHAPES = [(2, 2), (4, 2), (3, 3)]


@pytest.mark.parametrize(("world", "copies"), SHAPES)
@pytest.mark.parametrize("ownership", ["flat", "whole"])
@pytest.mark.parametrize("policy", ["zero1", "zero2", "zero3"])
def test_gradients_over_copies(ranks: Any, policy: str, ownership: str, world: int, copies: int) -> None:
    """Units that only some micro-batches use, the last one not among them."""
    check_gradients(
        ranks,
        _build_routed,
        _later_loss,
        policy=policy,
        world=world,
        num_microbatches=3,
        copies=copies,
        ownership=ownership,
    )


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("policy", ["zero1", "zero2", "zero3"])
def test_gradients_of_whole_owners(ranks: Any, policy: str, world: int) -> None:
    check_gradients(
        ranks, _build_routed, _later_loss, policy=policy, world=world, num_microbatches=3, ownership="whole"
    )
    check_gradients(
        ranks, _build_frozen, _loss, policy=policy, world=world, num_microbatches=2, ownership="whole"
    )
