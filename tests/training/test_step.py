"""One training step on real ranks: the normaliser law, agreement, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwright.errors import MeshwrightError
from meshwright.models.loss import classification_loss
from meshwright.training.optimizer import OptimizerSpec
from meshwright.training.state import TrainState
from meshwright.training.step import StepResult, train_step
from tests.parity.harness import Case, candidate
from tests.sharding.harness import POLICIES, make_state

SPEC = OptimizerSpec("adamw", lr=0.1)
WIDTH = 4


@pytest.mark.parametrize("model", ["gpt", "mlp"])
def test_results_depend_neither_on_ranks_nor_on_accumulation_nor_on_the_policy(ranks, model: str) -> None:
    """Valid tokens a rank and micro-batch are unequal by construction of the samples."""
    expected = ranks.run(candidate, 1, Case(model, "ddp", 1, 1, "sgd"))[0]
    for policy, world, accumulate in [("ddp", 2, 3), ("zero1", 3, 2), ("zero2", 3, 4), ("zero3", 4, 3)]:
        for held in ranks.run(candidate, world, Case(model, policy, world, accumulate, "sgd")):
            assert held["losses"] == pytest.approx(expected["losses"], rel=1e-12)
            assert held["norms"] == pytest.approx(expected["norms"], rel=1e-12)


def _network() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3)).double()


def _batch(rank: int, microbatch: int, num_valid: int = 3) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(10 * rank + microbatch)
    labels = torch.randint(3, (3,), generator=generator)
    labels[num_valid:] = -100
    return {"inputs": torch.randn(3, WIDTH, generator=generator, dtype=torch.float64), "labels": labels}


def _step(
    state: TrainState, rank: int, num_valid: list[list[int]], *, clip_norm: float | None = None
) -> StepResult:
    """`num_valid`: valid labels by micro-batch and rank."""
    return train_step(
        state,
        lambda k: _batch(rank, k, num_valid[k][rank]),
        loss=classification_loss,
        num_microbatches=len(num_valid),
        lr=SPEC.lr,
        clip_norm=clip_norm,
    )


def _unequal_step(mesh, policy: str, num_valid: list[list[int]], clip_norm: float | None) -> tuple[Any, ...]:
    state = make_state(mesh, _network(), policy, SPEC)
    result = _step(state, mesh.rank, num_valid, clip_norm=clip_norm)
    gradients = [
        (s.name, s.piece.start, s.piece.stop, s.gradient.flatten().clone()) for s in state.engine.shards
    ]
    return result, gradients, state.step, state.tokens


@pytest.mark.parametrize("clip_norm", [None, 0.01])
@pytest.mark.parametrize("policy", POLICIES)
def test_the_sum_is_divided_once_by_the_global_count(ranks, policy: str, clip_norm: float | None) -> None:
    num_valid = [[3, 1], [0, 2]]  # one rank has no valid label at all in the second micro-batch
    model, total, count = _network(), 0.0, 0
    for k, row in enumerate(num_valid):
        for rank, valid in enumerate(row):
            part, part_count = classification_loss(model, _batch(rank, k, valid))
            (part / 6).backward()
            total, count = total + float(part.detach()), count + int(part_count)
    norm = float(torch.cat([p.grad.flatten() for p in model.parameters()]).norm())
    factor = 1.0 if clip_norm is None else clip_norm / (norm + 1e-6)
    for result, gradients, step, tokens in ranks.run(_unequal_step, 2, policy, num_valid, clip_norm):
        assert (result.count, tokens, step, result.applied) == (6, 6, 1, True)
        assert result.loss == pytest.approx(total / count, rel=1e-12)
        assert result.grad_norm == pytest.approx(norm, rel=1e-12)  # before clipping
        assert result.scale == pytest.approx(factor / 6, rel=1e-12)
        for name, start, stop, values in gradients:
            whole = model.get_parameter(name).grad.flatten()
            torch.testing.assert_close(values, factor * whole[start:stop], rtol=1e-11, atol=1e-15)


def _ignored(mesh, policy: str) -> tuple[str, str, bool]:
    state = make_state(mesh, _network(), policy, SPEC)
    before = [shard.parameter.detach().clone() for shard in state.engine.shards]
    with pytest.raises(MeshwrightError) as caught:
        _step(state, mesh.rank, [[0, 0], [0, 0]])
    unchanged = all(torch.equal(a, s.parameter) for a, s in zip(before, state.engine.shards, strict=True))
    return caught.value.code, caught.value.message, unchanged and state.step == 0


@pytest.mark.parametrize("policy", ["ddp", "zero3"])
def test_a_step_without_any_valid_label_is_refused_and_changes_nothing(ranks, policy: str) -> None:
    for code, message, unchanged in ranks.run(_ignored, 2, policy):
        assert code == "E602"
        assert "step 0: the loss counted 0 elements over all ranks; every label is ignored" in message
        assert unchanged


class Twins(nn.Module):
    """Two blocks of equal size; which one runs is the caller's choice."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(num_blocks)])

    def forward(self, x: Tensor, route: list[int]) -> Tensor:
        for position in route:
            x = torch.tanh(self.blocks[position](x))
        return x


def _diverge(mesh, routes: list[list[int]], num_blocks: int) -> tuple[str, str]:
    torch.manual_seed(1)
    state = make_state(mesh, Twins(num_blocks).double(), "zero3", SPEC)
    inputs = torch.ones(2, WIDTH, dtype=torch.float64)
    with pytest.raises(MeshwrightError) as caught:
        train_step(
            state,
            lambda _: inputs,
            loss=lambda model, x: (model(x, routes[mesh.rank]).square().sum(), 2),
            num_microbatches=1,
            lr=SPEC.lr,
            clip_norm=None,
        )
    return caught.value.code, caught.value.message


@pytest.mark.parametrize(
    "routes",
    [[[0], [1]], [[0, 1], [1, 0]], [[0, 1, 2], [0, 2, 1]]],
    ids=["another block", "another order", "another order later"],
)
def test_ranks_that_run_different_blocks_of_equal_size_all_raise(ranks, routes) -> None:
    num_blocks = max(max(route) for route in routes) + 1
    for code, message in ranks.run(_diverge, 2, routes, num_blocks, timeout=20.0):
        assert code == "E404"
        assert "ranks of dp issued different collectives before" in message
        assert "Every rank must run the same blocks in every micro-batch" in message


def _one_rank_diverges(mesh, world: int) -> tuple[str, str]:
    return _diverge(mesh, [[0]] * (world - 1) + [[1]], 2)


def test_one_rank_of_four_is_enough(ranks) -> None:
    assert [code for code, _ in ranks.run(_one_rank_diverges, 4, 4, timeout=20.0)] == ["E404"] * 4
