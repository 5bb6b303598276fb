"""Muon: momentum whose matrices are orthogonalised before they are applied; AdamW for everything that is no matrix.

The update of a matrix W with gradient G, learning rate η and weight decay λ:

    M ← M + (1 - μ)(G - M)      momentum
    U ← G + μ(M - G)            Nesterov's look-ahead
    W ← W(1 - ηλ) - η r O       O: U with its singular values brought near 1; r: adjustment to the shape

Five Newton-Schulz steps of the odd polynomial ax + bx³ + cx⁵ make O; their coefficients are steep at 0 instead of
exact at 1, so singular values end between about 0.7 and 1.2. Source: K. Jordan et al., Muon (kellerjordan.github.io/
posts/muon, 2024), and the documentation of torch.optim.Muon, whose update rule this is.

Simplification: the iteration runs in the parameter's element type, not in bfloat16.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, cast

import torch
from torch import Tensor

from meshwright.training.cut_matrices import CutMatrices

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
NUM_ITERATIONS = 5
# Norms below count as this much: a zero gradient stays zero.
_LEAST_NORM = 1e-7
LrAdjust = Literal["original", "match_rms_adamw"]


def orthogonalise(matrix: Tensor) -> Tensor:
    """`matrix` (rows, columns) with its singular vectors kept and its singular values brought near 1."""
    a, b, c = COEFFICIENTS
    wide = (
        matrix.mT if matrix.shape[0] > matrix.shape[1] else matrix
    )  # the product of the short side is smaller
    x = wide / torch.linalg.matrix_norm(wide).clamp(min=_LEAST_NORM)
    for _ in range(NUM_ITERATIONS):
        gram = x @ x.mT
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if wide is not matrix else x


def shape_factor(rows: int, columns: int, adjust: LrAdjust) -> float:
    """Factor of the learning rate for a matrix (rows = outputs, columns = inputs).

    `original` keeps the size of outputs alike for tall matrices; `match_rms_adamw` gives the update the root mean
    square of a typical AdamW update, so that AdamW's learning rate fits (arXiv 2502.16982, section 2.2).
    """
    if adjust == "original":
        return math.sqrt(max(1.0, rows / columns))
    return 0.2 * math.sqrt(max(rows, columns))


class Muon(torch.optim.Optimizer):
    """Muon over matrices and AdamW over the rest, with one list of groups and one state.

    Groups of matrices have `update = "muon"`, the others `update = "adamw"`.

    Args:
        matrices: groups of 2-D parameters, each with `params` and `weight_decay`.
        rest: groups for AdamW, each with `params`, `weight_decay` and `lr`.
        lr: learning rate of matrices.
        momentum: μ.
        adjust: see `shape_factor`.
        betas: AdamW's.
        eps: AdamW's.
        cut: matrices of which `matrices` has this rank's parts; None: it has them whole.
    """

    def __init__(  # noqa: PLR0913 - torch optimizers take their numbers one by one
        self,
        matrices: Sequence[dict[str, Any]],
        rest: Sequence[dict[str, Any]],
        *,
        lr: float,
        momentum: float = 0.95,
        adjust: LrAdjust = "original",
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        cut: CutMatrices | None = None,
    ) -> None:
        self._cut = cut
        self._adamw: torch.optim.AdamW | None = None
        if rest:
            self._adamw = torch.optim.AdamW([dict(group) for group in rest], betas=betas, eps=eps, fused=True)
        groups = [{**group, "update": "muon"} for group in matrices]
        groups += [
            {**group, "update": "adamw"} for group in (self._adamw.param_groups if self._adamw else [])
        ]
        super().__init__(groups, {"lr": lr, "momentum": momentum, "adjust": adjust})
        for group in self._groups("muon"):
            assert all(p.dim() == 2 for p in group["params"]), "Muon's groups hold matrices only"

    def _groups(self, update: str) -> list[dict[str, Any]]:
        return [group for group in self.param_groups if group["update"] == update]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient."""
        assert closure is None, "Muon takes no closure"
        for group in self._groups("muon"):
            self._update([p for p in group["params"] if p.grad is not None], group)
        if self._adamw is not None:
            # Groups and state may have been exchanged by a load.
            self._adamw.param_groups = self._groups("adamw")
            self._adamw.state = self.state
            cast(Any, self._adamw).step()
        return None

    def _update(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        if self._cut is None:  # one at a time, in little memory
            for parameter in parameters:
                direction = orthogonalise(self._direction(parameter, group["momentum"]))
                self._apply(parameter, direction, parameter.shape, group)
            return
        pairs = [(parameter, self._direction(parameter, group["momentum"])) for parameter in parameters]
        for (parameter, _), part in zip(pairs, self._cut.changed(pairs, orthogonalise), strict=True):
            self._apply(parameter, part, self._cut.whole_shape(parameter), group)

    def _direction(self, parameter: Tensor, decay: float) -> Tensor:
        """U of a matrix or of a part of one: element by element."""
        gradient, state = parameter.grad, self.state[parameter]
        assert gradient is not None, "a matrix without a gradient is left out"
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        momentum: Tensor = state["momentum_buffer"]
        momentum.lerp_(gradient, 1.0 - decay)
        return gradient.lerp(momentum, decay)

    @staticmethod
    def _apply(parameter: Tensor, direction: Tensor, shape: Sequence[int], group: dict[str, Any]) -> None:
        lr = group["lr"]
        parameter.mul_(1.0 - lr * group["weight_decay"])
        rows, columns = shape
        parameter.add_(direction, alpha=-lr * shape_factor(rows, columns, group["adjust"]))
