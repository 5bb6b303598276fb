"""Copies of the model (hsdp) and whole ownership: gradients, calls and bytes to the number, and one norm."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from meshwright.comm import ops
from meshwright.errors import WorkerError
from meshwright.training.optimizer import OptimizerSpec
from meshwright.training.step import train_step
from tests.sharding.harness import (
    accumulate,
    assemble,
    check_gradients,
    gradient_pieces,
    make_engine,
    make_state,
)
from tests.sharding.test_engine import _build_frozen, _build_routed, _inputs, _later_loss, _loss

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


def _one_copy_calls_more(mesh: Any) -> str:
    """The ranks of copy 0 issue a collective that those of copy 1 do not: nobody hangs."""
    state = make_state(mesh, _build_routed(), "zero2", OptimizerSpec("sgd"), copies=2)
    shard = state.engine.groups.shard
    if mesh.rank in (0, 1):
        ops.all_reduce(torch.ones(3), shard, cause="only in copy 0").wait()
    try:
        train_step(
            state,
            lambda k: _inputs(mesh.rank, k),
            loss=lambda model, x: (model(x, [0, 1, 2]).square().sum(), len(x)),
            num_microbatches=1,
            lr=0.1,
            clip_norm=None,
        )
    except WorkerError as error:
        return error.code
    return "agreed"


def test_copies_that_issue_other_collectives_are_found(ranks: Any) -> None:
    assert ranks.run(_one_copy_calls_more, 4) == ["E404"] * 4


def _norms(mesh: Any, policy: str, copies: int, ownership: str) -> tuple[float, Any]:
    engine = make_engine(mesh, _build_routed(), policy, copies=copies, ownership=ownership, bucket_bytes=200)
    accumulate(engine, _later_loss, mesh.rank, 3)
    return float(engine.norm_squared()), gradient_pieces(engine)


@pytest.mark.parametrize("ownership", ["flat", "whole"])
@pytest.mark.parametrize(("policy", "world", "copies"), [("zero1", 4, 2), ("zero3", 3, 3), ("zero2", 3, 1)])
def test_every_element_of_the_norm_is_counted_once(
    ranks: Any, policy: str, world: int, copies: int, ownership: str
) -> None:
    results = ranks.run(_norms, world, policy, copies, ownership)
    held = assemble([pieces for _, pieces in results])
    expected = sum(float(gradient.square().sum()) for gradient in held.values())
    assert sum(counted for counted, _ in results) == pytest.approx(expected, rel=1e-12)
