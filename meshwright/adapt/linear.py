"""`nn.Linear` whose weight gradient is computed straight into the engine's flat gradient buffer.

Autograd allocates a fresh tensor for every weight gradient, pays its page faults, and the engine then copies it. Here
the product writes into the flat buffer itself. Autograd still sees an ordinary gradient: it passes through the
accumulation node and all hooks, sums with other uses of the same weight, and the engine copies whenever what
arrives is not the memory it lent. Under torch.compile, autocast or double backward the plain operation runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# Called in backward; lends the memory where the gradient belongs, or None when it must not be overwritten.
Lend = Callable[[], Tensor | None]


class Deferral:
    """Weight gradients that wait: while `is_on`, backwards keep what they are made of, and `run` makes them."""

    def __init__(self) -> None:
        self.is_on = False
        self._waiting: list[Callable[[], None]] = []

    def add(self, make: Callable[[], None]) -> None:
        """Keep `make` for `take`."""
        self._waiting.append(make)

    def take(self) -> list[Callable[[], None]]:
        """What has been kept since the last call."""
        waiting, self._waiting = self._waiting, []
        return waiting


class _LinearDeferred(torch.autograd.Function):
    """y = x·wᵀ + b whose weight gradient is made when the deferral runs, if it is on in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, place: _Place) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.place = place
        return F.linear(x, weight, bias).data

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        rows = grads[0].reshape(-1, grads[0].shape[-1])
        grad_bias = rows.sum(0) if ctx.needs_input_grad[2] else None
        place: _Place = ctx.place

        def make() -> None:
            inputs, lent = x.reshape(-1, x.shape[-1]), place.lend()
            place.receive(rows.t() @ inputs if lent is None else torch.mm(rows.t(), inputs, out=lent))

        if place.deferral.is_on:
            place.deferral.add(make)
        else:
            make()
        return grads[0] @ weight, None, grad_bias, None


@dataclass(frozen=True)
class _Place:
    """Where the gradient of a weight belongs."""

    lend: Lend
    receive: Callable[[Tensor], None]
    deferral: Deferral


class _LinearInto(torch.autograd.Function):
    """y = x·wᵀ + b with the weight gradient gᵀ·x written into lent memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, lend: Lend) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.lend = lend
        # Of more than two dims it is a view, which autograd lets nobody change in place; `.data` is none.
        return F.linear(x, weight, bias).data

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        grad_x = grads[0] @ weight if needs_x else None
        rows, inputs = grads[0].reshape(-1, grads[0].shape[-1]), x.reshape(-1, x.shape[-1])
        grad_bias = rows.sum(0) if needs_bias else None
        grad_weight = None
        if needs_weight:
            # Grad mode is on only under create_graph: an `out=` product cannot be differentiated again.
            lent = None if torch.is_grad_enabled() else ctx.lend()
            grad_weight = rows.t() @ inputs if lent is None else torch.mm(rows.t(), inputs, out=lent)
        return grad_x, grad_weight, grad_bias, None


def _forward(module: nn.Linear, lend: Lend, place: _Place | None, x: Tensor) -> Tensor:
    plain = torch.compiler.is_compiling() or torch.is_autocast_enabled(x.device.type)
    if (
        plain
        or not module.weight.requires_grad
        or not torch.is_grad_enabled()
        or x.dtype != module.weight.dtype
    ):
        return F.linear(x, module.weight, module.bias)
    if place is not None and x.requires_grad:
        # Without an edge to the weight: its hook would fire with nothing in it, and not when the gradient is made.
        return _LinearDeferred.apply(x, module.weight.detach(), module.bias, place)
    return _LinearInto.apply(x, module.weight, module.bias, lend)


class Lends(Protocol):
    """Has memory for gradients."""

    def lender(self, parameter: nn.Parameter) -> Lend | None:
        """What lends the memory for the gradient of `parameter`, if anything does."""


class Receives(Lends, Protocol):
    """Takes gradients."""

    def receiver(self, parameter: nn.Parameter) -> Callable[[Tensor], None] | None:
        """What takes a gradient of `parameter` that autograd does not hand over."""


def _place(weight: nn.Parameter, lend: Lend, deferred: tuple[Receives, Deferral] | None) -> _Place | None:
    """Where a gradient goes that can wait."""
    receive = None if deferred is None else deferred[0].receiver(weight)
    return None if receive is None or deferred is None else _Place(lend, receive, deferred[1])


def install(
    model: nn.Module, engine: Lends, deferred: tuple[Receives, Deferral] | None = None
) -> Callable[[], None]:
    """Let every plain `nn.Linear` of `model` write its weight gradient into `engine`'s buffers.

    Subclasses and modules whose `forward` was replaced are left alone. `deferred` takes weight gradients that wait.

    Returns:
        A function that undoes it.
    """
    adapted = []
    for module in model.modules():
        if type(module) is nn.Linear and "forward" not in vars(module):
            lend = engine.lender(cast(nn.Parameter, module.weight))
            if lend is not None:
                place = _place(cast(nn.Parameter, module.weight), lend, deferred)
                # An attribute of the instance; the class keeps its method.
                vars(module)["forward"] = partial(_forward, module, lend, place)
                adapted.append(module)

    def undo() -> None:
        for module in adapted:
            del vars(module)["forward"]

    return undo
