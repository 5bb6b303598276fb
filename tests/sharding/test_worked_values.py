"""Published vectors of a ZeRO-3 layer on 4 ranks, and the sharded Adam against its formulas in NumPy."""

import numpy as np
import pytest
import torch
from torch import nn

from meshwright.training.optimizer import OptimizerSpec
from meshwright.training.step import train_step
from tests.sharding.harness import (
    POLICIES,
    accumulate,
    assemble,
    make_engine,
    make_state,
    parameter_pieces,
    plain_gradients,
)


class Product(nn.Module):
    def __init__(self, weight: list[list[float]]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(weight))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


class Shift(nn.Module):
    def __init__(self, bias: list[float]) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.tensor(bias))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.bias


def _layer(mesh, weight, bias, inputs, output_gradient) -> tuple[list, list, list]:
    """x_grad, and this rank's shards of the summed weight and bias gradients, padding included."""
    engine = make_engine(mesh, nn.Sequential(Product(weight), Shift(bias)), "zero3", alignment_numel=1)
    x = torch.tensor(inputs, requires_grad=True)
    accumulate(engine, lambda model, *_: (model(x) * torch.tensor(output_gradient)).sum(), mesh.rank)
    w_memory, b_memory = engine.memories
    return x.grad.tolist(), w_memory.gradient_shard.tolist(), b_memory.gradient_shard.tolist()


@pytest.mark.parametrize(
    ("layer", "x_grad", "w_shards", "b_shards"),
    [
        (
            (
                [[11.0, 6, 2, 3], [4, 5, 7, 8]],
                [1.0, 0, 2, 1],
                [[1.0, 2], [3, 4]],
                [[1.0, 2, 3, 4], [5, 6, 7, 8]],
            ),
            [[41, 67], [129, 163]],
            [[64, 80], [96, 112], [88, 112], [136, 160]],
            [[24], [32], [40], [48]],
        ),
        (
            ([[2.0, 1, 3], [4, 0, 5]], [1.0, 2, 3], [[2.0, 1]], [[3.0, 4, 5]]),
            [[25, 37]],
            [[24, 32], [40, 12], [16, 20], [0, 0]],
            [[12], [16], [20], [0]],
        ),
    ],
    ids=["divisible", "zero padding at the end"],
)
def test_zero3_layer(ranks, layer, x_grad, w_shards, b_shards) -> None:
    results = ranks.run(_layer, 4, *layer)
    assert [result[0] for result in results] == [x_grad] * 4
    assert [result[1] for result in results] == w_shards
    assert [result[2] for result in results] == b_shards


SPEC = OptimizerSpec("adam", lr=0.02, weight_decay=0.0, betas=(0.9, 0.99), eps=1e-8)
NUM_STEPS, NUM_MICROBATCHES, WORLD = 4, 2, 3


def _network() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()


def _batch(step: int, rank: int, microbatch: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + 10 * rank + microbatch)
    return torch.randn(2, 5, generator=generator, dtype=torch.float64)


def _loss_sum(model, batch) -> tuple[torch.Tensor, int]:
    return model(batch).square().sum(), len(batch)


def _train_with_adam(mesh, policy: str):
    state = make_state(mesh, _network(), policy, SPEC, bucket_bytes=200)
    log, update = mesh.log, state.optimizer.step

    def watched_update(**arguments) -> None:
        before = log.num_started
        update(**arguments)
        assert log.num_started == before, "the update communicates"

    state.optimizer.step = watched_update
    for step in range(NUM_STEPS):
        train_step(
            state,
            lambda k, step=step: _batch(step, mesh.rank, k),
            loss=_loss_sum,
            num_microbatches=NUM_MICROBATCHES,
            lr=SPEC.lr,
            clip_norm=None,
        )
    steps = [float(value["step"]) for value in state.optimizer.torch_optimizer.state.values()]
    return parameter_pieces(state.engine), steps


def _numpy_adam(parameters: dict[str, np.ndarray], gradients_at) -> None:
    (beta1, beta2), m, v = SPEC.betas, {}, {}
    for t in range(1, NUM_STEPS + 1):
        for name, g in gradients_at(t - 1, parameters).items():
            m[name] = beta1 * m.get(name, 0.0) + (1 - beta1) * g
            v[name] = beta2 * v.get(name, 0.0) + (1 - beta2) * g * g
            m_hat, v_hat = m[name] / (1 - beta1**t), v[name] / (1 - beta2**t)
            parameters[name] -= SPEC.lr * m_hat / (np.sqrt(v_hat) + SPEC.eps)


def _plain_mean_gradients(step: int, parameters: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    def build() -> nn.Module:
        model = _network()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(torch.from_numpy(parameters[name]).view_as(parameter))
        return model

    summed = plain_gradients(
        build,
        lambda model, rank, k: _loss_sum(model, _batch(step, rank, k))[0],
        world=WORLD,
        num_microbatches=NUM_MICROBATCHES,
    )
    return {name: gradient.numpy() / (WORLD * NUM_MICROBATCHES * 2) for name, gradient in summed.items()}


@pytest.mark.parametrize("policy", POLICIES)
def test_sharded_adam_equals_its_formulas(ranks, policy: str) -> None:
    expected = {name: p.detach().flatten().numpy().copy() for name, p in _network().named_parameters()}
    _numpy_adam(expected, _plain_mean_gradients)
    results = ranks.run(_train_with_adam, WORLD, policy)
    held = assemble([pieces for pieces, _ in results])
    for name, values in expected.items():
        np.testing.assert_allclose(held[name].numpy(), values, rtol=1e-12, atol=1e-13)
    counts = [count for _, steps in results for count in steps]
    assert set(counts) == {float(NUM_STEPS)}, "t counts optimizer steps, not micro-batches"
