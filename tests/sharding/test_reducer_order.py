"""Communication overlaps backward: reductions are issued as gradients become ready, not at the end."""

from typing import Any

import pytest
import torch
from torch import nn

from tests.sharding.harness import POLICIES, accumulate, make_engine

WIDTH = 8


class _Mark(torch.autograd.Function):
    """Identity whose backward, the very last of the graph, notes what has been issued until then."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, note: Any) -> torch.Tensor:
        ctx.note = note
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.note()
        return grads[0], None


def _issued(mesh) -> list[str]:
    return [event.cause for event in mesh.log.events() if event.cause.startswith("reduce")]


def _watch(mesh, policy: str, num_microbatches: int) -> list[dict[str, list[str]]]:
    """For each micro-batch: reductions issued when parameter i's gradient is ready (`0`..`3`), and at the very end."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)))
    seen: list[dict[str, list[str]]] = []

    def note(what: str) -> None:
        seen[-1][what] = _issued(mesh)[start[-1] :]

    for position, layer in enumerate(model):  # before the engine's own hooks
        layer.weight.register_post_accumulate_grad_hook(lambda _p, position=position: note(str(position)))
    engine = make_engine(mesh, model, policy, bucket_bytes=2 * 4 * WIDTH * WIDTH)
    start: list[int] = []

    def loss(model, _rank: int, _microbatch: int) -> torch.Tensor:
        seen.append({})
        start.append(len(_issued(mesh)))
        x = _Mark.apply(torch.ones(2, WIDTH, requires_grad=True), lambda: note("last"))
        return model(x).square().sum()

    accumulate(engine, loss, mesh.rank, num_microbatches)
    note("after")
    return seen


@pytest.mark.parametrize("policy", ["ddp", "zero1", "zero2"])
def test_bucket_0_is_reduced_before_the_gradient_of_parameter_0_is_ready(ranks, policy: str) -> None:
    for seen in ranks.run(_watch, 2, policy, 1):
        (only,) = seen
        assert list(only) == ["3", "2", "1", "0", "last", "after"]
        assert only["2"] == []  # parameter 2's own gradient completes bucket 0
        assert only["1"] == ["reduce bucket 0"]
        assert only["0"] == ["reduce bucket 0"]
        assert only["after"] == ["reduce bucket 0", "reduce bucket 1"]


@pytest.mark.parametrize("policy", POLICIES)
def test_the_first_reduction_is_issued_before_the_last_backward_operation(ranks, policy: str) -> None:
    for seen in ranks.run(_watch, 2, policy, 2):
        assert len(seen[-1]["last"]) > 0
        assert seen[-1]["after"][: len(seen[-1]["last"])] == seen[-1]["last"]


def test_zero3_reduces_a_block_when_the_next_one_starts_backward(ranks) -> None:
    for seen in ranks.run(_watch, 2, "zero3", 1):
        assert seen[0]["2"] == ["reduce 3"]
        assert seen[0]["last"] == ["reduce 3", "reduce 2", "reduce 1"]
        assert seen[0]["after"] == ["reduce 3", "reduce 2", "reduce 1", "reduce 0"]


@pytest.mark.parametrize(("policy", "first"), [("ddp", []), ("zero1", []), ("zero2", ["reduce bucket 0"])])
def test_accumulation_postpones_reductions_unless_gradients_are_sharded(ranks, policy: str, first) -> None:
    for seen in ranks.run(_watch, 2, policy, 3):
        assert [step["last"][:1] for step in seen] == [first, first, ["reduce bucket 0"]]
