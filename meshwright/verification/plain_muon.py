"""Muon by its definition, for the reference: singular values of each matrix through the polynomial, one by one.

Shares no code with `training/muon.py`. An odd polynomial of a matrix keeps singular vectors and maps singular values,
so five Newton-Schulz steps are five evaluations on numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

_A, _B, _C = 3.4445, -4.7750, 2.0315
_NUM_STEPS = 5


class PlainMuon(torch.optim.Optimizer):
    """Muon for `matrices`, torch's AdamW (`rest`) for what it already holds; one state."""

    def __init__(
        self,
        matrices: Sequence[nn.Parameter],
        rest: torch.optim.AdamW,
        *,
        lr: float,
        weight_decay: float,
        momentum: float,
        adjust: str,
    ) -> None:
        numbers = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "adjust": adjust}
        super().__init__(
            [{"params": list(matrices)}, *({"params": g["params"]} for g in rest.param_groups)], numbers
        )
        self._matrices = list(matrices)
        self._rest = rest
        self._rest.state = self.state

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update."""
        numbers = self.defaults
        lr, decay, mu = numbers["lr"], numbers["weight_decay"], numbers["momentum"]
        for weight in self._matrices:
            if weight.grad is None:
                continue
            state = self.state.setdefault(weight, {})
            before = state.get("momentum_buffer", torch.zeros_like(weight))
            state["momentum_buffer"] = mu * before + (1 - mu) * weight.grad
            look_ahead = (1 - mu) * weight.grad + mu * state["momentum_buffer"]
            rows, columns = weight.shape
            wide = math.sqrt(max(1, rows / columns))
            ratio = wide if numbers["adjust"] == "original" else 0.2 * math.sqrt(max(rows, columns))
            weight.copy_((1 - lr * decay) * weight - lr * ratio * _mapped(look_ahead))
        return self._rest.step()


def _mapped(matrix: Tensor) -> Tensor:
    norm = max(float(matrix.norm()), 1e-7)
    left, values, right = torch.linalg.svd(matrix / norm, full_matrices=False)
    for _ in range(_NUM_STEPS):
        values = _A * values + _B * values**3 + _C * values**5
    return (left * values) @ right
