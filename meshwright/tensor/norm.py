"""Norms over a dim that is cut over ranks: statistics of the whole dim, each rank's own part of the result.

A rank sends one number a row: one all-reduce forward and one backward for RMSNorm, two each for LayerNorm, whose
variance is taken around the mean so that no digits are lost.
Weight and bias are cut as the dim is, and their gradients stay local. Source: formulas of Ba et al. 2016 (arXiv
1607.06450) and Zhang and Sennrich 2019 (arXiv 1910.07467).
"""

from __future__ import annotations

import torch
from torch import Tensor

from meshwright.comm import autograd
from meshwright.comm.ops import Group


def rms_norm(
    x: Tensor, weight: Tensor | None, group: Group, *, width: int, epsilon: float, cause: str
) -> Tensor:
    """x / sqrt(mean of x² + epsilon) · weight, with the mean over all ranks' chunks.

    Args:
        x: this rank's chunk, `(..., n)`.
        weight: its part of the weight, `(n,)`.
        group: the ranks.
        width: of all chunks together.
        epsilon: added under the root.
        cause: for the log.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    mean_square = _total(wide.square(), group, cause) / width
    y = (wide * torch.rsqrt(mean_square + epsilon)).to(x.dtype)
    return y if weight is None else y * weight


def layer_norm(
    x: Tensor,
    affine: tuple[Tensor | None, Tensor | None],
    group: Group,
    *,
    width: int,
    epsilon: float,
    cause: str,
) -> Tensor:
    """(x - mean) / sqrt(variance + epsilon) · weight + bias, with statistics over all ranks' chunks.

    `affine` is this rank's part of weight and bias; the rest as in `rms_norm`.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    centred = wide - _total(wide, group, cause) / width
    variance = _total(centred.square(), group, cause) / width
    y = (centred * torch.rsqrt(variance + epsilon)).to(x.dtype)
    weight, bias = affine
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


def _total(x: Tensor, group: Group, cause: str) -> Tensor:
    """Sum over the last dim of all ranks, kept as a dim; every rank uses it, so its gradient is summed too."""
    return autograd.copy(autograd.reduce(x.sum(-1, keepdim=True), group, cause=cause), group, cause=cause)
