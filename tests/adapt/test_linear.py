"""Linear layers that write their weight gradient into the engine's memory; around them they are torch's own."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from meshwright.adapt import linear
from meshwright.comm.log import CommLog
from meshwright.comm.ops import DataGroups, Group
from meshwright.layout.policy import find_policy
from meshwright.sharding.engine import ShardingEngine
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
    linear.install(model, engine.gradients)
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


class UsedTwice(nn.Module):
    """A layer on what needs no gradient and on what does, one with a hook, and gradients of gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.hooked = nn.Linear(6, 6), nn.Linear(6, 6)
        self.hooked.weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        y = self.hooked(self.shared(self.shared(x).tanh()) + self.shared(x.flip(-1)).sin())
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        (constant,) = torch.autograd.grad(self.shared(x).square().sum(), x)
        return y + slope.square() + constant


def _build_used_twice() -> nn.Module:
    torch.manual_seed(3)
    return UsedTwice().double()


def _past_autograd(mesh: Any, policy: str, waits: bool) -> Any:
    model, deferral = _build_used_twice(), linear.Deferral()
    again = partial(checkpoint, model, use_reentrant=False)
    engine = make_engine(mesh, model, policy)
    linear.install(model, engine.gradients, deferral)
    engine.start_step()
    for microbatch in range(3):
        engine.start_microbatch(last=microbatch == 2)
        total = _loss(model if microbatch else again, mesh.rank, microbatch, shape=(4, 6))
        if waits:
            engine.expect_gradients(last=False)
        engine.start_backward()
        deferral.watch([total])
        deferral.is_on = waits
        total.backward()
        deferral.is_on = False
        if waits:
            engine.expect_gradients(last=microbatch == 2)
        with torch.no_grad():
            for make in deferral.take():
                make()
        engine.finish_microbatch()
    return gradient_pieces(engine)


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("policy", ["ddp", "zero1"])
def test_products_past_autograd_sum_with_its_own_and_leave_hooks_alone(
    ranks, policy: str, waits: bool
) -> None:
    held = assemble(ranks.run(_past_autograd, 2, policy, waits))
    model = _build_used_twice()
    for rank in range(2):
        for microbatch in range(3):
            _loss(model, rank, microbatch, shape=(4, 6)).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(held[name], parameter.grad.flatten(), rtol=1e-12, atol=1e-12)


class Solver(nn.Module):
    """An implicit layer: its own gradient is found in a hook, by gradients of a graph that the forward made."""

    def __init__(self) -> None:
        super().__init__()
        self.step, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            z = torch.tanh(self.step(x))
        z = torch.tanh(self.step(z))
        start = z.clone().detach().requires_grad_()
        again = torch.tanh(self.step(start))
        z.register_hook(lambda g: torch.autograd.grad(again, start, g, retain_graph=True)[0] + g)
        return self.head(z)


@pytest.mark.parametrize("waits", [False, True])
def test_a_backward_inside_of_the_steps_adds_nothing(waits: bool) -> None:
    """Past autograd, its gradients of weights would be counted, and nobody asked for them."""
    torch.manual_seed(0)
    alone, model = Solver().double(), Solver().double()
    model.load_state_dict(alone.state_dict())
    group = Group("dp", (0,), 0, None, CommLog(0, 1))
    engine = ShardingEngine(
        model, policy=find_policy("ddp"), groups=DataGroups.of(group), device=torch.device("cpu")
    )
    deferral = linear.Deferral()
    linear.install(model, engine.gradients, deferral)
    products: list[Tensor] = []
    deferral.informed = lambda weight, _left, _right: products.append(weight)
    engine.start_step()
    engine.start_microbatch(last=not waits)
    x = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    alone(x).square().sum().backward()
    total = model(x).square().sum()
    engine.start_backward()
    deferral.watch([total])
    deferral.is_on = waits
    total.backward()
    if waits:
        engine.expect_gradients(last=True)
    with torch.no_grad():
        for make in deferral.take():
            make()
    engine.finish_microbatch()
    assert products == [model.head.weight, model.step.weight]
    held = {shard.name: shard.gradient for shard in engine.shards}
    for name, parameter in alone.named_parameters():
        torch.testing.assert_close(held[name], parameter.grad, rtol=1e-12, atol=1e-12)


def test_a_backward_is_known_by_its_number() -> None:
    """Not of torch's public API: -1 outside, one number in all nodes of a backward, another in one inside of it."""
    found: list[int] = []

    def note(_gradient: Tensor | None = None) -> None:
        found.append(torch._C._current_graph_task_id())

    def inside(_gradient: Tensor) -> None:
        with torch.enable_grad():
            z = torch.ones(2, requires_grad=True)
            z.register_hook(note)
            (z * 3).sum().backward()

    x = torch.ones(2, requires_grad=True)
    y = x * 2
    y.register_hook(note)
    x.register_hook(inside)
    x.register_hook(note)
    note()
    y.sum().backward()
    outside, first, inner, second = found
    assert outside == -1
    assert first == second >= 0
    assert inner not in (first, -1)
