"""Linear layers that write their weight gradient into the engine's memory; around them they are torch's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwright.adapt import linear
from tests.sharding.harness import accumulate, assemble, gradient_pieces, make_engine


class InPlace(nn.Module):
    """Changes the outputs of linear layers in place: whole, and a view of them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6, bias=bool(i)) for i in range(3))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.blocks[0](x))
        x = self.blocks[1](x)
        x[..., 2:] *= 0.5
        x = self.blocks[2](x)
        x += 1.0
        return x.tanh()


def _build() -> nn.Module:
    torch.manual_seed(3)
    return InPlace().double()


def _loss(model: Any, rank: int, microbatch: int, *, shape: tuple[int, ...]) -> Tensor:
    generator = torch.Generator().manual_seed(10 * rank + microbatch)
    return model(torch.randn(shape, generator=generator, dtype=torch.float64)).square().sum()


def _gradients(mesh: Any, policy: str, shape: tuple[int, ...]) -> Any:
    model = _build()
    engine = make_engine(mesh, model, policy)
    linear.install(model, engine)
    accumulate(engine, lambda m, rank, k: _loss(m, rank, k, shape=shape), mesh.rank, 2)
    return gradient_pieces(engine)


@pytest.mark.parametrize("policy", ["ddp", "zero3"])
@pytest.mark.parametrize("shape", [(5, 6), (2, 3, 6), (2, 2, 3, 6)])
def test_outputs_may_be_changed_in_place(ranks, policy: str, shape: tuple[int, ...]) -> None:
    held = assemble(ranks.run(_gradients, 2, policy, shape))
    model = _build()
    for rank in range(2):
        for microbatch in range(2):
            _loss(model, rank, microbatch, shape=shape).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(held[name], parameter.grad.flatten(), rtol=1e-12, atol=1e-12)
