"""What the plain loop updates in a plan of 16 bits: float32 copies of the parameters, as one writes them by hand.

Shares nothing with the engine but what a model of 16 bits is (`training/precision.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from meshwright.layout.plan import Precision
from meshwright.training.loss_scale import INITIAL_SCALE
from meshwright.training.precision import cast_parameters, is_low

# How far below the largest scale that does not overflow in the first step the scale of a comparison lies.
_HEADROOM = 8.0


class Masters:
    """The parameters that an optimizer updates, by name, and their way into the model.

    Attributes:
        parameters: of the model itself in fp64 and fp32; else float32 copies, each with a gradient of its own.
    """

    def __init__(self, model: nn.Module, precision: Precision) -> None:
        self._computed = dict(model.named_parameters())
        self.parameters = dict(self._computed)
        if not is_low(precision):
            return
        copies = {name: p.detach().clone() for name, p in self._computed.items() if p.requires_grad}
        cast_parameters(model, precision)
        for name, values in copies.items():
            if self._computed[name].dtype != values.dtype:
                self.parameters[name] = nn.Parameter(values)

    def collect(self) -> None:
        """After a backward: add its gradients to those of the copies, in float32."""
        for name, master in self.parameters.items():
            computed = self._computed[name]
            if computed is master or computed.grad is None:
                continue
            if master.grad is None:
                master.grad = computed.grad.to(master.dtype)
            else:
                master.grad.add_(computed.grad)
            computed.grad = None

    @torch.no_grad()
    def publish(self) -> None:
        """After an update: round the copies into the model."""
        for name, master in self.parameters.items():
            if self._computed[name] is not master:
                self._computed[name].copy_(master)


def finite_scale(model: nn.Module, loss: Callable[[Any, Any], Any], batch: Any, *, count: float) -> float:
    """A power of two by which fp16 can multiply the loss / `count` of `batch` with room to the first overflow.

    `model` computes in fp16; its gradients are lost.
    """
    scale = INITIAL_SCALE
    while scale >= 1.0:
        total, _ = loss(model, batch)
        (total * (scale / count)).backward()
        norms = [float(p.grad.float().norm()) for p in model.parameters() if p.grad is not None]
        model.zero_grad(set_to_none=True)
        if all(math.isfinite(norm) for norm in norms):
            break
        scale /= 2
    return max(1.0, scale / _HEADROOM)
