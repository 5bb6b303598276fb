"""A linear layer y = x·w + b over ranks: each rank has some columns of w (outputs), or some rows (inputs).

Weights here are as `nn.Linear` has them, (outputs, inputs) = wᵀ; gradients are w_grad = xᵀ·g, b_grad = sum of g over
the batch, x_grad = g·wᵀ. Each split needs one exchange in one direction:

| layer | forward | backward |
|---|---|---|
| naive column, x replicated | all-gather y | slice g, then all-reduce x_grad |
| naive column, x cut along its last dim | all-gather x, all-gather y | slice g, then reduce-scatter x_grad |
| naive row, x replicated | slice x, all-reduce y | g as it is, all-gather x_grad |
| row, x cut | all-reduce y | g as it is, x_grad stays local |
| column -> row | all-reduce y | all-reduce x_grad; nothing between |

The backward of a column split of w is the forward of a row split of wᵀ, and the other way round. No weight gradient
travels: a rank has the whole batch and all of g that its part of w sees. A row split adds its bias after the sum, once.

Source: Shoeybi et al. 2019 (arXiv 1909.08053), section 3. Must not know modules, plans, or who owns the weights.
Simplification: chunks of different sizes travel padded to the largest (`tensor/uneven.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor
from torch.nn import functional as F

from meshwright.comm import autograd
from meshwright.comm.ops import Group
from meshwright.tensor import uneven

Sizes = Sequence[int]


def naive_column(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    group: Group,
    *,
    sizes: Sizes,
    input_sizes: Sizes | None = None,
    cause: str,
) -> Tensor:
    """A column split by itself: whole outputs on every rank.

    Args:
        x: `(..., inputs)`; with `input_sizes` this rank's chunk of it.
        weight: this rank's rows of the weight, `(sizes[index], inputs)`.
        bias: this rank's part, `(sizes[index],)`.
        group: the ranks.
        sizes: outputs of each rank.
        input_sizes: chunks of the last dim of x; None: x is whole and the same on every rank.
        cause: for the log.
    """
    if input_sizes is None:
        x = autograd.copy(x, group, cause=cause)
    else:
        x = uneven.gather_sum(x, group, dim=-1, sizes=input_sizes, cause=cause)
    return uneven.gather(F.linear(x, weight, bias), group, dim=-1, sizes=sizes, cause=cause)


def naive_row(
    x: Tensor, weight: Tensor, bias: Tensor | None, group: Group, *, sizes: Sizes, cause: str
) -> Tensor:
    """A row split by itself, of a whole x that is the same on every rank; whole outputs on every rank.

    Args:
        x: `(..., inputs)`.
        weight: this rank's columns of the weight, `(outputs, sizes[index])`.
        bias: whole, `(outputs,)`; its gradient is the same on every rank.
        group: the ranks.
        sizes: inputs of each rank.
        cause: for the log.
    """
    return row(uneven.split(x, group, dim=-1, sizes=sizes, cause=cause), weight, bias, group, cause=cause)


def column(x: Tensor, weight: Tensor, bias: Tensor | None, group: Group, *, cause: str) -> Tensor:
    """The first half of a pair: this rank's outputs of a whole x; its gradient is summed over the ranks."""
    return F.linear(autograd.copy(x, group, cause=cause), weight, bias)


def fused_columns(
    x: Tensor, parts: Sequence[tuple[Tensor, Tensor | None]], group: Group, *, cause: str
) -> list[Tensor]:
    """Several column splits of one x (query, key and value; gate and up) with one sum of x's gradient for all."""
    x = autograd.copy(x, group, cause=cause)
    return [F.linear(x, weight, bias) for weight, bias in parts]


def row(x: Tensor, weight: Tensor, bias: Tensor | None, group: Group, *, cause: str) -> Tensor:
    """The second half of a pair: whole outputs, summed over the ranks, of this rank's part of x."""
    y = autograd.reduce(F.linear(x, weight), group, cause=cause, in_place=True)
    return y if bias is None else y + bias


def feed_forward(
    x: Tensor,
    up: tuple[Tensor, Tensor | None],
    down: tuple[Tensor, Tensor | None],
    group: Group,
    *,
    activation: Callable[[Tensor], Tensor],
    cause: str,
) -> Tensor:
    """A pair column -> activation -> row: one all-reduce forward, one backward, and nothing between.

    Args:
        x: `(..., inputs)`, the same on every rank.
        up: this rank's weight `(hidden chunk, inputs)` and bias `(hidden chunk,)`.
        down: this rank's weight `(outputs, hidden chunk)` and the whole bias `(outputs,)`.
        group: the ranks.
        activation: works on each element.
        cause: for the log.
    """
    return row(activation(column(x, *up, group, cause=cause)), *down, group, cause=cause)
