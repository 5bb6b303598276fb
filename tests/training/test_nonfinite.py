"""A loss that is not finite: the update is left out, and the error names module, rank and micro-batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from meshwright.training.nonfinite import explain_not_finite
from meshwright.training.optimizer import OptimizerSpec
from meshwright.training.step import train_step
from tests.sharding.harness import POLICIES, make_state

WIDTH = 4
SPEC = OptimizerSpec("adamw", lr=0.1)


class Fragile(nn.Module):
    """Blocks of which one takes a logarithm: a negative sum of inputs gives NaN there first."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])
        self.logarithm = _Logarithm()

    def forward(self, x: Tensor) -> Tensor:
        marks = self.logarithm(x.sum(-1, keepdim=True))
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x + marks


class _Logarithm(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.log()


def _inputs(mesh, microbatch: int, poison: str) -> Tensor:
    x = torch.ones(2, WIDTH, dtype=torch.float64)
    if mesh.rank == 1 and microbatch == 1:
        if poison == "nan":
            x[1, 2] = torch.nan
        elif poison == "negative":
            x[1] = -1.0
    return x


def _loss(model, x: Tensor) -> tuple[Tensor, int]:
    return model(x).square().sum(), len(x)


def _gradient_only(model, x: Tensor) -> tuple[Tensor, int]:
    """A finite loss whose gradient is infinite: the root at zero."""
    return (model(x) * 0.0).square().sum().sqrt() + 1.0, len(x)


def _train(mesh, policy: str, poison: str):
    torch.manual_seed(1)
    state = make_state(mesh, Fragile().double(), policy, SPEC)
    loss = _gradient_only if poison == "gradient" else _loss

    def step(poison: str):
        return train_step(
            state,
            lambda k: _inputs(mesh, k, poison),
            loss=_gradient_only if poison == "gradient" else _loss,
            num_microbatches=2,
            lr=SPEC.lr,
            clip_norm=1.0,
        )

    assert step("none").applied
    engine, states = state.engine, state.optimizer.torch_optimizer.state
    before = [(s.parameter.detach().clone(), float(states[s.parameter]["step"])) for s in engine.shards]
    result = step(poison)
    for shard, (value, count) in zip(engine.shards, before, strict=True):
        assert torch.equal(shard.parameter, value), f"{shard.name} was updated"
        assert float(states[shard.parameter]["step"]) == count
    batches = (_inputs(mesh, k, poison) for k in range(2))
    error = explain_not_finite(engine, batches, loss=loss, step=1)
    assert step("none").applied, "the run can go on"
    assert all(bool(s.parameter.isfinite().all()) for s in engine.shards)
    return result, error.code, error.message


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    ("poison", "place"),
    [
        ("nan", "logarithm output on rank 1, micro-batch 1"),
        ("negative", "logarithm output on rank 1, micro-batch 1"),
        ("gradient", "a gradient (every forward output is finite)"),
    ],
)
def test_named_on_every_rank_and_not_applied(ranks, policy: str, poison: str, place: str) -> None:
    for result, code, message in ranks.run(_train, 2, policy, poison):
        assert not result.applied
        assert result.scale == 0.0
        assert code == "E601"
        assert "not finite at step 1" in message
        assert f"first non-finite value: {place}" in message
        assert "not applied" in message


class _Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(WIDTH, WIDTH), _Logarithm()) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def _poisoned_weight(mesh) -> str:
    model = _Deep().double()
    with torch.no_grad():
        for block in model.blocks:
            block[0].weight.fill_(1.0)
            block[0].bias.zero_()
        model.blocks[1][0].bias[2] = torch.inf
    state = make_state(mesh, model, "zero3", SPEC)
    inputs = torch.ones(2, WIDTH, dtype=torch.float64)
    return explain_not_finite(state.engine, [inputs], loss=_loss, step=0).message


def test_the_innermost_module_of_the_lowest_rank_is_named(ranks) -> None:
    for message in ranks.run(_poisoned_weight, 2):
        assert "first non-finite value: blocks.1.0 output on rank 0, micro-batch 0" in message
